"""The audit of a budget profile: everything it states, computed again from its score profile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvalloc.accounting import BoolArray, IntArray
from kvalloc.allocation.curves import RequestCurves
from kvalloc.allocation.formulation import problem_of
from kvalloc.allocation.request import Request
from kvalloc.allocation.sensitivity import limits_of, price_at
from kvalloc.allocation.verification import DUAL, prove
from kvalloc.formats.budget_profile import BudgetProfile, Limit, relative_gap
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.formats.shipped_profiles import load_profile, load_scores
from kvalloc.problem import AllocationProblem, Sense, Termination
from kvalloc.shape import ModelShape
from kvalloc.units import gap_text

TOLERANCE = 1e-9
"""Recomputed and stated numbers this close, relative to the larger of 1 and them, agree."""

BOUND, SCORES = "bound", "score profile digest"


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
        Whether nothing shows that it is false.
    proven : bool
        Whether it was shown to be true; a solver's word alone is not.
    """

    name: str
    stated: str
    found: str
    passed: bool
    proven: bool = True


def is_proven(checks: Iterable[Check]) -> bool:
    """Return whether the bound was proven again, by duality."""
    return all(check.proven for check in checks if check.name == BOUND)


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
        objective, retention, predicted loss, the bound recomputed by duality and the price. A
        bound beyond the dual one is not proven again: it stands on the word of its solver. A
        measured loss is only compared with its target.

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
    curves = RequestCurves(scores=scores, request=request)
    problem = problem_of(curves)
    choice, is_option = choice_of(profile, problem)
    objective, written = problem.objective(choice), _objective_text(request, problem)
    return [
        Check("sizes", _sizes(profile.shape), _sizes(scores.shape), profile.shape == scores.shape),
        _equal(SCORES, profile.score_digest, scores.digest),
        Check(
            "budgets are options",
            f"{is_option.size} budgets",
            "all are" if is_option.all() else f"{int((~is_option).sum())} are not",
            bool(is_option.all()),
        ),
        *_side_checks(profile, problem, choice),
        *_prediction_checks(profile, curves),
        _goal_check(request, problem, choice),
        _close("objective", profile.objective, objective, written),
        _equal("problem digest", profile.problem_digest, problem.digest()),
        *_proof_checks(profile, problem, choice, written),
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


def _prediction_checks(profile: BudgetProfile, curves: RequestCurves) -> list[Check]:
    """Check retention, cost and loss, computed again from the score profile."""
    budgets, bits = profile.budgets, profile.bits
    checks = [_close("retention", profile.retention, curves.retention(budgets))]
    loss = curves.predicted_loss(budgets, bits)
    checks.append(_close("predicted loss", profile.predicted_loss, loss))
    error = None if loss is None else curves.model_error(bits, profile.share)
    checks.append(_close("model error", profile.model_error, error))
    if (measured := profile.measured_loss) is not None and measured.target is not None:
        met, stated = measured.loss <= measured.target, f"{measured.target:.9g}"
        checks.append(Check("measured target met", stated, f"{measured.loss:.9g}", met))
    return checks


def choice_of(profile: BudgetProfile, problem: AllocationProblem) -> tuple[IntArray, BoolArray]:
    """Return the options that a profile's budgets are, or the nearest below where they are none.

    Returns
    -------
    choice : ndarray of int64, (n_units,)
    is_option : ndarray of bool, (n_units,)
        Whether the unit's budget is one of its options.
    """
    heads = np.maximum(problem.heads, 0)  # at layer level all heads have the budget of the first
    tokens = profile.budgets[problem.layers, heads]
    here = problem.tokens == tokens[:, None]
    if problem.bits is not None:
        here = here & (problem.bits == profile.widths[problem.layers, heads][:, None])
    is_option = here.any(axis=1)
    choice = np.where(is_option, np.argmax(here, axis=1), problem.options_within(tokens))
    return choice.astype(np.int64), is_option


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


def _proof_checks(
    profile: BudgetProfile,
    problem: AllocationProblem,
    choice: IntArray,
    written: Callable[[float], str],
) -> list[Check]:
    """Check sense, bound, reason for stopping and price: what makes up the certificate."""
    objective, stated, ended = problem.objective(choice), profile.bound, profile.termination
    proof, slack = prove(problem, choice, profile.prices), TOLERANCE * max(1.0, abs(objective))
    checks = [_equal("sense", profile.sense, problem.sense.value)]
    found, passed, proven = f"{written(proof.bound)} by duality", stated is None, True
    if stated is not None:
        proven = abs(stated - proof.bound) <= slack
        beaten = [objective] if problem.is_better(objective, stated, TOLERANCE) else []
        if beaten := beaten + proof.beating(problem, stated):
            found = f"a choice of {written(beaten[0])}"
        elif not proven and profile.bound_source != DUAL:
            found += f"; not proven again: {profile.bound_source or 'nobody'}'s word"
        by_word = profile.bound_source in {profile.decided_by, profile.solver} - {DUAL}
        passed = not beaten and (proven or (by_word and problem.is_better(proof.bound, stated)))
    checks.append(
        Check(BOUND, "none" if stated is None else written(stated), found, passed, proven)
    )
    closed = stated is not None and abs(stated - objective) <= slack
    if ended == Termination.OPTIMAL.value:
        gap = f"a gap of {gap_text(relative_gap(objective, stated))}"
        checks.append(Check("ended", ended, ended if closed else gap, closed))
    if profile.limits:
        again = limits_of(problem, choice, proof.prices or (proof.multiplier,))
        pairs = zip(profile.limits, again, strict=False)
        wrong = [one for one, other in pairs if not _same(one, other)]
        same = len(again) == len(profile.limits) and not wrong
        stated_limit = wrong[0].name if wrong else f"{len(profile.limits)} limits"
        checks.append(Check("limits", stated_limit, "as stated" if same else "another", same))
    if profile.value_per_mib is not None:
        is_optimal = ended == Termination.OPTIMAL.value
        price = price_at(problem, choice, is_optimal, proof.multiplier, proof.prices)
        checks.append(_close("price", profile.value_per_mib, price.value_per_mib))
    return checks


def _same(stated: Limit, found: Limit) -> bool:
    """Return whether two limits agree, their prices within the tolerance."""
    priced = _close("price", stated.value_per_mib, found.value_per_mib).passed
    return priced and stated == found.replace(value_per_mib=stated.value_per_mib)


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
