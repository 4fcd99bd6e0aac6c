"""The search of the integer programming solver: cores, sets of budgets, placements, workloads."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvalloc.accounting import BoolArray, IntArray
from kvalloc.errors import InfeasibleError
from kvalloc.problem import Aggregate, AllocationProblem, Sense, TailBound, is_closed, tail_bound
from kvalloc.problem.constraints import MaxDistinct, RankBalance
from kvalloc.solvers import _tail_repair
from kvalloc.solvers._choices import Choices
from kvalloc.solvers._ilp_program import (
    Answer,
    Limits,
    Placement,
    Program,
    encode,
    placement_program,
)
from kvalloc.solvers._levels import LevelSets, level_sets
from kvalloc.solvers._prices import Prices, best_prices
from kvalloc.solvers._repair import best_known

REPAIR_SECONDS = 5.0
"""Longest search for a choice to start from."""

FEWER_LEVELS = 64
"""Where sets of all levels are too many, a start is sought with about so many of them."""

JOINT_SECONDS = 60.0
"""Without a time limit, longest search for budgets and a placement together: few bytes on many
ranks are a packing problem, of which nobody may ever see the end."""

PLACEMENT_SECONDS = 2.0
"""Longest search for a placement of decided budgets: where there is none, that is often hard to
show and not needed."""

TOTALS = 10_000
"""Totals looked at for one that ranks can share."""

SWEEPS = 50
"""Most passes of exchanges over all layers."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked of the solver.

    Attributes
    ----------
    gap : float
        Relative gap at which to stop.
    workers : int
    backend : callable
    """

    gap: float
    workers: int
    backend: Callable[[Program, Limits], Answer]


@dataclass(frozen=True, kw_only=True)
class Found:
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
    ranks : ndarray of int64, (n_units,), or None
    """

    picked: IntArray | None
    bound: float
    status: str = "dual bound"
    n_options: int = 0
    infeasible: bool = False
    ranks: IntArray | None = None


NOTHING = Found(picked=None, bound=math.inf, infeasible=True)


class Search:
    """One solve: the problem's rows, what is asked beyond them, and the time left.

    Parameters
    ----------
    options : Options
    problem : AllocationProblem
    deadline : float
        ``time.monotonic()`` at which to stop.

    Raises
    ------
    InfeasibleError
        If capacity, target or one cap alone cannot be met.
    """

    def __init__(self, options: Options, problem: AllocationProblem, deadline: float) -> None:
        self.options = options
        self.problem = problem
        self.deadline = deadline
        self.choices = Choices.of(problem)
        levels = [c.most for c in problem.constraints if isinstance(c, MaxDistinct)]
        self.most = min(levels) if levels else None
        balances = [c for c in problem.constraints if isinstance(c, RankBalance)]
        self.balance = balances[0] if balances else None

    @property
    def seconds_left(self) -> float:
        """Until the deadline."""
        return self.deadline - time.monotonic()

    @property
    def repair_until(self) -> float:
        """Until when a choice to start from may be sought, beginning now."""
        return min(self.deadline, time.monotonic() + REPAIR_SECONDS)

    def run(self) -> Found:
        """Solve for the problem's aggregate and sense."""
        if self.problem.aggregate is Aggregate.TAIL:
            return self._best_tail()
        if self.problem.aggregate is Aggregate.WORST:
            # Whether a level fits has no almost.
            self.options = dataclasses.replace(self.options, gap=0.0)
            if self.problem.sense is Sense.MAX_VALUE:
                return self._most_for_worst()
            return self._cheapest_with(self.choices.worth >= self.problem.lowest_accepted_value)
        found = self._placed(self.choices)
        if not self.choices.minimise or found.picked is None or self.balance is not None:
            return found
        if not is_closed(self.choices.objective(found.picked), found.bound):
            return found
        # Of the picks that cost the least, the one with the most value.
        within = self.choices.with_capacity(self.choices.cost(found.picked))
        richest = self._free(within, known=found).picked
        if richest is None or not self.choices.satisfies(richest):
            return found
        return dataclasses.replace(found, picked=richest)

    # The worst unit: whether a level can be reached is a problem of least cost.

    def _most_for_worst(self) -> Found:
        """The highest level that every row can reach within the capacity, by bisection."""
        worth = self.choices.worth
        levels = np.unique(worth[self.choices.exists])
        # Each row can reach its own best, so the worst cannot be above the least of those.
        high = int(np.searchsorted(levels, worth.max(axis=1).min(), side="right")) - 1
        low, best = -1, Found(picked=None, bound=0.0)
        capacity = self.problem.capacity_bytes or 0
        while low < high:
            middle = (low + high + 1) // 2
            found = self._cheapest_with(worth >= levels[middle])
            if found.picked is not None and self.choices.cost(found.picked) <= capacity:
                best = found
                reached = float(worth[self.choices.index, found.picked].min())
                low = int(np.searchsorted(levels, reached))
            elif found.infeasible or found.bound > capacity:
                high = middle - 1
            else:
                break  # time is up
        if best.picked is None:
            return dataclasses.replace(best, infeasible=low >= high)
        return dataclasses.replace(best, bound=float(levels[high]))

    def _cheapest_with(self, allowed: BoolArray) -> Found:
        free = dataclasses.replace(
            self.choices,
            worth=np.where(self.choices.exists, 0.0, -np.inf),
            minimise=True,
            capacity_bytes=None,
            target=None,
        )
        try:
            return self._placed(free.restricted(allowed))
        except InfeasibleError:
            return NOTHING

    # Ranks: without them first, then for a placement that is kept, then both together.

    def _placed(self, choices: Choices) -> Found:
        """The best pick, with a placement where ranks are to be balanced."""
        if self.balance is None:
            return self._free(choices)
        if choices.capacity_bytes is not None:
            total = even_total(choices, self.balance, choices.budget_bytes, up=False)
            if total is None:
                return dataclasses.replace(NOTHING, bound=0.0)
            choices = dataclasses.replace(choices, capacity_bytes=total)
        free = self._free(choices)
        if free.picked is None:
            return free
        start = spread(self.problem, choices.expand(free.picked), self.balance)
        free = self._with_ranks(choices, free, self.balance)
        if free.ranks is not None:
            return free
        kept = self._free(choices, Placement(balance=self.balance, ranks=start))
        kept = dataclasses.replace(kept, ranks=start)
        if self._is_closed(choices, dataclasses.replace(kept, bound=free.bound)):
            return dataclasses.replace(kept, bound=free.bound)
        if math.isinf(self.deadline):
            self.deadline = time.monotonic() + JOINT_SECONDS
        both = self._free(choices, Placement(balance=self.balance), kept)
        return dataclasses.replace(both, bound=choices.tighter(both.bound, free.bound))

    def _with_ranks(self, choices: Choices, free: Found, balance: RankBalance) -> Found:
        """A pick with its ranks; for a target, also one of the next total that ranks can share."""
        ranks = self._place(choices, free.picked, balance)
        if ranks is not None or not choices.minimise:
            return dataclasses.replace(free, ranks=ranks)
        total = even_total(choices, balance, int(free.bound), up=True)
        if total is None or total <= free.bound:
            return free
        free = dataclasses.replace(free, bound=float(total))
        if choices.target is None:
            return free
        richest = self._free(choices.with_capacity(total)).picked
        if richest is None or not choices.satisfies(richest) or choices.cost(richest) != total:
            return free
        ranks = self._place(choices, richest, balance)
        return free if ranks is None else dataclasses.replace(free, picked=richest, ranks=ranks)

    def _place(
        self, choices: Choices, picked: IntArray | None, balance: RankBalance
    ) -> IntArray | None:
        """A balanced placement of a pick: by exchanges, else by a program."""
        assert picked is not None  # checked by the callers
        choice = choices.expand(picked)
        ranks = spread(self.problem, choice, balance)
        if balance.fault(self.problem, choice, ranks) is None:
            return ranks
        if self.seconds_left <= 0:
            return None
        until = time.monotonic() + min(0.2 * self.seconds_left, PLACEMENT_SECONDS)
        limits = Limits(deadline=until, absolute_gap=0.0, workers=self.options.workers)
        program = placement_program(self.problem, choice, balance)
        values = self.options.backend(program, limits).values
        if values is None:
            return None
        ranks = np.argmax(values.reshape(self.problem.n_units, -1), axis=1).astype(np.int64)
        return ranks if balance.fault(self.problem, choice, ranks) is None else None

    # Few levels: one set of them after the other, as far as their bounds allow.

    def _free(
        self, choices: Choices, placement: Placement | None = None, known: Found = NOTHING
    ) -> Found:
        """The best pick for a placement that is given, free or of no concern."""
        prices = best_prices(choices)
        if known.picked is None and placement is None:
            known = Found(picked=best_known(choices, prices, self.repair_until), bound=0.0)
        if self.most is None:
            return self._core(choices, prices, placement, known, None)
        if known.picked is not None and choices.n_levels(known.picked) > self.most:
            known = NOTHING
        sets = level_sets(choices, prices, self.most)
        if known.picked is None:
            known = self._first_levels(choices, sets, placement)
        if sets is None or known.picked is None:
            return self._core(choices, prices, placement, known, self.most)
        return self._best_levels(choices, sets, placement, known)

    def _first_levels(
        self, choices: Choices, sets: LevelSets | None, placement: Placement | None
    ) -> Found:
        """A pick with few levels: of the set that loses least, or where there are many, of some."""
        if sets is not None:
            return self._with_levels(choices, sets, tuple(sets.best()), placement)
        levels = np.unique(choices.tokens[choices.exists])
        some = levels[:: -(-levels.size // FEWER_LEVELS)]
        try:
            return self._free(choices.restricted(np.isin(choices.tokens, some)), placement)
        except InfeasibleError:
            return NOTHING

    def _best_levels(
        self, choices: Choices, sets: LevelSets, placement: Placement | None, best: Found
    ) -> Found:
        """The best pick over all sets of levels that could beat the known one."""
        assert best.picked is not None  # checked by the caller
        prices, known = sets.prices, best.picked
        listed = sets.within(self._room(choices, prices, best)) if placement is None else None
        # Too many sets, or each a hard problem of its own: one program, with fewer levels.
        if listed is None:
            usable = sets.levels[sets.usable(prices.room(choices, choices.objective(known)))]
            usable = np.union1d(usable, choices.tokens[choices.index, known])
            fewer = choices.restricted(np.isin(choices.tokens, usable))
            return self._core(fewer, best_prices(fewer), placement, best, self.most)
        loose: list[float] = []  # bounds of what was not decided
        for lost, places in listed:
            if lost > self._room(choices, prices, best):
                break
            if self.seconds_left <= 0:
                loose.append(prices.beyond(choices, lost))
                break
            found = self._with_levels(choices, sets, places, placement, best.picked)
            if not found.infeasible:
                loose.append(found.bound)
                best = self._better(choices, best, found)
        assert best.picked is not None  # it starts with one
        if self.options.gap > 0:
            room = max(0.0, self._room(choices, prices, best))
            loose.append(prices.beyond(choices, room))
        bound = choices.looser(choices.objective(best.picked), *loose)
        return dataclasses.replace(best, bound=bound, status=f"{best.status}, few budgets")

    def _with_levels(
        self,
        choices: Choices,
        sets: LevelSets,
        places: tuple[int, ...],
        placement: Placement | None,
        known: IntArray | None = None,
    ) -> Found:
        """The best pick with the levels of one set; nothing where none of it could matter."""
        try:
            few = choices.restricted(np.isin(choices.tokens, sets.levels[list(places)]))
            prices = best_prices(few)
        except InfeasibleError:
            return NOTHING
        if known is not None and not choices.better(prices.bound, choices.objective(known)):
            return NOTHING
        start = best_known(few, prices, self.repair_until) if placement is None else None
        return self._core(few, prices, placement, Found(picked=start, bound=0.0), None)

    # Cores: only the options that lose little enough to be part of something better.

    def _core(
        self,
        choices: Choices,
        prices: Prices,
        placement: Placement | None,
        known: Found,
        most: int | None,
    ) -> Found:
        """The best pick, by a program over the options that could be part of a better one.

        With the dual bound U and losses l, a pick with an option of loss l is worth at most U - l.
        """
        best = Found(picked=known.picked, bound=prices.bound, ranks=known.ranks)
        room = self._room(choices, prices, best)
        if room >= 0 and self.seconds_left > 0 and not self._is_closed(choices, best):
            kept = self._kept(choices, prices, room, best.picked)
            asked = self._ask(choices, kept, placement, best.picked, most)
            if best.picked is None and asked.infeasible:
                return dataclasses.replace(asked, bound=prices.bound)
            bound = asked.bound
            if best.picked is not None:  # what is not in the program beats it by the gap at most
                objective = choices.objective(best.picked)
                beyond = prices.beyond(choices, room) if self.options.gap else objective
                bound = beyond if asked.infeasible else choices.looser(bound, beyond)
            bound = choices.tighter(prices.bound, bound)
            best = self._better(choices, best, dataclasses.replace(asked, bound=bound))
            best = dataclasses.replace(best, bound=bound)
        if best.picked is None:
            return best
        objective = choices.objective(best.picked)  # where nothing can beat it, its own bound
        beaten = prices.room(choices, objective) < 0
        bound = objective if beaten else choices.looser(best.bound, objective)
        return dataclasses.replace(best, bound=bound)

    def _better(self, choices: Choices, best: Found, asked: Found) -> Found:
        """The better of two picks, with the word of the last program."""
        if asked.picked is not None and (
            best.picked is None
            or choices.better(choices.objective(asked.picked), choices.objective(best.picked))
        ):
            return asked
        return dataclasses.replace(best, status=asked.status, n_options=asked.n_options)

    def _is_closed(self, choices: Choices, best: Found) -> bool:
        picked = best.picked
        return picked is not None and is_closed(choices.objective(picked), best.bound)

    def _room(self, choices: Choices, prices: Prices, best: Found) -> float:
        if best.picked is None:
            return math.inf
        return prices.room(choices, choices.objective(best.picked), self.options.gap)

    def _kept(
        self, choices: Choices, prices: Prices, room: float, best: IntArray | None
    ) -> BoolArray:
        if best is None:
            return choices.exists
        kept = prices.worth_keeping(room) & choices.exists
        kept[choices.index, best] = True
        return kept

    def _ask(
        self,
        choices: Choices,
        kept: BoolArray,
        placement: Placement | None,
        best: IntArray | None,
        most: int | None,
    ) -> Found:
        """Encode, solve and read; twice where rounding lets the target be missed."""
        tail = self.problem.aggregate is Aggregate.TAIL
        known = 0.0 if best is None else choices.objective(best)
        relaxed: Found | None = None
        for tight in (False, True):
            encoding = encode(
                choices,
                kept,
                most=most,
                placement=placement,
                hint=best,
                tight_target=tight,
                tail=tail,
            )
            gap = 0.0 if tail else self.options.gap * abs(known) / encoding.step
            limits = Limits(deadline=self.deadline, absolute_gap=gap, workers=self.options.workers)
            answer = self.options.backend(encoding.program, limits)
            values = answer.values
            found = Found(
                picked=None if values is None else encoding.picked(values),
                bound=float(encoding.bound(answer.bound)),
                status=answer.status,
                n_options=encoding.rows.size,
                infeasible=answer.infeasible,
                ranks=None if values is None else encoding.ranks(values),
            )
            if relaxed is not None:  # the bound of the program that loses nothing
                return dataclasses.replace(found, bound=relaxed.bound, infeasible=False)
            if found.picked is None or choices.satisfies(found.picked):
                return found
            relaxed = found
        raise AssertionError("the loop returns")

    # Several workloads: one program over what the best weights of the scenarios leave open.

    def _best_tail(self) -> Found:
        """The best worst share of the scenarios.

        The dual's weights of the scenarios make a problem with one workload whose bound holds
        here too; its losses say which options cannot be part of anything better than what is
        known, and the program holds the others.
        """
        bound = tail_bound(self.problem)
        mean = Choices.of(self.problem.reweighted(bound.weights))
        placement = None if self.balance is None else Placement(balance=self.balance)
        known = self._known_tail(bound, mean)
        return self._core(self.choices, best_prices(mean), placement, known, self.most)

    def _known_tail(self, bound: TailBound, mean: Choices) -> Found:
        """A pick that keeps everything, and its ranks, where one is found easily."""
        if not self.problem.constraints:
            choice = _tail_repair.best_known(self.problem, bound, self.repair_until)
            return Found(picked=choice, bound=bound.bound)
        try:
            found = Search(self.options, mean.problem, self.repair_until).run()
        except InfeasibleError:
            return Found(picked=None, bound=bound.bound)
        if found.picked is not None:
            choice = self.choices.expand(found.picked)
            able = self.problem.side_fault(choice, found.ranks) is None
            if able and self.problem.meets_target(self.problem.objective_value(choice)):
                return Found(picked=found.picked, bound=bound.bound, ranks=found.ranks)
        return Found(picked=None, bound=bound.bound)


def even_total(choices: Choices, balance: RankBalance, start: int, *, up: bool) -> int | None:
    """The first total cost that ranks can share, as far as arithmetic tells.

    Loads are multiples of what divides all costs: of 7 pages on 2 ranks one holds at least 4,
    which is 14% above the mean.

    Parameters
    ----------
    choices : Choices
    balance : RankBalance
    start : int
        Bytes; the cost of some pick, or above it.
    up : bool
        Look above it rather than below.

    Returns
    -------
    int or None
        Bytes; None when no pick has such a cost.
    """
    problem = choices.problem
    unit = max(1, int(np.gcd.reduce(problem.costs[problem.exists])))
    most = int(np.where(choices.exists, choices.costs, 0).max(axis=1).sum())
    steps = (start - choices.floor_bytes) // choices.grain
    for step in range(TOTALS):
        total = choices.floor_bytes + (steps + (step if up else -step)) * choices.grain
        if not choices.floor_bytes <= total <= most:
            return None
        if balance.largest_allowed(total) // unit * unit * balance.n_ranks >= total:
            return total
    return start


def spread(problem: AllocationProblem, choice: IntArray, balance: RankBalance) -> IntArray:
    """A placement with loads as even as exchanges make them.

    The largest unit of each layer goes to the least loaded rank that the layer has room on
    (largest processing time first), then units of a layer trade places while that evens out two
    ranks.

    Parameters
    ----------
    problem : AllocationProblem
    choice : ndarray of int64, (n_units,)
    balance : RankBalance

    Returns
    -------
    ndarray of int64, (n_units,)
        Rank of each unit; every layer is spread, the balance may still be missed.
    """
    costs = problem.costs[np.arange(problem.n_units), choice]
    layers = [np.flatnonzero(problem.layers == layer) for layer in np.unique(problem.layers)]
    ranks = np.zeros(problem.n_units, dtype=np.int64)
    loads = np.zeros(balance.n_ranks, dtype=np.int64)
    for units in sorted(layers, key=lambda units: -int(costs[units].max())):
        room = np.full(balance.n_ranks, -(-units.size // balance.n_ranks))
        for unit in units[np.argsort(-costs[units], kind="stable")].tolist():
            rank = int(np.argmin(np.where(room > 0, loads, np.iinfo(np.int64).max)))
            ranks[unit] = rank
            room[rank] -= 1
            loads[rank] += costs[unit]
    for _ in range(SWEEPS):
        if not any(_trade(units, costs, ranks, loads) for units in layers):
            break
    return ranks


def _trade(units: IntArray, costs: IntArray, ranks: IntArray, loads: IntArray) -> bool:
    """Exchange units of a layer, or move one to a free place, wherever that evens out two ranks."""
    most = -(-units.size // loads.size)
    changed = False
    for first in units.tolist():
        for second in units.tolist():
            a, b = int(ranks[first]), int(ranks[second])
            shift = int(costs[first] - costs[second])
            if 0 < shift < int(loads[a] - loads[b]):
                ranks[first], ranks[second] = b, a
                loads[a] -= shift
                loads[b] += shift
                changed = True
        held = np.bincount(ranks[units], minlength=loads.size)
        rank, cost = int(ranks[first]), int(costs[first])
        free = int(np.argmin(np.where(held < most, loads, np.iinfo(np.int64).max)))
        if held[free] < most and 0 < cost < int(loads[rank] - loads[free]):
            ranks[first] = free
            loads[rank] -= cost
            loads[free] += cost
            changed = True
    return changed
