"""Audit of a budget profile: every statement is recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvalloc.accounting import BoolArray, IntArray
from kvalloc.allocation.formulation import PosedRequest
from kvalloc.allocation.request import Request
from kvalloc.allocation.verification import DUAL, limits_of, price_at, prove
from kvalloc.errors import one_line
from kvalloc.formats.budget_profile import BudgetProfile, Limit, relative_gap
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.formats.shipped_profiles import load_profile, load_scores
from kvalloc.problem import AllocationProblem, Termination
from kvalloc.shape import ModelShape
from kvalloc.units import gap_text

TOLERANCE = 1e-9
"""Relative difference, to the larger of 1 and the numbers, up to which numbers agree."""

BOUND, SCORES = "bound", "score profile digest"


@dataclass(frozen=True)
class Check:
    """One statement of a budget profile and whether it is true."""

    name: str
    stated: str
    recomputed: str
    passed: bool
    proven: bool = True


def is_proven(checks: Iterable[Check]) -> bool:
    """Return whether the bound was proven again, by duality."""
    return all(check.proven for check in checks if check.name == BOUND)


def verify(profile: BudgetProfile | str | Path, scores: ScoreProfile | str | Path) -> list[Check]:
    """Recompute all that a budget profile states from its score profile.

    A solver's bound beyond the dual one is not proven again. A measured loss is only compared with
    its target.

    Raises
    ------
    ModelMismatchError
    InputError
        If the profile does not state its request.
    """
    name = "the budget profile" if isinstance(profile, BudgetProfile) else profile
    profile, scores = load_profile(profile), load_scores(scores)
    profile.shape.require_same_model(scores.shape)
    request = Request.read(profile, name)
    posed = PosedRequest(scores=scores, request=request)
    problem = posed.problem
    choice, is_option = choice_of(profile, problem)
    n_others = int((~is_option).sum())
    options = f"{n_others} are not" if n_others else "all are"
    value, written = problem.objective_value(choice), _value_text(request)
    checks = [
        Check("sizes", _sizes(profile.shape), _sizes(scores.shape), profile.shape == scores.shape),
        _equal(SCORES, profile.score_digest, scores.digest),
        Check("budgets are options", f"{is_option.size} budgets", options, not n_others),
    ]
    for constraint in problem.constraints:
        fault = constraint.fault(problem, choice)
        checks.append(Check(*constraint.stated(), fault or "it holds", fault is None))
    checks += _prediction_checks(profile, posed)
    if problem.target is None:
        cost, capacity = problem.cost(choice), problem.capacity_bytes or 0
        checks.append(
            Check("within capacity", f"{capacity:,} bytes", f"{cost:,} bytes", cost <= capacity)
        )
    else:
        met = problem.meets_target(value)
        checks.append(Check("target met", written(problem.target), written(value), met))
        written = _bytes_text
    return [
        *checks,
        _close("objective", profile.objective, problem.objective(choice), written),
        _equal("problem digest", profile.problem_digest, problem.digest()),
        *_proof_checks(profile, problem, choice, written),
    ]


def _prediction_checks(profile: BudgetProfile, posed: PosedRequest) -> list[Check]:
    budgets, bits = profile.budgets, profile.bits
    loss = posed.predicted_loss(budgets, bits)
    error = None if loss is None else posed.model_error(bits, profile.share)
    checks = [
        _close("retention", profile.retention, posed.retention(budgets)),
        _close("predicted loss", profile.predicted_loss, loss),
        _close("model error", profile.model_error, error),
    ]
    if (measured := profile.measured_loss) is not None and measured.target is not None:
        met, stated = measured.loss <= measured.target, f"{measured.target:.9g}"
        checks.append(Check("measured target met", stated, f"{measured.loss:.9g}", met))
    return checks


def choice_of(profile: BudgetProfile, problem: AllocationProblem) -> tuple[IntArray, BoolArray]:
    """Return the options of a profile's budgets, or the nearest smaller ones, (n_units,).

    With them, whether the problem offers the unit's budget, (n_units,).
    """
    heads = np.maximum(problem.heads, 0)  # at layer level all heads have the budget of the first
    tokens = profile.budgets[problem.layers, heads]
    equal = problem.tokens == tokens[:, None]
    if problem.bits is not None:
        equal = equal & (problem.bits == profile.widths[problem.layers, heads][:, None])
    is_option = equal.any(axis=1)
    choice = np.where(is_option, np.argmax(equal, axis=1), problem.options_within(tokens))
    return choice.astype(np.int64), is_option


def _sizes(shape: ModelShape) -> str:
    sizes = (shape.n_layers, shape.n_kv_heads, *shape.dims, shape.dtype_bytes)
    return " x ".join(map(str, sizes))


def _equal(name: str, stated: object, true: object) -> Check:
    return Check(name, one_line(stated, 40), one_line(true, 40), stated == true)


def _close(
    name: str, stated: float | None, true: float | None, written: Callable[[float], str] = repr
) -> Check:
    if stated is None or true is None:
        return _equal(name, stated, true)
    close = abs(stated - true) <= TOLERANCE * max(1.0, abs(true))
    return Check(name, written(stated), written(true), close)


def _bytes_text(value: float) -> str:
    return f"{int(value) if float(value).is_integer() else value:,} bytes"


def _value_text(request: Request) -> Callable[[float], str]:
    if request.objective != "loss":
        return repr
    return lambda value: f"{0.0 - value!r} nats per token"  # a loss is a value of 0 or below


def _proof_checks(
    profile: BudgetProfile,
    problem: AllocationProblem,
    choice: IntArray,
    written: Callable[[float], str],
) -> list[Check]:
    objective, stated, ended = problem.objective(choice), profile.bound, profile.termination
    proof, slack = prove(problem, choice, profile.prices), TOLERANCE * max(1.0, abs(objective))
    checks = [_equal("sense", profile.sense, problem.sense.value)]
    text, passed, proven = f"{written(proof.bound)} by duality", stated is None, True
    if stated is not None:
        proven = abs(stated - proof.bound) <= slack
        beaten = [objective] if problem.is_better(objective, stated, TOLERANCE) else []
        if beaten := beaten + proof.beating(problem, stated):
            text = f"a choice of {written(beaten[0])}"
        elif not proven and profile.bound_source != DUAL:
            text += f"; not proven again: {profile.bound_source or 'nobody'}'s word"
        by_word = profile.bound_source in {profile.decided_by, profile.solver} - {DUAL}
        passed = not beaten and (proven or (by_word and problem.is_better(proof.bound, stated)))
    checks.append(Check(BOUND, "none" if stated is None else written(stated), text, passed, proven))
    is_optimal = ended == Termination.OPTIMAL.value
    if is_optimal:
        closed = stated is not None and abs(stated - objective) <= slack
        gap = f"a gap of {gap_text(relative_gap(objective, stated))}"
        checks.append(Check("ended", ended, ended if closed else gap, closed))
    if profile.limits:
        true = limits_of(problem, choice, proof.prices or (proof.multiplier,))
        pairs = zip(profile.limits, true, strict=False)
        wrong = [limit for limit, other in pairs if not _same(limit, other)]
        same = len(true) == len(profile.limits) and not wrong
        name = wrong[0].name if wrong else f"{len(profile.limits)} limits"
        checks.append(Check("limits", name, "as stated" if same else "another", same))
    if profile.value_per_mib is not None:
        price = price_at(problem, choice, is_optimal, proof.multiplier, proof.prices)
        checks.append(_close("price", profile.value_per_mib, price.value_per_mib))
    return checks


def _same(stated: Limit, true: Limit) -> bool:
    priced = _close("price", stated.value_per_mib, true.value_per_mib).passed
    return priced and stated == true.replace(value_per_mib=stated.value_per_mib)
