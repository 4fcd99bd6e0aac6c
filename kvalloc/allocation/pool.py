"""Pool: one memory for several score profiles, as one problem with all members' units.

Its value is the weighted sum of members' values. A floor's price, a limit on a member's value,
raises its weight. Any prices mu >= 0 prove:

    max sum_i w_i V_i  <=  max sum_i (w_i + mu_i) V_i - mu . f    with  V_i >= f_i.

If the worst member counts, any weights p >= 0 that add up to 1 prove:

    max min_i V_i  <=  max sum_i p_i V_i.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.accounting.costs import MOST_BYTES
from kvalloc.allocation.audit import BOUND, TOLERANCE, Check, choice_of
from kvalloc.allocation.decision import decide
from kvalloc.allocation.formulation import PosedRequest, choose_objective
from kvalloc.allocation.infeasibility import advise
from kvalloc.allocation.request import Request, RequestOptions, Target
from kvalloc.allocation.verification import DUAL, CheckedSolution, prove, solve_problem
from kvalloc.errors import InfeasibleError, InputError, no_such, one_line, option
from kvalloc.formats.budget_profile import BudgetProfile, relative_gap
from kvalloc.formats.record import Record
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.formats.shipped_profiles import load_profile, load_scores
from kvalloc.problem import (
    AllocationProblem,
    GroupCap,
    Solver,
    deadline_after,
)
from kvalloc.problem.arrays import VALUE_TOLERANCE
from kvalloc.problem.registry import get_solver
from kvalloc.units import parse_bytes

Fairness = Literal["sum", "worst"]


class Bound(NamedTuple):
    """A bound on the choices that keep all floors, and its proof.

    Attributes
    ----------
    source : str
        ``"dual"``, or the solver that claims it.
    scales : tuple of float
        Factors on members' weights for floors; if the worst member counts, the weights p.
    prices : tuple of float
        Of the memory and of each cap, if they prove more than kvalloc's own.
    """

    value: float
    source: str
    scales: tuple[float, ...]
    prices: tuple[float, ...]


HALVINGS, SWEEPS, MAX_POWER = 14, 2, 30.0
"""Weights tried for each floor, number of sweeps, and the largest power of two tried; any give a
bound."""

MOST_SPLIT = 4
"""Members that may be whole or not, beyond which not all combinations are tried."""

WEIGHINGS, FLOOR_HALVINGS = 16, 40
"""If the worst member counts: weights tried for a bound, and halvings of the common floor."""


class PoolStatement(Record):
    """Statement about its pool in a member's budget profile."""

    NAME: ClassVar[str] = "pool"

    memory: int
    """Bytes that all caches may take together, at their peaks."""

    members: int
    """Number of members."""

    member: int = 0
    """Place of this one, from 1."""

    weights: list[float]
    """Factor on each member's value."""

    floors: list[float | None]
    """Smallest value of each member; None without a floor."""

    fairness: Fairness
    """Whether the weighted sum of the values counts, or the worst one."""

    objective: float
    """The weighted sum of the members' values, or the worst one's."""

    bound: float
    """Bound on the objective of any split of the memory."""

    bound_source: str
    """``dual``, or the name of the solver that claims the bound."""

    scales: list[float]
    """Scales from which the bound is computed again, see `Bound`."""

    prices: list[float]
    """Prices from which the bound is computed again."""


class Pool(list[BudgetProfile]):
    """Budget profiles of the members, in their order, and fields of `PoolStatement`."""

    def __init__(self, profiles: Sequence[BudgetProfile], stated: PoolStatement) -> None:
        self.fairness, self.objective = stated.fairness, stated.objective
        self.bound, self.bound_source = stated.bound, stated.bound_source
        for place, one in enumerate(profiles, 1):
            pool = stated.replace(member=place).record()
            self.append(one.replace(requested={**one.requested, "pool": pool}))

    @property
    def gap(self) -> float | None:
        """Relative distance between objective and bound."""
        return relative_gap(self.objective, self.bound)


def solve_pool(
    members: Sequence[tuple[ScoreProfile | str | Path, Mapping[str, Any], float]],
    *,
    memory: str | int,
    fairness: Fairness = "sum",
    solver: str | Solver = "auto",
    time_limit: float | None = None,
) -> Pool:
    """Decide the budgets of several prompts, models or tenants that share one memory.

    Parameters
    ----------
    members : sequence of (scores, request, weight)
        Score profile, keywords of `kvalloc.solve` without a size, and the value's factor.
        ``target_retention`` or ``target_loss`` is a floor.
    memory : str or int
        Bytes of all caches, such as ``"2GiB"``: the sum of their peaks.
    fairness : {"sum", "worst"}
        Whether the weighted sum of members' values counts, or the worst.
    solver : str or Solver
        As in `kvalloc.solve`.
    time_limit : float, optional
        Seconds, for the joint problem, and again for each member's part.

    Raises
    ------
    InputError
        If a request, a weight or the fairness does not suit a pool.
    InfeasibleError
        If the memory is too small for all members, or for their floors.
    SolverError
        As `kvalloc.solve`.

    Examples
    --------
    >>> pool = solve_pool([(a, {}, 1.0), (b, {}, 2.0)], memory="2GiB")  # doctest: +SKIP
    """
    if fairness not in get_args(Fairness):
        raise InputError(f"the fairness is {fairness!r}, expected 'sum' or 'worst'")
    if not members:
        raise InputError("the pool has no members; give at least one (scores, request, weight)")
    untyped: Sequence[Any] = members  # a user may give anything
    for place, one in enumerate(untyped, 1):
        if not (isinstance(one, Sequence) and len(one) == 3 and isinstance(one[1], Mapping)):
            expected = "(scores, request, weight)"
            raise InputError(f"member {place} of the pool is {one_line(one, 60)}, not {expected}")
    chosen, memory_bytes = get_solver(solver), parse_bytes(memory)
    named = {_objective(keywords) for _, keywords, _ in members} - {None}
    common = named.pop() if len(named) == 1 else None
    read = [
        _Member.of(place, scores, {"objective": common, **keywords}, weight, chosen)
        for place, (scores, keywords, weight) in enumerate(members, 1)
    ]
    if len({one.posed.request.objective for one in read}) > 1:
        raise InputError(
            "some members are decided by loss and others by retention, which do not add up; give "
            f"each {option('objective', 'mean')}"
        )
    if fairness == "worst" and any(one.weight != 1 or one.floor is not None for one in read):
        raise InputError(
            "the worst member is the worst whatever it weighs; leave weights and floors out"
        )
    deadline = deadline_after(time_limit)
    search = _Search(members=read, memory=memory_bytes, solver=chosen, deadline=deadline)
    best = _best if fairness == "sum" else _fairest
    try:
        choice, bound = best(search)
        if search.peak(choice) > memory_bytes:
            choice = search.split(best, fairness)
    except InfeasibleError as error:
        raise search.too_small(error) from None
    profiles = [
        one.profile(one.posed.problem.cost(part), chosen, time_limit)
        for one, part in search.parts(choice)
    ]
    values = [one.weight * profile.objective for one, profile in zip(read, profiles, strict=True)]
    objective = _combined(values, fairness)
    stated = PoolStatement(
        memory=memory_bytes,
        members=len(read),
        weights=[one.weight for one in read],
        floors=[one.floor for one in read],
        fairness=fairness,
        objective=objective,
        bound=max(bound.value, objective),
        bound_source=bound.source,
        scales=[*bound.scales],
        prices=[*bound.prices],
    )
    return Pool(profiles, stated)


def verify_pool(
    profiles: Sequence[BudgetProfile | str | Path],
    scores: Sequence[ScoreProfile | str | Path],
) -> list[Check]:
    """Recompute statements about a pool from all its profiles, and their scores in the same order.

    A solver's bound beyond the dual one is not proven again.

    Raises
    ------
    InputError
        If they are not one pool.
    """
    loaded = [load_profile(one) for one in profiles]
    try:
        statements = [PoolStatement(**one.requested.get("pool", {})) for one in loaded]
        order = sorted(range(len(loaded)), key=lambda at: statements[at].member)
        stated = statements[order[0]]
        memory, fairness, scales = stated.memory, stated.fairness, stated.scales
        members = [
            _Member.of_profile(loaded[at], load_scores(scores[at]), weight, floor)
            for at, weight, floor in zip(order, stated.weights, stated.floors, strict=True)
        ]
        places = [statements[at].member for at in order]
        if places != [*range(1, len(places) + 1)] or len(scales) != len(members):
            raise ValueError(f"members {places}")
        if not _can_prove(scales, members, fairness):
            raise ValueError(f"weights {scales} for the {fairness}")
    except (InputError, TypeError, ValueError, IndexError) as error:
        raise InputError(
            f"these {len(loaded)} profiles are not one pool: {one_line(error, 80)}; give the "
            "folder that 'kvalloc solve' wrote, and the score profile of each member"
        ) from error
    same = all(one.replace(member=stated.member) == stated for one in statements)
    checks = [Check("pool", f"of {len(members)} members", "all say so" if same else "others", same)]
    parts = [at.requested["value"] for at in loaded]
    fits = sum(parts) <= memory
    checks.append(Check("memory", f"{memory:,} bytes", f"{sum(parts):,} bytes", fits))
    choices = [
        choice_of(loaded[at], one.posed.problem)[0] for at, one in zip(order, members, strict=True)
    ]
    values = [
        one.posed.problem.objective_value(choice)
        for one, choice in zip(members, choices, strict=True)
    ]
    for one, value in zip(members, values, strict=True):
        if one.floor is not None:
            kept = value >= one.floor - VALUE_TOLERANCE
            checks.append(Check(f"floor of {one.name}", repr(one.floor), repr(value), kept))
    weighed = [one.weight * value for one, value in zip(members, values, strict=True)]
    reached = _combined(weighed, fairness)
    slack = TOLERANCE * max(1.0, abs(reached))
    close = abs(reached - stated.objective) <= slack
    checks.append(Check("objective", repr(stated.objective), repr(reached), close))
    pooled = _Search(members=members, memory=memory, solver=get_solver("auto"))
    joint, paid = pooled.scaled(scales), pooled.paid(scales)
    proof = prove(joint, np.concatenate(choices), tuple(stated.prices))
    bound, source = stated.bound, stated.bound_source
    dual = max(proof.bound - paid, reached)
    proven = abs(bound - dual) <= slack
    beaten = bound < reached - slack or bool(proof.beating(joint, bound + paid))
    word = "" if proven or source == DUAL else f"; not proven again: {source}'s word"
    passed = not beaten and (proven or (source != DUAL and bound <= dual + slack))
    text = "a better choice" if beaten else f"{dual!r} by duality{word}"
    return [*checks, Check(BOUND, repr(bound), text, passed, proven)]


def _combined(values: Sequence[float] | FloatArray, fairness: Fairness) -> float:
    return min(values) if fairness == "worst" else math.fsum(values)


def _can_prove(scales: Sequence[float], members: Sequence[_Member], fairness: Fairness) -> bool:
    if fairness == "worst":
        return min(scales) >= 0 and math.isclose(math.fsum(scales), 1.0)
    pairs = zip(scales, members, strict=True)
    return all(scale == 1 or (scale > 1 and one.floor is not None) for scale, one in pairs)


def _objective(keywords: Mapping[str, Any]) -> str | None:
    by_floor = {"target_retention": "mean", "target_loss": "loss"}
    floors = (by_floor[key] for key in by_floor if keywords.get(key) is not None)
    return keywords.get("objective") or next(floors, None)


@dataclass(frozen=True, kw_only=True)
class _Member:
    name: str
    posed: PosedRequest
    weight: float
    floor: float | None
    target: Target | None = None
    """The floor as the user wrote it."""

    @classmethod
    def of(cls, place: int, scores: Any, keywords: Any, weight: Any, solver: Solver) -> _Member:
        name = f"member {place} of the pool"
        if not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise InputError(f"{name} has the weight {weight!r}, expected a number above 0")
        options = {key: value for key, value in keywords.items() if value is not None}
        if unknown := sorted(options.keys() - RequestOptions.__annotations__.keys()):
            raise InputError(
                f"{name}: {no_such('option', unknown[0], RequestOptions.__annotations__)}"
            )
        for key in sorted(options.keys() & _REFUSED.keys()):
            raise InputError(
                f"{name} gives {option(key, options[key])}, and {_REFUSED[key]}; leave it out"
            )
        target = Target.of(options) if options.keys() & _FLOORS else None
        options = {key: value for key, value in options.items() if key not in _FLOORS}
        request = Request.parse(**options, memory=MOST_BYTES)  # the pool's is limited together
        if request.objective == "worst":
            raise InputError(f"{name} asks for its worst unit, and {_ADDED}; leave it out")
        scores = load_scores(scores)
        request, _ = choose_objective(scores, request, solver)
        posed = PosedRequest(scores=scores, request=request)
        floor = None if target is None else target.needed_value
        return cls(name=name, posed=posed, weight=float(weight), floor=floor, target=target)

    @classmethod
    def of_profile(
        cls, profile: BudgetProfile, scores: ScoreProfile, weight: float, floor: float | None
    ) -> _Member:
        profile.shape.require_same_model(scores.shape)
        request = Request.read(profile, "a profile of the pool")
        request = replace(request, target=Target.of({"memory": MOST_BYTES}))
        return cls(
            name=f"member {profile.requested['pool']['member']} of the pool",
            posed=PosedRequest(scores=scores, request=request),
            weight=weight,
            floor=floor,
        )

    @property
    def extra_bytes(self) -> int:
        """Additional bytes of a cache that keeps everything, in the model's type."""
        costs = self.posed.costs
        if self.posed.problem.max_cost_bytes < costs.everything:
            return 0
        return max(0, costs.plain_bytes - costs.everything - self.peak_bytes(0))

    def peak_bytes(self, cost: int) -> int:
        return int(self.posed.request.target.nearest(cost, self.posed.costs)[0])

    def problem(self, whole: bool) -> AllocationProblem:
        problem = self.posed.problem
        if whole or not self.extra_bytes:
            return problem
        less, units = self.posed.costs.everything - 1, tuple(range(problem.n_units))
        cap = GroupCap(name="all layers", units=units, capacity_bytes=less)
        return problem.replace(constraints=(*problem.constraints, cap))

    def least_peak(self, solver: Solver, seconds: float) -> int:
        """Return the smallest peak that keeps its floor and limits."""
        for whole in (False, True):
            problem = self.problem(whole)
            try:
                if self.floor is None:
                    problem.with_capacity(problem.max_cost_bytes).check_feasible()
                    return self.peak_bytes(problem.min_cost_bytes)
                within = problem.with_target(self.floor)
                answer = solve_problem(within, solver, time_limit_seconds=seconds)
                return self.peak_bytes(answer.cost_bytes)
            except InfeasibleError as error:
                never = error
        if self.target is None:
            raise InfeasibleError(f"{self.name}: {never}")
        request = replace(self.posed.request, target=self.target)
        never = advise(self.posed.scores, request, never, time_limit_seconds=seconds)
        raise InfeasibleError(f"the floor of {self.name}: {never}", nearest=never.nearest)

    def profile(self, cost: int, solver: Solver, time_limit: float | None) -> BudgetProfile:
        request = self.posed.request
        _, target = request.target.nearest(cost, self.posed.costs)
        part = replace(self.posed, request=replace(request, target=target))
        return decide(part, solver, time_limit=time_limit)


_FLOORS = frozenset({"target_retention", "target_loss"})
_ADDED = "the members' values add up"
_REFUSED = {
    **dict.fromkeys(("budget", "budget_tokens", "memory"), "the memory of the pool is its size"),
    "max_distinct": _ADDED,
}


def _best(search: _Search) -> tuple[IntArray, Bound]:
    members = search.members
    floors = {at: one.floor for at, one in enumerate(members) if one.floor is not None}

    def keeps(choice: IntArray, at: int) -> bool:
        return bool(search.values(choice)[at] >= floors[at] - VALUE_TOLERANCE)

    scales = np.ones(len(members))
    choice, bound = search.weighted(scales)
    if all(keeps(choice, at) for at in floors):
        return choice, bound
    cheapest = search.cheapest(floors)
    choices = [cheapest, search.extended(cheapest)]
    for at in [*floors] * SWEEPS:
        low, high = 0.0, MAX_POWER
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            scales[at] = 2.0**middle
            choice, proven = search.weighted(scales)
            choices.append(choice)
            bound = min(bound, proven)
            low, high = (low, middle) if keeps(choice, at) else (middle, high)
            if time.monotonic() > search.deadline:
                break
        scales[at] = 2.0**high
    able = [one for one in choices if all(keeps(one, at) for at in floors)]
    return max(able, key=search.joint.objective_value), bound


def _fairest(search: _Search) -> tuple[IntArray, Bound]:
    members = search.members
    weights = np.full(len(members), 1.0 / len(members))
    choice, bound = search.weighted(weights)
    choices = [choice]
    for _ in range(WEIGHINGS):  # cutting planes (Kelley, 1960)
        weights, value = _least_weights(np.array([search.values(one) for one in choices]))
        if bound.value <= value + VALUE_TOLERANCE or time.monotonic() > search.deadline:
            break
        choice, proven = search.weighted(weights)
        choices.append(choice)
        bound = min(bound, proven)
    best = max(choices, key=lambda one: search.values(one).min())
    low, high = search.values(best).min(), bound.value
    for _ in range(FLOOR_HALVINGS):
        if high - low <= VALUE_TOLERANCE or time.monotonic() > search.deadline:
            break
        middle = 0.5 * (low + high)
        try:
            best = search.cheapest(dict.fromkeys(range(len(members)), middle))
            low = search.values(best).min()
        except InfeasibleError:
            high = middle
    more = search.extended(best)  # all share the remaining memory
    return (more if search.values(more).min() >= low else best), bound


def _least_weights(values: FloatArray) -> tuple[FloatArray, float]:
    """Return weights (n_members,) that make the best of some choices worst, and its value.

    ``values`` are (n_choices, n_members).
    """
    from scipy.optimize import linprog

    count = values.shape[1]
    answer = linprog(
        np.append(np.zeros(count), 1.0),
        A_ub=np.column_stack([values, -np.ones(len(values))]),
        b_ub=np.zeros(len(values)),
        A_eq=np.append(np.ones(count), 0.0)[None],
        b_eq=[1.0],
        bounds=[(0, None)] * count + [(None, None)],
    )
    weights = np.maximum(answer.x[:-1], 0.0)
    return weights / weights.sum(), float(answer.x[-1])


@dataclass(frozen=True, kw_only=True)
class _Search:
    members: Sequence[_Member]
    memory: int
    solver: Solver
    deadline: float = math.inf
    whole: Collection[int] | None = None

    @cached_property
    def able(self) -> Collection[int]:
        if self.whole is not None:
            return self.whole
        smallest = [one.peak_bytes(one.posed.problem.min_cost_bytes) for one in self.members]
        largest = [one.peak_bytes(one.posed.problem.max_cost_bytes) for one in self.members]
        room = self.memory - sum(smallest)
        return [at for at, size in enumerate(largest) if size - smallest[at] <= room]

    @cached_property
    def joint(self) -> AllocationProblem:
        problems = [one.problem(at in self.able) for at, one in enumerate(self.members)]
        extra = sum(self.members[at].extra_bytes for at in self.whole or ())
        n_options = max(one.n_options for one in problems)
        units = np.cumsum([0, *(one.n_units for one in problems)]).tolist()
        layers = np.cumsum([0, *(int(one.layers.max()) + 1 for one in problems)]).tolist()
        bits = [one.bits for one in problems]
        if any(one is not None for one in bits):
            bits = [np.full_like(p.tokens, 16) if p.bits is None else p.bits for p in problems]

        def stacked(arrays: Sequence[Any]) -> Any:
            # Padding repeats the last option; it is never selected.
            padded = (np.pad(a, ((0, 0), (0, n_options - a.shape[1])), "edge") for a in arrays)
            return np.vstack([*padded])

        return AllocationProblem(
            tokens=stacked([one.tokens for one in problems]),
            values=stacked([one.values for one in problems]),
            costs=stacked([one.costs for one in problems]),
            bits=None if bits[0] is None else stacked(bits),
            option_counts=np.concatenate([one.option_counts for one in problems]),
            weights=np.concatenate([m.weight * m.posed.problem.weights for m in self.members]),
            layers=np.concatenate(
                [first + one.layers for one, first in zip(problems, layers[:-1], strict=True)]
            ),
            heads=np.concatenate([one.heads for one in problems]),
            capacity_bytes=self.memory - extra - sum(one.peak_bytes(0) for one in self.members),
            context_tokens=max(one.context_tokens for one in problems),
            protected_tokens=min(one.protected_tokens for one in problems),
            constraints=tuple(
                replace(
                    limit,
                    name=f"{limit.name} of {one.name}",
                    units=tuple(first + unit for unit in limit.units),
                )
                for one, problem, first in zip(self.members, problems, units[:-1], strict=True)
                for limit in problem.caps
            ),
        )

    def scaled(self, scales: Sequence[float] | FloatArray) -> AllocationProblem:
        units = [one.posed.problem.n_units for one in self.members]
        return self.joint.replace(weights=self.joint.weights * np.repeat(scales, units))

    def paid(self, scales: Sequence[float] | FloatArray) -> float:
        """Return the sum that raised weights add for the floors, which the bound subtracts."""
        return math.fsum(
            (float(scale) - 1) * one.weight * one.floor
            for one, scale in zip(self.members, scales, strict=True)
            if one.floor is not None
        )

    def parts(self, choice: IntArray) -> Iterator[tuple[_Member, IntArray]]:
        ends = np.cumsum([one.posed.problem.n_units for one in self.members])[:-1]
        return zip(self.members, np.split(choice, ends), strict=True)

    def peak(self, choice: IntArray) -> int:
        return sum(one.peak_bytes(one.posed.problem.cost(part)) for one, part in self.parts(choice))

    def split(
        self, best: Callable[[_Search], tuple[IntArray, Bound]], fairness: Fairness
    ) -> IntArray:
        floors = [-math.inf if one.floor is None else one.floor for one in self.members]
        able = [at for at in self.able if self.members[at].extra_bytes]
        able.sort(key=lambda at: (-floors[at], self.members[at].extra_bytes))
        choices: list[IntArray] = []
        for count in range(len(able) + 1):
            few = len(able) <= MOST_SPLIT
            for whole in combinations(able, count) if few else [able[:count]]:
                with contextlib.suppress(InfeasibleError):
                    choices.append(best(replace(self, whole=whole))[0])
        if not choices:
            raise InfeasibleError("no choice was found that fits with what is kept whole")
        weights = np.array([one.weight for one in self.members])
        return max(choices, key=lambda one: _combined(weights * self.values(one), fairness))

    def too_small(self, error: InfeasibleError) -> InfeasibleError:
        left = max(self.deadline - time.monotonic(), 1.0)
        needed = sum(one.least_peak(self.solver, left) for one in self.members)
        if needed <= self.memory:
            return error
        return InfeasibleError(
            f"{Target.of({'memory': self.memory})} is too small for {len(self.members)} members: "
            "their floors or smallest budgets, and one layer of each in full, take "
            f"{needed:,} bytes; ask for at least {Target.of({'memory': needed})}",
            nearest=needed,
        )

    def solved(self, problem: AllocationProblem) -> CheckedSolution:
        left = max(self.deadline - time.monotonic(), 0.1)
        return solve_problem(problem, self.solver, time_limit_seconds=left)

    def weighted(self, scales: FloatArray) -> tuple[IntArray, Bound]:
        answer = self.solved(self.scaled(scales))
        value = answer.bound - self.paid(scales)
        used = tuple(scales.tolist())
        return answer.choice, Bound(value, answer.bound_source, used, answer.prices)

    def values(self, choice: IntArray) -> FloatArray:
        """Return the value of a choice to each member, (n_members,)."""
        parts = self.parts(choice)
        return np.array([one.posed.problem.objective_value(part) for one, part in parts])

    def cheapest(self, floors: Mapping[int, float]) -> IntArray:
        parts = []
        for at, one in enumerate(self.members):
            part = 0 * one.posed.problem.last_options
            if at in floors:
                part = self.solved(one.problem(at in self.able).with_target(floors[at])).choice
            parts.append(part)
        cheapest = np.concatenate(parts)
        if self.joint.cost(cheapest) > (self.joint.capacity_bytes or 0):
            raise InfeasibleError(f"no choice was found that keeps {len(floors)} floors")
        return cheapest

    def extended(self, floors: IntArray) -> IntArray:
        """Return the best choice that gives no unit less than its floor."""
        joint = self.joint
        columns = np.minimum(
            floors[:, None] + np.arange(joint.n_options), joint.last_options[:, None]
        )
        above = joint.with_options(columns, joint.option_counts - floors)
        return self.solved(above).choice + floors
