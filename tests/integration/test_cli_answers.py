"""`kvalloc verify`, `frontier` and `diff`, from files, as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kvalloc
from kvalloc.cli.main import main
from tests.cli_tools import run
from tests.factories import make_bits, make_losses, make_scores, make_shape


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    scores = make_scores(0)
    names = {"scores": tmp_path / "s.safetensors"}
    scores.save(names["scores"])
    for solver in ("greedy", "pyramid"):
        names[solver] = tmp_path / f"{solver}.json"
        kvalloc.solve(scores, budget="40%", solver=solver).save(names[solver])
    return {name: str(path) for name, path in names.items()}


def test_verify_says_what_holds(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", files["greedy"], files["scores"]]) == 0
    printed = capsys.readouterr().out
    assert "WRONG" not in printed
    assert printed.count("ok   ") >= 9
    assert main(["verify", files["pyramid"], files["scores"], "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is True
    assert {"objective", "bound", "retention"} <= {check["name"] for check in report["checks"]}


def test_verify_finds_another_measurement(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.safetensors"
    make_scores(1).save(other)
    assert main(["verify", files["greedy"], str(other)]) == 1
    assert "WRONG  score profile digest" in capsys.readouterr().out


def test_frontier_in_numbers_and_as_a_picture(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    png = tmp_path / "f.png"
    assert main(["frontier", files["scores"], "--points", "9", "--png", str(png), "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [p["retention"] for p in points] == sorted(p["retention"] for p in points)
    assert all(p["retention"] <= p["bound"] for p in points)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert main(["frontier", files["scores"], "--points", "5"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6


@pytest.mark.parametrize("objective", ["mean", "worst", "loss"])
def test_frontier_of_any_objective(
    objective: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Retention or loss against bytes, where loss was measured."""
    pytest.importorskip("matplotlib")
    scores, png = str(tmp_path / "s.safetensors"), tmp_path / "f.png"
    make_losses().save(scores)
    asked = ["frontier", scores, "--points", "6", "--objective", objective]
    assert main([*asked, "--png", str(png), "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    values = [point["value"] for point in points]
    assert values == sorted(values)
    assert all(0 <= point["retention"] <= 1 + 1e-12 for point in points)
    assert all(point["bound"] >= point["value"] for point in points)
    if objective == "loss":
        for point in points:
            assert point["predicted_loss"] == pytest.approx(-point["value"], abs=1e-12)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert main(asked) == 0
    captured = capsys.readouterr()
    heading = captured.out.splitlines()[0]
    assert ("worst unit" in heading) == (objective == "worst")
    assert ("+1 MiB saves" in heading) == (objective == "loss")
    assert " loss " in heading
    assert "sum of single-unit measurements" in captured.err


@pytest.mark.parametrize("more", [["--bits", "16,8,4"], ["--cost", "decode-bytes"]], ids=" ".join)
def test_frontier_of_bits_and_other_costs(more: list[str], tmp_path: Path) -> None:
    make_bits().save(tmp_path / "s.safetensors")
    ran = run("frontier", tmp_path / "s.safetensors", "--points", "5", *more, "--json")
    assert ran.code == 0, ran.err
    points = ran.json["points"]
    assert [point["value"] for point in points] == sorted(point["value"] for point in points)
    assert all(0 < point["share"] <= 1 for point in points)
    for point in points:  # the mean objective is the retention, at whatever bits
        assert point["retention"] == pytest.approx(point["value"], abs=1e-12)


def test_frontier_of_the_worst_sample(files: dict[str, str]) -> None:
    asked = ["frontier", files["scores"], "--points", "4", "--workloads", "worst", "--page", "8"]
    points = run(*asked, "--json").json["points"]
    assert all(point["value"] <= point["retention"] + 1e-12 for point in points)
    assert all(point["bound"] >= point["value"] for point in points)
    assert "worst samples" in run(*asked).out.splitlines()[0]
    ran = run("compare", files["scores"], "--budget", "40%", "--workloads", "worst", "--page", "8")
    assert "the worst sample counts" in ran.out
    assert "worst samples" in ran.out


def test_frontier_of_weighted_layers(files: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "w.json").write_text("[1, 2, 3]")
    asked = ["frontier", files["scores"], "--weights", str(tmp_path / "w.json"), "--points", "4"]
    ran = run(*asked)
    assert ran.code == 0, ran.err
    assert "weighted" in ran.out.splitlines()[0]
    points = run(*asked, "--json").json["points"]
    assert any(point["value"] != point["retention"] for point in points)


def test_diff_shows_who_gains(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", files["pyramid"], files["greedy"]]) == 0
    printed = capsys.readouterr().out
    assert "pyramid -> greedy" in printed
    assert main(["diff", files["greedy"], files["greedy"], "--json"]) == 0
    same = json.loads(capsys.readouterr().out)
    assert same["same"] is True
    assert same["moved_entries"] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["verify", "{greedy}", "missing.safetensors"], "missing.safetensors"),
        (["verify", "{scores}", "{scores}"], "not readable as JSON"),
        (["verify", "{greedy}", "{greedy}"], "budget profile"),
        (["frontier", "{scores}", "--points", "1"], "points"),
        (["frontier", "{scores}", "--solver", "adaptive_head"], "--level head"),
        (["verify", "{other}", "{scores}"], "tests/other"),
        (["frontier", "{scores}", "--png", "missing/f.png"], "does not exist"),
        (["frontier", "{scores}", "--png", "f.unknownext"], "another ending than .png"),
        (["diff", "{greedy}", "missing.json"], "missing.json"),
        (["diff", "{greedy}", "{other}"], "tests/other"),
    ],
)
def test_mistakes_get_one_line(
    words: list[str],
    said: str,
    files: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = tmp_path / "other.json"
    shape = make_shape(model_id="tests/other")
    kvalloc.solve(make_scores(0, shape=shape), budget="40%").save(other)
    arguments = [word.format(**files, other=other) for word in words]
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert said in captured.err
