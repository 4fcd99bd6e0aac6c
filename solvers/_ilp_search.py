"""Search for the integer programming solver: cores and sets of budgets."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvalloc.accounting import BoolArray, FloatArray, IntArray
from kvalloc.errors import InfeasibleError
from kvalloc.problem import (
    Aggregate,
    AllocationProblem,
    MaxDistinct,
    Sense,
    dual_bound,
    is_closed,
)
from kvalloc.problem.bounds import NOISE
from kvalloc.solvers._ilp_program import BackEnd, by_cp_sat, encode
from kvalloc.solvers._prices import Prices, best_known, best_prices, rule_choices

SHORT_SECONDS = 0.5
"""Time after which a search by many small programs becomes one program."""

REPAIR_SECONDS = 5.0
"""Longest search for a choice to start from."""

MOST_LEVELS = 512
"""Largest number of levels in the table of neighbours."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A choice, (n_units,), and a bound on any choice."""

    choice: IntArray | None
    bound: float
    status: str = "dual bound"
    n_options: int = 0
    infeasible: bool = False


NOTHING = Outcome(choice=None, bound=math.inf, infeasible=True)


class Search:
    """One solve, until a ``time.monotonic()`` or a relative gap.

    A sum sets ``prices``, of the capacity's byte and each cap's.
    """

    def __init__(
        self,
        problem: AllocationProblem,
        deadline: float,
        backend: BackEnd,
        *,
        gap: float,
        workers: int,
    ) -> None:
        self.problem, self.deadline = problem, deadline
        self.backend, self.gap, self.workers = backend, gap, workers
        levels = [one.maximum for one in problem.constraints if isinstance(one, MaxDistinct)]
        self.limit = min(levels, default=None)
        self.prices: tuple[float, ...] = ()

    @property
    def repair_until(self) -> float:
        return min(self.deadline, time.monotonic() + REPAIR_SECONDS)

    def run(self) -> Outcome:
        problem = self.problem
        if problem.aggregate is Aggregate.WORST:
            # Whether a level fits has no almost.
            self.gap = 0.0
            if problem.sense is Sense.MAX_VALUE:
                return self._highest_worst()
            return self._cheapest_with(problem.worth >= problem.lowest_accepted_value)
        result = self._sum(problem)
        if problem.target is None or result.choice is None:
            return result
        if not is_closed(problem.objective(result.choice), result.bound):
            return result
        # Of the choices that cost the least, the one with the most value.
        within = problem.with_capacity(problem.cost(result.choice))
        richest = self._sum(within, known=result).choice
        if richest is None or not within.satisfies(richest):
            return result
        return dataclasses.replace(result, choice=richest)

    # The worst unit: whether a level can be reached is a problem of least cost.

    def _highest_worst(self) -> Outcome:
        """Return the highest level within the capacity, by bisection, later by one program."""
        problem, within = self.problem, dual_bound(self.problem)
        worth = problem.worth
        levels = np.unique(worth[problem.exists])
        # Each unit can reach its own best, so the worst cannot be above the least of those.
        limit = min(float(worth.max(axis=1).min()), within.bound)
        high = int(np.searchsorted(levels, limit, side="right")) - 1
        low, best = -1, Outcome(choice=None, bound=0.0)
        for choice in rule_choices(problem):
            if (reached := self._reached(levels, choice)) > low:
                low, best = reached, Outcome(choice=choice, bound=0.0)
        capacity, deadline = problem.capacity_bytes or 0, self.deadline
        self.deadline = min(deadline, time.monotonic() + SHORT_SECONDS)
        while low < high:
            middle = (low + high + 1) // 2
            result = self._cheapest_with(worth >= levels[middle])
            if result.choice is not None and problem.cost(result.choice) <= capacity:
                low, best = self._reached(levels, result.choice), result
            elif result.infeasible or result.bound > capacity:
                high = middle - 1
            else:
                break  # time is up
        self.deadline = deadline
        if low < high and time.monotonic() < deadline:
            ranks = np.minimum(np.searchsorted(levels, worth), high)
            ranked = problem.replace(
                values=ranks.astype(np.float64), weights=np.ones(problem.n_units)
            )
            result = self._program(ranked, problem.exists & (ranks > low), None, self.limit)
            high = low if result.infeasible else min(high, math.floor(result.bound + 1e-6))
            if result.choice is not None:
                low, best = self._reached(levels, result.choice), result
        if best.choice is None:
            return dataclasses.replace(best, infeasible=low >= high)
        return dataclasses.replace(best, bound=float(levels[high]))

    def _reached(self, levels: FloatArray, choice: IntArray) -> int:
        return int(np.searchsorted(levels, self.problem.objective_value(choice)))

    def _cheapest_with(self, allowed: BoolArray) -> Outcome:
        """Return the cheapest choice of allowed options; ignore values."""
        worthless = self.problem.replace(
            values=np.zeros(allowed.shape), aggregate=Aggregate.SUM
        ).with_target(0.0)
        return self._among(worthless, allowed, self._sum)

    def _among(
        self,
        problem: AllocationProblem,
        allowed: BoolArray,
        search: Callable[[AllocationProblem], Outcome],
    ) -> Outcome:
        allowed = allowed & problem.exists
        counts = allowed.sum(axis=1)
        if not counts.all():
            return NOTHING
        columns = np.argsort(~allowed, axis=1, kind="stable")[:, : int(counts.max())]
        part = problem.with_options(columns, counts)
        try:
            part.check_feasible()
            result = search(part)
        except InfeasibleError:
            return NOTHING
        if result.choice is None:
            return result
        return dataclasses.replace(result, choice=columns[problem.units, result.choice])

    # Few levels: one set of them after the other, as far as their bounds allow.

    def _sum(self, problem: AllocationProblem, known: Outcome = NOTHING) -> Outcome:
        prices = best_prices(problem, self.deadline)
        if problem is self.problem:
            self.prices = (prices.per_byte, *prices.per_cap)
        if known.choice is None:
            rules = rule_choices(problem)
            start = best_known(problem, prices, self.repair_until, *rules)
            known = NOTHING if start is None else Outcome(choice=start, bound=0.0)
        if self.limit is None:
            return self._core(prices, known, None)
        if np.unique(problem.tokens[problem.exists]).size <= MOST_LEVELS:
            return self._best_levels(LevelSets.of(prices, self.limit), known)
        return self._core(prices, known, self.limit)

    def _best_levels(self, sets: LevelSets, best: Outcome) -> Outcome:
        prices, problem = sets.prices, sets.prices.problem
        if self._room(prices, best) >= 0:
            likely = self._with_levels(sets, sets.best(), best)
            best = likely if best.choice is None else self._better(problem, best, likely)
        listed = None
        if best.choice is not None:
            listed = sets.within(self._room(prices, best))
        if listed is None or best.choice is None:  # too many sets: one program for all
            return self._core(prices, best, self.limit)
        loose: list[float] = []  # bounds of undecided sets
        short = time.monotonic() + SHORT_SECONDS
        for lost, places in listed:
            if lost > self._room(prices, best):
                break
            if time.monotonic() > min(short, self.deadline):
                one = self._core(prices, best, self.limit)
                assert one.choice is not None  # the best one at least
                loose += [problem.objective(one.choice), prices.bound_beyond(lost)]
                bound = _tighter(problem, one.bound, _looser(problem, *loose))
                return dataclasses.replace(one, bound=bound)
            result = self._with_levels(sets, places, best)
            if not result.infeasible:
                loose.append(result.bound)
                best = self._better(problem, best, result)
        assert best.choice is not None  # it starts with one, and only a better one follows
        objective = problem.objective(best.choice)
        loose.append(prices.bound_outside(objective, self.gap))
        bound = _looser(problem, objective, *loose)
        return dataclasses.replace(best, bound=bound, status=f"{best.status}, few budgets")

    def _with_levels(self, sets: LevelSets, places: tuple[int, ...], known: Outcome) -> Outcome:
        """Return the best choice with one set of levels, if it could beat the known one."""
        problem = sets.prices.problem

        def search(few: AllocationProblem) -> Outcome:
            prices = best_prices(few, self.deadline)
            if known.choice is not None and not problem.is_better(
                prices.bound, problem.objective(known.choice)
            ):
                return NOTHING
            start = best_known(few, prices, self.repair_until)
            return self._core(prices, Outcome(choice=start, bound=0.0), None)

        return self._among(problem, np.isin(problem.tokens, sets.levels[list(places)]), search)

    # Cores: only the options that lose little enough to be part of something better.

    def _core(self, prices: Prices, known: Outcome, limit: int | None) -> Outcome:
        """Return the best choice, by a program over the options that could be part of a better one.

        With the dual bound U, a choice with an option of loss l is worth U - l at most.
        """
        problem = prices.problem
        best = Outcome(choice=known.choice, bound=prices.bound)
        room = self._room(prices, best)
        closed = best.choice is not None and is_closed(problem.objective(best.choice), best.bound)
        if room >= 0 and time.monotonic() < self.deadline and not closed:
            kept, tolerance = prices.worth_keeping(room), 0.0  # all options where none is known
            if best.choice is not None:
                kept[problem.units, best.choice] = True
                tolerance = prices.tolerance(problem.objective(best.choice), self.gap)
            result = self._ask(problem, kept, best.choice, limit, tolerance)
            if best.choice is None and result.infeasible:
                return dataclasses.replace(result, bound=prices.bound)
            bound = result.bound
            if best.choice is not None:  # options outside the program beat it by the gap at most
                outside = prices.bound_outside(problem.objective(best.choice), self.gap)
                bound = outside if result.infeasible else _looser(problem, bound, outside)
            bound = _tighter(problem, prices.bound, bound)
            best = self._better(problem, best, dataclasses.replace(result, bound=bound))
            best = dataclasses.replace(best, bound=bound)
        if best.choice is None:
            return best
        objective = problem.objective(best.choice)  # where nothing can beat it, its own bound
        beaten = prices.room(objective) < 0
        bound = objective if beaten else _looser(problem, best.bound, objective)
        return dataclasses.replace(best, bound=bound)

    def _better(self, problem: AllocationProblem, best: Outcome, other: Outcome) -> Outcome:
        """Return the better choice, with the status of the last program."""
        if other.choice is not None and (
            best.choice is None
            or problem.is_better(problem.objective(other.choice), problem.objective(best.choice))
        ):
            return other
        return dataclasses.replace(best, status=other.status, n_options=other.n_options)

    def _room(self, prices: Prices, best: Outcome) -> float:
        if best.choice is None:
            return math.inf
        return prices.room(prices.problem.objective(best.choice), self.gap)

    def _ask(
        self,
        problem: AllocationProblem,
        kept: BoolArray,
        best: IntArray | None,
        limit: int | None,
        tolerance: float,
    ) -> Outcome:
        """Encode, solve and read; again in whole numbers if the target is just missed."""
        answer = self._program(problem, kept, best, limit, tolerance)
        for tight in (False, True):
            if answer.choice is None or problem.satisfies(answer.choice):
                return answer
            self.backend, bound = by_cp_sat, answer.bound
            answer = self._program(problem, kept, best, limit, tolerance, tight_target=tight)
        # the bound of the program that loses nothing
        return dataclasses.replace(answer, bound=bound, infeasible=False)

    def _program(
        self,
        problem: AllocationProblem,
        kept: BoolArray,
        best: IntArray | None,
        limit: int | None,
        tolerance: float = 0.0,
        *,
        tight_target: bool = False,
    ) -> Outcome:
        encoding = encode(problem, kept, limit, best, tight_target=tight_target)
        gap = tolerance / encoding.step
        answer = self.backend(encoding.program, self.deadline, gap, self.workers)
        return Outcome(
            choice=None if answer.values is None else encoding.choice(answer.values),
            bound=float(encoding.bound(answer.bound)),
            status=answer.status,
            n_options=encoding.units.size,
            infeasible=answer.infeasible,
        )


def _tighter(problem: AllocationProblem, *bounds: float) -> float:
    return min(bounds) if problem.target is None else max(bounds)


def _looser(problem: AllocationProblem, *bounds: float) -> float:
    return max(bounds) if problem.target is None else min(bounds)


MOST_SETS = 50_000
"""Largest number of beginnings of sets that are listed."""


@dataclass(frozen=True, kw_only=True)
class LevelSets:
    """Losses of sets of the largest allowed number of levels, at given prices.

    Smaller sets are parts of these, and lose no less.

    Every unit takes the level in the set with its smallest loss, so a set costs the sum of those.
    Losses fall up to a unit's best level and rise after it, or have a lower bound that does. So a
    unit uses the level below or above its best one, and the sum splits over neighbouring levels.
    The best set is a path, found by a dynamic program over levels, as for medians on a line (Hassin
    and Tamir, 1991). It bounds every beginning of a set, so all sets that could beat a known choice
    are listed directly.

    ``loss``, (n_units, n_levels), is inf without an option. Sums are over units below a set's
    ``first`` level, ``between`` two, and above a level if 0, 1, ... further ones follow (``rest``).
    """

    prices: Prices
    levels: IntArray
    loss: FloatArray
    first: FloatArray
    between: FloatArray
    rest: FloatArray

    @classmethod
    def of(cls, prices: Prices, max_distinct: int) -> LevelSets:
        """Return the losses of sets of ``max_distinct`` levels, or of all if fewer."""
        problem = prices.problem
        levels = np.unique(problem.tokens[problem.exists])
        loss = np.full((problem.n_units, levels.size), np.inf)
        units, columns = np.nonzero(problem.exists)
        at = np.searchsorted(levels, problem.tokens[units, columns])
        loss[units, at] = prices.loss[units, columns]
        below = _valley(loss)
        best = np.argmin(loss, axis=1)
        index = np.arange(levels.size)
        under = best[:, None] < index[None, :]
        first = np.where(under, below, 0.0).sum(axis=0)
        last = np.where(under, 0.0, below).sum(axis=0)
        between = np.full((levels.size, levels.size), np.inf)
        for level in range(levels.size - 1):
            after = slice(level + 1, None)
            pair = np.minimum(below[:, level, None], below[:, after])
            inside = under[:, after] & (best >= level)[:, None]
            between[level, after] = np.where(inside, pair, 0.0).sum(axis=0)
        rest = [last]
        for _ in range(1, min(max_distinct, levels.size)):
            rest.append((between + rest[-1][None, :]).min(axis=1))
        return cls(
            prices=prices,
            levels=levels,
            loss=loss,
            first=first,
            between=between,
            rest=np.stack(rest),
        )

    def best(self) -> tuple[int, ...]:
        chosen = [int(np.argmin(self.first + self.rest[-1]))]
        for rest in self.rest[-2::-1]:
            chosen.append(int(np.argmin(self.between[chosen[-1]] + rest)))
        return tuple(chosen)

    def within(self, room: float) -> list[tuple[float, tuple[int, ...]]] | None:
        """List loss and level indices of sets within the room, by loss; None if too many."""
        room += NOISE
        sets: list[tuple[float, tuple[int, ...]]] = []
        begun = np.flatnonzero(self.first + self.rest[-1] <= room).tolist()
        stack: list[tuple[float, tuple[int, ...]]]
        stack = [(float(self.first[level]), (level,)) for level in begun]
        for _ in range(MOST_SETS):
            if not stack:
                return sorted(sets)
            lost, chosen = stack.pop()
            if len(chosen) < len(self.rest):
                following = lost + self.between[chosen[-1]]
                able = following + self.rest[-1 - len(chosen)] <= room
                for level in np.flatnonzero(able).tolist():
                    stack.append((float(following[level]), (*chosen, level)))
            elif (lost := float(self.loss[:, chosen].min(axis=1).sum())) <= room:
                sets.append((lost, chosen))  # by the losses themselves, not by lower bounds
        return None


def _valley(loss: FloatArray) -> FloatArray:
    """Return the largest losses below these that fall up to each unit's best, then rise."""
    best = np.argmin(loss, axis=1)
    falling = np.minimum.accumulate(loss, axis=1)
    rising = np.minimum.accumulate(loss[:, ::-1], axis=1)[:, ::-1]
    before = np.arange(loss.shape[1])[None, :] <= best[:, None]
    return np.where(before, falling, rising)
