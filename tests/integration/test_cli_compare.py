"""``kvalloc compare``, ``frontier`` and ``verify``, from files."""

from __future__ import annotations

import re

import pytest
from cli_tools import refused, run
from factories import make_losses, make_scores, make_shape

import kvalloc
from kvalloc.allocation.request import TARGETS, RequestOptions
from kvalloc.problem import registry
from kvalloc.problem.registry import solver_names


@pytest.fixture
def files(tmp_path):
    """Scores, their budgets by two solvers, other scores, and budgets of another model."""
    scores = make_scores(0)
    scores.save(tmp_path / "s.safetensors")
    make_scores(1).save(tmp_path / "others.safetensors")
    for solver in ("greedy", "pyramid"):
        kvalloc.solve(scores, budget="40%", solver=solver).save(tmp_path / f"{solver}.json")
    other_model = make_scores(0, shape=make_shape(model_id="tests/other"))
    kvalloc.solve(other_model, budget="40%").save(tmp_path / "other.json")
    return tmp_path


@pytest.mark.parametrize("level", ["layer", "head"])
def test_compare_shows_every_solver_or_its_reason(scores, monkeypatch, level):
    monkeypatch.setenv("COLUMNS", "80")
    asked = ("compare", scores, "--budget", "40%", "--level", level)
    ran = run(*asked, "--json", "-q")
    assert (ran.code, ran.err) == (0, "")
    rows = {row["solver"]: row for row in ran.json}
    assert set(rows) == set(solver_names())
    decided = [row for row in ran.json if row["reason"] is None]
    values = [row["objective"] for row in decided]
    assert values == sorted(values, reverse=True)
    assert decided[0]["gap"] == 0
    assert all(row["retained_bytes"] <= row["requested_bytes"] for row in decided)
    assert all(row["predicted_loss"] is None for row in decided)
    shown = run(*asked)
    assert "not answer quality" in shown.err
    lines = shown.out.splitlines()
    heading = next(line for line in lines if line.startswith("solver"))
    columns = ["retention", "bytes", "share", "bound", "gap", "seconds", "ended"]
    assert [column for column in columns if column not in heading] == []
    if level == "layer":
        assert "--level head" in rows["adaptive_head"]["reason"]
        assert any(line.startswith("greedy ") and line.endswith("optimal") for line in lines)
        assert any(line.startswith("adaptive_head ") and "--level head" in line for line in lines)


def test_compare_and_frontier_take_the_loss_where_it_was_measured(tmp_path):
    scores = tmp_path / "s.safetensors"
    make_losses().save(scores)
    rows = run("compare", scores, "--budget", "50%", "--json", "-q").json
    best = run("solve", scores, "--budget", "50%", "--json", "-q").json
    assert rows[0]["objective"] == best["objective"] == pytest.approx(-best["predicted_loss"])
    ran = run("compare", scores, "--target-loss", "0.05")
    assert "sum of single-unit measurements" in " ".join(ran.err.split())
    traced = run("frontier", scores, "--points", "3", "--json")
    assert traced.json["objective"] == "loss"
    assert "least predicted loss decides" in traced.err
    by_mean = run("frontier", scores, "--points", "3", "--json", "--objective", "mean")
    assert (by_mean.json["objective"], by_mean.err) == ("mean", "")


def test_solvers_get_options_of_their_own_in_a_comparison(scores):
    asked = ("compare", scores, "--budget", "40%", "--solver", "pyramid:beta=3", "--solver")
    rows = run(*asked, "ilp:gap=1", "--json").json
    rows = {row["solver"]: row["solver_options"] for row in rows}
    assert rows == {"pyramid": {"beta": 3.0}, "ilp": {"gap": 1.0}}


def test_a_broken_solver_is_one_line_and_the_others_go_on(files, monkeypatch):
    """What solvers can claim is in tests/unit/allocation/test_forgeries.py."""

    def fail(*arguments, **options):
        raise IndexError("first line\nsecond line")

    monkeypatch.setattr(type(registry.get_solver("pyramid")), "solve", fail)
    scores, said = files / "s.safetensors", "pyramid failed: IndexError: first line second line"
    asked = ("--budget", "40%", "--solver", "pyramid")
    assert said in refused(files, "solve", scores, *asked, "-o", files / "p.json")
    ran = run("compare", scores, *asked, "--solver", "ilp", "--json")
    rows = {row["solver"]: row["reason"] for row in ran.json}
    assert rows["ilp"] is None
    assert said in rows["pyramid"]


@pytest.mark.parametrize("command", ["solve", "compare", "frontier"])
def test_every_keyword_of_a_request_is_a_flag_in_its_group(command):
    shown = run(command, "--help-all").out
    flags = {name: f"--{name.replace('_', '-')} " for name in RequestOptions.__annotations__}
    targets = {*TARGETS} if command == "frontier" else set()
    assert {name for name, flag in flags.items() if flag not in shown} == targets
    headings = [line for line in shown.splitlines() if line.endswith(":") and line[0] != " "]
    assert ("Target:" in headings) == (command != "frontier")
    assert {"Arguments:", "Prompts:", "Budgets:", "Limits:", "Objective:"} < set(headings)

    assert re.search(r"--batch N .*; 1 by default", " ".join(shown.split()))


@pytest.mark.parametrize(
    ("make", "asked", "heading"),
    [
        (make_losses, "--objective mean", "retention"),
        (make_losses, "--objective worst", "worst unit"),
        (make_losses, "--objective loss", "+1.00 KiB saves"),
        (make_scores, "--page 8", "retention"),
    ],
)
def test_frontier_in_numbers(tmp_path, make, asked, heading):
    make().save(tmp_path / "s.safetensors")
    line = ["frontier", tmp_path / "s.safetensors", "--points", "5", *asked.split()]
    points = run(*line, "--json").json["points"]
    values = [point["value"] for point in points]
    assert values == sorted(values)
    assert all(0 < point["share"] <= 1 for point in points)
    ran = run(*line)
    assert heading in ran.out.splitlines()[0]
    assert not re.search(r"[+ ]0\.0000%?( |$)", ran.out.splitlines()[2])  # a price that is there
    assert len(ran.out.splitlines()) == 1 + len(points)
    assert ("sum of single-unit measurements" in ran.err) == (make is not make_scores)


def test_verify_says_what_holds(files):
    ran = run("verify", files / "greedy.json", files / "s.safetensors")
    assert (ran.code, "WRONG" in ran.out) == (0, False)
    assert ran.out.count("ok   ") >= 9
    report = run("verify", files / "pyramid.json", files / "s.safetensors", "--json").json
    assert report["passed"] is True
    assert {"objective", "bound", "retention"} <= {check["name"] for check in report["checks"]}
    ran = run("verify", files / "greedy.json", files / "others.safetensors")
    assert (ran.code, "WRONG  score profile digest" in ran.out) == (1, True)
    assert "others.safetensors, so this is the wrong pair of files" in ran.err
