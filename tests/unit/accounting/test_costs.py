"""Costs of budgets, and numbers that are large."""

import numpy as np
import pytest
from factories import make_problem, make_scores, make_shape

from kvalloc.accounting.costs import POSITION_BYTES, CacheCosts
from kvalloc.allocation.decision import solve
from kvalloc.allocation.formulation import formulate
from kvalloc.allocation.request import Request
from kvalloc.errors import InputError


def cost_of(shape, tokens, page=1):
    return CacheCosts(shape=shape, context_tokens=100, batch=1, page_tokens=page).of_head(
        tokens, 16, page
    )


def test_whole_pages_are_stored():
    shape = make_shape(head_dim=64)
    assert int(cost_of(shape, 17, page=16)) == 32 * (shape.bytes_per_entry + POSITION_BYTES)


# Sizes of numbers


def test_bytes_beyond_int32_are_counted_exactly():
    shape = make_shape(n_layers=80, n_kv_heads=8, head_dim=128, max_context_tokens=200_000)
    scores = make_scores(shape=shape, n_samples=1)
    request = Request.parse(budget=0.5, context=131_072, batch=64, page=16)
    problem = formulate(scores, request)
    assert problem.costs.dtype == np.int64
    each = int(cost_of(shape, 131_072, page=16))
    assert problem.max_cost_bytes == each * 80 * 8 * 64 > 2**32
    decided = solve(scores, memory="1TiB", context=131_072, batch=64, page=16)
    assert 2**39 < decided.retained_bytes <= 2**40


def test_more_options_than_fit_in_memory_are_refused():
    with pytest.raises(InputError, match=r"larger pages, such as page=239") as caught:
        formulate(make_scores(), Request.parse(budget=0.5, context=10**9))
    assert "budgets for each unit" in str(caught.value)


def test_a_problem_whose_costs_could_overflow_is_refused():
    huge = np.array([[0, 2**61], [0, 2**61]])
    with pytest.raises(InputError, match="add up to more than"):
        make_problem([[0.0, 1.0]] * 2, costs=huge, capacity=10)
