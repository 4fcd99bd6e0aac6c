"""``kvalloc demo --quick`` from end to end, with the real model."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import cli_tools
import numpy as np
import pytest

from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.problem.registry import solver_names
from kvalloc.prompts.metrics import contained
from kvalloc.prompts.splits import split_texts

pytestmark = [pytest.mark.model, pytest.mark.slow]

MIB = 1024**2


def run(*arguments: str, folder: Path) -> cli_tools.Ran:
    with contextlib.chdir(folder):
        return cli_tools.run("demo", "--quick", *arguments)


SOLVERS = ("uniform", "greedy", "ilp", "pyramid", "adaptive_head")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """As if these were all solvers: every other one's budgets cost three more rounds of answers."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvalloc.allocation.decision.solver_names", lambda: SOLVERS)
        # a limit that no machine reaches: the whole ladder is asked
        done = run("--time-limit", "3600", folder=folder)
    assert done.code == 0, done.err
    assert "Traceback" not in done.err
    return folder / "demo-output", done.out


@pytest.fixture(scope="module")
def record(demo: tuple[Path, str]) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((demo[0] / "results.json").read_text("utf-8"))
    return results


def test_every_file_is_there_and_sound(demo, record):
    folder, _ = demo
    scores = ScoreProfile.load(folder / "scores.safetensors")
    assert not any(name in scores.text_description for name in split_texts("development"))
    assert (folder / "demo.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    names = {d["solver"] for d in record["decisions"] if d["level"] is not None}
    assert names == {*SOLVERS}
    for name in names:
        profile = BudgetProfile.load(folder / f"{name}.json")
        assert profile.score_digest == scores.digest
        assert profile.solver == name
        assert profile.retention >= 0.9 - 1e-9
    assert not list(folder.glob("*.tmp"))


def test_output_fits_80_columns_without_a_terminal(demo):
    _, output = demo
    assert max(map(len, output.splitlines())) <= 80
    assert "\x1b" not in output
    for number in range(1, 7):
        assert re.search(rf"^{number}\. ", output, re.MULTILINE)


def test_found_is_what_the_answers_say(record):
    for asked in record["asked"] + record["by_loss"] + record["ladder"]:
        assert asked["found"] == sum(map(is_found, asked["rows"]))
        for row in asked["rows"] + record["full_cache"]:
            assert row["found"] is is_found(row)


def is_found(row: dict[str, Any]) -> bool:
    return contained(row["answer"], row["number"])


def test_what_is_printed_is_what_was_recorded(demo, record):
    _, output = demo
    apply_part = output.split("3. Apply")[1].split("4. Harm")[0]
    harm_part = output.split("4. Harm")[1].split("5. Search")[0]
    search_part = output.split("5. Search")[1].split("6. What")[0]
    for asked in record["by_loss"]:
        (summary,) = re.findall(rf"^{asked['solver']} .*$", harm_part, re.MULTILINE)
        assert f"{asked['found']} of 1" in summary
        assert f"{asked['kl']:.3f}" in summary
    own = [asked for asked in record["asked"] if asked["same_as"] is None]
    assert {"uniform", "greedy", "pyramid"} <= {asked["solver"] for asked in own}
    for asked in own:
        answer, summary = re.findall(rf"^{asked['solver']} .*$", apply_part, re.MULTILINE)
        (row,) = asked["rows"]
        assert (" yes " if row["found"] else " no ") in answer
        assert f"{row['kl']:.3f}" in answer
        assert f"{row['retained_bytes'] / MIB:.2f}" in answer
        assert f"{asked['found']} of 1" in summary
        assert f"{asked['retention']:.4f}" in summary
        rungs = re.findall(rf"^{asked['solver']} .*$", search_part, re.MULTILINE)
        for rung in record["ladder"]:
            if rung["solver"] == asked["solver"] and rungs:
                assert f"{rung['found']}/1 {rung['kl']:.2f}" in rungs[0]
    for asked in record["asked"]:
        if asked["same_as"] is not None:
            assert re.search(rf"\b{asked['solver']}\b", apply_part)
    assert "weak guide to harm" in output.replace("\n", " ")
    assert re.search(r"\badaptive_head\b", apply_part)


def test_bytes_are_equal_and_true(demo, record):
    folder, _ = demo
    greedy = BudgetProfile.load(folder / "greedy.json")
    assert record["capacity_bytes"] == greedy.retained_bytes
    layer_step = greedy.shape.n_layers * greedy.shape.n_kv_heads * greedy.shape.bytes_per_entry
    *by_loss, default = record["by_loss"]
    assert default["solver"] == "default"
    for row in default["rows"]:  # at 5 bits: the share is of a cache at 16 bits
        assert 0.4 < row["retained_bytes"] / record["capacity_bytes"] <= 0.5
    for asked in record["asked"] + by_loss:
        for row in asked["rows"]:
            # never above what was granted; below it by less than one entry a head, plus what a
            # prompt that is a token or two shorter cannot fill
            missing = record["capacity_bytes"] - row["retained_bytes"]
            assert 0 <= missing <= 4 * layer_step
            assert row["full_bytes"] == greedy.full_bytes_at(row["prompt_tokens"])
    decided = [d for d in record["at_capacity"] if d["level"] is not None]
    assert {a["solver"] for a in record["asked"]} == {d["solver"] for d in decided}


def test_loss_was_measured_on_other_texts(demo):
    losses = ScoreProfile.load(demo[0] / "losses.safetensors")
    assert losses.has_losses
    assert losses.loss_method == "measured"
    assert losses.losses.shape[2] == 1
    assert not any(name in losses.text_description for name in split_texts("development"))
    decided = BudgetProfile.load(demo[0] / "least_loss.json")
    assert decided.score_digest == losses.digest
    assert decided.predicted_loss is not None


def test_the_whole_ladder_was_asked(record):
    assert record["ladder_skipped"] == []
    solvers = {asked["solver"] for asked in record["asked"] + record["by_loss"][:-1]}
    shares = {rung["share"] for rung in record["ladder"]}
    assert {(r["solver"], r["share"]) for r in record["ladder"]} == {
        (solver, share) for solver in solvers for share in shares
    }
    for rung in record["ladder"]:
        kept = np.mean([row["retained_bytes"] / row["full_bytes"] for row in rung["rows"]])
        assert kept == pytest.approx(rung["share"], abs=0.01)


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "taken").write_text("x")
    done = run("--output-dir", "taken", folder=tmp_path)
    assert done.code == 2
    assert done.out == ""
    assert done.err.strip().count("\n") == 0
    assert "taken is a file" in done.err


@pytest.mark.parametrize("limit", ["0", "-5", "nan", "inf"])
def test_a_time_limit_that_is_no_positive_number_is_refused(tmp_path, limit):
    done = run("--time-limit", limit, folder=tmp_path)
    assert (done.code, done.out) == (2, "")
    assert f"--time-limit is {limit} s, expected a number above 0" in done.err
    assert list(tmp_path.iterdir()) == []


def test_json_has_stdout_to_itself(tmp_path):
    done = run("--json", "--time-limit", "1", "--output-dir", "o", folder=tmp_path)
    assert done.code == 0, done.err
    record = json.loads(done.out)
    assert record == json.loads((tmp_path / "o" / "results.json").read_text("utf-8"))
    assert record["ladder"] == []
    assert {a["solver"] for a in record["asked"]} >= {"uniform", "greedy"}
    assert {d["solver"] for d in record["decisions"]} == {*solver_names()}
    assert len(record["ladder_skipped"]) == 2 * len(record["asked"] + record["by_loss"])
