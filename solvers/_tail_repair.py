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

    On 240 problems of measured curves (30 x 3 heads, 8 prompts of 512 tokens, whole pages) it buys
    up to 0.18% of the objective.

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
    found = [repair.improve(start, deadline) for start in repair.starts()]
    return max(found, key=repair.merit, default=None)


class _Repair:
    """Moves among the options near the best weights and price."""

    def __init__(self, problem: Problem, bound: TailBound) -> None:
        assert problem.scenarios is not None  # checked by the callers
        self.problem = problem
        self.bound = bound
        self.scenarios = problem.scenarios
        self.places = tail_places(self.scenarios.shape[0], problem.tail_share)
        net = problem.weights[:, None] * problem.reweighted(bound.weights).values
        net -= bound.multiplier * (problem.costs - problem.costs[:, :1])
        self.net = np.where(problem.exists, net, -np.inf)
        self.rows, self.columns = np.nonzero(problem.exists)
        if self.rows.size > NEAR:
            lost = (self.net.max(axis=1, keepdims=True) - self.net)[self.rows, self.columns]
            near = np.sort(np.argpartition(lost, NEAR)[:NEAR])
            self.rows, self.columns = self.rows[near], self.columns[near]

    def merit(self, choice: IntArray) -> tuple[float, float]:
        """What is optimised, higher is better; of equal costs the higher value."""
        value = self.problem.objective_value(choice)
        least_cost = self.problem.sense is Sense.MIN_COST
        return (-float(self.problem.cost(choice)), value) if least_cost else (value, 0.0)

    def starts(self) -> Iterator[IntArray]:
        """Choices that keep the goal: the best ones for some weights, or for a higher mean."""
        problem, count = self.problem, self.scenarios.shape[0]
        even = np.full(count, 1.0 / count)
        if problem.sense is Sense.MAX_VALUE:
            yield self.bound.choice
            yield dual_bound(problem.reweighted(even)).choice
            return
        reached = [self._reach_target(weights) for weights in (self.bound.weights, even)]
        known = [choice for choice in reached if choice is not None] or [self.bound.choice]
        for choice in known:
            if problem.meets_target(problem.objective_value(choice)):
                yield choice

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

    def improve(self, choice: IntArray, deadline: float) -> IntArray:
        """Make the best single move, else the best of two, until there is none."""
        problem = self.problem
        for _ in range(ROUNDS):
            if time.monotonic() > deadline:
                break
            tried = self._moved(choice)
            if tried is None or self.merit(tried) <= self.merit(choice):
                break  # the last digit of a sum: nothing real is left to gain
            if problem.capacity_bytes is not None and problem.cost(tried) > problem.capacity_bytes:
                break
            if not problem.meets_target(problem.objective_value(tried)):
                break
            choice = tried
        return choice

    def _moved(self, choice: IntArray) -> IntArray | None:
        """The choice after the best move of one unit, else of two units; None where none helps."""
        rows, columns, now = self.rows, self.columns, choice[self.rows]
        gained = self.scenarios[:, rows, columns] - self.scenarios[:, rows, now]
        gained = (self.problem.weights[rows] * gained).T  # (n_near, n_scenarios)
        bytes_ = (self.problem.costs[rows, columns] - self.problem.costs[rows, now]).astype(float)
        moves = np.arange(rows.size)[:, None]
        best = self._best(choice, gained, bytes_)
        if best is None:  # of the moves that lose least
            lost = self.net[rows, now] - self.net[rows, columns]
            lost[columns == now] = np.inf
            few = np.argsort(lost, kind="stable")[:PAIRED]
            moves = few[np.stack(np.triu_indices(few.size, k=1), axis=1)]
            moves = moves[rows[moves[:, 0]] != rows[moves[:, 1]]]
            if moves.size:
                best = self._best(choice, gained[moves].sum(axis=1), bytes_[moves].sum(axis=1))
        if best is None:
            return None
        changed = choice.copy()
        changed[rows[moves[best]]] = columns[moves[best]]
        return changed

    def _best(self, choice: IntArray, gained: FloatArray, bytes_: FloatArray) -> int | None:
        """Index of the best of some changes; None if none improves.

        ``gained`` is what they add in each scenario, ``(n_changes, n_scenarios)``.
        """
        problem, values = self.problem, self.problem.scenario_values(choice)
        now = float(np.sort(values) @ self.places)
        tail = np.sort(values + gained, axis=-1) @ self.places
        noise = MARGIN * max(1.0, abs(now))
        if problem.capacity_bytes is not None:
            able = (problem.cost(choice) + bytes_ <= problem.capacity_bytes) & (tail > now + noise)
            score = np.where(able, tail, -np.inf)
        else:
            able = tail >= problem.lowest_accepted_value + noise
            able &= (bytes_ < 0) | ((bytes_ == 0) & (tail > now + noise))
            # Bytes first; among equal ones the one that leaves most to give back.
            spread = float(np.ptp(tail)) or 1.0
            score = np.where(able, -bytes_ + 0.5 * (tail - tail.min()) / spread, -np.inf)
        best = int(np.argmax(score))
        return best if able[best] else None
