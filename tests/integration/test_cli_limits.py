"""Caps, ranks, few budgets and equal heads on the command line: decided, shown and verified."""

from __future__ import annotations

import json
import re

import pytest
from cli_tools import refused, run
from factories import make_scores

from kvalloc.formats.budget_profile import BudgetProfile


@pytest.fixture
def folder(tmp_path):
    make_scores(0).save(tmp_path / "s.safetensors")
    return tmp_path


@pytest.fixture
def scores(folder):
    return folder / "s.safetensors"


LIMITS = [
    ["--cap", "0=300B", "--cap", "0-1=900B"],
    ["--max-distinct", "2"],
    ["--max-tokens", "15"],
    ["--level", "head", "--ranks", "2"],
    ["--level", "head", "--ranks", "2", "--rank-tolerance", "0.2", "--equal-heads"],
]


@pytest.mark.parametrize("limits", LIMITS, ids=" ".join)
@pytest.mark.parametrize("command", ["solve", "compare", "frontier"])
def test_every_command_takes_them(folder, scores, command, limits):
    goal = [] if command == "frontier" else ["--budget", "40%"]
    more = ["--points", "4"] if command == "frontier" else []
    ran = run(command, scores, *goal, *limits, *more, "--json", "-q")
    assert ran.code == 0, ran.err
    if command == "compare":
        decided = [row for row in ran.json if row["reason"] is None]
        assert {"auto", "ilp"} <= {row["solver"] for row in decided}
        assert all(row["reason"] for row in ran.json if row not in decided)


@pytest.mark.parametrize("limits", LIMITS, ids=" ".join)
def test_what_is_written_can_be_verified(folder, scores, limits):
    ran = run("solve", scores, "--budget", "40%", *limits, "-o", folder / "p.json")
    assert (ran.code, ran.err) == (0, "")
    checked = run("verify", folder / "p.json", scores)
    assert checked.code == 0, checked.out
    assert "WRONG" not in checked.out
    if "--cap" in limits:
        assert "cap of layers 0-1" in checked.out
        assert "layers 0-1 within 900B" in ran.out
    if "--ranks" in limits:
        assert "balance of ranks" in checked.out
        assert "above the mean" in ran.out
        assert "above the mean" in run("inspect", folder / "p.json").out


def test_a_placement_that_was_edited_is_found(folder, scores):
    """Even where somebody made the digest fit again: verify counts the bytes itself."""

    run("solve", scores, "--budget", "40%", *LIMITS[3], "-o", folder / "p.json")
    profile = BudgetProfile.load(folder / "p.json")
    ranks = profile.ranks.copy()
    ranks[:, 0], ranks[:, 1] = 0, 1  # balanced only by chance
    profile.replace(ranks=ranks).save(folder / "q.json")
    ran = run("verify", folder / "q.json", scores, "--json")
    failed = {check["name"] for check in ran.json["checks"] if not check["passed"]}
    assert (ran.code, failed) == (1, {"balance of ranks"})


def test_auto_says_who_decided_and_why(folder, scores):
    ran = run("solve", scores, "--budget", "40%", "--json", "-o", folder / "p.json")
    assert (ran.json["solver"], ran.json["decided_by"]) == ("auto", "greedy")
    assert "concave" in ran.json["detail"]
    saved = json.loads((folder / "p.json").read_text())
    assert (saved["solver"], saved["decided_by"]) == ("auto", "greedy")
    assert saved["detail"] == ran.json["detail"]
    shown = run("solve", scores, "--budget", "40%", "-o", folder / "p.json").out
    assert "auto (greedy), optimal" in shown
    (why,) = [line for line in shown.splitlines() if line.startswith("why ")]
    assert why.split(maxsplit=1)[1].startswith("concave curves")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cap", "0-15"], ["LAYERS=SIZE", "0-15=256MiB"]),
        (["--max-distinct", "0"], ["--max-distinct 1"]),
        (["--ranks", "2"], ["--level head"]),
        (["--min-tokens", "20", "--max-tokens", "10"], ["10", "20", "--max-tokens"]),
        (["--max-tokens", "3"], ["sinks and window", "--max-tokens 5"]),
        (["--min-tokens", "9", "--max-tokens", "14", "--page", "15"], ["--max-tokens 15"]),
        (
            ["--max-distinct", "2", "--solver", "greedy"],
            ["greedy does not handle --max-distinct; use ilp"],
        ),
        (["--batch", "100000000000000000"], ["more than can be counted"]),
    ],
)
def test_limits_that_cannot_be(folder, scores, arguments, words):
    refused(
        folder, "solve", scores, "--budget", "40%", *arguments, "-o", folder / "p.json", words=words
    )


def test_a_solver_object_leaves_its_options_in_the_profile():
    from kvalloc.allocation.decision import solve
    from kvalloc.solvers.ilp import ILP

    scores = make_scores(0)
    assert solve(scores, budget=0.4, solver=ILP(gap=0.5)).solver_options == {"gap": 0.5}
    assert solve(scores, budget=0.4, solver=ILP()).solver_options == {}


def test_bytes_beyond_32_bits_are_counted_exactly(folder, scores):
    ran = run("solve", scores, "--budget", "40%", "--batch", "1000000000", "--json")
    one = run("solve", scores, "--budget", "40%", "--json").json
    assert ran.code == 0, ran.err
    assert ran.json["retained_bytes"] == one["retained_bytes"] * 10**9 > 2**32
    assert ran.json["budgets"] == one["budgets"]


# what is said where nothing can work


INFEASIBLE = [
    (
        ["--target-retention", "0.9", "--cap", "0=300B"],
        ["--target-retention 0.9 is not possible with --cap 0=300B", "the most is", "--cap 0="],
    ),
    (
        ["--target-retention", "0.9", "--max-tokens", "12"],
        ["with --max-tokens 12", "the most is --target-retention 0.", "use --max-tokens "],
    ),
    (
        ["--target-retention", "0.9", "--max-tokens", "12", "--cap", "0=300B"],
        ["with --cap 0=300B and --max-tokens 12 together", "the most is --target-retention 0."],
    ),
    (
        ["--budget", "40%", "--cap", "0=100B"],
        ["--budget 40% is not possible with --cap 0=100B", "or use --cap 0=160B"],
    ),
    (
        ["--budget", "14%", "--min-tokens", "7"],
        ["below the floors", "ask for at least --budget 17.5%, or use --min-tokens 5"],
    ),
    (
        ["--budget", "40%", "--min-tokens", "12", "--cap", "0=300B"],
        ["with --cap 0=300B and --min-tokens 12", "or use --cap 0=384B, or --min-tokens 9"],
    ),
]


@pytest.mark.parametrize(("arguments", "words"), INFEASIBLE, ids=lambda a: " ".join(a[:6]))
@pytest.mark.parametrize("command", ["solve", "compare"])
def test_what_cannot_be_met_names_the_flag_and_what_can(folder, scores, command, arguments, words):
    output = ["-o", folder / "p.json"] if command == "solve" else []
    refused(folder, command, scores, *arguments, *output, words=words)


@pytest.mark.parametrize(("arguments", "words"), INFEASIBLE, ids=lambda a: " ".join(a[:6]))
def test_every_flag_that_is_offered_works(folder, scores, arguments, words):
    """Copied from the error as they are, one at a time."""
    line = refused(folder, "solve", scores, *arguments, "--json")
    offered = line.partition(";")[2]
    pairs = re.findall(r"(--[a-z-]+) ([0-9][^ ,;]*)", offered)
    assert pairs
    for flag, value in pairs:
        changed = list(arguments)
        changed[changed.index(flag) + 1] = value
        ran = run("solve", scores, *changed, "--json")
        assert ran.code == 0, (flag, value, ran.err)


def test_frontier_says_it_too(folder, scores):
    line = refused(folder, "frontier", scores, "--cap", "0=100B")
    assert "use --cap 0=160B" in line


def test_solvers_get_options_of_their_own_in_a_comparison(folder, scores):
    options = ["--solver", "pyramid", "--solver", "ilp", "--solver-option", "pyramid:beta=3"]
    ran = run(
        "compare", scores, "--budget", "40%", *options, "--solver-option", "ilp:gap=1", "--json"
    )
    assert ran.code == 0, ran.err
    rows = {row["solver"]: row for row in ran.json}
    assert rows["pyramid"]["solver_options"] == {"beta": 3.0}
    assert rows["ilp"]["solver_options"] == {"gap": 1.0}
    for bad, words in (
        ("beta=3", "NAME:KEY=VALUE"),
        ("dp:page=3", "not compared"),
        ("pyramid:delta=3", "no option 'delta'"),
        ("ilp:gap=much", "a number"),
    ):
        line = refused(
            folder, "compare", scores, "--budget", "40%", *options[:4], "--solver-option", bad
        )
        assert words in line


def test_the_price_is_told(folder, scores):
    ran = run("solve", scores, "--budget", "40%", "--json")
    assert ran.json["value_per_mib"] > 0
    assert ran.json["price_source"] == "the next entry"
    shown = run("solve", scores, "--budget", "40%", "-o", folder / "p.json").out
    assert "more buy +" in shown
    shown = run("solve", scores, "--target-retention", "0.6", "-o", folder / "p.json").out
    assert "0.01 more retention costs" in shown
    shown = run("solve", scores, "--target-retention", "1", "-o", folder / "p.json").out
    assert "more retention" not in shown


def test_a_gap_that_is_reached_is_no_rule_of_thumb(folder, scores):
    asked = ["--budget", "40%", "--level", "head", "--max-distinct", "2", "--solver", "ilp"]
    ran = run(
        "solve", scores, *asked, "--solver-option", "gap=0.9", "-o", folder / "p.json", "--json"
    )
    assert ran.json["termination"] in ("gap_limit", "optimal")
    assert ran.json["gap"] <= 0.9
    assert BudgetProfile.load(folder / "p.json").termination == ran.json["termination"]
