"""The command as a process: what it imports, and what becomes of it when others hang up."""

import json
import os
import shutil
import subprocess
import sys
from io import BytesIO, TextIOWrapper

import pytest

from kvalloc.cli.main import main
from kvalloc.formats.shipped_profiles import load_profile

RUN = "import sys; from kvalloc.cli.main import main; code = main()"
EXIT = "sys.exit(code)"


def started(*arguments, code=f"{RUN}; {EXIT}", **options):
    """A command in a process of its own."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, timeout=120, check=False, **options)


SHIPPED = "smollm2-135m-instruct"
LIGHT = {
    "scipy ortools networkx jinja2 vl_convert": [
        *("--help", "--version", "list solvers", "list scorers", "list profiles", "list models"),
        f"inspect {SHIPPED} -q",
        f"solve {SHIPPED} --budget 20% --solver uniform -o uniform.json",
    ],
    "": [
        *(f"compare {SHIPPED} --budget 20%", f"solve {SHIPPED} --budget 20% -o auto.json"),
        f"report auto.json uniform.json {SHIPPED} -o report.html",
    ],
}
"""Commands, and what of these they do not load, beside what runs a model."""
LOADED = """
import json, sys
from kvalloc.cli.main import main
for packages, lines in json.loads(sys.argv[1]).items():
    for line in lines:
        assert main(line.split()) == 0, line
        loaded = {"torch", "transformers", "matplotlib", *packages.split()} & sys.modules.keys()
        assert not loaded, (line, loaded)
"""


def test_decisions_from_what_ships_load_no_model_and_lists_no_optimizer(tmp_path):
    done = started(json.dumps(LIGHT), code=LOADED, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    auto, uniform = (load_profile(tmp_path / f"{own}.json") for own in ("auto", "uniform"))
    assert auto.predicted_loss < uniform.predicted_loss
    assert auto.termination == "optimal"


def test_a_refused_request_ends_with_2_and_one_line(scores):
    asked = ("solve", scores, "--budget", "20%", "--memory", "1MiB", "--json")
    done = started(*asked, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_a_reader_that_hangs_up_gets_no_complaint():
    read, write = os.pipe()
    os.close(read)
    done = started("list", "solvers", stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_what_an_encoding_lacks_is_escaped(models, profiles, folder, monkeypatch, encoding):
    """In answers, questions and names of files, on stdout and on stderr."""
    model, profile = folder / "日本", folder / "語\udce9.json"
    shutil.copytree(models / "tiny", model)
    shutil.copy(profiles / "tiny.json", profile)
    tokenizer = model / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"w', '"語'))
    way = (model, "--profile", profile, "--max-new-tokens", 3)
    lines = [
        (("generate", *way, "--prompt", "語1 語2 語3"), ("\\u8a9e",)),
        (("chat", *way, "--prompt", "語1", "--question", "語2"), ("\\u8a9e", "> \\u8a9e2")),
        (("inspect", folder / "日.json"), ("error: ", "\\u65e5")),
        (("report", profile, "-o", folder / "日.html"), ("\\u65e5.html",)),
    ]  # fmt: skip
    for words, expected in lines:
        out, err = (TextIOWrapper(BytesIO(), encoding=encoding) for _ in range(2))
        stdin = TextIOWrapper(BytesIO("語1 語2\n".encode()), encoding=encoding)
        for name, stream in (("stdout", out), ("stderr", err), ("stdin", stdin)):
            monkeypatch.setattr(sys, name, stream)
        code = main([str(word) for word in words])
        printed = ""
        for stream in (out, err):
            stream.flush()
            printed += stream.buffer.getvalue().decode(encoding)
        assert code == (2 if expected[0] == "error: " else 0), printed
        assert "語" not in printed
        assert all(word in printed for word in expected), (words, printed)


BREAKS_OFF = """
import os
import kvalloc
from kvalloc.extensions.answering import answer
from kvalloc.runtime.cache import BudgetCache
from tiny_models import tiny_model
BudgetCache.end_turn = lambda cache, write=os.write: write(2, b"computed")
def broken_off(model):
    cache = kvalloc.make_cache(model, kvalloc.load_profile(PROFILE), allow_other_model=True)
    tokens = answer(model, cache, list(range(1, 60)), ends=(), keep=True)
    next(tokens)
    raise ZeroDivisionError("ours")
broken_off(tiny_model())
"""


def test_an_answer_that_an_error_breaks_off_computes_nothing_while_python_exits(profiles):
    """Where it did, torch aborted the process."""
    done = started(
        code=BREAKS_OFF.replace("PROFILE", repr(str(profiles / "tiny.json"))),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.endswith("ZeroDivisionError: ours\n")


@pytest.mark.skipif(os.name != "posix", reason="closes a file descriptor as a shell's >&- does")
@pytest.mark.parametrize("closed", [[1], [2], [1, 2]])
def test_output_that_was_closed_is_no_defect(scores, closed):
    def close():
        for number in closed:
            os.close(number)

    out, err = (None if number in closed else subprocess.PIPE for number in (1, 2))
    done = started("inspect", scores, "-q", stdout=out, stderr=err, preexec_fn=close)
    assert done.returncode == 0
    assert not done.stderr
    assert bool(done.stdout) == (1 not in closed)
