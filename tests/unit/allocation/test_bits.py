"""Tokens and bits chosen together: stored bytes, options, solvers, profiles."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from factories import (
    make_bits,
    make_budget_profile,
    make_curves,
    make_loss_bits,
    make_problem,
)
from factories import make_shape as shape_of
from hypothesis import given, settings
from hypothesis import strategies as st

from kvalloc.accounting.costs import head_bytes, stored_bytes
from kvalloc.allocation.comparison import compare_profiles
from kvalloc.allocation.decision import solve
from kvalloc.allocation.formulation import formulate
from kvalloc.allocation.request import Request
from kvalloc.allocation.verification import solve_problem
from kvalloc.errors import InputError, SolverError
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.problem import MaxDistinct, SameBudget
from kvalloc.problem.registry import get_solver, solver_names
from kvalloc.report.wording import request_text
from kvalloc.shape import ModelShape

BITS = (16, 8, 4)


def _cost(tokens: int, bits: int, shape: ModelShape) -> int:
    """Bytes of the entries of one head, with four for the position of each."""
    return _by_hand(tokens, bits, shape.head_dim) + 4 * tokens


def _room(share: float, entries: int, shape: ModelShape) -> int:
    """A share of the bytes of so many entries at 16 bits a number."""
    return int(share * entries * 2 * shape.head_dim * 2 + 1e-9)


def _by_hand(tokens: int, bits: int, head_dim: int) -> int:
    """Bytes counted number by number."""
    if bits == 16:
        return tokens * 2 * head_dim * 2
    keys, values = {5: (5, 4), 3: (4, 3)}.get(bits, (bits, bits))
    row = (head_dim * keys + 7) // 8 + (head_dim * values + 7) // 8
    key_blocks = sum(1 for start in range(0, tokens, 64) for _ in range(head_dim))
    value_blocks = sum(1 for _ in range(tokens) for start in range(0, head_dim, 64))
    return tokens * row + 4 * key_blocks + 4 * value_blocks


@pytest.mark.parametrize("head_dim", [1, 3, 64, 65, 128])
@pytest.mark.parametrize("bits", [16, 8, 5, 4, 3])
def test_stored_bytes_are_those_counted_one_by_one(head_dim: int, bits: int) -> None:
    shape = shape_of(head_dim=head_dim, dtype_bytes=4)  # whatever the model computes in
    tokens = np.array([0, 1, 63, 64, 65, 200])
    expected = [_by_hand(n, bits, head_dim) for n in tokens.tolist()]
    assert stored_bytes(tokens, bits, shape).tolist() == expected
    assert stored_bytes(tokens, bits, shape).dtype == np.int64


def test_all_that_is_kept_at_16_bits_is_the_most() -> None:
    problem = formulate(make_bits(), Request.parse(budget=1.0, bits=BITS))
    assert problem.bits is not None
    plain = formulate(make_bits(), Request.parse(budget=1.0))
    assert plain.bits is None
    assert plain.digest() == formulate(make_bits(), Request.parse(budget=1.0, bits=[16])).digest()
    assert problem.digest() != plain.digest()


def test_solvers_that_count_tokens_refuse() -> None:
    problem = formulate(make_bits(), Request.parse(budget=0.3, level="head", bits=BITS))
    able = {name: get_solver(name).can_solve(problem) for name in solver_names()}
    for name in ("uniform", "pyramid", "adaptive_head", "proportional", "head_classes"):
        assert "use dp, lagrangian or ilp" in str(able[name]), name
        with pytest.raises(SolverError, match="no bits"):
            solve(make_bits(), budget=0.3, bits=BITS, level="head", solver=name)
    for name in ("dp", "lagrangian", "hull", "ilp", "auto"):
        assert able[name] is True, name


def test_a_decision_with_bits() -> None:
    scores = make_bits(3, shape=shape_of(n_layers=3, n_kv_heads=2, head_dim=32))
    decided = solve(scores, budget="25%", level="head", bits=BITS)
    assert set(np.unique(decided.bits).tolist()) <= set(BITS)
    assert int(decided.bits.min()) < 16
    stored = head_bytes(decided.budgets, decided.bits, scores.shape)
    assert decided.retained_bytes == int(stored.sum())
    assert decided.share <= 0.25
    plain = solve(scores, budget="25%", level="head")
    assert plain.bits is None
    assert decided.objective >= plain.objective
    expected = make_curves(scores).retention(decided.budgets)
    assert decided.retention == pytest.approx(expected)
    assert decided.requested["bits"] == [16, 8, 4]
    assert "bits" in compare_profiles(plain, decided).fields


@pytest.mark.parametrize("bits", [None, (8, 4)])
def test_a_budget_is_the_same_share_of_a_cache_at_16_bits_in_any_type(bits: Any) -> None:
    decided = []
    for dtype_bytes in (2, 4):
        shape = shape_of(n_layers=3, n_kv_heads=2, head_dim=32, dtype_bytes=dtype_bytes)
        scores = make_loss_bits(2, shape=shape)
        decided.append(solve(scores, budget=0.5, level="head", objective="loss", bits=bits))
        text = request_text(decided[-1])
        assert "least predicted loss in 50% of the bytes of a cache at 16 bits, " in text
    assert (decided[0].budgets == decided[1].budgets).all()
    assert decided[0].retained_bytes == decided[1].retained_bytes <= 0.5 * decided[0].full_bytes


def test_sliding_layers_stay_at_16_bits() -> None:
    shape = shape_of(layer_types=("full", "sliding", "full"), sliding_window=9)
    decided = solve(make_bits(shape=shape), budget="20%", bits=(8, 4))
    assert decided.bits[1].tolist() == [16, 16]
    assert int(decided.bits[[0, 2]].max()) < 16
    with pytest.raises(InputError, match="16 there"):
        decided.replace(bits=np.full((3, 2), 8))


def test_constraints_that_compare_budgets_are_refused_with_bits() -> None:
    values, costs = [[0.1, 0.5]] * 2, [[2, 3]] * 2
    bits = np.array([[8, 16]] * 2)
    tokens = np.array([[4, 3]] * 2)  # fewer tokens at more bits: dearer all the same
    problem = make_problem(values, costs=costs, tokens=tokens, bits=bits, capacity=5)
    assert problem.bits[np.arange(2), [0, 1]].tolist() == [8, 16]  # type: ignore[index]
    for side in (SameBudget(groups=((0, 1),)), MaxDistinct(most=1)):
        with pytest.raises(InputError, match="compares budgets in tokens"):
            dataclasses.replace(problem, constraints=(side,))
    with pytest.raises(InputError, match="tokens must be >= 0 and rise"):
        make_problem(values, costs=costs, tokens=tokens, capacity=5)
    with pytest.raises(InputError, match="bits are int64 shaped"):
        make_problem(values, costs=costs, tokens=tokens, bits=bits[:1], capacity=5)


LOSS: dict[str, Any] = {"objective": "loss", "bits": BITS}


def _losses_by_hand(scores: ScoreProfile, layer: int, head: int) -> dict[tuple[int, int], float]:
    """The least loss of a head by tokens and bits, over policies, linear between the levels."""
    by_width = scores.losses[:, layer, head].mean(axis=0)  # type: ignore[index]
    levels, tokens = scores.loss_tokens.tolist(), range(5, scores.context_tokens + 1)  # type: ignore[union-attr]
    least = [np.min([np.interp(tokens, levels, one) for one in some], axis=0) for some in by_width]
    return {
        (n, bits): float(row[at])
        for bits, row in zip(BITS, least, strict=True)
        for at, n in enumerate(tokens)
    }


@settings(max_examples=15)
@given(st.integers(0, 10_000), st.floats(0.1, 0.95), st.booleans())
def test_exact_solvers_find_the_least_loss_of_entries_and_bits(
    seed: int, share: float, dear: bool
) -> None:
    """By brute force over all products of tokens and bits, with losses read off by hand."""
    shape = shape_of(n_layers=2, n_kv_heads=1, head_dim=32)
    scores = make_loss_bits(seed, shape=shape, context_tokens=22)
    each = [_losses_by_hand(scores, layer, 0) for layer in range(2)]
    every = [(_cost(*option, shape), option) for option in each[0]]
    pairs = itertools.product(every, repeat=2)
    found = [(a[0] + b[0], each[0][a[1]] + each[1][b[1]]) for a, b in pairs]
    if dear:
        least, most = min(loss for _, loss in found), max(loss for _, loss in found)
        limit = max(0.0, least) + share * (most - least)
        best = min(cost for cost, loss in found if loss <= limit + 1e-12)
        request = Request.parse(target_loss=limit, level="head", bits=BITS)
    else:
        room = _room(share, 2 * 22, shape)
        affordable = [loss for cost, loss in found if cost <= room]
        if not affordable:
            return
        best = -min(affordable)
        request = Request.parse(budget=share, level="head", **LOSS)
    problem = formulate(scores, request)
    for name in ("dp", "ilp", "auto"):
        answer = solve_problem(problem, get_solver(name))
        assert answer.objective == pytest.approx(best, abs=1e-12), name


def test_bad_bits_in_a_budget_profile() -> None:
    budgets = np.full((3, 2), 20)
    for bits, message in (
        (np.full((3, 2), 2), "one of 16, 8, 5, 4, 3"),
        (np.full((3, 1), 8), "shaped"),
        (np.full((3, 2), 8.0), "float64"),
    ):
        with pytest.raises(InputError, match=message):
            make_budget_profile(budgets, bits=bits)
    uneven = np.array([[8, 4], [8, 8], [8, 8]])
    with pytest.raises(InputError, match="one width for all KV heads"):
        make_budget_profile(budgets, bits=uneven, level="layer")
