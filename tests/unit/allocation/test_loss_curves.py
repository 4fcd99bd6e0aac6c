"""Loss curves: what a file may hold, what they make of a problem, and what is told of them."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import make_losses, make_scores, make_shape
from hypothesis import given, settings
from hypothesis import strategies as st

from kvalloc.allocation.audit import verify
from kvalloc.allocation.curves import (
    EVEN_OPTIONS,
    mean_retention,
    predicted_loss,
    predicted_loss_interval,
)
from kvalloc.allocation.decision import solve
from kvalloc.allocation.formulation import formulate
from kvalloc.allocation.request import Request
from kvalloc.errors import InfeasibleError, InputError, ProfileFileError, SolverError
from kvalloc.formats.budget_profile import BudgetProfile, relative_gap
from kvalloc.formats.score_profile import ScoreProfile


def test_loss_curves_are_saved_loaded_and_part_of_the_digest(tmp_path: Path) -> None:
    scores = make_losses(per="layer")
    assert scores.losses is not None
    scores.save(tmp_path / "s.safetensors")
    again = ScoreProfile.load(tmp_path / "s.safetensors")
    for name in ("loss_tokens", "losses", "loss_stderr"):
        np.testing.assert_array_equal(getattr(again, name), getattr(scores, name))
    assert again.digest == scores.digest
    changed = scores.losses.copy()
    changed[0, 0, 0, 0] += 1e-9
    assert scores.replace(losses=changed).digest != scores.digest
    assert scores.replace(loss_stderr=None).digest != scores.digest
    with pytest.raises(ValueError, match="read-only"):
        scores.losses[0] = 0.0


def test_without_them_file_and_digest_are_as_before(tmp_path: Path) -> None:
    plain = make_scores()
    bare = make_losses().replace(loss_tokens=None, losses=None, loss_stderr=None)
    assert not plain.has_losses
    assert bare.digest == plain.digest
    plain.save(tmp_path / "plain.safetensors")
    bare.save(tmp_path / "bare.safetensors")
    same = [(tmp_path / name).read_bytes() for name in ("plain.safetensors", "bare.safetensors")]
    assert same[0] == same[1]


def test_noise_is_kept() -> None:
    """Slightly negative, and rising with more entries: that is what measurements look like."""
    scores = make_losses(noise=0.0)
    assert scores.losses is not None
    noisy = scores.losses.copy()
    noisy[0, 0, 0, 1] = -0.0004
    noisy[0, 1, 0, 2] = noisy[0, 1, 0, 1] + 0.01
    kept = scores.replace(losses=noisy).losses
    np.testing.assert_array_equal(kept, noisy)


def _nan_losses(scores: ScoreProfile) -> dict[str, Any]:
    assert scores.losses is not None
    losses = scores.losses.copy()
    losses[1, 2, 1, 0] = np.nan
    return {"losses": losses}


FAULTS: dict[str, tuple[Any, str]] = {
    "nan": (_nan_losses, r"losses is not finite in sample 1, layer 2, head 1, level 0"),
    "levels fall": (lambda s: {"loss_tokens": s.loss_tokens[::-1].copy()}, "rising"),
    "levels end early": (lambda s: {"loss_tokens": s.loss_tokens - 1}, "to the context of 40"),
    "below the window": (
        lambda s: {"loss_tokens": np.array([4, 7, 12, 20, 40])},
        r"rising from at least 5 \(sinks and window\)",
    ),
    "levels turned round": (lambda s: {"losses": s.losses[..., ::-1].copy()}, "not 0 where"),
    "sign turned round": (lambda s: {"losses": -s.losses}, "what is lost, above 0"),
    "float levels": (lambda s: {"loss_tokens": s.loss_tokens.astype(float)}, "int64"),
    "single precision": (lambda s: {"losses": s.losses.astype(np.float32)}, "float64"),
    "other layers": (lambda s: {"losses": s.losses[:, :1]}, "shaped"),
    "other levels": (lambda s: {"losses": s.losses[..., 1:]}, "shaped"),
    "only the levels": (lambda s: {"losses": None}, "one without the other"),
    "only the losses": (lambda s: {"loss_tokens": None}, "one without the other"),
    "negative errors": (lambda s: {"loss_stderr": -s.loss_stderr}, ">= 0"),
    "errors of another shape": (lambda s: {"loss_stderr": s.loss_stderr[:, :, :1]}, "shaped"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_is_refused(fault: str) -> None:
    scores = make_losses()
    change, message = FAULTS[fault]
    with pytest.raises(InputError, match=message) as caught:
        scores.replace(**change(scores))
    assert str(caught.value).startswith("score profile: loss")


def test_a_file_with_nan_losses_names_file_and_field(tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.numpy import save_file

    path = tmp_path / "s.safetensors"
    make_losses().save(path)
    with safe_open(str(path), framework="numpy") as handle:
        metadata = handle.metadata()
        arrays = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    arrays["losses"][0, 0, 0, 0] = np.nan
    save_file(arrays, path, metadata=metadata)
    with pytest.raises(ProfileFileError, match=r"s\.safetensors.*losses is not finite"):
        ScoreProfile.load(path)


def test_the_problem_is_less_the_measured_loss() -> None:
    scores = make_losses(3, n_samples=2)
    assert scores.losses is not None
    assert scores.loss_tokens is not None
    problem = formulate(scores, Request.parse(target_loss=0.05, level="head"))
    mean = scores.losses.mean(axis=0)
    for unit in range(problem.n_units):
        layer, head = int(problem.layers[unit]), int(problem.heads[unit])
        expected = np.interp(problem.tokens[unit], scores.loss_tokens, mean[layer, head])
        np.testing.assert_allclose(problem.values[unit], -expected, atol=1e-15)
    assert problem.target == -0.05
    assert problem.weights.tolist() == [1.0] * problem.n_units
    single = formulate(scores, Request.parse(target_loss=0.05, level="head"), sample=1)
    at_first = -scores.losses[1].reshape(problem.n_units, -1)[:, 0]
    np.testing.assert_allclose(single.values[:, 0], at_first, atol=1e-15)


def test_options_start_where_a_loss_was_measured() -> None:
    scores = make_losses(levels=[11, 20, 40])
    problem = formulate(scores, Request.parse(budget=0.6, objective="loss"))
    assert int(problem.tokens.min()) == 11
    longer = formulate(scores, Request.parse(budget=0.6, objective="loss", context=75))
    # The same share of the evictable entries: 5 + 6 * 70 / 35.
    assert int(longer.tokens.min()) == 17
    assert predicted_loss(scores, np.full((3, 2), 10), 40) is None
    assert predicted_loss(scores, np.full((3, 2), 11), 40) is not None


@pytest.mark.parametrize(("context", "page"), [(40, 1), (2000, 1), (4096, 16), (5000, 7)])
def test_options_are_few_and_their_costs_keep_a_coarse_grain(context: int, page: int) -> None:
    scores = make_losses()
    problem = formulate(
        scores, Request.parse(budget=0.5, objective="loss", context=context, page=page)
    )
    assert problem.n_options <= EVEN_OPTIONS
    assert problem.step_bytes is not None
    assert problem.step_bytes % page == 0
    assert int(problem.tokens[0, -1]) == context
    # Everything is on offer where it is few.
    if context // page <= EVEN_OPTIONS:
        assert problem.step_bytes == page * 2 * scores.shape.bytes_per_entry


def test_whole_layers_only_where_whole_layers_were_measured() -> None:
    scores = make_losses(per="layer")
    assert formulate(scores, Request.parse(target_loss=0.1)).n_units == 3
    with pytest.raises(InputError, match="whole layers.*level='layer'"):
        formulate(scores, Request.parse(target_loss=0.1, level="head"))
    different = np.full((3, 2), 20)
    assert predicted_loss(scores, different, 40) is not None
    different[1, 0] = 19
    assert predicted_loss(scores, different, 40) is None


def test_heads_add_up_at_layer_level() -> None:
    scores = make_losses()
    layers = formulate(scores, Request.parse(budget=0.5, objective="loss"))
    heads = formulate(scores, Request.parse(budget=0.5, objective="loss", level="head"))
    summed = heads.values.reshape(3, 2, -1).sum(axis=1)
    np.testing.assert_allclose(layers.values, summed, atol=1e-15)


def test_no_loss_without_loss_curves() -> None:
    with pytest.raises(InputError, match="no loss curves.*ask for retention"):
        formulate(make_scores(), Request.parse(target_loss=0.1))
    with pytest.raises(InputError, match="no loss curves"):
        solve(make_scores(), budget=0.5, objective="loss", solver="dp")
    assert predicted_loss(make_scores(), np.full((3, 2), 20), 40) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target_loss": math.nan}, "cannot be asked for"),
        ({"target_loss": math.inf}, "cannot be asked for"),
        ({"target_loss": -0.01}, "cannot be asked for"),
        ({"target_loss": 0.1, "budget": 0.5}, "two targets at once"),
        ({"target_loss": 0.1, "objective": "worst"}, "summed over all units"),
        ({"target_retention": 0.9, "objective": "loss"}, "give target_loss"),
        ({"budget": 0.5, "objective": "best"}, "expected 'mean', 'worst' or 'loss'"),
    ],
)
def test_targets_that_contradict(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Request.parse(**arguments)


def test_a_target_loss_scales_with_the_prompt_and_is_recorded(tmp_path: Path) -> None:
    scores = make_losses(5)
    decided = solve(scores, target_loss=0.05, level="head", solver="dp")
    assert decided.requested["target"] == "loss"
    assert decided.requested["value"] == 0.05
    assert decided.requested["objective"] == "loss"
    assert decided.length_rule == "proportional"
    assert decided.predicted_loss is not None
    assert decided.predicted_loss <= 0.05 + 1e-12
    assert decided.retention == pytest.approx(mean_retention(scores, decided.budgets, 40))
    decided.save(tmp_path / "p.json")
    again = BudgetProfile.load(tmp_path / "p.json")
    assert again.predicted_loss == decided.predicted_loss
    failed = [check for check in verify(again, scores) if not check.passed]
    assert not failed
    lied = again.replace(predicted_loss=decided.predicted_loss / 2)
    assert [c.name for c in verify(lied, scores) if not c.passed] == ["predicted loss"]


def test_a_loss_of_nothing_keeps_everything_that_does_harm() -> None:
    scores = make_losses(noise=0.0)
    decided = solve(scores, target_loss=0.0, level="head", solver="dp")
    assert decided.predicted_loss == pytest.approx(0.0, abs=1e-12)


def test_retention_budgets_are_told_with_their_predicted_loss() -> None:
    scores = make_losses()
    decided = solve(scores, budget="50%", solver="greedy")
    assert decided.predicted_loss is not None
    best = solve(scores, budget="50%", solver="dp", objective="loss")
    assert best.predicted_loss is not None
    assert best.predicted_loss <= decided.predicted_loss
    assert best.predicted_loss == pytest.approx(-best.objective)
    assert best.retention is not None
    assert decided.retention is not None
    assert best.retention <= decided.retention
    assert solve(make_scores(), budget="50%", solver="greedy").predicted_loss is None


def test_greedy_refuses_what_is_not_concave() -> None:
    scores = make_losses()
    assert scores.losses is not None
    steps = np.broadcast_to([0.1, 0.1, 0.1, 0.01, 0.0], scores.losses.shape).copy()
    scores = scores.replace(losses=steps)
    with pytest.raises(SolverError, match="use ilp"):
        solve(scores, target_loss=0.05, solver="greedy")
    decided = solve(scores, target_loss=0.05)
    assert decided.termination == "optimal"
    assert decided.predicted_loss is not None
    assert decided.predicted_loss <= 0.05


def _least_loss(scores: ScoreProfile, total_tokens: int) -> float:
    """By looking at every pair of budgets of two layers of one head."""
    assert scores.losses is not None
    assert scores.loss_tokens is not None
    mean = scores.losses.mean(axis=0)[:, 0]
    lowest = int(scores.loss_tokens[0])
    grid = range(lowest, scores.context_tokens + 1)
    return min(
        sum(float(np.interp(n, scores.loss_tokens, row)) for n, row in zip(pair, mean, strict=True))
        for pair in itertools.product(grid, repeat=2)
        if sum(pair) <= total_tokens
    )


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.integers(10, 60))
def test_the_least_loss_is_found(seed: int, total: int) -> None:
    scores = make_losses(
        seed, shape=make_shape(n_layers=2, n_kv_heads=1), context_tokens=30, levels=[5, 8, 14, 30]
    )
    memory = total * scores.shape.bytes_per_entry
    for solver in ("dp", "ilp"):
        decided = solve(scores, memory=memory, objective="loss", solver=solver)
        expected = _least_loss(scores, total)
        assert decided.predicted_loss == pytest.approx(expected, abs=1e-10)
        assert decided.retained_bytes <= memory


def test_gaps_of_losses_are_shares_of_the_loss() -> None:
    assert relative_gap(-0.02, -0.01) == 0.5
    assert relative_gap(-0.02, 0.0) == 1.0
    assert relative_gap(-0.02, -0.02) == 0.0
    assert relative_gap(0.0, 0.0) == 0.0
    assert relative_gap(-0.02, None) is None


def test_sliding_layers_have_no_loss() -> None:
    shape = make_shape(layer_types=("full", "sliding", "full"), sliding_window=9)
    scores = make_losses(shape=shape)
    assert scores.losses is not None
    losses = scores.losses.copy()
    losses[:, 1] = np.nan  # nobody measures what no budget changes
    scores = scores.replace(losses=losses)
    decided = solve(scores, target_loss=0.05, solver="dp")
    assert decided.predicted_loss is not None
    assert math.isfinite(decided.predicted_loss)
    assert decided.budgets[1].tolist() == [8, 8]


def test_a_loss_out_of_reach_is_told_with_the_nearest_one() -> None:
    scores = make_losses(noise=0.0)
    with pytest.raises(InfeasibleError, match=r"target_loss=0.001.*the least is") as caught:
        solve(scores, target_loss=0.001, max_tokens=20, solver="dp")
    nearest = caught.value.nearest
    assert nearest is not None
    assert nearest > 0.001
    flag = re.search(r"the least is target_loss=([0-9.]+)", str(caught.value))
    assert flag is not None
    copied = solve(scores, target_loss=float(flag[1]), max_tokens=20, solver="dp")
    assert copied.predicted_loss == pytest.approx(nearest)
    assert int(copied.budgets.max()) <= 20


def test_no_page_between_the_least_measured_and_the_largest_allowed() -> None:
    with pytest.raises(InputError, match="can be offered.*allow larger"):
        solve(make_losses(levels=[17, 30, 40]), budget="50%", objective="loss", max_tokens=16)


def test_the_interval_of_a_predicted_loss_is_over_samples() -> None:
    scores = make_losses(n_samples=40)
    decided = solve(scores, budget="40%", objective="loss")
    context = decided.context_tokens
    each = np.array(
        [predicted_loss(scores, decided.budgets, context, sample=s) for s in range(40)], dtype=float
    )
    found = predicted_loss_interval(scores, decided.budgets, context)
    assert found is not None
    half = 1.96 * each.std() / 40**0.5
    assert decided.predicted_loss == pytest.approx(each.mean())
    assert found == pytest.approx((each.mean() - half, each.mean() + half), abs=0.25 * half)
    one = make_losses(n_samples=1)
    assert predicted_loss_interval(one, solve(one, budget="40%").budgets, context) is None
