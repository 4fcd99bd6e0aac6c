"""Rotations of any pairs by any frequencies are found, and rotate as complex numbers do."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvalloc.interop.kvpress_budgets import order_of_halves
from kvalloc.models.rope import NO_ROTATION, rotate, rotation_of

HEAD_DIM = 12
POSITIONS = torch.tensor([0, 1, 17, 200])
OTHERWISE = "queries and keys of Kind change with the position, and not by one rotation"
PAIRS = {
    "halves": lambda start, n: [(start + i, start + n + i) for i in range(n)],
    "neighbours": lambda start, n: [(start + 2 * i, start + 2 * i + 1) for i in range(n)],
}


def turned(states, positions, pairs, rates):
    """Each pair as a complex number; (..., n, HEAD_DIM) by (n,) positions, in float64."""
    result = states.double().numpy().copy()
    for (i, j), rate in zip(pairs, rates, strict=True):
        number = (result[..., i] + 1j * result[..., j]) * np.exp(1j * positions.numpy() * rate)
        result[..., i], result[..., j] = number.real, number.imag
    return torch.tensor(result, dtype=states.dtype)


def queries_of(pairs, rates, *, scale=1.0, seed=0):
    """Queries of a probe: two tokens at four positions, three heads."""
    generator = torch.Generator().manual_seed(seed)
    plain = torch.randn(2, 3, 1, HEAD_DIM, generator=generator).expand(2, 3, 4, HEAD_DIM)
    rows = scale * turned(plain, POSITIONS, pairs, rates)
    return rows.transpose(1, 2).reshape(8, 3, 1, HEAD_DIM)


@st.composite
def rotations(draw):
    """Pairs and rates: a first pair that moves, and others of any speed."""
    n_pairs = draw(st.integers(1, HEAD_DIM // 2))
    start = draw(st.sampled_from([0, HEAD_DIM - 2 * n_pairs]))
    pairs = PAIRS[draw(st.sampled_from([*PAIRS]))](start, n_pairs)
    if draw(st.booleans()):
        pairs = [(j, i) for i, j in pairs]
    speeds = st.floats(-6, 0).map(lambda power: 10.0**power)
    return pairs, [1.0, *draw(st.lists(speeds, min_size=n_pairs - 1, max_size=n_pairs - 1))]


@given(rotations(), st.booleans(), st.integers(0, 9))
@settings(max_examples=150, deadline=None)
def test_a_rotation_is_found_and_undone(case, buffered, seed):
    """By one of two buffers of frequencies; without it, pairs of the whole head are measured."""
    pairs, rates = case
    decoder = torch.nn.Linear(1, 1)
    decoder.register_buffer("sliding_inv_freq", torch.linspace(0.9, 0.2, HEAD_DIM // 2))
    if buffered:
        decoder.register_buffer("inv_freq", torch.tensor(rates))
    queries = queries_of(pairs, rates, scale=1.7, seed=seed)
    found = rotation_of("Kind", queries, POSITIONS, decoder)
    if not buffered and abs(pairs[0][0] - pairs[0][1]) not in (1, HEAD_DIM // 2):
        assert found.fixed == OTHERWISE
        return
    states, positions = torch.randn(2, 3, 40, HEAD_DIM), torch.arange(40) * 11
    moved = rotate(states, positions, found)
    # a measured frequency has the error of an angle at position 200
    expected = turned(states, positions, pairs, rates)
    torch.testing.assert_close(moved, expected, atol=1e-3, rtol=0)
    torch.testing.assert_close(rotate(moved, -positions, found), states, atol=1e-5, rtol=0)
    order, dims = order_of_halves(found, HEAD_DIM), range(HEAD_DIM)
    assert sorted(order) == [*dims]
    for place, pair in enumerate(zip(dims[found.first], dims[found.second], strict=True)):
        assert (order[place], order[place + HEAD_DIM // 2]) == pair


def test_queries_that_never_change_are_not_rotated():
    found = rotation_of("Kind", queries_of([], []), POSITIONS, torch.nn.Linear(1, 1))
    assert found == NO_ROTATION
    states = torch.randn(2, 3, 5, HEAD_DIM)
    assert torch.equal(rotate(states, torch.arange(5), found), states)


@pytest.mark.parametrize("share", [0.05, 0.5, 1.0])
def test_positions_that_are_added_are_no_rotation(share):
    """As learned positions do, beside a rotation or alone."""
    queries = queries_of(PAIRS["halves"](0, 6), [0.5] * 6)
    queries = queries + share * torch.randn(4, 3, 1, HEAD_DIM).repeat(2, 1, 1, 1)
    found = rotation_of("Kind", queries, POSITIONS, torch.nn.Linear(1, 1))
    assert found.fixed == OTHERWISE


def test_states_keep_their_type_and_others_their_numbers():
    found = rotation_of(
        "Kind", queries_of(PAIRS["halves"](0, 6), [0.5] * 6), POSITIONS, torch.nn.Linear(1, 1)
    )
    states = torch.randn(2, 3, 5, HEAD_DIM).bfloat16()
    before = states.clone()
    assert rotate(states, torch.arange(5), found).dtype == torch.bfloat16
    assert torch.equal(states, before)
