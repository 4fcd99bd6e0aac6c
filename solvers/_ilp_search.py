"""The search of the integer programming solver: cores and sets of budgets."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass

import numpy as np

from kvalloc.accounting import BoolArray, FloatArray, IntArray
from kvalloc.errors import InfeasibleError
from kvalloc.problem import (
    Aggregate,
    AllocationProblem,
    Sense,
    dual_bound,
    is_closed,
)
from kvalloc.problem.constraints import MaxDistinct
from kvalloc.solvers._choices import Choices
from kvalloc.solvers._ilp_program import BackEnd, by_cp_sat, encode
from kvalloc.solvers._levels import LevelSets
from kvalloc.solvers._prices import Prices, best_prices
from kvalloc.solvers._repair import best_known, best_of, rule_picks

SHORT_SECONDS = 0.5
"""A search by many small programs becomes one program after this long."""

REPAIR_SECONDS = 5.0
"""Longest search for a choice to start from."""

MOST_LEVELS = 512
"""With more, the table of neighbouring levels is too large."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a search.

    Attributes
    ----------
    picked : ndarray of int64, (n_rows,), or None
    bound : float
        No pick is better.
    status : str
    n_options : int
        Options in the last program.
    infeasible : bool
        Proven to have no pick.
    """

    picked: IntArray | None
    bound: float
    status: str = "dual bound"
    n_options: int = 0
    infeasible: bool = False


NOTHING = Outcome(picked=None, bound=math.inf, infeasible=True)


class Search:
    """One solve: the problem's rows, what is asked beyond them, and the time left.

    Parameters
    ----------
    problem : AllocationProblem
    deadline : float
        ``time.monotonic()`` at which to stop.
    backend : callable
    gap : float
        Relative gap at which to stop.
    workers : int
        Threads of the back end.

    Attributes
    ----------
    prices : tuple of float
        Of a byte of the capacity and of each cap, in the linear relaxation of a sum.

    Raises
    ------
    InfeasibleError
        If capacity, target or one cap alone cannot be met.
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
        self.choices = Choices.of(problem)
        levels = [c.most for c in problem.constraints if isinstance(c, MaxDistinct)]
        self.limit = min(levels) if levels else None
        self.prices: tuple[float, ...] = ()

    @property
    def seconds_left(self) -> float:
        """Until the deadline."""
        return self.deadline - time.monotonic()

    @property
    def repair_until(self) -> float:
        """Until when a choice to start from may be sought, beginning now."""
        return min(self.deadline, time.monotonic() + REPAIR_SECONDS)

    def run(self) -> Outcome:
        """Solve for the problem's aggregate and sense."""
        if self.problem.aggregate is Aggregate.WORST:
            # Whether a level fits has no almost.
            self.gap = 0.0
            if self.problem.sense is Sense.MAX_VALUE:
                return self._highest_worst()
            return self._cheapest_with(self.choices.worth >= self.problem.lowest_accepted_value)
        result = self._free(self.choices)
        if not self.choices.minimise or result.picked is None:
            return result
        if not is_closed(self.choices.objective(result.picked), result.bound):
            return result
        # Of the picks that cost the least, the one with the most value.
        within = self.choices.with_capacity(self.choices.cost(result.picked))
        richest = self._free(within, known=result).picked
        if richest is None or not self.choices.satisfies(richest):
            return result
        return dataclasses.replace(result, picked=richest)

    # The worst unit: whether a level can be reached is a problem of least cost.

    def _highest_worst(self) -> Outcome:
        """Return the highest level that every row can reach within the capacity, by bisection.

        What is not decided in a short while is left to one program.
        """
        worth, within = self.choices.worth, dual_bound(self.problem)
        levels = np.unique(worth[self.choices.exists])
        # Each row can reach its own best, so the worst cannot be above the least of those.
        most = min(float(worth.max(axis=1).min()), within.bound)
        high = int(np.searchsorted(levels, most, side="right")) - 1
        low, best = -1, Outcome(picked=None, bound=0.0)
        for picked in rule_picks(self.choices):
            if (reached := self._reached(levels, picked)) > low:
                low, best = reached, Outcome(picked=picked, bound=0.0)
        capacity, deadline = self.problem.capacity_bytes or 0, self.deadline
        self.deadline = min(deadline, time.monotonic() + SHORT_SECONDS)
        while low < high:
            middle = (low + high + 1) // 2
            result = self._cheapest_with(worth >= levels[middle])
            if result.picked is not None and self.choices.cost(result.picked) <= capacity:
                low, best = self._reached(levels, result.picked), result
            elif result.infeasible or result.bound > capacity:
                high = middle - 1
            else:
                break  # time is up
        self.deadline = deadline
        if low < high and self.seconds_left > 0:
            ranks = np.minimum(np.searchsorted(levels, worth), high)
            result = self._program(
                dataclasses.replace(
                    self.choices, worth=np.where(self.choices.exists, ranks, -np.inf)
                ),
                self.choices.exists & (ranks > low),
                None,
                self.limit,
            )
            high = low if result.infeasible else min(high, math.floor(result.bound + 1e-6))
            if result.picked is not None:
                low, best = self._reached(levels, result.picked), result
        if best.picked is None:
            return dataclasses.replace(best, infeasible=low >= high)
        return dataclasses.replace(best, bound=float(levels[high]))

    def _reached(self, levels: FloatArray, picked: IntArray) -> int:
        """Return the place of the level that every row reaches."""
        return int(np.searchsorted(levels, self.choices.worth[self.choices.index, picked].min()))

    def _cheapest_with(self, allowed: BoolArray) -> Outcome:
        free = dataclasses.replace(
            self.choices,
            worth=np.where(self.choices.exists, 0.0, -np.inf),
            minimise=True,
            capacity_bytes=None,
            target=None,
        )
        try:
            return self._free(free.restricted(allowed))
        except InfeasibleError:
            return NOTHING

    # Few levels: one set of them after the other, as far as their bounds allow.

    def _free(self, choices: Choices, known: Outcome = NOTHING) -> Outcome:
        """Return the best pick for the sum."""
        prices = best_prices(choices, self.deadline)
        if choices is self.choices:
            self.prices = (prices.per_byte, *prices.per_cap)
        if known.picked is None:
            known = self._start(choices, prices)
        if self.limit is None:
            return self._core(choices, prices, known, None)
        levels = np.unique(choices.tokens[choices.exists])
        if levels.size <= MOST_LEVELS:
            return self._best_levels(choices, LevelSets.of(choices, prices, self.limit), known)
        return self._core(choices, prices, known, self.limit)

    def _start(self, choices: Choices, prices: Prices) -> Outcome:
        """Return the best pick of simple rules: equal budgets, or what is repaired from prices."""
        rules = rule_picks(choices)
        picked = best_known(choices, prices, self.repair_until, *rules)
        if picked is not None and self.limit and choices.n_levels(picked) > self.limit:
            picked = best_of(choices, *rules)
        return NOTHING if picked is None else Outcome(picked=picked, bound=0.0)

    def _best_levels(self, choices: Choices, sets: LevelSets, best: Outcome) -> Outcome:
        """Return the best pick over all sets of levels that could beat the known one."""
        prices = sets.prices
        if self._room(choices, prices, best) >= 0:
            likely = self._with_levels(choices, sets, sets.best(), best.picked)
            best = likely if best.picked is None else self._better(choices, best, likely)
        listed = None
        if best.picked is not None:
            listed = sets.within(self._room(choices, prices, best))
        if listed is None or best.picked is None:  # too many sets: one program for all
            return self._core(choices, prices, best, self.limit)
        loose: list[float] = []  # bounds of what was not decided
        short = time.monotonic() + SHORT_SECONDS
        for lost, places in listed:
            if lost > self._room(choices, prices, best):
                break
            if time.monotonic() > min(short, self.deadline):
                one = self._core(choices, prices, best, self.limit)
                assert one.picked is not None  # the best one at least
                loose += [choices.objective(one.picked), prices.beyond(choices, lost)]
                bound = choices.tighter(one.bound, choices.looser(*loose))
                return dataclasses.replace(one, bound=bound)
            result = self._with_levels(choices, sets, places, best.picked)
            if not result.infeasible:
                loose.append(result.bound)
                best = self._better(choices, best, result)
        assert best.picked is not None  # it starts with one, and only a better one follows
        objective = choices.objective(best.picked)
        loose.append(prices.beyond_room(choices, objective, self.gap))
        bound = choices.looser(objective, *loose)
        return dataclasses.replace(best, bound=bound, status=f"{best.status}, few budgets")

    def _with_levels(
        self,
        choices: Choices,
        sets: LevelSets,
        places: tuple[int, ...],
        known: IntArray | None = None,
    ) -> Outcome:
        """Return the best pick with the levels of one set, if it could beat the known one."""
        try:
            few = choices.restricted(np.isin(choices.tokens, sets.levels[list(places)]))
            prices = best_prices(few, self.deadline)
        except InfeasibleError:
            return NOTHING
        if known is not None and not choices.better(prices.bound, choices.objective(known)):
            return NOTHING
        start = best_known(few, prices, self.repair_until)
        return self._core(few, prices, Outcome(picked=start, bound=0.0), None)

    # Cores: only the options that lose little enough to be part of something better.

    def _core(
        self,
        choices: Choices,
        prices: Prices,
        known: Outcome,
        limit: int | None,
    ) -> Outcome:
        """Return the best pick, by a program over the options that could be part of a better one.

        With the dual bound U and losses l, a pick with an option of loss l is worth at most U - l.
        """
        best = Outcome(picked=known.picked, bound=prices.bound)
        room = self._room(choices, prices, best)
        if room >= 0 and self.seconds_left > 0 and not self._is_closed(choices, best):
            kept = prices.worth_keeping(room) & choices.exists  # all where none is known
            if best.picked is not None:
                kept[choices.index, best.picked] = True
            tolerance = 0.0
            if best.picked is not None:
                tolerance = prices.tolerance(choices.objective(best.picked), self.gap)
            result = self._ask(choices, kept, best.picked, limit, tolerance)
            if best.picked is None and result.infeasible:
                return dataclasses.replace(result, bound=prices.bound)
            bound = result.bound
            if best.picked is not None:  # what is not in the program beats it by the gap at most
                objective = choices.objective(best.picked)
                beyond = prices.beyond_room(choices, objective, self.gap)
                bound = beyond if result.infeasible else choices.looser(bound, beyond)
            bound = choices.tighter(prices.bound, bound)
            best = self._better(choices, best, dataclasses.replace(result, bound=bound))
            best = dataclasses.replace(best, bound=bound)
        if best.picked is None:
            return best
        objective = choices.objective(best.picked)  # where nothing can beat it, its own bound
        beaten = prices.room(choices, objective) < 0
        bound = objective if beaten else choices.looser(best.bound, objective)
        return dataclasses.replace(best, bound=bound)

    def _better(self, choices: Choices, best: Outcome, other: Outcome) -> Outcome:
        """Return the better of two picks, with the status of the last program."""
        if other.picked is not None and (
            best.picked is None
            or choices.better(choices.objective(other.picked), choices.objective(best.picked))
        ):
            return other
        return dataclasses.replace(best, status=other.status, n_options=other.n_options)

    def _is_closed(self, choices: Choices, best: Outcome) -> bool:
        picked = best.picked
        return picked is not None and is_closed(choices.objective(picked), best.bound)

    def _room(self, choices: Choices, prices: Prices, best: Outcome) -> float:
        if best.picked is None:
            return math.inf
        return prices.room(choices, choices.objective(best.picked), self.gap)

    def _ask(
        self,
        choices: Choices,
        kept: BoolArray,
        best: IntArray | None,
        limit: int | None,
        tolerance: float,
    ) -> Outcome:
        """Encode, solve and read; again in whole numbers where the target is just missed."""
        answer = self._program(choices, kept, best, limit, tolerance)
        for tight in (False, True):
            if answer.picked is None or choices.satisfies(answer.picked):
                return answer
            self.backend, bound = by_cp_sat, answer.bound
            answer = self._program(choices, kept, best, limit, tolerance, tight_target=tight)
        # the bound of the program that loses nothing
        return dataclasses.replace(answer, bound=bound, infeasible=False)

    def _program(
        self,
        choices: Choices,
        kept: BoolArray,
        best: IntArray | None,
        limit: int | None,
        tolerance: float = 0.0,
        *,
        tight_target: bool = False,
    ) -> Outcome:
        """Return what a back end answers to one program."""
        aggregate = self.problem.aggregate
        if aggregate is Aggregate.WORST and choices.minimise:  # whether a level fits
            aggregate = Aggregate.SUM
        encoding = encode(choices, kept, limit, best, aggregate, tight_target=tight_target)
        gap = tolerance / encoding.step
        answer = self.backend(encoding.program, self.deadline, gap, self.workers)
        return Outcome(
            picked=None if answer.values is None else encoding.picked(answer.values),
            bound=float(encoding.bound(answer.bound)),
            status=answer.status,
            n_options=encoding.rows.size,
            infeasible=answer.infeasible,
        )
