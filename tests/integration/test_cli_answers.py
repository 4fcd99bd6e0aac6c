"""`kvalloc verify`, `frontier` and `diff`, from files, as a user runs them."""

from __future__ import annotations

import pytest
from cli_tools import refused, run
from factories import make_bits, make_losses, make_scores, make_shape

import kvalloc


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


def test_verify_says_what_holds(files):
    ran = run("verify", files / "greedy.json", files / "s.safetensors")
    assert ran.code == 0
    assert "WRONG" not in ran.out
    assert ran.out.count("ok   ") >= 9
    report = run("verify", files / "pyramid.json", files / "s.safetensors", "--json").json
    assert report["passed"] is True
    assert {"objective", "bound", "retention"} <= {check["name"] for check in report["checks"]}


def test_verify_finds_another_measurement(files):
    ran = run("verify", files / "greedy.json", files / "others.safetensors")
    assert ran.code == 1
    assert "WRONG  score profile digest" in ran.out


@pytest.mark.parametrize("objective", ["mean", "worst", "loss"])
def test_frontier_of_any_objective_in_numbers_and_as_a_picture(objective, tmp_path):
    """Retention or loss against bytes, where loss was measured."""
    make_losses().save(tmp_path / "s.safetensors")
    asked = ["frontier", tmp_path / "s.safetensors", "--points", "6", "--objective", objective]
    points = run(*asked, "--png", tmp_path / "f.png", "--json").json["points"]
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    values = [point["value"] for point in points]
    assert values == sorted(values)
    assert all(0 <= point["retention"] <= 1 + 1e-12 for point in points)
    assert all(point["bound"] >= point["value"] for point in points)
    if objective == "loss":
        for point in points:
            assert point["predicted_loss"] == pytest.approx(-point["value"], abs=1e-12)
    ran = run(*asked)
    assert ran.code == 0
    heading, *rows = ran.out.splitlines()
    assert len(rows) == 6
    assert ("worst unit" in heading) == (objective == "worst")
    assert ("+1 MiB saves" in heading) == (objective == "loss")
    assert " loss " in heading
    assert "sum of single-unit measurements" in ran.err


@pytest.mark.parametrize("more", [["--bits", "16,8,4"], ["--cost", "decode-bytes"]], ids=" ".join)
def test_frontier_of_bits_and_other_costs(more, tmp_path):
    make_bits().save(tmp_path / "s.safetensors")
    ran = run("frontier", tmp_path / "s.safetensors", "--points", "5", *more, "--json")
    assert ran.code == 0, ran.err
    points = ran.json["points"]
    assert [point["value"] for point in points] == sorted(point["value"] for point in points)
    assert all(0 < point["share"] <= 1 for point in points)
    for point in points:  # the mean objective is the retention, at whatever bits
        assert point["retention"] == pytest.approx(point["value"], abs=1e-12)


def test_frontier_of_the_worst_sample(files):
    worst = ["--workloads", "worst", "--page", "8"]
    asked = ["frontier", files / "s.safetensors", "--points", "4", *worst]
    points = run(*asked, "--json").json["points"]
    assert all(point["value"] <= point["retention"] + 1e-12 for point in points)
    assert all(point["bound"] >= point["value"] for point in points)
    assert "worst samples" in run(*asked).out.splitlines()[0]
    ran = run("compare", files / "s.safetensors", "--budget", "40%", *worst)
    assert "the worst sample counts" in ran.out
    assert "worst samples" in ran.out


def test_frontier_of_weighted_layers(files):
    (files / "w.json").write_text("[1, 2, 3]")
    weights = ["--weights", files / "w.json", "--points", "4"]
    ran = run("frontier", files / "s.safetensors", *weights)
    assert ran.code == 0, ran.err
    assert "weighted" in ran.out.splitlines()[0]
    points = run("frontier", files / "s.safetensors", *weights, "--json").json["points"]
    assert any(point["value"] != point["retention"] for point in points)


def test_diff_shows_who_gains(files):
    ran = run("diff", files / "pyramid.json", files / "greedy.json")
    assert ran.code == 0
    assert "pyramid -> greedy" in ran.out
    same = run("diff", files / "greedy.json", files / "greedy.json", "--json").json
    assert same["same"] is True
    assert same["moved_entries"] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["verify", "greedy.json", "missing.safetensors"], "missing.safetensors"),
        (["verify", "s.safetensors", "s.safetensors"], "expected a budget profile"),
        (["verify", "greedy.json", "greedy.json"], "budget profile"),
        (["frontier", "s.safetensors", "--points", "1"], "points"),
        (["frontier", "s.safetensors", "--solver", "adaptive_head"], "--level head"),
        (["verify", "other.json", "s.safetensors"], "tests/other"),
        (["frontier", "s.safetensors", "--png", "missing/f.png"], "does not exist"),
        (["frontier", "s.safetensors", "--png", "f.unknownext"], "another ending than .png"),
        (["diff", "greedy.json", "missing.json"], "missing.json"),
        (["diff", "greedy.json", "other.json"], "tests/other"),
    ],
)
def test_mistakes_get_one_line(words, said, files):
    assert said in refused(files, *(files / word if "." in word else word for word in words))
