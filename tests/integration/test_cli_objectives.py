"""Objectives beyond mean retention, several workloads and shared layers on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_tools import refused, run
from factories import make_bits, make_losses, make_scores, make_shared_scores

from kvalloc.formats.budget_profile import BudgetProfile

NOTE = "sum of single-unit measurements"


@pytest.fixture
def scores(tmp_path: Path) -> Path:
    path = tmp_path / "s.safetensors"
    make_losses().save(path)
    return path


def test_a_target_loss_ends_in_a_profile_that_verifies(scores: Path) -> None:
    out = scores.parent / "p.json"
    ran = run("solve", scores, "--target-loss", "0.05", "--solver", "dp", "-o", out)
    assert ran.code == 0
    assert "predicted loss of 0.05 nats per token or less in the fewest bytes" in ran.out
    assert NOTE in ran.out
    decided = BudgetProfile.load(out)
    assert decided.predicted_loss is not None
    assert decided.predicted_loss <= 0.05
    assert f"{decided.predicted_loss:.6f} nats per token" in ran.out
    assert run("verify", out, scores).code == 0
    told = run("inspect", out)
    assert NOTE in " ".join(told.out.split())
    assert run("inspect", out, "--json").json["predicted_loss"] == decided.predicted_loss


def test_the_least_loss_in_a_size(scores: Path) -> None:
    found = run(
        "solve", scores, "--budget", "50%", "--objective", "loss", "--solver", "dp", "--json"
    ).json
    assert found["predicted_loss"] == pytest.approx(-found["objective"])
    assert NOTE in found["predicted_loss_note"]
    by_retention = run("solve", scores, "--budget", "50%", "--objective", "mean", "--json").json
    assert by_retention["predicted_loss"] >= found["predicted_loss"]


def test_loss_decides_where_nothing_was_said_and_it_was_measured(scores: Path) -> None:
    asked = ("solve", scores, "--budget", "50%", "--json")
    by_default = run(*asked)
    assert "least predicted loss decides" in by_default.err
    assert by_default.err.count("\n") == 1
    low, high = by_default.json["predicted_loss_interval"]
    assert low < by_default.json["predicted_loss"] < high
    assert by_default.json["budgets"] == run(*asked, "--objective", "loss").json["budgets"]
    assert run(*asked, "--objective", "mean").err == ""
    # a solver that takes concave curves only, and curves of other units
    make_losses(per="layer").save(scores)
    by_head = run(*asked, "--level", "head")
    assert "retention decides, not the loss curves" in by_head.err
    assert by_head.json["requested"]["objective"] == "mean"
    asked_for = run("solve", scores, "--target-retention", "0.8", "--json")
    assert asked_for.err == ""
    make_scores().save(scores)
    assert run(*asked).err == ""


def test_compare_and_frontier_take_the_same_objective_by_default(scores: Path) -> None:
    rows = run("compare", scores, "--budget", "50%", "--json", "-q").json
    best = run("solve", scores, "--budget", "50%", "--json", "-q").json
    assert rows[0]["objective"] == best["objective"] == pytest.approx(-best["predicted_loss"])
    traced = run("frontier", scores, "--points", "3", "--json")
    assert traced.json["objective"] == "loss"
    assert "least predicted loss decides" in traced.err
    for one in traced.json["points"]:
        assert one["value"] == pytest.approx(-one["predicted_loss"])
    by_mean = run("frontier", scores, "--points", "3", "--json", "--objective", "mean")
    assert (by_mean.json["objective"], by_mean.err) == ("mean", "")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--average", "allocations", "--max-distinct", "2"), "--average curves"),
        (("--cap", "0=100B"), "use --cap 0="),
        (("--solver", "adaptive_head"), "--level head"),
    ],
)
def test_what_decides_is_not_said_of_a_call_that_is_refused(
    scores: Path, wrong: tuple[str, ...], said: str
) -> None:
    asked = ("solve", scores, "--budget", "50%", "-o", scores.parent / "p.json")
    assert said in refused(scores.parent, *asked, *wrong)


def test_compare_shows_the_loss_where_it_is_known(scores: Path) -> None:
    rows = run("compare", scores, "--budget", "50%", "--json").json
    assert all(row["predicted_loss"] is not None for row in rows if row["reason"] is None)
    ran = run("compare", scores, "--target-loss", "0.05")
    assert NOTE in " ".join((ran.out + ran.err).split())
    make_scores().save(scores)
    rows = run("compare", scores, "--budget", "50%", "--json").json
    assert all(row["predicted_loss"] is None for row in rows if row["reason"] is None)


def test_inspect_tells_what_was_measured(scores: Path) -> None:
    assert "one head at a time, at 5 budgets from 5 to 40 tokens" in run("inspect", scores).out
    told = run("inspect", scores, "--json").json
    assert told["loss_tokens"] == [5, 7, 12, 20, 40]
    assert told["losses_per"] == "head"
    make_scores().save(scores)
    assert run("inspect", scores, "--json").json["losses_per"] is None


def test_weights_from_a_file(scores: Path) -> None:
    weights = scores.parent / "w.json"
    weights.write_text("[0, 1, 1]")
    out = scores.parent / "p.json"
    asked = ("--budget", "40%", "--objective", "mean", "--weights", weights)
    ran = run("solve", scores, *asked, "--solver", "greedy", "-o", out)
    assert "most weighted retention" in ran.out
    assert BudgetProfile.load(out).budgets[0].tolist() == [5, 5]
    assert run("verify", out, scores).code == 0
    assert run("compare", scores, "--budget", "40%", "--weights", weights).code == 0


def test_tokens_and_bits_together(scores: Path) -> None:
    make_bits().save(scores)
    out = scores.parent / "p.json"
    ran = run("solve", scores, "--budget", "20%", "--bits", "16,8,4", "--level", "head", "-o", out)
    assert "bits, of the kept entries" in ran.out
    decided = BudgetProfile.load(out)
    assert decided.bits is not None
    assert run("verify", out, scores).code == 0
    assert "bits, of the kept entries" in " ".join(run("inspect", out).out.split())
    assert "mean fidelity 1.0000 at 16 bits" in " ".join(run("inspect", scores).out.split())
    assert run("inspect", scores, "--json").json["bit_widths"] == [16, 8, 4]
    told = run("solve", scores, "--budget", "20%", "--bits", "8,4", "--json").json
    assert set(sum(told["bits"], [])) <= {8, 4}
    uneven = ("--bits", "16,8.5")
    assert "expected numbers such as 16,8,4" in refused(
        scores.parent, "solve", scores, "--budget", "20%", *uneven, "-o", out
    )


@pytest.mark.parametrize("cost", ["decode-bytes", "communication"])
def test_another_cost_than_bytes(scores: Path, cost: str) -> None:
    make_scores(context_tokens=200).save(scores)
    out = scores.parent / "p.json"
    ran = run("solve", scores, "--budget", "40%", "--cost", cost, "-o", out)
    assert "for each generated token" in " ".join(ran.out.split())
    assert run("verify", out, scores).code == 0
    assert "for each generated token" in " ".join(run("inspect", out).out.split())
    told = run("solve", scores, "--target-retention", "0.9", "--cost", cost, "--json").json
    assert told["cost"] == cost
    assert told["cost_bytes"] == told["objective"]
    assert told["retained_bytes"] > 0
    assert "stored bytes" in refused(
        scores.parent, "solve", scores, "--memory", "1MiB", "--cost", cost, "-o", out
    )


def test_compare_says_why_the_others_do_not_apply(scores: Path) -> None:
    make_shared_scores(3, n_samples=3).save(scores)
    ran = run("compare", scores, "--budget", "40%", "--workloads", "worst", "--json", "-q")
    assert ran.code == 0
    rows = {row["solver"]: row for row in ran.json}
    assert "use cvar or ilp" in rows["greedy"]["reason"]
    values = {n: rows[n]["objective"] for n in ("auto", "cvar", "ilp")}
    assert values["ilp"] == pytest.approx(max(values.values()), abs=1e-9)


@pytest.mark.parametrize("groups", ["2-3,4-5", "4"])
def test_layers_that_share(scores: Path, groups: str) -> None:
    make_shared_scores(3, n_samples=3).save(scores)
    out = scores.parent / "p.json"
    ran = run("solve", scores, "--budget", "40%", "--share-groups", groups, "-o", out, "-q")
    assert (ran.code, ran.err) == (0, "")
    profile = BudgetProfile.load(out)
    assert profile.share_groups
    assert run("verify", out, scores, "-q").code == 0
    shown = run("inspect", out).out
    assert "keep the same entries" in shown
    assert ("bound over all groupings" in shown) == (groups == "4")
    assert run("inspect", out, "--json").json["share_groups"] == [
        list(group) for group in profile.share_groups
    ]
