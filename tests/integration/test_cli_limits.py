"""Caps, few budgets and equal heads on the command line: decided, shown and verified."""

from __future__ import annotations

import json
import re

import pytest
from cli_tools import refused, run
from factories import make_scores

LIMITS = [
    ["--cap", "0=300B", "--cap", "0-1=900B"],
    ["--max-distinct", "2"],
    ["--max-tokens", "15"],
    ["--level", "head", "--equal-heads"],
]


@pytest.mark.parametrize("limits", LIMITS, ids=" ".join)
def test_what_is_written_can_be_verified(tmp_path, scores, limits):
    ran = run("solve", scores, "--budget", "40%", *limits, "-o", tmp_path / "p.json")
    assert (ran.code, ran.err) == (0, "")
    checked = run("verify", tmp_path / "p.json", scores)
    assert checked.code == 0, checked.out
    assert "WRONG" not in checked.out
    if "--cap" in limits:
        assert "cap of layers 0-1" in checked.out
        assert "layers 0-1 within 900B" in ran.out


def test_auto_says_who_decided_and_why(tmp_path, scores):
    ran = run("solve", scores, "--budget", "40%", "--json", "-o", tmp_path / "p.json")
    assert (ran.json["solver"], ran.json["decided_by"]) == ("auto", "greedy")
    assert "concave" in ran.json["detail"]
    saved = json.loads((tmp_path / "p.json").read_text())
    assert (saved["solver"], saved["decided_by"]) == ("auto", "greedy")
    assert saved["detail"] == ran.json["detail"]
    shown = run("solve", scores, "--budget", "40%", "-o", tmp_path / "p.json").out
    assert "auto (greedy), optimal" in shown
    (why,) = [line for line in shown.splitlines() if line.startswith("why ")]
    assert why.split(maxsplit=1)[1].startswith("concave curves")


def test_a_solver_object_leaves_its_options_in_the_profile():
    from kvalloc.allocation.decision import solve
    from kvalloc.solvers.ilp import ILP

    scores = make_scores(0)
    assert solve(scores, budget=0.4, solver=ILP(gap=0.5)).solver_options == {"gap": 0.5}
    assert solve(scores, budget=0.4, solver=ILP()).solver_options == {}


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
def test_what_cannot_be_met_names_the_flag_and_what_can(
    tmp_path, scores, command, arguments, words
):
    output = ["-o", tmp_path / "p.json"] if command == "solve" else []
    refused(tmp_path, command, scores, *arguments, *output, words=words)


@pytest.mark.parametrize(("arguments", "words"), INFEASIBLE, ids=lambda a: " ".join(a[:6]))
def test_every_flag_that_is_offered_works(tmp_path, scores, arguments, words):
    """Copied from the error as they are, one at a time."""
    line = refused(tmp_path, "solve", scores, *arguments, "--json")
    offered = line.partition(";")[2]
    pairs = re.findall(r"(--[a-z-]+) ([0-9][^ ,;]*)", offered)
    assert pairs
    for flag, value in pairs:
        changed = list(arguments)
        changed[changed.index(flag) + 1] = value
        ran = run("solve", scores, *changed, "--json")
        assert ran.code == 0, (flag, value, ran.err)


def test_frontier_says_it_too(tmp_path, scores):
    line = refused(tmp_path, "frontier", scores, "--cap", "0=100B")
    assert "use --cap 0=160B" in line


def test_solvers_get_options_of_their_own_in_a_comparison(tmp_path, scores):
    options = ["--solver", "pyramid", "--solver", "ilp", "--solver-option", "pyramid:beta=3"]
    asked = ("compare", scores, "--budget", "40%")
    ran = run(*asked, *options, "--solver-option", "ilp:gap=1", "--json")
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
        assert words in refused(tmp_path, *asked, *options[:4], "--solver-option", bad)


def test_the_price_is_told(tmp_path, scores):
    ran = run("solve", scores, "--budget", "40%", "--json")
    assert ran.json["value_per_mib"] > 0
    assert ran.json["price_source"] == "the next entry"
    shown = run("solve", scores, "--budget", "40%", "-o", tmp_path / "p.json").out
    assert "more buy +" in shown
    shown = run("solve", scores, "--target-retention", "0.6", "-o", tmp_path / "p.json").out
    assert "0.01 more retention costs" in shown
    shown = run("solve", scores, "--target-retention", "1", "-o", tmp_path / "p.json").out
    assert "more retention" not in shown
