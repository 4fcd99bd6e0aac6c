"""The integer program of a problem in whole numbers, the same for every back end."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from kvalloc.accounting import BoolArray, IntArray
from kvalloc.problem import AllocationProblem, RankBalance
from kvalloc.solvers._choices import Choices

VALUE_RANGE = 2**50
"""The spread of all values is mapped to so many whole steps; sums stay far within int64."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """``lower <= sum coefficients * variables <= upper``; None where there is no limit."""

    variables: IntArray
    coefficients: IntArray
    lower: int | None = None
    upper: int | None = None


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program of 0/1 variables with whole coefficients, and a few larger whole variables.

    Attributes
    ----------
    n_variables : int
    one_of : list of ndarray
        Of each of these sets of variables exactly one is 1.
    implied : list of (ndarray, int)
        Where one of the first is 1, the second is.
    rows : list of Row
    objective : ndarray of int64, (n_variables,)
    maximise : bool
    hint : ndarray of int64, (n_variables,), or None
        A solution to start from.
    whole_limits : tuple of int
        The last so many variables are not 0/1 but lie between 0 and these limits, whole numbers
        in every best solution.
    """

    n_variables: int
    one_of: list[IntArray]
    implied: list[tuple[IntArray, int]]
    rows: list[Row]
    objective: IntArray
    maximise: bool
    hint: IntArray | None
    whole_limits: tuple[int, ...] = ()

    @property
    def n_binary(self) -> int:
        """Number of 0/1 variables: the first ones."""
        return self.n_variables - len(self.whole_limits)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a back end may stop.

    Attributes
    ----------
    deadline : float
        ``time.monotonic()`` at which to stop.
    absolute_gap : float
        Distance between objective and bound, in the program's whole numbers.
    workers : int
        Threads.
    """

    deadline: float
    absolute_gap: float
    workers: int

    @property
    def seconds(self) -> float:
        """Wall time left: asked for after the model was built, which takes time too."""
        return max(self.deadline - time.monotonic(), 0.01)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a back end said, in the program's whole numbers.

    Attributes
    ----------
    values : ndarray of int64, (n_variables,), or None
        The best solution found.
    bound : float or None
        No solution is better; None when nothing was proven.
    status : str
        The back end's word for it.
    infeasible : bool
        Proven to have no solution.
    """

    values: IntArray | None
    bound: float | None
    status: str
    infeasible: bool = False


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where units may sit.

    Attributes
    ----------
    balance : RankBalance
    ranks : ndarray of int64, (n_units,), or None
        A placement to keep; None to choose one.
    """

    balance: RankBalance
    ranks: IntArray | None


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """A program and how to read its numbers.

    Attributes
    ----------
    program : Program
    rows, columns : ndarray of int64, (n_picks,)
        What each of the first variables picks.
    base_value : float
        Worth that every pick has; a whole step is worth ``1 / scale`` more.
    scale : float
    base_bytes : int
        Cost that every pick has; a whole step of cost is one grain.
    placed : tuple of ndarray, or None
        Unit and rank of each variable that places a unit, and the first such variable.
    """

    program: Program
    rows: IntArray
    columns: IntArray
    base_value: float
    scale: float
    base_bytes: int
    placed: tuple[IntArray, IntArray, int] | None

    def picked(self, values: IntArray, n_rows: int) -> IntArray:
        """Column of each row in a solution."""
        on = np.flatnonzero(values[: self.rows.size])
        picked = np.zeros(n_rows, dtype=np.int64)
        picked[self.rows[on]] = self.columns[on]
        return picked

    def ranks(self, values: IntArray, n_units: int) -> IntArray | None:
        """Rank of each unit in a solution, where the program places them."""
        if self.placed is None:
            return None
        units, ranks, first = self.placed
        on = np.flatnonzero(values[first : first + units.size])
        where = np.zeros(n_units, dtype=np.int64)
        where[units[on]] = ranks[on]
        return where


def encode(
    choices: Choices,
    kept: BoolArray,
    *,
    most: int | None,
    placement: Placement | None,
    hint: IntArray | None,
    tight_target: bool = False,
) -> Encoding:
    """Write the choices left as an integer program.

    Parameters
    ----------
    choices : Choices
    kept : ndarray of bool, (n_rows, n_columns)
        Options to choose from, at least one in each row.
    most : int or None
        Most different budgets.
    placement : Placement or None
        Balance over ranks, with units placed or to be placed.
    hint : ndarray of int64, (n_rows,), or None
        A pick to start from.
    tight_target : bool
        Ask for the target plus rounding, so that every answer meets it; else less rounding, so
        that nothing feasible is lost.

    Returns
    -------
    Encoding
    """
    rows, columns = np.nonzero(kept)
    worth = np.where(kept, choices.worth, np.nan)
    least = np.nanmin(worth, axis=1)
    spread = float(np.sum(np.nanmax(worth, axis=1) - least))
    scale = VALUE_RANGE / spread if spread > 0 else 1.0
    cheapest = choices.costs[choices.index, np.argmax(kept, axis=1)]
    value = np.floor((worth[rows, columns] - least[rows]) * scale).astype(np.int64)
    cost = (choices.costs[rows, columns] - cheapest[rows]) // choices.grain
    base_value, base_bytes = math.fsum(least), int(cheapest.sum())
    variables = np.arange(rows.size)
    limits = _goal_rows(choices, cost, value, base_bytes, (base_value, scale), tight_target)
    limits += _cap_rows(choices, kept)
    parts = _Parts(n_variables=rows.size, rows=limits, implied=[], hints=[])
    if hint is not None:
        parts.hints.append((columns == hint[rows]).astype(np.int64))
    if most is not None:
        _add_levels(parts, choices.tokens[rows, columns], most, hint is not None)
    placed = None
    if placement is not None:
        placed = _add_ranks(parts, choices, rows, columns, placement)
    objective = np.zeros(parts.n_variables, dtype=np.int64)
    objective[: rows.size] = cost if choices.minimise else value
    starts = np.searchsorted(rows, np.arange(choices.n_rows + 1))
    program = Program(
        n_variables=parts.n_variables,
        one_of=[variables[a:b] for a, b in zip(starts[:-1], starts[1:], strict=True)],
        implied=parts.implied,
        rows=parts.rows,
        objective=objective,
        maximise=not choices.minimise,
        hint=parts.hint(),
    )
    return Encoding(
        program=program,
        rows=rows,
        columns=columns,
        base_value=base_value,
        scale=scale,
        base_bytes=base_bytes,
        placed=placed,
    )


@dataclass(kw_only=True)
class _Parts:
    """What is collected while a program is written."""

    n_variables: int
    rows: list[Row]
    implied: list[tuple[IntArray, int]]
    hints: list[IntArray]

    def hint(self) -> IntArray | None:
        """The whole hint, or None where a part is missing."""
        hint = np.concatenate(self.hints) if self.hints else np.zeros(0, dtype=np.int64)
        return hint if hint.size == self.n_variables else None


def _goal_rows(
    choices: Choices,
    cost: IntArray,
    value: IntArray,
    base_bytes: int,
    worth_of_steps: tuple[float, float],
    tight_target: bool,
) -> list[Row]:
    """The rows for the capacity and for the target, as far as there are such."""
    variables = np.arange(cost.size)
    limits = []
    if choices.capacity_bytes is not None:
        room = (min(choices.capacity_bytes, 2**62) - base_bytes) // choices.grain
        limits.append(Row(variables=variables, coefficients=cost, upper=room))
    if choices.target is not None:
        base_value, scale = worth_of_steps
        wanted = (choices.target - base_value) * scale
        lower = math.ceil(wanted) if tight_target else math.floor(wanted) - choices.n_rows
        limits.append(Row(variables=variables, coefficients=value, lower=lower))
    return limits


def _cap_rows(choices: Choices, kept: BoolArray) -> list[Row]:
    position = np.full(choices.worth.shape, -1, dtype=np.int64)
    position[kept] = np.arange(int(kept.sum()))
    limits = []
    for cap in choices.caps:
        where = position[cap.rows]
        there = where >= 0
        limits.append(
            Row(variables=where[there], coefficients=cap.costs[there], upper=cap.capacity_bytes)
        )
    return limits


def _add_levels(parts: _Parts, tokens: IntArray, most: int, hinted: bool) -> None:
    """One variable for each budget in use, at most so many of them."""
    levels, level_of = np.unique(tokens, return_inverse=True)
    first = parts.n_variables
    parts.n_variables += levels.size
    for level in range(levels.size):
        parts.implied.append((np.flatnonzero(level_of == level), first + level))
    used = np.arange(first, first + levels.size)
    parts.rows.append(Row(variables=used, coefficients=np.ones_like(used), upper=most))
    if hinted:
        on = np.zeros(levels.size, dtype=np.int64)
        on[level_of[parts.hints[0] == 1]] = 1
        parts.hints.append(on)


def _add_ranks(
    parts: _Parts, choices: Choices, rows: IntArray, columns: IntArray, placement: Placement
) -> tuple[IntArray, IntArray, int] | None:
    """Loads of the ranks; with the units to be placed, one variable per unit, option and rank."""
    problem, balance = choices.problem, placement.balance
    picks = [np.flatnonzero(rows == choices.row_of[u]) for u in range(problem.n_units)]
    costs = [problem.costs[u, _options(choices, u, columns[own])] for u, own in enumerate(picks)]
    share = Fraction(1 + balance.tolerance).limit_denominator(10**6) / balance.n_ranks
    if placement.ranks is not None:
        ranks = placement.ranks
        loads = [
            (np.concatenate(own), np.concatenate(cost))
            for own, cost in (
                _of_rank(picks, costs, ranks, rank) for rank in range(balance.n_ranks)
            )
            if own
        ]
        _balance_rows(parts, loads, np.concatenate(picks), np.concatenate(costs), share)
        return None
    first = parts.n_variables
    units, at_rank, bytes_ = [], [], []
    free = _free_ranks(problem, balance.n_ranks)
    for unit, (own, cost) in enumerate(zip(picks, costs, strict=True)):
        for pick, bytes_here in zip(own.tolist(), cost.tolist(), strict=True):
            here = np.arange(parts.n_variables, parts.n_variables + len(free[unit]))
            parts.n_variables += here.size
            units += [unit] * here.size
            at_rank += free[unit]
            bytes_ += [bytes_here] * here.size
            # The option is picked on exactly one rank, or not at all.
            parts.rows.append(
                Row(
                    variables=np.append(here, pick),
                    coefficients=np.append(np.ones_like(here), -1),
                    lower=0,
                    upper=0,
                )
            )
    unit_of, rank_of, cost_of = np.array(units), np.array(at_rank), np.array(bytes_)
    _spread_rows(parts, problem, balance.n_ranks, unit_of, rank_of, first)
    loads = [
        (first + np.flatnonzero(rank_of == rank), cost_of[rank_of == rank])
        for rank in range(balance.n_ranks)
    ]
    _balance_rows(parts, loads, np.concatenate(picks), np.concatenate(costs), share)
    return unit_of, rank_of, first


def _of_rank(
    picks: list[IntArray], costs: list[IntArray], ranks: IntArray, rank: int
) -> tuple[list[IntArray], list[IntArray]]:
    on = np.flatnonzero(ranks == rank).tolist()
    return [picks[u] for u in on], [costs[u] for u in on]


def _options(choices: Choices, unit: int, columns: IntArray) -> IntArray:
    return columns if choices.option_of is None else choices.option_of[unit, columns]


def _free_ranks(problem: AllocationProblem, n_ranks: int) -> list[list[int]]:
    """Ranks each unit may take; ranks are alike, so the first layer's units take the first."""
    free = [list(range(n_ranks)) for _ in range(problem.n_units)]
    first = np.flatnonzero(problem.layers == problem.layers[0]).tolist()
    if len(first) <= n_ranks:  # one each: which one does not matter
        for rank, unit in enumerate(first):
            free[unit] = [rank]
    else:
        free[first[0]] = [0]
    return free


def _spread_rows(
    parts: _Parts,
    problem: AllocationProblem,
    n_ranks: int,
    unit_of: IntArray,
    rank_of: IntArray,
    first: int,
) -> None:
    for layer in np.unique(problem.layers):
        in_layer = problem.layers[unit_of] == layer
        most = -(-int((problem.layers == layer).sum()) // n_ranks)
        for rank in range(n_ranks):
            here = first + np.flatnonzero(in_layer & (rank_of == rank))
            parts.rows.append(Row(variables=here, coefficients=np.ones_like(here), upper=most))


def _balance_rows(
    parts: _Parts,
    loads: list[tuple[IntArray, IntArray]],
    all_picks: IntArray,
    all_costs: IntArray,
    share: Fraction,
) -> None:
    """``load of a rank <= share * load of all``, in whole numbers."""
    unit_bytes = max(1, int(np.gcd.reduce(all_costs)))
    total = np.zeros(int(all_picks.max()) + 1, dtype=np.int64)
    np.add.at(total, all_picks, all_costs // unit_bytes)
    for variables, costs in loads:
        row = np.zeros(parts.n_variables, dtype=np.int64)
        row[: total.size] -= total * share.numerator
        np.add.at(row, variables, costs // unit_bytes * share.denominator)
        used = np.flatnonzero(row)
        parts.rows.append(Row(variables=used, coefficients=row[used], upper=0))
