"""Verification of a solver's answer: every claim is recomputed, and memory is priced."""

from __future__ import annotations

import contextlib
import contextvars
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple, TypeVar

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.errors import InputError, KVAllocError, SolverError
from kvalloc.formats.budget_profile import Limit, relative_gap
from kvalloc.problem import (
    Aggregate,
    AllocationProblem,
    GroupCap,
    MaxDistinct,
    Sense,
    Solution,
    Solver,
    Termination,
)
from kvalloc.problem.arrays import VALUE_TOLERANCE
from kvalloc.problem.bounds import bound_at, cheapest_reaching, dual_bound, next_gain
from kvalloc.problem.registry import get_solver

PROOF_TOLERANCE = 1e-10
"""Relative difference, to the larger of 1 and the objective, up to which objective and bound are
equal."""

DUAL = "dual"
"""Source of a bound that kvalloc computes, and again in `kvalloc verify`."""

GRACE_SECONDS = 5.0
"""Seconds beyond twice its time limit after which a solver of another package is given up."""

MIB = 2**20

WORST_STEP = 0.01
"""Step of value that is priced if the step of a single option would be too uneven."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class CheckedSolution(Solution):
    """A solver's answer with all claims recomputed.

    `prices` are stated if they, not kvalloc's own, prove the dual bound.

    Attributes
    ----------
    bound : float
        kvalloc's dual bound, or a tighter one that an exact solver claims.
    value : float
        Weighted value, in either sense.
    bound_source : str
        ``"dual"`` or the solver's name.
    multiplier : float
        Price of a byte in the dual bound, without side constraints.
    seconds : float
        Of the solver alone.
    """

    bound: float
    value: float
    cost_bytes: int
    bound_source: str
    multiplier: float
    seconds: float

    @property
    def gap(self) -> float | None:
        """Relative distance between objective and bound."""
        return relative_gap(self.objective, self.bound)


def solve_problem(
    problem: AllocationProblem, solver: Solver, *, time_limit_seconds: float | None = None
) -> CheckedSolution:
    """Run a solver and recompute every claim of its answer.

    Raises
    ------
    InfeasibleError
    SolverError
        If the solver refuses, fails, hangs, or makes a false claim.
    """
    check_time_limit(time_limit_seconds)
    patience = None if time_limit_seconds is None else 2 * time_limit_seconds + GRACE_SECONDS
    able = _guarded(solver, patience, solver.can_solve, problem)
    if isinstance(able, str) or not able:
        raise SolverError(able or f"{solver.name} cannot solve this problem")
    problem.check_feasible()
    start = time.perf_counter()
    solution = _guarded(
        solver, patience, solver.solve, problem, time_limit_seconds=time_limit_seconds
    )
    return checked(problem, solution, solver.name, time.perf_counter() - start)


def checked(
    problem: AllocationProblem, solution: Solution, name: str, seconds: float
) -> CheckedSolution:
    """Recompute every claim of a solver's answer.

    Raises
    ------
    SolverError
    """
    if fault := _claims_fault(problem, solution):
        raise SolverError(f"the solver {name} {fault}")
    choice, objective = solution.choice, problem.objective(solution.choice)
    proof = prove(problem, choice, solution.prices)
    bound, source = proof.bound, DUAL
    if solution.bound is not None:
        if known := proof.beating(problem, solution.bound):
            raise SolverError(
                f"the solver {name} reports a bound of {solution.bound:.9g}, but a choice "
                f"of {known[0]:.9g} exists"
            )
        if problem.is_better(bound, solution.bound, PROOF_TOLERANCE):
            bound, source = solution.bound, solution.decided_by or name
    if abs(bound - objective) <= PROOF_TOLERANCE * max(1.0, abs(objective)):
        bound = objective
    return CheckedSolution(
        choice=choice,
        objective=objective,
        value=problem.objective_value(choice),
        cost_bytes=problem.cost(choice),
        bound=bound,
        bound_source=source,
        termination=solution.termination,
        detail=" ".join(solution.detail.split()),
        decided_by=solution.decided_by or name,
        prices=proof.prices,
        multiplier=proof.multiplier,
        seconds=seconds,
    )


def check_time_limit(seconds: float | None) -> None:
    """Raise an `InputError` for a time limit that leaves no time."""
    if seconds is not None and not seconds > 0:
        raise InputError(f"a time limit of {seconds:g} s leaves no time; give more")


def _guarded(
    solver: Solver,
    patience_seconds: float | None,
    call: Callable[..., T],
    *args: Any,
    **options: Any,
) -> T:
    ours = type(solver).__module__.startswith("kvalloc.")
    try:
        if ours or patience_seconds is None:
            return call(*args, **options)
        # Ours keep their limits, which is tested; others may ignore theirs, or hang.
        return call_in_time(lambda: call(*args, **options), seconds=patience_seconds)
    except KVAllocError:
        raise
    except NoAnswerError as error:
        raise SolverError(
            f"the solver {solver.name} ignores its time limit: {error}, it was given up (it may "
            "still be using the processor until this process ends); try another one"
        ) from error
    except Exception as error:  # a plug-in may fail in any way
        raise SolverError(
            f"the solver {solver.name} failed: {type(error).__name__}: {error}; try another one"
        ) from error


class NoAnswerError(Exception):
    """A call that did not return in time."""


def call_in_time(call: Callable[[], T], *, seconds: float) -> T:
    """Return the result of a call, or raise its errors, or if it takes too long.

    It runs in a thread, in a copy of the caller's context. One that hangs stays as a daemon. Code
    that keeps the interpreter lock cannot be watched.

    Raises
    ------
    NoAnswerError

    Examples
    --------
    >>> call_in_time(lambda: 6 * 7, seconds=5.0)
    42
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # raised again where it is waited for
            errors.append(error)

    context = contextvars.copy_context()
    worker = threading.Thread(target=context.run, args=(run,), daemon=True, name="kvalloc-call")
    worker.start()
    worker.join(min(seconds, threading.TIMEOUT_MAX))
    if errors:
        raise errors[0]
    if not results:
        raise NoAnswerError(f"no answer after {seconds:g} s")
    return results[0]


_KINDS: dict[str, Any] = {
    "choice": np.ndarray,
    "objective": Real,
    "bound": (Real, type(None)),
    "termination": Termination,
    "detail": str,
    "decided_by": str,
    "prices": tuple,
}
"""Types of a solution's fields."""


def _claims_fault(problem: AllocationProblem, solution: Any) -> str:
    sound = isinstance(solution, Solution)
    for name, kind in _KINDS.items():
        sound = sound and isinstance(getattr(solution, name), kind)
    if not sound:
        return (
            "returned no sound Solution (an array as choice, numbers as objective and bound, a "
            f"Termination, texts): {str(solution)[:200]!r}"
        )
    choice, capacity = solution.choice, problem.capacity_bytes
    if choice.shape != (problem.n_units,) or choice.dtype.kind != "i":
        return (
            f"returned a choice of {choice.dtype} shaped {choice.shape}, expected whole numbers "
            f"shaped ({problem.n_units},)"
        )
    unknown = (choice < 0) | (choice >= problem.option_counts)
    if np.any(unknown):
        unit = int(np.argmax(unknown))
        options = int(problem.option_counts[unit])
        return f"chose option {int(choice[unit])} of unit {unit}, which has {options}"
    cost, value = problem.cost(choice), problem.objective_value(choice)
    if capacity is not None and cost > capacity:
        return f"spends {cost:,} bytes of a capacity of {capacity:,}"
    if not problem.meets_target(value):
        return f"reaches {value:.15g}, below the target of {problem.target:.15g}"
    if fault := problem.side_fault(choice):
        return f"breaks a constraint: {fault}"
    if solution.prices and not are_prices(problem, solution.prices):
        return f"reports prices of {solution.prices}, expected one >= 0 for the capacity and a cap"
    true, bound = problem.objective(choice), solution.bound
    slack = PROOF_TOLERANCE * max(1.0, abs(true))
    if not abs(solution.objective - true) <= slack:  # also when it is NaN
        return f"reports an objective of {solution.objective:.9g}; it is {true:.9g}"
    if bound is None:
        return ""
    room = bound - true if problem.sense is Sense.MAX_VALUE else true - bound
    if not room >= -slack:
        return f"reports a bound of {bound:.9g}, which its own choice of {true:.9g} beats"
    if solution.termination is Termination.OPTIMAL and room > slack:
        return f"claims to be optimal at {true:.9g} with a bound of {bound:.9g}"
    return ""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Bounds that kvalloc proves of a problem without its solver.

    Attributes
    ----------
    bound : float
        By duality.
    prices : tuple of float
        Of the capacity and the caps, if they prove it.
    multiplier : float
        kvalloc's own price of a byte, without side constraints.
    known : tuple of float
        Objectives of sound choices.
    """

    bound: float
    prices: tuple[float, ...]
    multiplier: float
    known: tuple[float, ...]

    def beating(self, problem: AllocationProblem, bound: float) -> list[float]:
        """Return the known objectives that a bound rules out."""
        return [one for one in self.known if problem.is_better(one, bound, PROOF_TOLERANCE)]


def prove(problem: AllocationProblem, choice: IntArray, prices: tuple[float, ...] = ()) -> Proof:
    """Return the tightest dual bound, and known objectives that every bound has to allow.

    The dual at the own price of ``choice``, (n_units,), is tried first, then ``prices`` of the
    capacity and of each cap: any give a valid bound.
    """
    is_sum, objective = problem.aggregate is Aggregate.SUM, problem.objective(choice)
    tried: list[tuple[float, ...]] = []  # before the search for the best price
    if is_sum and problem.target is None and not problem.constraints and problem.is_concave:
        tried.append((next_gain(problem, choice),))
    if is_sum and prices and are_prices(problem, prices):
        tried.append(prices)
    priced = []
    for each in tried:
        bound = bound_at(problem, *each)
        if abs(bound - objective) <= PROOF_TOLERANCE * max(1.0, abs(objective)):
            used = prices if each is prices else ()
            return Proof(bound=bound, prices=used, multiplier=each[0], known=(objective,))
        priced.append((bound, each))
    dual = dual_bound(problem)
    choices, bound, used = [dual.choice], dual.bound, ()
    for other, each in priced:
        if each[1:] and not problem.is_better(other, bound, PROOF_TOLERANCE):
            bound, used = other, each
    equal = get_solver("uniform")
    if problem.constraints and equal.can_solve(problem) is True:
        with contextlib.suppress(KVAllocError):  # no equal budgets fit
            choices.append(equal.solve(problem).choice)
    known = tuple(problem.objective(one) for one in choices if problem.satisfies(one))
    return Proof(bound=bound, prices=used, multiplier=dual.multiplier, known=known)


def are_prices(problem: AllocationProblem, prices: tuple[float, ...]) -> bool:
    """Return whether these are prices of the capacity and of each cap, or none."""
    sound = all(0 <= one < math.inf for one in prices)
    return sound and len(prices) in (0, 1 + len(problem.caps))


class ShadowPrice(NamedTuple):
    """The price of memory at a choice.

    Attributes
    ----------
    value_per_mib : float or None
        Value of one MiB more, at least 0.
    source : str
        Source of the price, or reason why it is unknown.
    """

    value_per_mib: float | None
    source: str


UNPRICED = ShadowPrice(None, "not computed: the limits leave no formula")


def price_at(
    problem: AllocationProblem,
    choice: IntArray,
    is_optimal: bool = True,
    multiplier: float | None = None,
    prices: tuple[float, ...] = (),
) -> ShadowPrice:
    """Return the price of a MiB at a choice, (n_units,).

    For concave units, also under caps, it is the best gain of a next option within all caps. For
    others it is the capacity's price in the Lagrangian dual, for the worst unit from the bytes of
    `WORST_STEP` more value. It is unknown if side constraints leave no formula.

    If not ``is_optimal``, only the multiplier counts. It, and ``prices`` under caps, are of the
    dual bound.
    """
    if problem.aggregate is Aggregate.WORST and not problem.constraints and is_optimal:
        return _worst_price(problem, choice)
    if problem.aggregate is not Aggregate.SUM:
        return UNPRICED
    only_caps = set(map(type, problem.constraints)) <= {GroupCap}
    if only_caps and problem.is_concave and is_optimal:
        return ShadowPrice(next_gain(problem, choice) * MIB, "the next entry")
    if problem.constraints:
        return ShadowPrice(prices[0] * MIB, DUAL) if only_caps and prices else UNPRICED
    if multiplier is None:
        multiplier = dual_bound(problem).multiplier
    return ShadowPrice(multiplier * MIB, DUAL)


def _worst_price(problem: AllocationProblem, choice: IntArray) -> ShadowPrice:
    value = problem.objective_value(choice)
    source = f"{WORST_STEP:g} more"
    higher = min(value + WORST_STEP, problem.max_value)
    # Curves that tie but for the last bit reach a level together.
    now, then = (cheapest_reaching(problem, one - VALUE_TOLERANCE) for one in (value, higher))
    if now is None or then is None or higher <= value:
        return ShadowPrice(0.0, source)
    gained, spent = problem.objective_value(then) - value, problem.cost(then) - problem.cost(now)
    per_byte = max(0.0, gained) / spent if spent > 0 else 0.0
    return ShadowPrice(per_byte * MIB, source)


def limits_of(
    problem: AllocationProblem, choice: IntArray, prices: tuple[float, ...]
) -> tuple[Limit, ...]:
    """Return the limits of a problem, as a choice uses them: capacity, caps, and different budgets.

    ``prices``, of a byte of the capacity and of each cap in the dual, are stated if complete and
    there are no other limits.
    """
    caps = problem.caps
    # Prices of a dual that leaves limits out are no prices under them.
    priced = problem.aggregate is Aggregate.SUM and len(caps) == len(problem.constraints)
    known = priced and len(prices) == 1 + len(caps)
    of_capacity, *of_caps = prices if known else [None] * (1 + len(caps))
    after = np.minimum(choice + 1, problem.last_options)
    steps = problem.costs[problem.units, after] - problem.costs[problem.units, choice]

    def limit(name: str, units: Sequence[int] | IntArray, size: int, price: float | None) -> Limit:
        used, larger = problem.cost(choice, units), steps[list(units)]
        binds = bool((larger > 0).any()) and used + int(larger[larger > 0].min()) > size
        worth = None if price is None else price * MIB
        return Limit(name=name, used=used, allowed=size, binds=binds, value_per_mib=worth)

    limits = []
    if problem.capacity_bytes is not None:
        limits.append(limit("capacity", problem.units, problem.capacity_bytes, of_capacity))
    for cap, price in zip(caps, of_caps, strict=True):
        limits.append(limit(cap.stated()[0], cap.units, cap.capacity_bytes, price))
    for one in problem.constraints:
        if isinstance(one, MaxDistinct):
            used = int(np.unique(problem.chosen_tokens(choice)).size)
            name = one.stated()[0]
            limits.append(
                Limit(name=name, used=used, allowed=one.maximum, binds=used == one.maximum)
            )
    return tuple(limits)
