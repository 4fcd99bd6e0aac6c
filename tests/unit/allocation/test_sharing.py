"""Layers that keep the same entries: fixed groups, chosen ones, and all there are."""

import itertools

import numpy as np
import pytest
from factories import make_shared_scores

from kvalloc.allocation.curves import RequestCurves
from kvalloc.allocation.decision import solve
from kvalloc.allocation.formulation import formulate, pose, problem_of
from kvalloc.allocation.frontier import frontier
from kvalloc.allocation.request import Request
from kvalloc.allocation.sharing import choose_groups
from kvalloc.allocation.verification import solve_problem
from kvalloc.errors import InfeasibleError, InputError
from kvalloc.formats.sharing_groups import runs_of, segments_of
from kvalloc.problem import Sense
from kvalloc.problem.registry import get_solver

GOALS = [{"budget": "50%"}, {"target_retention": 0.7}, {"budget_tokens": 9}, {"budget": "100%"}]


def all_groupings(n_layers, longest, most):
    """Every way to cut the layers into runs, the first two alone."""
    found = []
    for cuts in itertools.product([False, True], repeat=n_layers - 1):
        runs, run = [], [0]
        for layer, cut in enumerate(cuts, start=1):
            if cut:
                runs.append(tuple(run))
                run = []
            run.append(layer)
        runs.append(tuple(run))
        shared = tuple(r for r in runs if len(r) > 1)
        if len(runs) <= most and all(r[0] >= 2 and len(r) <= longest for r in shared):
            found.append(shared)
    return found


def best_of(scores, goal, level, groupings):
    """The optimum over all groupings, each solved exactly."""
    values = {}
    for groups in groupings:
        request = Request.parse(**goal, level=level, share_groups=groups or None)
        problem = formulate(scores, request)
        try:
            values[groups] = solve_problem(problem, get_solver("ilp")).objective
        except InfeasibleError:
            continue
    return values


def test_a_group_is_one_unit():
    scores = make_shared_scores(1)
    plain = formulate(scores, Request.parse(budget="40%", level="head"))
    shared = formulate(scores, Request.parse(budget="40%", level="head", share_groups="2-4"))
    assert shared.n_units == plain.n_units - 2 * 2
    group = shared.layers == 2
    assert np.array_equal(shared.costs[group], 3 * plain.costs[plain.layers == 2])
    joint = scores.shared_contributions((2, 3, 4))
    assert np.allclose(shared.values[group], joint)
    separate = sum(plain.values[plain.layers == layer] for layer in (2, 3, 4))
    assert np.all(shared.values[group] <= separate + 1e-12)
    assert np.any(shared.values[group] < separate - 1e-6)
    assert shared.capacity_bytes == plain.capacity_bytes
    assert shared.min_cost_bytes == plain.min_cost_bytes
    assert shared.max_cost_bytes == plain.max_cost_bytes
    assert shared.max_value == pytest.approx(plain.max_value)


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("level", ["layer", "head"])
def test_the_bound_holds_for_every_grouping_and_the_choice_is_near_the_best(goal, level):
    longest, near = 3, 0
    for seed in range(3):
        scores = make_shared_scores(
            seed, longest=longest, n_kv_heads=1 if level == "head" else 2, context_tokens=16
        )
        for most in (4, 5):
            groupings = all_groupings(6, longest, most)
            values = best_of(scores, goal, level, groupings)
            assert len(values) > 2
            request = Request.parse(**goal, level=level)
            curves = RequestCurves(scores=scores, request=request)
            found = choose_groups(curves, problem_of(curves), most)
            assert found.groups in groupings
            sign = 1.0 if problem_of(curves).sense is Sense.MAX_VALUE else -1.0
            best = max(sign * value for value in values.values())
            assert sign * found.bound >= best - 1e-9
            spread = best - min(sign * value for value in values.values())
            lost = best - sign * values[found.groups]
            assert lost <= 0.5 * spread + 1e-9
            near += lost <= 1e-9
    assert near >= 4  # of six: one price per byte may sit between two groupings


@pytest.mark.parametrize("level", ["layer", "head"])
@pytest.mark.parametrize("goal", [{"budget": "35%"}, {"target_retention": 0.8}])
def test_named_and_chosen_groups_are_stated(goal, level):
    scores = make_shared_scores(2)
    free = solve(scores, **goal, level=level)
    fixed = solve(scores, **goal, level=level, share_groups="2-3,4-5")
    chosen = solve(scores, **goal, level=level, share_groups=4)
    for profile in (fixed, chosen):
        for group in profile.share_groups:
            assert np.all(profile.budgets[list(group)] == profile.budgets[group[0]])
    assert fixed.share_groups == ((2, 3), (4, 5))
    assert fixed.grouping_bound is None
    assert fixed.requested["share_groups"] == [[2, 3], [4, 5]]
    assert chosen.requested["share_groups"] == 4
    assert 6 - sum(len(g) - 1 for g in chosen.share_groups) <= 4
    sign = 1.0 if "budget" in goal else -1.0
    assert sign * chosen.grouping_bound >= sign * chosen.objective - 1e-9
    # Sharing gives something up; the bound over groupings says how little more there is.
    assert sign * free.objective >= sign * chosen.objective - 1e-9
    assert chosen.retained_bytes <= chosen.full_bytes


def test_a_frontier_needs_the_groups_by_name():
    with pytest.raises(InputError, match="best groups of layers differ from size to size"):
        frontier(make_shared_scores(2), share_groups=4)


def test_enough_groups_leave_every_layer_alone():
    scores = make_shared_scores(2)
    posed = pose(scores, Request.parse(budget="35%", share_groups=6))
    assert posed.request.share_groups is None
    assert posed.grouping_bound is None
    assert solve(scores, budget="35%", share_groups=6).share_groups == ()


def test_budgets_of_other_lengths_stay_equal_in_a_group():
    profile = solve(make_shared_scores(2), budget="35%", share_groups="2-4", level="head")
    for context in (7, 19, 31, 100, 1001):
        budgets = profile.budgets_for(context)
        assert np.all(budgets[2:5] == budgets[2])
        assert np.all(budgets <= context)


def test_too_few_groups_say_how_many_are_needed():
    with pytest.raises(InfeasibleError, match=r"share_groups=4") as error:
        solve(make_shared_scores(2, longest=2), budget="35%", share_groups=3)
    assert error.value.nearest == 4


def test_layers_stand_alone_or_in_their_group():
    groups = ((2, 3), (4, 5, 6))
    assert segments_of(range(8), groups) == ((0,), (1,), (2, 3), (4, 5, 6), (7,))
    assert runs_of([0, 1, 2, 4, 5], 4).tolist() == [[4, 2]]  # not over what is not full attention
    with pytest.raises(InputError, match="at most 4 layers"):
        make_shared_scores(longest=2).shared_contributions((2, 3, 4, 5, 6))


def test_formulating_needs_groups_that_are_chosen():
    with pytest.raises(InputError, match=r"formulation\.pose"):
        formulate(make_shared_scores(2), Request.parse(budget="35%", share_groups=4))
