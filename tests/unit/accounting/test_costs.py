"""Cost models beyond stored bytes, and units of unequal cost."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import make_problem, make_scores, make_shape
from refusals import untrue

from kvalloc.accounting.costs import (
    GATHER_CONSTANT_BYTES,
    POSITION_BYTES,
    CacheCosts,
    Cost,
    gather_bytes,
)
from kvalloc.allocation.decision import solve
from kvalloc.allocation.formulation import formulate
from kvalloc.allocation.request import Request
from kvalloc.errors import InfeasibleError, InputError
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.shape import ModelShape


def test_the_example_of_mpcache_table_2() -> None:
    """1.125 MB for a quarter of C = 64 clusters of T = 1024 tokens."""
    assert int(gather_bytes(1024)) == 1.125 * 2**20
    assert 16 * 64 * math.log2(64) * GATHER_CONSTANT_BYTES == 1.125 * 2**20


def test_gathering_grows_with_clusters_not_tokens() -> None:
    sent = gather_bytes(np.arange(1, 3000))
    assert np.all(np.diff(sent) >= 0)
    by_hand = [
        192 * math.ceil(0.25 * c) * c * (c - 1).bit_length() for c in range(1, 3000 // 16 + 1)
    ]
    assert sent[15::16].tolist() == by_hand[: sent[15::16].size]
    assert len(set(sent[16:32].tolist())) == 1


def cost_of(cost: Cost, shape: ModelShape, tokens: Any, bits: int = 16, page: int = 1) -> Any:
    costs = CacheCosts(shape=shape, cost=cost, context_tokens=100, batch=1, page_tokens=page)
    return costs.of_head(tokens, bits, page)


def test_what_is_read_is_what_is_kept_not_whole_pages() -> None:
    shape = make_shape(head_dim=64)
    entry = shape.bytes_per_entry
    assert int(cost_of("bytes", shape, 17, page=16)) == 32 * (entry + POSITION_BYTES)
    assert int(cost_of("decode-bytes", shape, 17, page=16)) == 17 * entry
    assert int(cost_of("decode-bytes", shape, 17, 4, page=16)) < 17 * entry / 3


@pytest.mark.parametrize("level", ["layer", "head"])
@pytest.mark.parametrize("cost", ["decode-bytes", "communication"])
def test_a_share_of_another_cost(cost: Any, level: Any, tmp_path: Path) -> None:
    scores = make_scores(2, context_tokens=300)
    decided = solve(scores, budget="40%", cost=cost, level=level, batch=2)
    each = cost_of(cost, scores.shape, decided.budgets)
    assert decided.cost_bytes == 2 * int(each.sum())
    whole = 2 * 6 * int(cost_of(cost, scores.shape, 300))
    assert decided.full_cost_bytes == whole
    assert decided.cost_bytes <= 0.4 * whole
    assert decided.requested["cost"] == cost
    # Stored bytes are stated all the same.
    stored = scores.shape.bytes_per_entry + POSITION_BYTES
    assert decided.retained_bytes == 2 * int(decided.budgets.sum()) * stored
    assert "bytes" not in decided.requested
    decided.save(tmp_path / "p.json")
    again = BudgetProfile.load(tmp_path / "p.json")
    assert (again.cost_bytes, again.full_cost_bytes) == (decided.cost_bytes, whole)
    assert not untrue(again, scores)


def test_a_cluster_that_costs_the_same_is_filled() -> None:
    """Nothing is won by leaving places of a cluster empty."""
    scores = make_scores(1, context_tokens=301)
    problem = formulate(scores, Request.parse(budget=0.3, cost="communication"))
    assert problem.bits is None
    for unit in range(problem.n_units):
        offered = problem.tokens[unit, : int(problem.option_counts[unit])]
        assert set(offered[:-1] % 16) <= {0}
        assert int(offered[-1]) == 301


def test_fewest_bytes_communicated_for_a_target() -> None:
    scores = make_scores(1, context_tokens=200)
    decided = solve(scores, target_retention=0.9, cost="communication")
    assert decided.objective == decided.cost_bytes
    assert decided.retention is not None
    assert decided.retention >= 0.9 - 1e-12
    by_bytes = solve(scores, target_retention=0.9)
    sent = cost_of("communication", scores.shape, by_bytes.budgets).sum()
    assert decided.cost_bytes is not None
    assert decided.cost_bytes <= int(sent)


def test_tokens_as_a_budget_of_another_cost() -> None:
    scores = make_scores(1, context_tokens=200)
    decided = solve(scores, budget_tokens=64, cost="communication")
    assert decided.cost_bytes is not None
    assert decided.cost_bytes <= 6 * int(gather_bytes(64))
    floors = make_scores(1, context_tokens=200, window=100, sinks=0)
    with pytest.raises(InfeasibleError, match=r"bytes communicated per token; .* budget_tokens=97"):
        solve(floors, budget_tokens=64, cost="communication")
    assert solve(floors, budget_tokens=97, cost="communication").cost_bytes is not None


# Sizes of numbers


def test_bytes_beyond_int32_are_counted_exactly() -> None:
    shape = make_shape(n_layers=80, n_kv_heads=8, head_dim=128, max_context_tokens=200_000)
    scores = make_scores(shape=shape, n_samples=1)
    for cost in ("bytes", "decode-bytes", "communication"):
        request = Request.parse(budget=0.5, context=131_072, batch=64, page=16, cost=cost)
        problem = formulate(scores, request)
        assert problem.costs.dtype == np.int64
        each = int(cost_of(cost, shape, 131_072, page=16))  # type: ignore[arg-type]
        assert problem.max_cost_bytes == each * 80 * 8 * 64 > 2**32
    decided = solve(scores, memory="1TiB", context=131_072, batch=64, page=16)
    assert 2**39 < decided.retained_bytes <= 2**40


def test_more_options_than_fit_in_memory_are_refused() -> None:
    with pytest.raises(InputError, match=r"larger pages, such as page=239") as caught:
        formulate(make_scores(), Request.parse(budget=0.5, context=10**9))
    assert "budgets for each unit" in str(caught.value)


def test_a_problem_whose_costs_could_overflow_is_refused() -> None:
    huge = np.array([[0, 2**61], [0, 2**61]])
    with pytest.raises(InputError, match="add up to more than"):
        make_problem([[0.0, 1.0]] * 2, costs=huge, capacity=10)
