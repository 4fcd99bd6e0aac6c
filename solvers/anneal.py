"""Search by simulated annealing: for objectives and constraints that can only be evaluated."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.errors import InputError, SolverError
from kvalloc.problem import (
    Aggregate,
    AllocationProblem,
    GroupCap,
    MaxDistinct,
    RankBalance,
    SameBudget,
    Sense,
    SideConstraint,
    Solution,
    Solver,
    Termination,
    dual_bound,
)
from kvalloc.solvers._choices import Choices
from kvalloc.solvers._placement import place

Evaluate = Callable[[IntArray], float]

COLDEST = 1e-4
"""Temperature at the end, as a share of that at the start."""


class Anneal(Solver):
    """Random changes, kept when they are better, or by chance when they are not much worse.

    It needs nothing but a number for each choice, so it takes any objective (``evaluate``) and
    any side constraint, also of kinds that kvalloc does not know: all are asked whether a choice
    breaks them, and what does is never accepted. It starts from the choice of the Lagrangian
    dual, or where that breaks a constraint from the best of some simple ones, and proves nothing.
    With the same seed and no time limit the answer is the same.

    Parameters
    ----------
    evaluate : callable, optional
        ``evaluate(choice) -> number`` to be made large, ``choice`` being the option of each unit,
        ``(n_units,)`` int64. It takes the place of the problem's objective; capacity, target and
        side constraints hold as they are. The problem's own objective by default.
    steps : int
        Changes to try, at least 1.
    seed : int
        Of the random numbers, at least 0.

    Raises
    ------
    InputError
        If there is no step, the seed is negative, or ``evaluate`` cannot be called.

    References
    ----------
    Kirkpatrick, Gelatt, Vecchi: Optimization by Simulated Annealing (1983).
    """

    name: ClassVar[str] = "anneal"
    summary: ClassVar[str] = "simulated annealing; any objective and constraint, proves nothing"
    reference: ClassVar[str] = "Kirkpatrick et al. 1983"
    takes_bits: ClassVar[bool] = True
    handles: ClassVar[frozenset[type[SideConstraint]]] = frozenset(
        {GroupCap, SameBudget, MaxDistinct, RankBalance}
    )
    aggregates: ClassVar[frozenset[Aggregate]] = frozenset(Aggregate)

    def __init__(
        self, evaluate: Evaluate | None = None, steps: int = 20_000, seed: int = 0
    ) -> None:
        if steps < 1 or seed < 0:
            raise InputError(f"anneal: steps {steps} and seed {seed}, expected >= 1 and >= 0")
        if evaluate is not None and not callable(evaluate):
            raise InputError(
                f"anneal: evaluate is {evaluate!r}, expected a function of a choice; it can be "
                "given in Python only"
            )
        self.evaluate = evaluate
        self.steps = steps
        self.seed = seed

    def can_solve(self, problem: AllocationProblem) -> bool | str:
        """Always: a choice only has to be checked."""
        return True

    def solve(
        self, problem: AllocationProblem, *, time_limit_seconds: float | None = None
    ) -> Solution:
        """The best choice found; see the class.

        Raises
        ------
        SolverError
            If no choice was found that keeps every constraint, or ``evaluate`` gives no number.
        """
        clock = _Clock(self.steps, time_limit_seconds)
        search = _Search(problem, self.evaluate, np.random.default_rng(self.seed))
        state = search.start(clock)
        if state is None:
            raise SolverError(
                f"anneal found no choice that keeps every constraint in {clock.taken:,} steps; "
                "use ilp, or more steps"
            )
        best, kept = search.anneal(state, clock)
        choice = search.rows.expand(best.picked)
        detail = f"{clock.taken:,} changes tried, {kept:,} kept, seed {self.seed}"
        if self.evaluate is not None:
            detail += f", evaluated at {best.score:.9g}"
        return Solution(
            choice=choice,
            objective=problem.objective(choice),
            bound=None,
            termination=Termination.TIME_LIMIT if clock.ran_out else Termination.HEURISTIC,
            detail=detail,
            ranks=best.ranks,
        )


class _Clock:
    """Steps and seconds that are left."""

    def __init__(self, steps: int, seconds: float | None) -> None:
        self.steps = steps
        self.seconds = math.inf if seconds is None else seconds
        self.taken = 0
        self.ran_out = False
        self._start = time.monotonic()

    def progress(self) -> float:
        """Share of the search that is over, 0..1."""
        used = (time.monotonic() - self._start) / self.seconds
        self.ran_out = used >= 1.0
        return min(1.0, max(used, self.taken / self.steps))

    def tick(self) -> bool:
        """Count a step; False when none is left."""
        if self.progress() >= 1.0:
            return False
        self.taken += 1
        return True


@dataclass(frozen=True, kw_only=True)
class _State:
    """A pick that keeps every constraint, its ranks, and what it scores (higher is better)."""

    picked: IntArray
    ranks: IntArray | None
    score: float


class _Search:
    def __init__(
        self,
        problem: AllocationProblem,
        evaluate: Evaluate | None,
        random: np.random.Generator,
    ) -> None:
        self.problem = problem
        self.evaluate = evaluate
        self.random = random
        capacity = problem.capacity_bytes
        # The rows only merge units that share a budget; limits are checked on the problem.
        self.rows = Choices.of(
            problem.with_capacity(problem.max_cost_bytes if capacity is None else capacity)
        )
        self.columns = self.rows.exists.sum(axis=1)
        self.most_distinct = min(
            (c.most for c in problem.constraints if isinstance(c, MaxDistinct)),
            default=problem.n_units,
        )
        self.balances = [c for c in problem.constraints if isinstance(c, RankBalance)]

    def judge(self, picked: IntArray, ranks: IntArray | None = None) -> _State | None:
        """The pick as a state, or None where it breaks a constraint."""
        problem, choice = self.problem, self.rows.expand(picked)
        if problem.capacity_bytes is not None and problem.cost(choice) > problem.capacity_bytes:
            return None
        if not problem.meets_target(problem.objective_value(choice)):
            return None
        if problem.constraints and problem.side_fault(choice, ranks) is not None:
            if not self.balances:
                return None
            ranks = place(problem, choice, self.balances[0].n_ranks)
            if problem.side_fault(choice, ranks) is not None:
                return None
        return _State(picked=picked, ranks=ranks, score=self.score(choice))

    def score(self, choice: IntArray) -> float:
        """What is made large."""
        if self.evaluate is None:
            objective = self.problem.objective(choice)
            return objective if self.problem.sense is Sense.MAX_VALUE else -objective
        score = float(self.evaluate(choice))
        if math.isnan(score):
            raise SolverError("anneal: evaluate returned no number (NaN) for a choice")
        return score

    def start(self, clock: _Clock) -> _State | None:
        """The best of the simple picks; where none holds, a search for one that does."""
        best, nearest, least = None, self.rows.floors, math.inf
        for picked in self._simple_picks():
            state = self.judge(picked)
            if state is not None and (best is None or state.score > best.score):
                best = state
            if state is None and best is None and (excess := self._excess(picked)) < least:
                nearest, least = picked, excess
        picked = nearest
        while best is None and clock.tick():
            changed = self._changed(picked)
            excess = self._excess(changed)
            # Ties too, so that the walk does not stay on a plateau.
            if excess <= least:
                picked, least = changed, excess
                best = self.judge(picked)
        return best

    def anneal(self, state: _State, clock: _Clock) -> tuple[_State, int]:
        """The best state seen, and how many changes were kept."""
        best, kept = state, 0
        scale = self._typical_change(state, clock)
        while clock.tick():
            temperature = scale * COLDEST ** clock.progress()
            other = self.judge(self._changed(state.picked), state.ranks)
            if other is None:
                continue
            worse = state.score - other.score
            if worse <= 0 or self.random.random() < math.exp(-worse / max(temperature, 1e-300)):
                state = other
                kept += 1
                if state.score > best.score:
                    best = state
        return best, kept

    def _typical_change(self, state: _State, clock: _Clock) -> float:
        """Median size of a change of the score, so that the temperature has its unit."""
        sizes = []
        for _ in range(min(50, 1 + clock.steps // 20)):
            if not clock.tick():
                break
            other = self.judge(self._changed(state.picked), state.ranks)
            if other is not None and other.score != state.score:
                sizes.append(abs(other.score - state.score))
        return float(np.median(sizes)) if sizes else 0.0

    def _simple_picks(self) -> Iterator[IntArray]:
        """Picks to start from: the dual's, cheaper and dearer ones, and equal budgets."""
        rows = self.rows
        yield rows.floors
        yield np.argmax(rows.worth, axis=1).astype(np.int64)
        dual = dual_bound(self.problem)
        if self.problem.aggregate is Aggregate.WORST:
            reaches = rows.worth >= dual.bound
            yield np.where(reaches.any(axis=1), np.argmax(reaches, axis=1), self.columns - 1)
        for power in range(-4, 13):
            net = rows.worth - dual.multiplier * 2.0**power * np.where(rows.exists, rows.costs, 0)
            picked = np.argmax(net, axis=1).astype(np.int64)
            yield picked
            if self.most_distinct < self.problem.n_units:
                yield self._few_levels(picked)
        levels = np.unique(np.where(rows.exists, rows.tokens, rows.tokens[:, :1]))
        for level in levels[:: max(1, levels.size // 64)]:
            yield self._within(np.full(rows.n_rows, level))

    def _few_levels(self, picked: IntArray) -> IntArray:
        """The pick with its budgets moved to at most as many levels as are allowed."""
        tokens = self.rows.tokens[self.rows.index, picked]
        ordered = np.sort(tokens)
        groups = np.array_split(ordered, min(self.most_distinct, ordered.size))
        down = self.problem.sense is Sense.MAX_VALUE
        levels = np.unique([group[0] if down else group[-1] for group in groups])
        if down:
            at = np.searchsorted(levels, tokens, side="right") - 1
        else:
            at = np.searchsorted(levels, tokens, side="left")
        return self._within(levels[np.clip(at, 0, levels.size - 1)])

    def _within(self, tokens: IntArray) -> IntArray:
        """Each row's largest option of at most so many tokens, or its smallest."""
        inside = (self.rows.tokens <= tokens[:, None]) & self.rows.exists
        column: IntArray = np.maximum(inside.sum(axis=1) - 1, 0)
        return column

    def _changed(self, picked: IntArray) -> IntArray:
        """A random neighbour: a row moved, two rows traded, or a level of budgets moved."""
        changed = picked.copy()
        row, other = self.random.integers(self.rows.n_rows, size=2).tolist()
        kind = self.random.integers(4)
        limited = self.most_distinct < self.problem.n_units
        if kind == 0 and limited:
            tokens = self.rows.tokens[self.rows.index, picked]
            together = np.flatnonzero(tokens == tokens[row])
            level = self._moved(row, int(picked[row]))
            changed[together] = self._within(
                np.full(self.rows.n_rows, self.rows.tokens[row, level])
            )[together]
        elif kind == 1 and limited:
            level = self.rows.tokens[other, picked[other]]
            changed[row] = self._within(np.full(self.rows.n_rows, level))[row]
        elif kind == 2 and row != other:
            self._trade(changed, row, other)
        else:
            changed[row] = self._moved(row, int(picked[row]))
        return changed

    def _moved(self, row: int, column: int) -> int:
        """Another column of a row: mostly near, sometimes far."""
        most = int(self.columns[row]) - 1
        if most == 0:
            return 0
        reach = max(1, int(most * self.random.random() ** 4))
        step = int(self.random.integers(1, reach + 1)) * (1 if self.random.random() < 0.5 else -1)
        return min(max(column + step, 0), most)

    def _trade(self, changed: IntArray, row: int, other: int) -> None:
        """Move one row and give (take) about as many bytes to (from) another."""
        rows = self.rows
        before = int(rows.costs[row, changed[row]])
        changed[row] = self._moved(row, int(changed[row]))
        paid = int(rows.costs[row, changed[row]]) - before
        wanted = int(rows.costs[other, changed[other]]) - paid
        count = int(self.columns[other])
        column = int(np.searchsorted(rows.costs[other, :count], wanted, side="right")) - 1
        changed[other] = min(max(column, 0), count - 1)

    def _excess(self, picked: IntArray) -> float:
        """How far a pick is beyond the limits, each as a share; 0 when none is known to be."""
        problem, choice = self.problem, self.rows.expand(picked)
        excess = 0.0
        if problem.capacity_bytes is not None:
            over = problem.cost(choice) - problem.capacity_bytes
            excess += max(0, over) / max(problem.capacity_bytes, 1)
        if problem.target is not None:
            short = problem.lowest_accepted_value - problem.objective_value(choice)
            excess += max(0.0, short) / max(abs(problem.target), 1e-300)
        for cap in self.rows.caps:
            excess += max(0, cap.load(picked) - cap.capacity_bytes) / max(cap.capacity_bytes, 1)
        distinct = np.unique(problem.chosen_tokens(choice)).size
        excess += max(0, distinct - self.most_distinct)
        ranks = None
        for balance in self.balances:
            ranks = place(problem, choice, balance.n_ranks)
            loads = balance.loads(problem, choice, ranks)
            allowed = balance.largest_allowed(int(loads.sum()))
            excess += max(0, int(loads.max()) - allowed) / max(allowed, 1)
        known = (GroupCap, SameBudget, MaxDistinct, RankBalance)
        others = (c for c in problem.constraints if not isinstance(c, known))
        return excess + sum(c.fault(problem, choice, ranks) is not None for c in others)
