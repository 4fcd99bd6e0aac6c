"""Policies and bits chosen with budgets: profile, solve, verify, inspect, diff and generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_tools import prose, refused, run, save_tiny_model
from tiny_models import tiny_model

from kvalloc.formats.budget_profile import BudgetProfile


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("choices")
    save_tiny_model(path / "tiny", tiny_model(initializer_range=0.2))
    (path / "text.txt").write_text(prose(1000))
    (path / "prompt.txt").write_text(prose(100))
    return path


def profiling(folder: Path, *more: object) -> list[object]:
    return ["profile", folder / "tiny", "--text", folder / "text.txt", "--context", 64,
            "--samples", 2, "--scorer", "snapkv", "--window", 8, *more]  # fmt: skip


def test_from_a_model_to_an_answer(folder: Path) -> None:
    scores, budgets = folder / "s.safetensors", folder / "p.json"
    losses = ("--loss", "fast", "--loss-level", "head")
    names = ("--loss-policies", "tova,critical,snapkv:window=2:pool=1")
    ran = run(*profiling(folder, *losses, *names, "-o", scores), "--json")
    assert ran.code == 0
    titles = ["snapkv", "tova", "critical", "snapkv:window=2:pool=1"]
    assert ran.json["loss_policies"] == titles
    assert f"with each of {', '.join(titles)}" in " ".join(run("inspect", scores).out.split())
    asked = ("solve", scores, "--budget", "50%", "--level", "head")
    solved = run(*asked, "-o", budgets)
    assert solved.code == 0
    assert "retention       unknown: some heads keep others" in solved.out
    decided = BudgetProfile.load(budgets)
    assert decided.unit_policies is not None
    assert f"of {decided.unit_policies.size} KV heads" in solved.out
    assert run("verify", budgets, scores).code == 0
    told = " ".join(run("inspect", budgets, "--verbose").out.split())
    assert "other policies" in told
    assert "of 6 KV heads" in told
    one = run(*asked, "--loss-policies", "tova", "--json").json
    assert one["policies"] == ["snapkv", "tova"]
    assert one["unit_policies"] == [[1, 1]] * 3
    assert one["predicted_loss"] >= decided.predicted_loss - 1e-12  # type: ignore[operator]
    generated = run(
        "generate", folder / "tiny", "--profile", budgets, "--prompt-file", folder / "prompt.txt",
        "--max-new-tokens", 3, "--json",
    ).json  # fmt: skip
    assert generated["other_policies"] == [each.title for each in decided.other_policies]
    assert generated["retained_bytes"] < generated["full_bytes"]


def test_bits_are_decided_by_what_is_lost_with_them(folder: Path) -> None:
    scores, budgets = folder / "bits.safetensors", folder / "bits.json"
    losses = ("--loss", "fast", "--loss-level", "head", "--bits", "8,3")
    ran = run(*profiling(folder, *losses, "-o", scores), "--json")
    assert ran.json["loss_widths"] == [16, 8, 3]
    assert "stored at 16, 8, 3 bits each" in " ".join(run("inspect", scores).out.split())
    asked = ("--budget", "60%", "--level", "head", "--bits", "16,8,3")
    solved = run("solve", scores, *asked, "-o", budgets)
    assert "the least predicted loss decides" in solved.err
    decided = BudgetProfile.load(budgets)
    compared = run("compare", scores, *asked, "--objective", "loss", "--solver", "dp").out
    assert f"{decided.predicted_loss:.4f}" in compared
    unmeasured = ("solve", scores, "--target-loss", "0.1", "--bits", "5,4", "--json")
    refused_line = refused(folder, *unmeasured)
    assert "what 5 and 4 bits lose was not measured" in refused_line
    assert "'kvalloc profile --loss fast --bits 16,8,5,4,3'" in refused_line
