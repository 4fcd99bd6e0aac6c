"""Several workloads at once: the tail's value, its bound, and what is refused."""

import dataclasses

import numpy as np
import pytest
from factories import make_curves, make_problem, make_scores
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.optimize import linprog

from kvalloc.allocation import formulation
from kvalloc.allocation.formulation import formulate, problem_of
from kvalloc.allocation.request import Request
from kvalloc.errors import InfeasibleError, InputError
from kvalloc.problem import Aggregate, AllocationProblem, dual_bound, tail_value

VALUES = np.array([[[0.0, 1.0, 1.0], [0.0, 0.1, 0.2]], [[0.0, 0.1, 0.2], [0.0, 1.0, 1.0]]])


def tail_problem(scenarios=VALUES, tail_share=0.5, **changes) -> AllocationProblem:
    goal = {} if "target" in changes else {"capacity": 2}
    return make_problem(
        scenarios.mean(axis=0),
        aggregate=Aggregate.TAIL,
        scenarios=scenarios.copy(),
        tail_share=tail_share,
        **{**goal, **changes},
    )


@settings(max_examples=60)
@given(
    hnp.arrays(np.float64, st.integers(1, 6), elements=st.floats(-1, 1)),
    st.floats(0.01, 1.0),
)
def test_the_tail_is_rockafellar_and_uryasevs_program(values, share):
    """max t - sum of shortfalls / (a S), solved as a linear program."""
    count = values.size
    weight = 1.0 / max(1.0, share * count)
    answer = linprog(
        np.append(-1.0, np.full(count, weight)),
        A_ub=np.hstack([np.ones((count, 1)), -np.eye(count)]),
        b_ub=values,
        bounds=[(None, None)] + [(0, None)] * count,
    )
    assert tail_value(values, share) == pytest.approx(-answer.fun, abs=1e-7)


def test_the_bound_is_that_of_the_whole_linear_program():
    """Against the relaxation written down in full: shares of options, one row a scenario."""
    for seed in range(6):
        rng = np.random.default_rng(100 + seed)
        scenarios = rng.random((4, 5, 9))
        problem = tail_problem(scenarios, tail_share=0.5, capacity=int(rng.integers(5, 30)))
        n = 5 * 9
        flat = scenarios.reshape(4, n)
        weights = np.concatenate([np.zeros(n), [-1.0], np.full(4, 1 / 2)])
        above = np.hstack([-flat, np.ones((4, 1)), -np.eye(4)])
        cost = np.concatenate([problem.costs.ravel(), np.zeros(5)])[None, :]
        one = np.hstack([np.kron(np.eye(5), np.ones(9)), np.zeros((5, 5))])
        answer = linprog(
            weights,
            A_ub=np.vstack([above, cost]),
            b_ub=np.append(np.zeros(4), problem.spendable_bytes),
            A_eq=one,
            b_eq=np.ones(5),
            bounds=[(0, 1)] * n + [(None, None)] + [(0, None)] * 4,
        )
        assert dual_bound(problem).bound == pytest.approx(-answer.fun, abs=1e-7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"aggregate": Aggregate.SUM}, "scenarios go with Aggregate.TAIL"),
        ({"scenarios": None}, "scenarios go with Aggregate.TAIL"),
        ({"tail_share": 0.0}, "the tail share is 0"),
        ({"tail_share": 1.5}, "the tail share is 1.5"),
        ({"scenarios": VALUES[:, :1].copy()}, "scenarios are shaped"),
        ({"scenarios": np.full_like(VALUES, np.nan)}, "not all finite"),
        ({"scenarios": VALUES + 0.1}, "values must be the mean"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(tail_problem(), **changes)


def test_scenarios_and_tail_are_part_of_the_problems_identity():
    problem = tail_problem()
    others = [
        dataclasses.replace(problem, tail_share=0.75),
        tail_problem(VALUES[::-1]),
        make_problem(VALUES.mean(axis=0), capacity=2),
    ]
    digests = {p.digest() for p in (problem, *others)}
    assert len(digests) == 4
    with pytest.raises(ValueError, match="read-only"):
        problem.scenarios[0, 0, 0] = 1.0


def test_a_target_beyond_all_is_refused_with_the_most():
    with pytest.raises(InfeasibleError, match="cannot be met") as error:
        dual_bound(tail_problem(target=1.3))
    assert error.value.nearest == pytest.approx(1.2)


# From a score profile.


def test_every_sample_is_a_workload():
    scores = make_scores(3, n_samples=4)
    worst = formulate(scores, Request.parse(budget="40%", workloads="worst", level="head"))
    mean = formulate(scores, Request.parse(budget="40%", level="head"))
    assert worst.tail_share == 0.25
    assert np.allclose(worst.values, mean.weights[:, None] * mean.values, atol=1e-12)
    for sample in range(4):
        alone = problem_of(make_curves(scores, sample, budget="40%", level="head"))
        assert np.array_equal(worst.scenarios[sample], alone.weights[:, None] * alone.values)
    for request in (
        Request.parse(budget="40%", workloads="cvar", tail=1.0, level="head"),
        Request.parse(budget="40%", workloads="mean", level="head"),
    ):
        assert formulate(scores, request).digest() == mean.digest()
    single = make_scores(3, n_samples=1)
    plain = formulate(single, Request.parse(budget="40%"))
    worst = formulate(single, Request.parse(budget="40%", workloads="worst"))
    assert worst.digest() == plain.digest()


def test_a_variant_computes_again_what_its_changes_touch() -> None:
    """Values that rise on the whole may fall in one of the scenarios."""
    scenarios = np.array([[[0.0, 3.0, 4.0]], [[0.0, 1.0, 0.5]]])
    problem = make_problem(
        scenarios.mean(axis=0), capacity=2, scenarios=scenarios, aggregate=Aggregate.TAIL
    )
    assert problem.best_so_far is problem.values
    assert problem.with_capacity(1).__dict__["best_so_far"] is problem.values
    one = problem.reweighted(np.array([0.0, 1.0]))
    assert one.best_so_far.tolist() == [[0.0, 1.0, 1.0]]
    with pytest.raises(InputError, match="not all finite"):
        problem.replace(values=np.full((1, 3), np.nan))
    with pytest.raises(TypeError, match="no field capacity"):
        problem.replace(capacity=3)


def test_many_values_of_many_samples_are_offered_by_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every n-th page is left, the last one among them, and the problem says which."""
    scores = make_scores(5, n_samples=3)
    request = Request.parse(budget="35%", workloads="worst", level="head")
    every = formulate(scores, request)
    monkeypatch.setattr(formulation, "WORKLOAD_VALUES", every.scenarios.size // 4)
    some = formulate(scores, request)
    assert some.scenarios.size <= every.scenarios.size // 4 + 3 * 6
    assert some.tokens[0, -1] == every.tokens[0, -1]
    assert set(some.tokens[0].tolist()) <= set(every.tokens[0].tolist())
