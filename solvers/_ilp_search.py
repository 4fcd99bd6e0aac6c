"""The search of the integer programming solver: cores, sets of levels, and placements."""

from __future__ import annotations

import dataclasses
import math
import time

import numpy as np

from kvalloc.accounting import BoolArray, IntArray
from kvalloc.errors import InfeasibleError
from kvalloc.problem import Aggregate, AllocationProblem, MaxDistinct, RankBalance, Sense, is_closed
from kvalloc.solvers._choices import Choices
from kvalloc.solvers._ilp_found import Found, Options, combined_bound, lossy_bound
from kvalloc.solvers._ilp_program import Encoding, Limits, Placement, encode
from kvalloc.solvers._ilp_ranks import (
    even_total,
    limits_for_placement,
    placement_program,
    spread,
)
from kvalloc.solvers._levels import LevelSets, level_sets
from kvalloc.solvers._prices import Prices, best_prices
from kvalloc.solvers._repair import best_known, best_with_few_levels

CORE_OPTIONS = 3
"""Options per row, on average, that the first program holds."""

REPAIR_SECONDS = 5.0
"""Longest search for a choice to start from."""


JOINT_SECONDS = 60.0
"""Without a time limit, longest search for budgets and a placement together: few bytes on many
ranks are a packing problem, of which nobody may ever see the end."""


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

    def run(self) -> Found:
        """Solve for the problem's aggregate and sense."""
        if self.problem.aggregate is Aggregate.WORST:
            # Whether a level fits has no almost.
            self.options = dataclasses.replace(self.options, gap=0.0)
            if self.problem.sense is Sense.MAX_VALUE:
                return self._most_for_worst()
            return self._cheapest_with(self.choices.worth >= self.problem.lowest_accepted_value)
        found = self._placed(self.choices)
        if not self.choices.minimise or found.picked is None or self.balance is not None:
            return found
        return self._richest(found)

    def _richest(self, cheapest: Found) -> Found:
        """Of the picks that cost the least, the one with the most value."""
        assert cheapest.picked is not None  # the caller has one
        if not is_closed(self.choices.objective(cheapest.picked), cheapest.bound):
            return cheapest
        within = dataclasses.replace(
            self.choices,
            minimise=False,
            capacity_bytes=self.choices.cost(cheapest.picked),
            target=None,
        )
        richest = self._free(within, None, cheapest.picked)
        if richest.picked is None or not self.choices.satisfies(richest.picked):
            return cheapest
        return dataclasses.replace(cheapest, picked=richest.picked)

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
            return Found(picked=None, bound=math.inf, infeasible=True)

    # Ranks: without them first, then for a placement that is kept, then both together.

    def _placed(self, choices: Choices) -> Found:
        """The best pick, with a placement where ranks are to be balanced."""
        if self.balance is None:
            return self._free(choices, None, None)
        even = self._even_goal(choices, self.balance)
        if even is None:
            return Found(picked=None, bound=0.0, infeasible=True)
        free = self._free(even, None, None)
        if free.picked is None:
            return free
        unplaced = free.picked
        free, ranks = self._place_or_raise_total(choices, free, self.balance)
        if ranks is not None:
            return dataclasses.replace(free, ranks=ranks)
        start = spread(self.problem, choices.expand(unplaced), self.balance)
        kept = self._free(even, Placement(balance=self.balance, ranks=start), None)
        if kept.picked is not None:
            closed = is_closed(choices.objective(kept.picked), free.bound)
            kept = dataclasses.replace(kept, ranks=start)
            if closed:
                return dataclasses.replace(kept, bound=free.bound)
        if math.isinf(self.deadline):
            self.deadline = time.monotonic() + JOINT_SECONDS
        both = self._free(even, Placement(balance=self.balance, ranks=None), kept.picked)
        tighter = max if choices.minimise else min
        bound = tighter(both.bound, free.bound)
        if both.ranks is None and kept.picked is not None:  # nothing better than what was known
            both = dataclasses.replace(both, picked=kept.picked, ranks=start)
        return dataclasses.replace(both, bound=bound)

    def _even_goal(self, choices: Choices, balance: RankBalance) -> Choices | None:
        """With the capacity at the largest total that ranks can share; None where there is none."""
        if choices.capacity_bytes is None:
            return choices
        total = even_total(choices, balance, choices.budget_bytes, up=False)
        return None if total is None else dataclasses.replace(choices, capacity_bytes=total)

    def _place_or_raise_total(
        self, choices: Choices, free: Found, balance: RankBalance
    ) -> tuple[Found, IntArray | None]:
        """Ranks for a pick; for a target, also for one of the next total that ranks can share."""
        assert free.picked is not None  # the caller has looked
        ranks = self._place(choices, free.picked)
        if ranks is not None or not choices.minimise:
            return free, ranks
        total = even_total(choices, balance, int(free.bound), up=True)
        if total is None or total <= free.bound:
            return free, None
        free = dataclasses.replace(free, bound=float(total))
        if choices.target is None:
            return free, None
        richest = self._free(
            dataclasses.replace(choices, minimise=False, capacity_bytes=total, target=None),
            None,
            None,
        )
        if richest.picked is None or not choices.satisfies(richest.picked):
            return free, None
        ranks = self._place(choices, richest.picked)
        if ranks is None or choices.cost(richest.picked) != total:
            return free, None
        return dataclasses.replace(free, picked=richest.picked), ranks

    def _place(self, choices: Choices, picked: IntArray) -> IntArray | None:
        """A balanced placement of a pick: by exchanges, else by a program."""
        assert self.balance is not None  # the caller has looked
        choice = choices.expand(picked)
        ranks = spread(self.problem, choice, self.balance)
        if self.balance.fault(self.problem, choice, ranks) is None:
            return ranks
        if self.seconds_left <= 0:
            return None
        program = placement_program(self.problem, choice, self.balance)
        limits = limits_for_placement(self.seconds_left, self.options.workers)
        values = self.options.backend(program, limits).values
        if values is None:
            return None
        ranks = np.argmax(values.reshape(self.problem.n_units, -1), axis=1).astype(np.int64)
        return ranks if self.balance.fault(self.problem, choice, ranks) is None else None

    # Few levels: one set of them after the other, as far as their bounds allow.

    def _free(self, choices: Choices, placement: Placement | None, known: IntArray | None) -> Found:
        """The best pick for a placement that is given, free or of no concern."""
        prices = best_prices(choices)
        if known is None and placement is None:
            known = self._start(choices, prices)
        if self.most is None or not self.options.reduce:
            return self._core(choices, prices, placement, known, self.most)
        sets = level_sets(choices, prices, self.most)
        if sets is None:
            return self._core(choices, prices, placement, known, self.most)
        if known is None:
            first = self._with_levels(choices, sets, tuple(sets.best()), placement)
            known = None if first is None else first.picked
            if known is None:
                return self._core(choices, prices, placement, None, self.most)
            return self._best_levels(choices, sets, placement, known, first)
        return self._best_levels(choices, sets, placement, known, None)

    def _best_levels(
        self,
        choices: Choices,
        sets: LevelSets,
        placement: Placement | None,
        known: IntArray,
        first: Found | None,
    ) -> Found:
        """The best pick over all sets of levels that could beat the known one."""
        best = Found(picked=known, bound=0.0, ranks=None if first is None else first.ranks)
        listed = None
        if placement is None:
            listed = sets.within(self._room(choices, sets.prices, known))
        # Too many sets, or each a hard problem of its own: one program, with fewer levels.
        if listed is None:
            usable = sets.levels[sets.usable(sets.prices.room(choices, choices.objective(known)))]
            usable = np.union1d(usable, choices.tokens[choices.index, known])
            fewer = choices.restricted(np.isin(choices.tokens, usable))
            return self._core(fewer, best_prices(fewer), placement, known, self.most)
        loose: list[float] = []  # bounds of what was not decided
        for lost, places in listed:
            assert best.picked is not None  # it starts with one
            room = self._room(choices, sets.prices, best.picked)
            if lost > room:
                break
            if self.seconds_left <= 0:
                loose.append(lossy_bound(choices, sets.prices, lost))
                break
            found = self._with_levels(choices, sets, places, placement, best.picked)
            if found is None:
                continue
            loose.append(found.bound)
            if found.picked is not None and choices.better(
                choices.objective(found.picked), choices.objective(best.picked)
            ):
                best = found
        assert best.picked is not None  # it starts with one
        if self.options.gap > 0:
            room = max(0.0, self._room(choices, sets.prices, best.picked))
            loose.append(lossy_bound(choices, sets.prices, room))
        extreme = min if choices.minimise else max
        bound = extreme([choices.objective(best.picked), *loose])
        return dataclasses.replace(best, bound=bound, status=f"{best.status}, few budgets")

    def _with_levels(
        self,
        choices: Choices,
        sets: LevelSets,
        places: tuple[int, ...],
        placement: Placement | None,
        known: IntArray | None = None,
    ) -> Found | None:
        """The best pick with the levels of one set; None when it has none that could matter."""
        try:
            few = choices.restricted(np.isin(choices.tokens, sets.levels[list(places)]))
            prices = best_prices(few)
        except InfeasibleError:
            return None
        if known is not None and not choices.better(prices.bound, choices.objective(known)):
            return None
        start = None
        if placement is None:
            start = best_known(few, prices, min(self.deadline, time.monotonic() + REPAIR_SECONDS))
        found = self._core(few, prices, placement, start, None)
        return None if found.infeasible else found

    def _start(self, choices: Choices, prices: Prices) -> IntArray | None:
        """A pick that satisfies everything but the ranks."""
        until = min(self.deadline, time.monotonic() + REPAIR_SECONDS)
        known = best_known(choices, prices, until)
        if self.most is None:
            return known
        if known is not None:
            levels = np.unique(choices.tokens[choices.index, known])
            if levels.size <= self.most:
                return known
        return best_with_few_levels(choices, prices, self.most, until)

    # Cores: the options that lose little first.

    def _core(
        self,
        choices: Choices,
        prices: Prices,
        placement: Placement | None,
        known: IntArray | None,
        most: int | None,
    ) -> Found:
        """The best pick over a growing core of options.

        With the dual bound U and losses l, a pick with an option of loss l is worth at most
        U - l. So a core of all options that lose at most t is enough as soon as its optimum is at
        least U - t.
        """
        best = Found(picked=known, bound=prices.bound)
        threshold = self._first_threshold(choices, prices, placement, known)
        while True:
            room = self._room(choices, prices, best.picked)
            if room < 0 or self.seconds_left <= 0 or self._is_closed(choices, best):
                break
            threshold = min(threshold, room)
            kept = self._kept(choices, prices, threshold, best.picked)
            whole = bool(np.array_equal(kept, choices.exists))
            asked = self._solve(choices, kept, placement, best.picked, most)
            if asked.infeasible and best.picked is None and whole:
                return dataclasses.replace(asked, bound=prices.bound)
            best = self._improved(choices, best, asked)
            room = self._room(choices, prices, best.picked)
            if not asked.infeasible or whole:
                outside = self._outside(choices, prices, threshold, best.picked)
                bound = combined_bound(choices, best.bound, asked.bound, None if whole else outside)
                best = dataclasses.replace(best, bound=bound)
            if whole or room <= threshold or self._is_closed(choices, best):
                break
            threshold = room if best.picked is not None else math.inf
        if best.picked is not None:
            return dataclasses.replace(best, bound=self._settled(choices, prices, best))
        return best

    def _improved(self, choices: Choices, best: Found, asked: Found) -> Found:
        """The better of two picks, with the word of the last program."""
        if asked.picked is not None and (
            best.picked is None
            or choices.better(choices.objective(asked.picked), choices.objective(best.picked))
        ):
            return dataclasses.replace(asked, bound=best.bound)
        return dataclasses.replace(best, status=asked.status, n_options=asked.n_options)

    def _is_closed(self, choices: Choices, best: Found) -> bool:
        if best.picked is None:
            return False
        return is_closed(choices.objective(best.picked), best.bound)

    def _settled(self, choices: Choices, prices: Prices, best: Found) -> float:
        """The bound, never better than the pick; the pick itself where nothing can beat it."""
        assert best.picked is not None  # the caller has looked
        objective = choices.objective(best.picked)
        if prices.room(choices, objective) < 0:
            return objective
        return min(best.bound, objective) if choices.minimise else max(best.bound, objective)

    def _first_threshold(
        self,
        choices: Choices,
        prices: Prices,
        placement: Placement | None,
        known: IntArray | None,
    ) -> float:
        """A loss within which each row has a few options, to find a good pick among them."""
        if not self.options.reduce or (known is None and placement is None):
            return math.inf
        losses = prices.loss[choices.exists]
        wanted = min(losses.size - 1, CORE_OPTIONS * choices.n_rows)
        return float(np.partition(losses, wanted)[wanted])

    def _room(self, choices: Choices, prices: Prices, best: IntArray | None) -> float:
        if best is None:
            return math.inf
        return prices.room(choices, choices.objective(best), self.options.gap)

    def _kept(
        self, choices: Choices, prices: Prices, threshold: float, best: IntArray | None
    ) -> BoolArray:
        if not self.options.reduce or not math.isfinite(threshold):
            return choices.exists.copy()
        kept = prices.worth_keeping(threshold) & choices.exists
        if best is not None:
            kept[choices.index, best] = True
        return kept

    def _outside(
        self, choices: Choices, prices: Prices, threshold: float, best: IntArray | None
    ) -> float:
        """What no pick with an option outside the core can beat: it loses the threshold."""
        if best is not None and prices.room(choices, choices.objective(best)) <= threshold:
            return choices.objective(best)
        return lossy_bound(choices, prices, threshold)

    def _solve(
        self,
        choices: Choices,
        kept: BoolArray,
        placement: Placement | None,
        best: IntArray | None,
        most: int | None,
    ) -> Found:
        """Encode, solve and read; twice where rounding lets the target be missed."""
        relaxed: Found | None = None
        for tight in (False, True):
            encoding = encode(
                choices, kept, most=most, placement=placement, hint=best, tight_target=tight
            )
            found = self._ask(choices, encoding, best)
            if relaxed is not None:  # the bound of the program that loses nothing
                return dataclasses.replace(found, bound=relaxed.bound, infeasible=False)
            if found.picked is None or choices.satisfies(found.picked):
                return found
            relaxed = found
        raise AssertionError("the loop returns")

    def _ask(self, choices: Choices, encoding: Encoding, best: IntArray | None) -> Found:
        known = 0.0 if best is None else choices.objective(best)
        step = choices.grain if choices.minimise else 1.0 / encoding.scale
        limits = Limits(
            deadline=self.deadline,
            absolute_gap=self.options.gap * abs(known) / step,
            workers=self.options.workers,
        )
        answer = self.options.backend(encoding.program, limits)
        picked = ranks = None
        if answer.values is not None:
            picked = encoding.picked(answer.values, choices.n_rows)
            ranks = encoding.ranks(answer.values, self.problem.n_units)
        bound = -math.inf if choices.minimise else math.inf
        if answer.bound is not None and choices.minimise:
            bound = encoding.base_bytes + math.ceil(answer.bound - 1e-6) * choices.grain
        elif answer.bound is not None:
            # Each value was rounded down by less than one step.
            bound = encoding.base_value + (answer.bound + choices.n_rows) / encoding.scale
        return Found(
            picked=picked,
            bound=float(bound),
            status=answer.status,
            n_options=encoding.rows.size,
            infeasible=answer.infeasible,
            ranks=ranks,
        )
