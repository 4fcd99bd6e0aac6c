"""From a choice at the best scenario weights to a good one: moves and exchanges, judged exactly."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.errors import InfeasibleError
from kvalloc.problem import AllocationProblem as Problem
from kvalloc.problem import Sense, TailBound, dual_bound, tail_places

ROUNDS = 2000
"""Most improvements of one choice; a safety net, dozens are common."""

NEAR = 4096
"""Options that moves may lead to: those that lose least at the best weights and price."""

PAIRED = 128
"""Moves that are tried in pairs: those that lose least from where the choice is."""

MARGIN = 1e-13
"""Sums made in another order may differ by so much: a target is aimed at from above it."""

RAISES = 12
"""Halvings of the interval in which the mean that reaches the target for the tail is sought."""


def best_known(problem: Problem, bound: TailBound, deadline: float) -> IntArray | None:
    """The best choice that repairing finds, without side constraints.

    Parameters
    ----------
    problem : AllocationProblem
        With scenarios.
    bound : TailBound
        Of the problem: its weights and price say where to look.
    deadline : float
        ``time.monotonic()`` at which to stop improving.

    Returns
    -------
    ndarray of int64, (n_units,), or None
        None when none was found that meets the target.
    """
    repair = _Repair(problem, bound)
    best: IntArray | None = None
    for start in repair.starts():
        found = repair.improve(start, deadline)
        if best is None or repair.better(found, best):
            best = found
    return best


class _Repair:
    """Moves among the options near the best weights and price."""

    def __init__(self, problem: Problem, bound: TailBound) -> None:
        assert problem.scenarios is not None  # the callers have looked
        self.problem = problem
        self.bound = bound
        self.scenarios = problem.scenarios
        self.units = np.arange(problem.n_units)
        self.places = tail_places(self.scenarios.shape[0], problem.tail_share)
        self.mean = problem.reweighted(bound.weights)
        self.rows, self.columns = self._near_options()

    def _net(self, rows: IntArray, columns: IntArray) -> FloatArray:
        """What options net at the best weights and price."""
        problem = self.problem
        price = self.bound.multiplier
        costs = (problem.costs[rows, columns] - problem.costs[rows, 0]).astype(np.float64)
        net: FloatArray = problem.weights[rows] * self.mean.values[rows, columns] - price * costs
        return net

    def _near_options(self) -> tuple[IntArray, IntArray]:
        exists = np.arange(self.problem.n_options)[None, :] < self.problem.option_counts[:, None]
        rows, columns = np.nonzero(exists)
        if rows.size > NEAR:
            net = self._net(rows, columns)
            best = np.full(self.problem.n_units, -np.inf)
            np.maximum.at(best, rows, net)
            near = np.argpartition(best[rows] - net, NEAR)[:NEAR]
            near.sort()
            rows, columns = rows[near], columns[near]
        return rows, columns

    def starts(self) -> Iterator[IntArray]:
        """Choices that keep the goal: the best ones for some weights, or for a higher mean."""
        problem, count = self.problem, self.scenarios.shape[0]
        even = np.full(count, 1.0 / count)
        if problem.sense is Sense.MAX_VALUE:
            known = [self.bound.choice, dual_bound(problem.reweighted(even)).choice]
            known.sort(key=problem.objective_value, reverse=True)
            yield from known
            return
        reached = [self._reach_target(weights) for weights in (self.bound.weights, even)]
        choices = [choice for choice in reached if choice is not None]
        if not choices:
            choice = self._raised(np.zeros(problem.n_units, dtype=np.int64))
            choices = [] if choice is None else [choice]
        yield from sorted(choices, key=problem.cost)

    def _reach_target(self, weights: FloatArray) -> IntArray | None:
        """The cheapest choice for a weighted mean so high that the tail meets the target."""
        problem = self.problem
        mean = problem.reweighted(weights)
        low, step = problem.lowest_accepted_value, 0.0
        best: IntArray | None = None
        high = mean.max_value
        for _ in range(RAISES):
            target = low + step if best is None else 0.5 * (low + high)
            try:
                choice = dual_bound(mean.with_target(min(target, mean.max_value))).choice
            except InfeasibleError:
                break
            value = problem.objective_value(choice)
            if problem.meets_target(value):
                best, high = choice, target
                if problem.cost(choice) <= self.bound.bound:
                    break
            elif target >= mean.max_value:
                break
            else:
                low = target
                step = 2.0 * step or (problem.lowest_accepted_value - value)
        return best

    def _raised(self, choice: IntArray) -> IntArray | None:
        """Raise the tail by the best move of one unit for its bytes, until the target is met."""
        problem = self.problem
        for _ in range(problem.n_units * problem.n_options):
            values = problem.scenario_values(choice)
            if problem.meets_target(problem.objective_value(choice)):
                return choice
            gained, bytes_ = self._changes(choice)
            gain = self._tail(values + gained) - self._tail(values)
            rate = np.where(gain > 0, gain / np.maximum(bytes_, 1.0), -np.inf)
            best = int(np.argmax(rate))
            if not rate[best] > 0:
                return None
            choice = choice.copy()
            choice[self.rows[best]] = self.columns[best]
        return None

    def _tail(self, values: FloatArray) -> FloatArray:
        """Mean of the worst share along the last axis, ``(...)``."""
        tail: FloatArray = np.sort(values, axis=-1) @ self.places
        return tail

    def _changes(self, choice: IntArray) -> tuple[FloatArray, FloatArray]:
        """Worth in each scenario, ``(n_near, n_scenarios)``, and bytes of moving to an option."""
        rows, columns, now = self.rows, self.columns, choice[self.rows]
        gained = self.scenarios[:, rows, columns] - self.scenarios[:, rows, now]
        bytes_ = self.problem.costs[rows, columns] - self.problem.costs[rows, now]
        return (self.problem.weights[rows] * gained).T, bytes_.astype(np.float64)

    def better(self, first: IntArray, second: IntArray) -> bool:
        """Whether the first choice beats the second."""
        problem = self.problem
        one, other = problem.objective(first), problem.objective(second)
        return one > other if problem.sense is Sense.MAX_VALUE else one < other

    def improve(self, choice: IntArray, deadline: float) -> IntArray:
        """Make the best single move, else the best of two, until there is none."""
        problem = self.problem
        for _ in range(ROUNDS):
            if time.monotonic() > deadline:
                break
            values, cost = problem.scenario_values(choice), problem.cost(choice)
            gained, bytes_ = self._changes(choice)
            changed = self._single(values, cost, gained, bytes_)
            if changed is None:
                changed = self._pair(values, cost, gained, bytes_, choice)
            if changed is None:
                break
            tried = choice.copy()
            tried[self.rows[changed]] = self.columns[changed]
            if not self._is_sound(tried) or not self._gains(tried, choice):
                break  # the last digit of a sum: nothing real is left to gain
            choice = tried
        return choice

    def _gains(self, tried: IntArray, choice: IntArray) -> bool:
        if self.better(tried, choice):
            return True
        value = self.problem.objective_value
        same = self.problem.objective(tried) == self.problem.objective(choice)
        return same and value(tried) > value(choice)

    def _is_sound(self, choice: IntArray) -> bool:
        problem = self.problem
        if problem.capacity_bytes is not None:
            return problem.cost(choice) <= problem.capacity_bytes
        return problem.meets_target(problem.objective_value(choice))

    def _best(
        self, values: FloatArray, cost: int, tail: FloatArray, bytes_: FloatArray
    ) -> int | None:
        """Index of the best of some changes, given the tail after them; None if none improves."""
        problem, now = self.problem, float(self._tail(values))
        noise = MARGIN * max(1.0, abs(now))
        if problem.capacity_bytes is not None:
            able = (cost + bytes_ <= problem.capacity_bytes) & (tail > now + noise)
            score = np.where(able, tail, -np.inf)
        else:
            able = tail >= problem.lowest_accepted_value + noise
            able &= (bytes_ < 0) | ((bytes_ == 0) & (tail > now + noise))
            # Bytes first; among equal ones the one that leaves most to give back.
            spread = float(np.ptp(tail)) or 1.0
            score = np.where(able, -bytes_ + 0.5 * (tail - tail.min()) / spread, -np.inf)
        best = int(np.argmax(score))
        return best if able[best] else None

    def _single(
        self, values: FloatArray, cost: int, gained: FloatArray, bytes_: FloatArray
    ) -> IntArray | None:
        best = self._best(values, cost, self._tail(values + gained), bytes_)
        return None if best is None else np.array([best])

    def _pair(
        self,
        values: FloatArray,
        cost: int,
        gained: FloatArray,
        bytes_: FloatArray,
        choice: IntArray,
    ) -> IntArray | None:
        """The best two moves of different units, among those that lose least."""
        net = self._net(self.rows, self.columns) - self._net(self.units, choice)[self.rows]
        net[self.columns == choice[self.rows]] = -np.inf
        few = np.argsort(-net, kind="stable")[:PAIRED]
        first, second = np.triu_indices(few.size, k=1)
        one, other = few[first], few[second]
        apart = self.rows[one] != self.rows[other]
        one, other = one[apart], other[apart]
        if one.size == 0:
            return None
        tail = self._tail(values + gained[one] + gained[other])
        best = self._best(values, cost, tail, bytes_[one] + bytes_[other])
        return None if best is None else np.array([one[best], other[best]])
