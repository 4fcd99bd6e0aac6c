"""solve, compare and inspect on files, and every way in which a user can go wrong with them."""

from __future__ import annotations

import numpy as np
import pytest
from cli_tools import refused, run
from factories import make_budget_profile, make_scores

from kvalloc.allocation.decision import solve
from kvalloc.allocation.request import TARGETS, RequestOptions
from kvalloc.errors import InputError
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.problem.registry import solver_names

SOLVE_KEYS = """solver termination objective bound gap retention retained_tokens retained_bytes
full_bytes seconds budgets requested context_tokens level output"""


# solve


@pytest.mark.parametrize(
    "target",
    [
        ("--target-retention", "0.9"),
        ("--budget", "40%"),
        ("--budget-tokens", "15"),
        ("--memory", "2KiB"),
    ],
)
@pytest.mark.parametrize("level", ["layer", "head"])
def test_solve_says_all_there_is_to_say(tmp_path, scores, target, level):
    output = tmp_path / "p.json"
    ran = run("solve", scores, *target, "--level", level, "--json", "-o", output)
    assert (ran.code, ran.err) == (0, "")
    assert set(ran.json) >= {*SOLVE_KEYS.split()}
    saved = BudgetProfile.load(output)
    assert ran.json["budgets"] == saved.budgets.tolist()
    assert ran.json["retained_bytes"] == saved.retained_bytes
    assert ran.json["output"] == str(output)
    assert ran.json["gap"] == 0
    if target[0] == "--target-retention":
        assert ran.json["retention"] >= 0.9 - 1e-9
        assert ran.json["requested_bytes"] is None
    else:
        assert ran.json["retained_bytes"] <= ran.json["requested_bytes"]


def test_solve_prints_a_summary_and_the_warning(tmp_path, scores):
    ran = run("solve", scores, "--budget", "40%", "-o", tmp_path / "p.json")
    assert (ran.code, ran.err) == (0, "")
    for words in ("retention", "gap 0%", "not answer quality", "p.json", "most retention in 40%"):
        assert words in ran.out


def test_quiet_solve_only_writes(tmp_path, scores):
    ran = run("solve", scores, "--budget", "40%", "-q", "-o", tmp_path / "p.json")
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    assert (tmp_path / "p.json").exists()


def test_solve_passes_every_option_on(tmp_path, scores):
    ran = run(
        *("solve", scores, "--budget", "50%", "--context", "80", "--batch", "2", "--page", "4"),
        *("--min-tokens", "8", "--solver", "pyramid", "--solver-option", "beta=4"),
        *("--average", "allocations", "--time-limit", "9", "--json"),
    )
    assert ran.code == 0, ran.err
    found = ran.json
    assert (found["context_tokens"], found["batch"], found["page_tokens"]) == (80, 2, 4)
    assert found["solver_options"] == {"beta": 4.0, "average": "allocations"}
    assert np.min(found["budgets"]) >= 8
    assert found["output"] is None


# solve: bad input


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["no target", "--target-retention"]),
        (["--budget", "20%", "--budget-tokens", "9"], ["two targets at once"]),
        (["--budget", "lots"], ["lots", "20%"]),
        (["--memory", "5 floppies"], ["5 floppies", "512MiB"]),
        (["--budget-tokens", "2"], ["floors", "ask for at least"]),
        (["--memory", "100"], ["ask for at least"]),
        (["--budget", "20%", "--time-limit", "nan"], ["--time-limit"]),
        (["--budget", "20%", "--solver-option", "beta=3"], ["auto has no option 'beta'"]),
        (["--budget", "20%", "--solver", "pyramid", "--solver-option", "beta=1"], ["beta"]),
        (["--budget", "40%", "--solver", "adaptive_head"], ["--level head"]),
        (["--budget", "40%", "--max-tokens", "3"], ["sinks and window", "--max-tokens 5"]),
        (
            ["--budget", "40%", "--min-tokens", "9", "--max-tokens", "14", "--page", "15"],
            ["--max-tokens 15"],
        ),
        (["--budget", "40%", "--batch", "100000000000000000"], ["more than can be counted"]),
        (["--budget", "20%", "--weights", "WEIGHTS"], ["w.json: the weight of layer 1 is nan"]),
    ],
)
def test_solve_refuses_a_request_that_cannot_be(tmp_path, scores, arguments, words):
    weights = tmp_path / "w.json"
    weights.write_text("[1.0, NaN, 1.0]")
    arguments = [weights if word == "WEIGHTS" else word for word in arguments]
    refused(tmp_path, "solve", scores, *arguments, "-o", tmp_path / "p.json", words=words)


def test_solve_needs_somewhere_to_put_it(tmp_path, scores):
    assert "-o OUT.json" in refused(tmp_path, "solve", scores, "--budget", "40%")


@pytest.mark.parametrize("output", ["no/such/folder/p.json", ""])
def test_solve_refuses_an_output_that_cannot_be_written(tmp_path, scores, output):
    line = refused(tmp_path, "solve", scores, "--budget", "40%", "-o", tmp_path / output)
    assert "cannot write" in line


def test_solve_does_not_overwrite_its_input(tmp_path, scores):
    assert "overwrite" in refused(tmp_path, "solve", scores, "--budget", "40%", "-o", scores)


@pytest.mark.parametrize("command", ["solve", "compare", "inspect"])
def test_what_is_no_score_profile(tmp_path, scores, command):
    rest = ["--budget", "40%", "--json"] if command != "inspect" else []
    for content in (b"", scores.read_bytes()[:2000]):
        (tmp_path / "cut.safetensors").write_bytes(content)
        assert "cut.safetensors" in refused(tmp_path, command, tmp_path / "cut.safetensors", *rest)
    assert "check the path" in refused(tmp_path, command, tmp_path / "nothing", *rest)
    assert "folder" in refused(tmp_path, command, tmp_path, *rest)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("solve", "p", "--budget", "40%", "--json"), "generate MODEL --profile {p}'"),
        (("frontier", "p"), "a budget profile, expected a score profile"),
        (("compare", "demo", "--budget", "40%"), "'kvalloc profile demo -o s.safetensors'"),
        (("diff", "p", "s"), "'kvalloc solve {s} --budget 20% -o p.json'"),
        (("verify", "s", "p"), "swapped; write: kvalloc verify {p} {s}"),
        (("generate", "p", "--full", "--prompt", "w1"), "a budget profile, and a model is wanted"),
        (("generate", "demo", "--profile", "s", "--prompt", "w1"), "'kvalloc solve {s} --budget"),
        (("chat", "demo", "--cache", "p"), "expected a cache written with"),
        (("solve", "e", "--budget", "40%", "--json"), "'kvalloc report {e} -o report.html'"),
        (("solve", "scroes", "--budget", "40%", "--json"), "the nearest is '{s}'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_file_of_another_kind_is_known_and_what_to_do_with_it_told(
    tmp_path, scores, arguments, said
):
    names = {
        "s": "scores.safetensors",
        "p": "p.json",
        "e": "e.json",
        "scroes": "scroes.safetensors",
    }
    files = {short: tmp_path / name for short, name in names.items()}
    files["s"].write_bytes(scores.read_bytes())
    files["e"].write_text('{"kind": "kvalloc.evaluation"}')
    assert run("solve", scores, "--budget", "40%", "-o", files["p"]).code == 0
    line = refused(tmp_path, *(files.get(word, word) for word in arguments))
    assert said.format(**files) in line


# compare


@pytest.mark.parametrize("level", ["layer", "head"])
def test_compare_shows_every_solver_or_its_reason(scores, level):
    ran = run("compare", scores, "--budget", "40%", "--level", level, "--json", "-q")
    assert (ran.code, ran.err) == (0, "")
    rows = {row["solver"]: row for row in ran.json}
    assert set(rows) == set(solver_names())
    decided = [row for row in ran.json if row["reason"] is None]
    values = [row["objective"] for row in decided]
    assert values == sorted(values, reverse=True)
    assert decided[0]["gap"] == 0
    assert all(row["retained_bytes"] <= row["requested_bytes"] for row in decided)
    if level == "layer":
        assert "--level head" in rows["adaptive_head"]["reason"]


def test_compare_prints_a_table(scores, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    ran = run("compare", scores, "--target-retention", "0.8")
    assert ran.code == 0
    assert "not answer quality" in ran.err
    lines = ran.out.splitlines()
    heading = next(line for line in lines if line.startswith("solver"))
    for column in ("retention", "tokens", "bytes", "share", "bound", "gap", "seconds", "ended"):
        assert column in heading
    assert any(line.startswith("greedy ") and line.endswith("optimal") for line in lines)
    assert any(line.startswith("adaptive_head ") and "--level head" in line for line in lines)


@pytest.mark.parametrize("command", ["solve", "compare", "frontier"])
def test_every_keyword_of_a_request_is_a_flag_in_its_group(command):
    shown = run(command, "--help-all").out
    flags = {name: f"--{name.replace('_', '-')} " for name in RequestOptions.__annotations__}
    targets = {kind.keyword for kind in TARGETS} if command == "frontier" else set()
    assert {name for name, flag in flags.items() if flag not in shown} == targets
    headings = [line for line in shown.splitlines() if line.endswith(":") and line[0] != " "]
    assert ("Target:" in headings) == (command != "frontier")
    assert {"Arguments:", "Prompts:", "Budgets:", "Limits:", "Objective:"} < set(headings)
    assert "--batch N" in shown
    assert "read together; 1 by default" in " ".join(shown.split())


def test_a_keyword_that_is_none_is_refused_with_the_nearest():
    with pytest.raises(InputError, match="no option 'bugdet'; the nearest is 'budget'"):
        solve(make_scores(), bugdet=0.5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no target"),
        (["--budget", "40%", "--solver", "adaptive_head"], "--level head"),
        (["--budget", "40%", "--time-limit", "-3"], "--time-limit"),
    ],
)
def test_compare_refuses(tmp_path, scores, arguments, words):
    assert words in refused(tmp_path, "compare", scores, *arguments)


# inspect


def test_inspect_tells_a_budget_profile_by_its_content(tmp_path, scores):
    run("solve", scores, "--budget", "40%", "-o", tmp_path / "p.json")
    (tmp_path / "p.json").rename(tmp_path / "no_suffix")
    ran = run("inspect", tmp_path / "no_suffix", "--json")
    assert ran.json["kind"] == "kvalloc.budget_profile"
    assert ran.json["min_tokens"] <= ran.json["mean_tokens"] <= ran.json["max_tokens"]
    shown = run("inspect", tmp_path / "no_suffix").out
    assert "auto (greedy), optimal" in shown
    assert len(shown.partition("\n\n")[2].splitlines()) == 1 + 3


def test_inspect_tells_a_score_profile(scores):
    ran = run("inspect", scores, "--json")
    assert (ran.code, ran.err) == (0, "")
    assert ran.json["kind"] == "kvalloc.score_profile"
    needed = ran.json["tokens_for_retention"]
    assert all(
        a <= b <= c for a, b, c in zip(*(needed[k] for k in ("0.5", "0.9", "0.99")), strict=True)
    )
    assert "made up" in run("inspect", scores).out


def test_inspect_a_profile_without_a_request(tmp_path):
    make_budget_profile([[10, 20], [8, 8]]).save(tmp_path / "p.json")
    assert "not recorded" in run("inspect", tmp_path / "p.json").out


def test_inspect_refuses_other_files(tmp_path, scores):
    run("solve", scores, "--budget", "40%", "-o", tmp_path / "p.json")
    edited = (tmp_path / "p.json").read_text().replace('"greedy"', '"reedy"', 1)
    (tmp_path / "p.json").write_text(edited)
    refused(tmp_path, "inspect", tmp_path / "p.json", words=["p.json", "digest", "edited"])
    (tmp_path / "notes.txt").write_text("hello, this is no profile at all")
    assert "notes.txt" in refused(tmp_path, "inspect", tmp_path / "notes.txt")
    assert "no shipped profile" in refused(tmp_path, "inspect", "a-name-nobody-gave")
