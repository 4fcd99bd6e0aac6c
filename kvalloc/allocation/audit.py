"""The audit of a budget profile: everything it states, computed again from its score profile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.allocation.curves import RequestCurves
from kvalloc.allocation.decision import head_table
from kvalloc.allocation.formulation import pose, problem_of
from kvalloc.allocation.request import Request
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.formats.sharing_groups import groups_text, parse_groups
from kvalloc.formats.shipped_profiles import load_profile, load_scores
from kvalloc.problem import AllocationProblem, Sense, dual_bound
from kvalloc.shape import ModelShape

TOLERANCE = 1e-9
"""Recomputed and stated numbers this close, relative to the larger of 1 and them, agree."""


@dataclass(frozen=True)
class Check:
    """One statement of a budget profile and whether it is true.

    Attributes
    ----------
    name : str
        What was checked.
    stated, found : str
        What the profile says and what was recomputed.
    passed : bool
        Whether they agree.
    """

    name: str
    stated: str
    found: str
    passed: bool


def verify(profile: BudgetProfile | str | Path, scores: ScoreProfile | str | Path) -> list[Check]:
    """Recompute everything a budget profile states from the score profile alone.

    Parameters
    ----------
    profile : BudgetProfile, str or Path
        The decision, its file, or the name of a shipped one.
    scores : ScoreProfile, str or Path
        The measurement it names, or its file.

    Returns
    -------
    list of Check
        Sizes, digests, every budget being an option of the problem, target or capacity, cost,
        objective, retention, predicted loss, and the bound recomputed by duality. A measured loss
        is only compared with its target.

    Raises
    ------
    ModelMismatchError
        If the scores are of another model.
    InputError
        If the profile does not say what was requested, so that nothing can be recomputed.
    """
    name = "the budget profile" if isinstance(profile, BudgetProfile) else profile
    profile, scores = load_profile(profile), load_scores(scores)
    profile.shape.require_same_model(scores.shape)
    request = Request.read(profile, name)
    curves = RequestCurves(scores=scores, request=request, biased=profile.policy.biased)
    problem = problem_of(curves)
    tokens, is_option, choice = _choice_of(profile, problem)
    objective, written = problem.objective(choice), _objective_text(request, problem)
    return [
        Check("sizes", _sizes(profile.shape), _sizes(scores.shape), profile.shape == scores.shape),
        _equal("score profile digest", profile.score_digest, scores.digest),
        Check(
            "budgets are options",
            f"{tokens.size} budgets",
            "all are" if is_option.all() else f"{int((~is_option).sum())} are not",
            bool(is_option.all()),
        ),
        *_side_checks(profile, problem, choice),
        *_prediction_checks(profile, curves, problem, choice),
        _goal_check(request, problem, choice),
        _close("objective", profile.objective, objective, written),
        _equal("problem digest", profile.problem_digest, problem.digest()),
        _bound_check(profile, request, problem, choice),
    ]


def _goal_check(request: Request, problem: AllocationProblem, choice: IntArray) -> Check:
    """Check that the capacity is kept, or the target met."""
    if (capacity := problem.capacity_bytes) is not None:
        cost = problem.cost(choice)
        return Check("within capacity", f"{capacity:,} bytes", f"{cost:,} bytes", cost <= capacity)
    assert problem.target is not None  # a problem has one of both
    value = problem.objective_value(choice)
    met = problem.meets_target(value)
    written = repr if request.target.max_loss is None else _loss_text
    return Check("target met", written(problem.target), written(value), met)


def _prediction_checks(
    profile: BudgetProfile,
    curves: RequestCurves,
    problem: AllocationProblem,
    choice: IntArray,
) -> list[Check]:
    """Check retention, cost and loss, computed again from the score profile."""
    request, scores, retention, loss = curves.request, curves.scores, None, None
    budgets, bits = profile.budgets, profile.bits
    policies, checks = _policies_of(profile, scores, problem, choice)
    if policies is None:
        retention = curves.retention(budgets, bits)
    checks.append(_close("retention", profile.retention, retention))
    if request.cost != "bytes":
        checks.append(_equal("cost", profile.cost_bytes, problem.cost(choice)))
    if not profile.share_groups:
        loss = curves.predicted_loss(budgets, bits, policies)
    checks.append(_close("predicted loss", profile.predicted_loss, loss))
    if (measured := profile.measured_loss) is not None and measured.target is not None:
        met, stated = measured.loss <= measured.target, f"{measured.target:.9g}"
        checks.append(Check("measured target met", stated, f"{measured.loss:.9g}", met))
    if request.workloads != "mean":
        worst = curves.worst_sample_retention(budgets)
        checks.append(_close("worst sample", profile.worst_sample_retention, worst))
    if "share_groups" in profile.requested:
        checks.extend(_group_checks(profile, request, scores))
    return checks


def _policies_of(
    profile: BudgetProfile, scores: ScoreProfile, problem: AllocationProblem, choice: IntArray
) -> tuple[IntArray | None, list[Check]]:
    """Return the units' policies as places in those of the score profile, and their check.

    The check is that each unit has the policy with the smallest loss. The places are those that
    the profile states, if the score profile has its policies: predictions are recomputed for them.
    """
    best = None
    if problem.policies is not None:
        chosen = problem.policies[problem.units, choice]
        best = head_table(scores.shape, problem, chosen, 0) if chosen.any() else None
    if best is None and profile.unit_policies is None:
        return None, []
    if unknown := [policy.title for policy in profile.policies if policy not in scores.policies]:
        known = ", ".join(policy.title for policy in scores.policies)
        return best, [Check("policies", unknown[0], f"losses of {known}", False)]
    none = np.zeros_like(profile.budgets)
    best, table = (none if one is None else one for one in (best, profile.unit_policies))
    stated = np.array([scores.policies.index(policy) for policy in profile.policies])[table]
    other, same = int((stated != best).sum()), _policies_text(scores, best)
    text = f"{other} heads lose less with another one" if other else same
    check = Check("policies", _policies_text(scores, stated), text, not other)
    return stated.astype(np.int64) if stated.any() else None, [check]


def _policies_text(scores: ScoreProfile, table: IntArray) -> str:
    """Return how many heads have which policy, for people."""
    places, heads = np.unique(table[list(scores.shape.full_layers)], return_counts=True)
    counted = zip(places.tolist(), heads.tolist(), strict=True)
    return ", ".join(f"{scores.policies[place].title} {count}" for place, count in counted)


def _group_checks(profile: BudgetProfile, request: Request, scores: ScoreProfile) -> list[Check]:
    """Check that the groups are the requested ones, and the bound over all groupings."""
    requested = parse_groups(profile.requested["share_groups"])
    if not isinstance(requested, int):
        return [_equal("groups", groups_text(profile.share_groups), groups_text(requested))]
    alone = len(scores.shape.full_layers) - sum(len(group) for group in profile.share_groups)
    count = alone + len(profile.share_groups)
    bound = pose(scores, replace(request, share_groups=requested)).grouping_bound
    return [
        Check("groups", f"at most {requested}", f"{count}", count <= requested),
        _close("bound over groupings", profile.grouping_bound, bound),
    ]


def _choice_of(
    profile: BudgetProfile, problem: AllocationProblem
) -> tuple[IntArray, np.ndarray[tuple[int, ...], np.dtype[np.bool_]], IntArray]:
    heads = np.maximum(problem.heads, 0)  # at layer level all heads have the budget of the first
    tokens: IntArray = profile.budgets[problem.layers, heads]
    table = np.full_like(profile.budgets, 16) if profile.bits is None else profile.bits
    here = problem.tokens == tokens[:, None]
    if problem.bits is not None:
        here = here & (problem.bits == table[problem.layers, heads][:, None])
    is_option = here.any(axis=1)
    # Where it is none, the nearest below stands for it.
    choice = np.where(is_option, np.argmax(here, axis=1), problem.options_within(tokens))
    return tokens, is_option, choice.astype(np.int64)


def _side_checks(
    profile: BudgetProfile, problem: AllocationProblem, choice: IntArray
) -> list[Check]:
    """Check each cap and every other constraint of the request."""
    checks = []
    for constraint in problem.constraints:
        fault = constraint.fault(problem, choice)
        name, stated = constraint.stated()
        checks.append(Check(name, stated, fault or "it holds", fault is None))
    return checks


def _sizes(shape: ModelShape) -> str:
    sizes = (shape.n_layers, shape.n_kv_heads, shape.head_dim, shape.dtype_bytes)
    return " x ".join(map(str, sizes))


def _equal(name: str, stated: object, found: object) -> Check:
    return Check(name, _brief(stated), _brief(found), stated == found)


def _close(
    name: str, stated: float | None, found: float | None, written: Callable[[float], str] = repr
) -> Check:
    if stated is None or found is None:
        return _equal(name, stated, found)
    close = abs(stated - found) <= TOLERANCE * max(1.0, abs(found))
    return Check(name, written(stated), written(found), close)


def _loss_text(value: float) -> str:
    """Return a value of a problem, 0 or below, as the loss that it stands for."""
    return f"{0.0 - value!r} nats per token"


def _bytes_text(value: float) -> str:
    return f"{int(value) if float(value).is_integer() else value:,} bytes"


def _objective_text(request: Request, problem: AllocationProblem) -> Callable[[float], str]:
    """Return the function that writes an objective and its bound with every digit."""
    if problem.sense is not Sense.MAX_VALUE:
        return _bytes_text
    return _loss_text if request.objective == "loss" else repr


def _bound_check(
    profile: BudgetProfile, request: Request, problem: AllocationProblem, choice: IntArray
) -> Check:
    """Check that no choice beats the stated bound, and that duality allows it."""
    dual, written = dual_bound(problem).bound, _objective_text(request, problem)
    objective, stated = problem.objective(choice), profile.bound
    slack = TOLERANCE * max(1.0, abs(objective))
    if stated is None:
        return Check("bound", "none", f"{written(dual)} by duality", True)
    if problem.sense is Sense.MAX_VALUE:
        passed = objective - slack <= stated <= dual + slack
    else:
        passed = dual - slack <= stated <= objective + slack
    return Check("bound", written(stated), f"{written(dual)} by duality", passed)


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
