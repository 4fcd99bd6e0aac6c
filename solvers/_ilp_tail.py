"""The integer program for the worst share of several workloads: one more row for each of them.

With the whole-number worths F_s of a pick in each scenario and a tail of ``a S = n / d`` of them,
``n * tail = max_t  n t - d sum_s max(0, t - F_s)`` (Rockafellar and Uryasev, 2000): one variable
for t and one for what each scenario falls short of it, all whole where the F_s are.
"""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from kvalloc.accounting import BoolArray, FloatArray, IntArray
from kvalloc.errors import InfeasibleError
from kvalloc.problem import AllocationProblem, Sense, TailBound, tail_bound
from kvalloc.solvers._choices import Choices
from kvalloc.solvers._ilp_found import Found, Options
from kvalloc.solvers._ilp_program import Encoding, Limits, Placement, Row, encode
from kvalloc.solvers._ilp_search import REPAIR_SECONDS, Search
from kvalloc.solvers._prices import best_prices
from kvalloc.solvers._tail_repair import best_known

TAIL_RANGE = 2**55
"""What the largest sums of the tail's row are mapped to."""

MOST_PARTS = 10_000
"""The tail share is read as a fraction of at most so many parts."""


@dataclass(frozen=True, kw_only=True)
class _Tail:
    """Worths in whole numbers, ``(n_scenarios, n_picks)``, and how to read sums of them."""

    worth: IntArray
    base: float
    scale: float
    share: Fraction


class TailSearch(Search):
    """One solve for a tail of scenarios, with all side constraints.

    The dual's weights of the scenarios make a problem with one workload whose bound holds here
    too; its losses say which options cannot be part of anything better than what is known, and
    the program holds the others.
    """

    def run(self) -> Found:
        """The optimum over what the bound leaves open."""
        bound = tail_bound(self.problem)
        mean = Choices.of(self.problem.reweighted(bound.weights))
        prices = best_prices(mean)
        known, ranks = self._known(bound, mean)
        best = Found(picked=known, bound=prices.bound, ranks=ranks)
        room = math.inf
        if known is not None:
            room = prices.room(mean, self._objective(known), self.options.gap)
        if room < 0:
            assert known is not None  # without it there is room
            return dataclasses.replace(best, bound=self._objective(known))
        kept = self.choices.exists.copy()
        if self.options.reduce and math.isfinite(room):
            kept &= prices.worth_keeping(room)
        if known is not None:
            kept[self.choices.index, known] = True
        asked = self._ask_tail(kept, known)
        if asked.infeasible and known is None:
            return dataclasses.replace(asked, bound=prices.bound)
        if asked.picked is not None and (known is None or self._improves(asked.picked, known)):
            best = dataclasses.replace(asked, bound=best.bound)
        return self._settled_tail(best, asked)

    def _settled_tail(self, best: Found, asked: Found) -> Found:
        """With the tighter of the dual's bound and the program's, no better than the pick."""
        tighter, looser = (max, min) if self.choices.minimise else (min, max)
        inside = asked.bound
        if best.picked is not None:
            objective = self._objective(best.picked)
            # Nothing outside the program is better than what was known.
            inside = objective if asked.infeasible else looser(inside, objective)
        return dataclasses.replace(
            best,
            bound=tighter(best.bound, inside),
            status=asked.status,
            n_options=asked.n_options,
        )

    def _objective(self, picked: IntArray) -> float:
        return self.problem.objective(self.choices.expand(picked))

    def _improves(self, picked: IntArray, known: IntArray) -> bool:
        return self.choices.better(self._objective(picked), self._objective(known))

    def _known(self, bound: TailBound, mean: Choices) -> tuple[IntArray | None, IntArray | None]:
        """A pick that keeps everything, and its ranks, where one is found easily."""
        until = min(self.deadline, time.monotonic() + REPAIR_SECONDS)
        if not self.problem.constraints:
            return best_known(self.problem, bound, until), None
        try:
            search = Search(self.options, mean.problem, until)
            found = search.run()
        except InfeasibleError:
            return None, None
        if found.picked is None:
            return None, None
        choice = self.choices.expand(found.picked)
        able = self.problem.side_fault(choice, found.ranks) is None
        if self.problem.target is not None:
            able &= self.problem.meets_target(self.problem.objective_value(choice))
        return (found.picked, found.ranks) if able else (None, None)

    def _ask_tail(self, kept: BoolArray, known: IntArray | None) -> Found:
        """Encode, solve and read; twice where rounding lets the target be missed."""
        relaxed: Found | None = None
        for tight in (False, True):
            encoding = encode(
                dataclasses.replace(self.choices, target=None),
                kept,
                most=self.most,
                placement=None
                if self.balance is None
                else Placement(balance=self.balance, ranks=None),
                hint=known,
            )
            tail = self._worths(encoding)
            found = self._answered(self._with_tail(encoding, tail, tight), tail)
            if relaxed is not None:  # the bound of the program that loses nothing
                return dataclasses.replace(found, bound=relaxed.bound, infeasible=False)
            if found.picked is None or self.problem.meets_target(
                self.problem.objective_value(self.choices.expand(found.picked))
            ):
                return found
            relaxed = found
        raise AssertionError("the loop returns")

    def _worths(self, encoding: Encoding) -> _Tail:
        """What each pick adds in each scenario, rounded down to whole numbers."""
        real = _pick_worths(self.choices, encoding.rows, encoding.columns)
        least = np.full(self.choices.n_rows, np.inf)
        np.minimum.at(least, encoding.rows, real.min(axis=0))
        most = np.full(self.choices.n_rows, -np.inf)
        np.maximum.at(most, encoding.rows, real.max(axis=0))
        spread = math.fsum(most - least)
        count = real.shape[0]
        share = Fraction(self.problem.tail_share).limit_denominator(MOST_PARTS) * count
        share = max(share, Fraction(1))
        largest = share.numerator + share.denominator * count
        scale = TAIL_RANGE / (largest * spread) if spread > 0 else 1.0
        whole = np.floor((real - least[encoding.rows]) * scale).astype(np.int64)
        return _Tail(worth=whole, base=math.fsum(least), scale=scale, share=share)

    def _with_tail(self, encoding: Encoding, tail: _Tail, tight: bool) -> Encoding:
        """The program with the variables and rows of the tail, and its goal."""
        program = encoding.program
        count, n_picks = tail.worth.shape
        level, first = program.n_variables, program.n_variables + 1
        rows = list(program.rows)
        picks = np.arange(n_picks)
        for scenario in range(count):  # what it falls short: at least the level less its worth
            rows.append(
                Row(
                    variables=np.concatenate([picks, [first + scenario, level]]),
                    coefficients=np.concatenate([tail.worth[scenario], [1, -1]]),
                    lower=0,
                )
            )
        variables = np.arange(level, first + count)
        parts = np.full(count + 1, -tail.share.denominator)
        parts[0] = tail.share.numerator
        if self.problem.target is not None:
            wanted = self.problem.lowest_accepted_value - tail.base
            wanted *= tail.scale * tail.share.numerator
            slack = self.choices.n_rows * tail.share.numerator
            lower = math.ceil(wanted) if tight else math.floor(wanted) - slack
            rows.append(Row(variables=variables, coefficients=parts, lower=lower))
        objective = np.concatenate([program.objective, np.zeros(count + 1, dtype=np.int64)])
        if self.problem.sense is Sense.MAX_VALUE:
            objective[:] = 0
            objective[level:] = parts
        hint = None
        if program.hint is not None:
            reached = tail.worth @ program.hint[:n_picks]
            place = min(count, math.ceil(tail.share)) - 1
            at = int(np.sort(reached)[place])
            hint = np.concatenate([program.hint, [at], np.maximum(0, at - reached)])
        extended = dataclasses.replace(
            program,
            n_variables=first + count,
            rows=rows,
            objective=objective,
            hint=hint,
            whole_limits=(self._highest(encoding, tail),) * (count + 1),
        )
        return dataclasses.replace(encoding, program=extended)

    def _highest(self, encoding: Encoding, tail: _Tail) -> int:
        """No scenario's worth is larger."""
        most = np.zeros(self.choices.n_rows, dtype=np.int64)
        np.maximum.at(most, encoding.rows, tail.worth.max(axis=0))
        return int(most.sum())

    def _answered(self, encoding: Encoding, tail: _Tail) -> Found:
        minimise = self.choices.minimise
        limits = Limits(deadline=self.deadline, absolute_gap=0.0, workers=self.options.workers)
        answer = self.options.backend(encoding.program, limits)
        picked = ranks = None
        if answer.values is not None:
            picked = encoding.picked(answer.values, self.choices.n_rows)
            ranks = encoding.ranks(answer.values, self.problem.n_units)
        bound = -math.inf if minimise else math.inf
        if answer.bound is not None and minimise:
            bound = encoding.base_bytes + math.ceil(answer.bound - 1e-6) * self.choices.grain
        elif answer.bound is not None:
            # Each worth was rounded down by less than one step.
            steps = answer.bound / tail.share.numerator + self.choices.n_rows
            bound = tail.base + steps / tail.scale
        return Found(
            picked=picked,
            bound=float(bound),
            status=answer.status,
            n_options=encoding.rows.size,
            infeasible=answer.infeasible,
            ranks=ranks,
        )


def most_reachable(options: Options, problem: AllocationProblem, deadline: float) -> float | None:
    """The largest tail that any choice within the side constraints has, where it is found."""
    try:
        search = TailSearch(options, problem.with_capacity(problem.max_cost_bytes), deadline)
        found = search.run()
    except InfeasibleError:
        return None
    if found.picked is None:
        return None
    return problem.objective_value(search.choices.expand(found.picked))


def _pick_worths(choices: Choices, rows: IntArray, columns: IntArray) -> FloatArray:
    """Weighted worth of options in each scenario, ``(n_scenarios, n_picks)``."""
    problem = choices.problem
    assert problem.scenarios is not None  # the search is for problems with scenarios
    if choices.option_of is None:
        direct: FloatArray = problem.weights[rows] * problem.scenarios[:, rows, columns]
        return direct
    worth = np.zeros((problem.scenarios.shape[0], rows.size))
    for unit in range(problem.n_units):
        own = np.flatnonzero(rows == choices.row_of[unit])
        options = choices.option_of[unit, columns[own]]
        worth[:, own] += problem.weights[unit] * problem.scenarios[:, unit, options]
    return worth
