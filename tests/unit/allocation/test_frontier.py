"""The frontier: each point is what solving at that size gives, and prices are true."""

from __future__ import annotations

import pytest
from factories import make_scores

import kvalloc
from kvalloc.allocation.frontier import frontier
from kvalloc.errors import InputError


@pytest.mark.parametrize("level", ["layer", "head"])
@pytest.mark.parametrize("page", [1, 4])
def test_points_are_optimal_and_rise(level: str, page: int) -> None:
    points = frontier(make_scores(1), points=12, level=level, page=page)  # type: ignore[arg-type]
    values = [point.value for point in points]
    costs = [point.cost_bytes for point in points]
    assert costs == sorted(set(costs))
    assert values == sorted(values)
    assert values[-1] == pytest.approx(1.0, abs=1e-12)
    assert all(abs(point.bound - point.value) <= 1e-12 for point in points)
    assert points[-1].share == 1.0


def test_points_agree_with_solving_alone() -> None:
    scores = make_scores(2)
    for point, share in zip(frontier(scores, shares=[0.3, 0.6]), [0.3, 0.6], strict=True):
        alone = kvalloc.solve(scores, budget=share)
        assert point.value == alone.objective
        assert point.cost_bytes == alone.retained_bytes


def test_a_rule_stays_below_its_bound() -> None:
    points = frontier(make_scores(5), points=8, solver="pyramid")
    assert all(point.value <= point.bound for point in points)
    assert any(point.value < point.bound - 1e-6 for point in points)


def test_shares_beyond_everything_are_refused() -> None:
    with pytest.raises(InputError, match="shares of the frontier"):
        frontier(make_scores(0), shares=[0.5, 1.5])
