"""Caps, few budgets and equal heads: from a user's words to constraints that hold."""

from __future__ import annotations

import numpy as np
import pytest
from factories import make_problem, make_scores, make_shape

from kvalloc.accounting.costs import POSITION_BYTES
from kvalloc.allocation.decision import solve
from kvalloc.allocation.formulation import formulate
from kvalloc.allocation.request import LayerCap, Request
from kvalloc.errors import InputError
from kvalloc.problem import GroupCap


def test_a_cap_is_layers_and_a_size() -> None:
    cap = LayerCap.parse(" 0-1, 5 = 2 KiB ")
    assert (cap.layers, cap.capacity_bytes) == ((0, 1, 5), 2048)
    assert (cap.name, cap.text) == ("layers 0-1,5", "0-1,5=2KiB")
    assert LayerCap.parse("3=1B").name == "layer 3"


SLIDING = make_shape(
    n_layers=4, layer_types=("full", "sliding", "sliding", "full"), sliding_window=9
)


def test_sliding_layers_count_towards_their_cap() -> None:
    scores = make_scores(1, shape=SLIDING)
    per_layer = 2 * 8 * SLIDING.bytes_per_entry
    problem = formulate(scores, Request.parse(budget=0.5, cap=("0-2=1500B",)))
    assert problem.constraints == (
        GroupCap(name="layers 0-2", units=(0,), capacity_bytes=1500 - 2 * per_layer),
    )
    profile = solve(scores, budget=1.0, cap="0-2=1500B")
    entry = SLIDING.bytes_per_entry + POSITION_BYTES
    stored = int(profile.budgets[0].sum()) * entry + 2 * per_layer
    assert 1500 - 2 * entry < stored <= 1500
    with pytest.raises(InputError, match="only sliding"):
        solve(scores, budget=0.5, cap="1-2=1MiB")
    paged = formulate(scores, Request.parse(budget=0.5, page=5, cap=("0-1=2000B",)))
    (cap,) = paged.constraints
    assert isinstance(cap, GroupCap)
    assert cap.capacity_bytes == 2000 - 2 * 10 * SLIDING.bytes_per_entry


def test_the_worst_unit_is_measured_against_the_whole_context() -> None:
    """With a largest budget no unit reaches 1: it must not be taken for the whole."""
    problem = formulate(make_scores(3), Request.parse(budget=0.5, max_tokens=20, objective="worst"))
    whole = formulate(make_scores(3), Request.parse(budget=0.5, objective="worst"))
    assert problem.values.shape[1] == 16
    assert np.array_equal(problem.values, whole.values[:, :16])


def test_caps_on_no_unit_and_on_units_that_are_not_there() -> None:
    empty = GroupCap(name="nothing", units=(), capacity_bytes=5)
    problem = make_problem([[0.0, 1.0]] * 2, capacity=2, constraints=(empty,))
    choice = np.array([1, 1])
    assert empty.fault(problem, choice) is None
    assert empty.floor_fault(problem) is None
    with pytest.raises(InputError, match="a unit twice"):
        GroupCap(name="device 0", units=(0, 0), capacity_bytes=5)
    beyond = GroupCap(name="device 0", units=(0, 2), capacity_bytes=5)
    with pytest.raises(InputError, match=r"cap of device 0 names units 0\.\.2 of 0\.\.1"):
        make_problem([[0.0, 1.0]] * 2, capacity=2, constraints=(beyond,))
