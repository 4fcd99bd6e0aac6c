"""A plug-in is not trusted: forged certificates, lying solvers, and what is proven again."""

import contextlib
import itertools
from collections import Counter

import numpy as np
import pytest
from factories import make_losses, make_problem, make_scores
from forgeries import forged_profiles, liar, lies
from scripted_solver import OPTIMAL, Scripted, says

import kvalloc
from kvalloc.allocation.audit import verify
from kvalloc.allocation.frontier import trace_frontier
from kvalloc.allocation.verification import prove, solve_problem
from kvalloc.errors import InfeasibleError, KVAllocError, SolverError
from kvalloc.problem import GroupCap, MaxDistinct, Sense, bound_at
from kvalloc.problem.registry import get_solver
from kvalloc.report.wording import decision_fields, proof_text
from kvalloc.testing import brute_force, tiny_problem

# Forged certificates and lying solvers, made by rule: none of them passes as proven


def accepted(profile, scores):
    return all(check.passed and check.proven for check in verify(profile, scores))


def test_no_forged_certificate_is_accepted():
    """Poor decisions (equal budgets) with and without limits, stated to be better ones."""
    forged = refuted = 0
    for name, profile, scores in forged_profiles():
        checks = verify(profile, scores)
        assert not all(check.passed and check.proven for check in checks), name
        forged += 1
        refuted += not all(check.passed for check in checks)
    assert forged >= 100
    assert refuted >= 0.75 * forged


def test_no_liar_is_believed():
    """What is not the best, stated to be it, is refused or stands on the liar's word alone."""
    seen = Counter()
    for name, problem, choice, prices in lies():
        seen["lies"] += 1
        solver = liar(choice, prices)
        try:
            answer = solve_problem(problem, solver)
        except SolverError:
            seen["refused"] += 1
        else:
            assert (answer.bound, answer.bound_source) == (answer.objective, "scripted"), name
        if problem.target is None and not prices:
            points = []
            with contextlib.suppress(KVAllocError):
                points = trace_frontier(problem, solver, [problem.capacity_bytes or 0])
            assert all(point.bound_source == "scripted" for point in points), name
    assert seen["lies"] >= 100
    assert seen["refused"] >= 0.5 * seen["lies"], seen


VALUES = [[0.0, 0.5, 0.75], [0.0, 0.25, 0.375]]


@pytest.mark.parametrize(
    "side",
    [GroupCap(name="device 0", units=(0, 1), capacity_bytes=9), MaxDistinct(maximum=2)],
    ids=["cap", "distinct"],
)
def test_a_limit_that_does_not_bind_hides_no_lie(side):
    problem = make_problem(VALUES, capacity=2, constraints=(side,))
    with pytest.raises(SolverError, match=r"bound of 0, but a choice of 0\.[57]5? exists"):
        solve_problem(problem, liar(np.array([0, 0])))


@pytest.mark.parametrize("prices", [(1.0,), (1.0, -1.0), (1.0, float("nan")), (1.0, float("inf"))])
def test_prices_that_are_none_are_refused(prices):
    with pytest.raises(SolverError, match="reports prices of"):
        solve_problem(CAPPED, liar(GOOD, prices))


@pytest.mark.parametrize("curves", ["concave", "losses", "unequal_costs", "bits"])
def test_any_prices_of_caps_give_a_bound(curves):
    random = np.random.default_rng(1)
    for seed in range(12):
        for side, sense in itertools.product(("nested_caps", "crossing_caps"), Sense):
            problem = tiny_problem(f"{curves}+{side}", seed=seed, sense=sense)
            best = brute_force(problem)
            if best is None:
                continue
            for scale in 10.0 ** random.uniform(-6, 3, 3):
                bound = bound_at(problem, *(scale * random.random(3)))
                assert not problem.is_better(best.objective, bound, 1e-11)


def test_bounds_under_nested_caps_are_proven_again_from_stored_prices():
    proven = 0
    for seed in range(20):
        for sense in Sense:
            problem = tiny_problem("concave+nested_caps", seed=seed, sense=sense)
            best = brute_force(problem)
            if best is None:
                continue
            answer = solve_problem(problem, get_solver("flow"))
            assert (answer.bound_source, answer.bound) == ("dual", best.objective)
            again = prove(problem, answer.choice, answer.prices).bound
            assert again == pytest.approx(best.objective, abs=1e-10)
            proven += bool(answer.prices)
    assert proven > 5
    scores = make_scores(2)
    asked = {"budget": "40%", "level": "head", "cap": ("0=500B", "0-1=900B")}
    profile = kvalloc.solve(scores, **asked)
    assert len(profile.prices) == 3
    assert accepted(profile, scores)
    assert decision_fields(profile)["solver"].endswith("optimal")
    checks = verify(profile.replace(prices=()), scores)
    assert not all(check.passed for check in checks)


ASK_LOSS = {"budget": "40%", "level": "head", "objective": "loss"}


def test_optimal_by_word_reads_so():
    scores = make_losses(0)
    profile = kvalloc.solve(scores, solver="dp", **ASK_LOSS)
    assert (profile.termination, profile.optimal_by_word) == ("optimal", "dp")
    assert decision_fields(profile)["solver"] == (
        "dp, optimal for the sum of single losses, not proven again: dp's word"
    )
    assert proof_text(profile).startswith(
        "Optimal for the sum of single losses by dp's word, not proven again: no"
    )
    [check] = [check for check in verify(profile, scores) if check.name == "bound"]
    assert (check.passed, check.proven) == (True, False)
    assert check.recomputed.endswith("; not proven again: dp's word")


# A plug-in is not trusted: everything it says is computed again


PROBLEM = make_problem(VALUES, capacity=2)  # the optimum is (2, 0) or (1, 1), worth 0.75
TARGET = make_problem(VALUES, target=0.6)  # the optimum costs 2


CAP = GroupCap(name="device 0", units=(0,), capacity_bytes=1)
CAPPED = PROBLEM.replace(constraints=(CAP,))


def raises(problem):
    raise ZeroDivisionError("first line\nsecond line")


def changes_the_values(problem):
    problem.values[:] = 100.0
    return says(np.array([0, 0]))(problem)


def changes_a_field(problem):
    problem.capacity_bytes = 10**9  # type: ignore[misc]
    return says(np.array([2, 2]))(problem)


GOOD = np.array([1, 1])

LIES = {
    "wrong objective": (PROBLEM, says(GOOD, objective=0.8), "an objective of 0.8; it is 0.75"),
    "objective NaN": (PROBLEM, says(GOOD, objective=float("nan")), "an objective of nan"),
    "objective text": (PROBLEM, says(GOOD, objective="0.75"), "no sound Solution"),
    "value given as cost": (TARGET, says(GOOD, objective=0.75), "objective of 0.75; it is 2"),
    "over capacity": (PROBLEM, says(np.array([2, 1])), "spends 3 bytes of a capacity of 2"),
    "below target": (TARGET, says(np.array([1, 0])), "reaches 0.5, below the target of 0.6"),
    "too short": (PROBLEM, says(np.array([1]), objective=0.5), r"shaped \(1,\), expected"),
    "not whole": (PROBLEM, says(np.array([1.0, 1.0]), objective=0.75), "choice of float64"),
    "negative": (PROBLEM, says(np.array([-1, 0])), "chose option -1 of unit 0, which has 3"),
    "beyond the end": (PROBLEM, says(np.array([0, 3]), objective=0.0), "option 3 of unit 1"),
    "bound beaten": (PROBLEM, says(GOOD, bound=0.7), "0.7, which its own choice of 0.75 beats"),
    "cost bound beaten": (TARGET, says(GOOD, bound=3.0), "3, which its own choice of 2 beats"),
    "bound NaN": (PROBLEM, says(GOOD, bound=float("nan")), "bound of nan"),
    "loose bound": (PROBLEM, says(GOOD, bound=0.9, termination=OPTIMAL), "to be optimal"),
    "loose cost bound": (TARGET, says(GOOD, bound=1.0, termination=OPTIMAL), "to be optimal"),
    "false bound": (
        PROBLEM,
        says(np.array([0, 0]), bound=0.0, termination=OPTIMAL),
        r"bound of 0, but a choice of 0\.\d+ exists",
    ),
    "false cost bound": (
        TARGET,
        says(np.array([2, 2]), bound=4.0, termination=OPTIMAL),
        "bound of 4, but a choice of [23] exists",
    ),
    "over a cap": (CAPPED, says(np.array([2, 0])), "a constraint: device 0 takes 2 bytes of 1"),
    "no bound": (PROBLEM, says(GOOD, termination=OPTIMAL), "optimal without a bound"),
    "nothing": (PROBLEM, lambda problem: None, "no sound Solution"),
    "a bare choice": (PROBLEM, lambda problem: GOOD, "no sound Solution"),
    "raises": (PROBLEM, raises, "scripted failed: ZeroDivisionError: first line second line"),
    "changes the values": (PROBLEM, changes_the_values, "scripted failed: ValueError"),
    "changes the capacity": (PROBLEM, changes_a_field, "scripted failed: FrozenInstanceError"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_in_one_line(lie):
    problem, answer, words = LIES[lie]
    with pytest.raises(SolverError, match=words) as caught:
        solve_problem(problem, Scripted(answer))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_the_same_answers_told_truly_are_accepted():
    best = solve_problem(PROBLEM, Scripted(says(GOOD, bound=0.75, termination=OPTIMAL)))
    assert (best.objective, best.bound, best.gap, best.cost_bytes) == (0.75, 0.75, 0.0, 2)
    poor = solve_problem(PROBLEM, Scripted(says(np.array([0, 0]))))
    assert (poor.objective, poor.bound, poor.bound_source) == (0.0, 0.75, "dual")
    assert poor.gap == 1.0
    loose = solve_problem(PROBLEM, Scripted(says(GOOD, bound=5.0)))
    assert (loose.bound, loose.bound_source) == (0.75, "dual")
    smaller = says(GOOD.astype(np.int32), bound=0.75, termination=OPTIMAL)
    assert solve_problem(PROBLEM, Scripted(smaller)).objective == 0.75


@pytest.mark.parametrize(
    ("able", "words"),
    [
        (False, "scripted cannot solve this problem"),
        ("", "scripted cannot solve this problem"),
        (None, "scripted cannot solve this problem"),
        ("too hard; use ilp", "^too hard; use ilp$"),
        (RuntimeError("boo"), "scripted failed: RuntimeError: boo"),
    ],
)
def test_a_refusal_is_passed_on(able, words):
    with pytest.raises(SolverError, match=words):
        solve_problem(PROBLEM, Scripted(says(GOOD), able=able))


def test_a_solver_is_not_asked_what_cannot_be():
    never = Scripted(raises)
    with pytest.raises(InfeasibleError, match="ask for at most that") as caught:
        solve_problem(make_problem(VALUES, target=1.2), never)
    assert caught.value.nearest == 1.125
    with pytest.raises(InfeasibleError, match="below the floors") as caught:
        solve_problem(make_problem(VALUES, capacity=3, protected_tokens=2), never)
    assert caught.value.nearest == 4


@pytest.mark.parametrize("limit", [None, 5.0])
def test_interrupting_is_not_failing(limit):
    def interrupted(problem):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        solve_problem(PROBLEM, Scripted(interrupted), time_limit_seconds=limit)
