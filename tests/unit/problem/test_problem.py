"""The problem's own arithmetic, and what it refuses."""

import dataclasses

import numpy as np
import pytest
from factories import concave_values, make_problem

from kvalloc.accounting.costs import constant_entries, full_bytes
from kvalloc.errors import InfeasibleError, InputError
from kvalloc.problem import GroupCap, Sense, dual_bound
from kvalloc.problem.arrays import MaxDistinct
from kvalloc.shape import ModelShape

SHAPE = {
    "model_id": "org/model",
    "n_layers": 4,
    "n_query_heads": 8,
    "n_kv_heads": 2,
    "head_dim": 64,
    "dtype_bytes": 2,
    "layer_types": ("full",) * 4,
}


def test_bytes_of_a_shape_by_hand():
    shape = ModelShape(
        **{**SHAPE, "layer_types": ("full", "sliding", "full", "sliding"), "sliding_window": 10}
    )
    assert shape.bytes_per_entry == 2 * 64 * 2
    assert shape.full_layers == (0, 2)
    sliding = [constant_entries(shape, n)[:, 0].tolist() for n in (1, 9, 10, 500)]
    assert sliding == [[0, 1, 0, 1], [0, 9, 0, 9], [0, 9, 0, 9], [0, 9, 0, 9]]
    assert full_bytes(shape, 100, rows=3) == (100 * 2 + 9 * 2) * 2 * 256 * 3
    stated = shape.to_dict()
    assert ModelShape(**stated | {"layer_types": tuple(stated["layer_types"])}) == shape


GOOD = make_problem([[0.0, 0.5, 0.75], [0.0, 0.25, 0.375]], capacity=2)


def remade(**changes):
    return dataclasses.replace(GOOD, **changes)


def test_what_a_solver_sees_cannot_be_changed():
    for name in ("tokens", "values", "costs", "option_counts", "weights", "layers", "heads"):
        assert not getattr(GOOD, name).flags.writeable
    with pytest.raises(dataclasses.FrozenInstanceError):
        GOOD.capacity_bytes = 9  # type: ignore[misc]


def test_steps_and_grain():
    assert make_problem([[0, 1, 2]], capacity=9, step=5).step_bytes == 5
    uneven = make_problem(np.zeros((2, 3)), costs=[[0, 4, 10], [2, 4, 6]], capacity=20)
    assert uneven.step_bytes is None
    assert uneven.lattice_bytes == 2
    assert uneven.spendable_bytes == 16
    assert remade(capacity_bytes=10**9).spendable_bytes == GOOD.max_cost_bytes
    ragged = make_problem(
        np.zeros((2, 3)), costs=[[0, 4, 99], [2, 6, 10]], counts=[2, 3], capacity=20
    )
    assert ragged.step_bytes == 4
    assert ragged.max_cost_bytes == 14
    single = make_problem([[0.5], [0.25]], capacity=7)
    assert single.step_bytes is None
    assert single.lattice_bytes == 1
    assert single.is_concave


@pytest.mark.parametrize("n_options", [2, 3, 50, 200, 3000])
def test_concave_curves_are_recognised_with_their_rounding(n_options):
    rng = np.random.default_rng(n_options)
    for kind in range(6):
        values = concave_values(rng, 3, n_options, kind=kind)
        values = values / values.max(initial=1.0)
        mean = np.mean([values * w / w.sum() * 3 for w in rng.random((7, 3, 1)) + 0.1], axis=0)
        assert make_problem(values, capacity=n_options).is_concave
        assert make_problem(mean, capacity=n_options).is_concave


@pytest.mark.parametrize(("bend", "n_options"), [(1e-3, 3), (1e-9, 500), (0.9e-12, 100_000)])
def test_tiny_bends_in_one_direction_are_not_rounding(bend, n_options):
    """A curve of many tiny rises is convex as a whole, and greedy would be wrong about it."""
    gains = np.arange(n_options - 1) * bend
    values = np.concatenate([[0.0], np.cumsum(gains)])
    assert not make_problem(np.stack([values, values]), capacity=n_options).is_concave


def test_falling_and_slowly_falling_curves_are_not_concave_rising_ones():
    assert not make_problem([[0.0, 1.0, 0.9]], capacity=2).is_concave
    sinking = np.linspace(0, -5e-13 * 100_000, 100_000)
    assert not make_problem(sinking[None], capacity=2).is_concave


def test_with_capacity_and_with_target_share_the_arrays():
    assert dual_bound(GOOD.with_target(0.6)).bound == 2
    other = GOOD.with_target(0.6).with_capacity(1)
    assert (other.capacity_bytes, other.target, other.sense) == (1, None, Sense.MAX_VALUE)
    assert other.values is GOOD.values
    assert GOOD.capacity_bytes == 2
    with pytest.raises(InputError, match="expected a finite number"):
        GOOD.with_target(float("inf"))


def test_digests_tell_problems_apart():
    seen = {
        problem.digest()
        for problem in (
            GOOD,
            remade(capacity_bytes=3),
            remade(weights=np.array([1.0, 2.0])),
            remade(heads=np.array([0, 1])),
            remade(protected_tokens=1),
            GOOD.with_target(0.5),
            remade(constraints=(MaxDistinct(maximum=1),)),
            remade(values=np.array([[0.0, 0.5, 0.75], [0.0, 0.25, 0.5]])),
        )
    }
    assert len(seen) == 8
    assert remade().digest() == GOOD.digest()


@pytest.mark.parametrize(
    ("capacity", "protected", "feasible"), [(3, 2, False), (4, 2, True), (0, 0, True)]
)
def test_capacity_at_the_floors(capacity, protected, feasible):
    problem = make_problem([[0, 1], [0, 1]], capacity=capacity, protected_tokens=protected)
    if feasible:
        problem.check_feasible()
    else:
        with pytest.raises(InfeasibleError, match="below the floors") as caught:
            problem.check_feasible()
        assert caught.value.nearest == problem.min_cost_bytes


def test_the_largest_value_of_curves_that_fall_again():
    problem = make_problem([[0.0, 3.0, 1.0], [2.0, 1.0, 9.0]], counts=[3, 2], target=4.9)
    assert problem.max_value == 5.0
    problem.check_feasible()


def test_side_constraints_by_hand():
    problem = make_problem(
        np.zeros((4, 3)), capacity=99, step=10, layers=[0, 0, 1, 1], heads=[0, 1, 0, 1]
    )
    choice = np.array([0, 1, 2, 2])
    cap = GroupCap(name="layer 1", units=(2, 3), capacity_bytes=39)
    assert cap.fault(problem, choice) == "layer 1 takes 40 bytes of 39"
    assert GroupCap(name="layer 1", units=(2, 3), capacity_bytes=40).fault(problem, choice) is None
    assert MaxDistinct(maximum=3).fault(problem, choice) is None
    assert "3 different budgets" in str(MaxDistinct(maximum=2).fault(problem, choice))
    capped = dataclasses.replace(
        make_problem([[0, 1]], capacity=9, protected_tokens=5),
        constraints=(GroupCap(name="device 0", units=(0,), capacity_bytes=4),),
    )
    with pytest.raises(InfeasibleError, match="the cap of device 0, 4 bytes, is below its floors"):
        capped.check_feasible()
    with pytest.raises(InputError, match="ask for 1"):
        MaxDistinct(maximum=0)


def test_a_variant_keeps_what_its_changes_leave_and_checks_the_rest():
    problem = make_problem([[0.0, 2.0, 2.25]], capacity=2)
    falling = problem.with_capacity(1).replace(values=np.array([[0.0, 1.0, 0.5]]))
    assert falling.best_so_far.tolist() == [[0.0, 1.0, 1.0]]
    with pytest.raises(InputError, match="not all finite"):
        problem.replace(values=np.full((1, 3), np.nan))
    with pytest.raises(TypeError, match="no field capacity"):
        problem.replace(capacity=3)
