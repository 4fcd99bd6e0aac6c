"""Loss curves: what a file may hold, what they make of a problem, and what is told of them."""

from __future__ import annotations

import numpy as np
import pytest
from factories import make_curves, make_losses, make_shape

from kvalloc.accounting.costs import POSITION_BYTES
from kvalloc.allocation.decision import solve
from kvalloc.allocation.formulation import EVEN_OPTIONS, formulate, problem_of
from kvalloc.allocation.request import Request
from kvalloc.formats.budget_profile import relative_gap


def test_the_problem_is_less_the_measured_loss() -> None:
    scores = make_losses(3, n_samples=2)
    assert scores.loss_tokens is not None
    problem = formulate(scores, Request.parse(target_loss=0.05, level="head"))
    mean = scores.losses[:, :, :, 0, 0].mean(axis=0)
    for unit in range(problem.n_units):
        layer, head = int(problem.layers[unit]), int(problem.heads[unit])
        expected = np.interp(problem.tokens[unit], scores.loss_tokens, mean[layer, head])
        np.testing.assert_allclose(problem.values[unit], -expected, atol=1e-15)
    assert problem.target == -0.05
    assert problem.weights.tolist() == [1.0] * problem.n_units
    single = problem_of(make_curves(scores, 1, target_loss=0.05, level="head"))
    at_first = -scores.losses[1].reshape(problem.n_units, -1)[:, 0]
    np.testing.assert_allclose(single.values[:, 0], at_first, atol=1e-15)


def test_options_start_where_a_loss_was_measured() -> None:
    scores = make_losses(levels=[11, 20, 40])
    problem = formulate(scores, Request.parse(budget=0.6, objective="loss"))
    assert int(problem.tokens.min()) == 11
    longer = formulate(scores, Request.parse(budget=0.6, objective="loss", context=75))
    # The same share of the evictable entries: 5 + 6 * 70 / 35.
    assert int(longer.tokens.min()) == 17
    assert make_curves(scores).predicted_loss(np.full((3, 2), 10)) is None
    assert make_curves(scores).predicted_loss(np.full((3, 2), 11)) is not None


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
        assert problem.step_bytes == page * 2 * (scores.shape.bytes_per_entry + POSITION_BYTES)


def test_whole_layers_only_where_whole_layers_were_measured() -> None:
    scores = make_losses(per="layer")
    assert formulate(scores, Request.parse(target_loss=0.1)).n_units == 3
    different = np.full((3, 2), 20)
    assert make_curves(scores).predicted_loss(different) is not None
    different[1, 0] = 19
    assert make_curves(scores).predicted_loss(different) is None


def test_a_loss_of_nothing_keeps_everything_that_does_harm() -> None:
    scores = make_losses(noise=0.0)
    decided = solve(scores, target_loss=0.0, level="head", solver="dp")
    assert decided.predicted_loss == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(("bound", "gap"), [(-0.01, 0.5), (0.0, 1.0), (-0.02, 0.0), (None, None)])
def test_gaps_of_losses_are_shares_of_the_loss(bound: float | None, gap: float | None) -> None:
    assert relative_gap(-0.02, bound) == gap


def test_sliding_layers_have_no_loss() -> None:
    shape = make_shape(layer_types=("full", "sliding", "full"), sliding_window=9)
    scores = make_losses(shape=shape)
    losses = scores.losses.copy()
    losses[:, 1, :, :-1] = 9.0  # counts for nothing: no budget changes it
    scores = scores.replace(losses=losses)
    decided = solve(scores, target_loss=0.05, solver="dp")
    assert decided.predicted_loss <= 0.05
    assert decided.budgets[1].tolist() == [8, 8]


def test_the_interval_of_a_predicted_loss_is_over_samples() -> None:
    scores = make_losses(n_samples=40)
    decided = solve(scores, budget="40%", objective="loss")
    each = np.array(
        [make_curves(scores, s).predicted_loss(decided.budgets) for s in range(40)], dtype=float
    )
    found = make_curves(scores).predicted_loss_interval(decided.budgets)
    assert found is not None
    half = 1.96 * each.std() / 40**0.5
    assert decided.predicted_loss == pytest.approx(each.mean())
    assert found == pytest.approx((each.mean() - half, each.mean() + half), abs=0.25 * half)
    one = make_losses(n_samples=1)
    assert make_curves(one).predicted_loss_interval(solve(one, budget="40%").budgets) is None
