"""Several workloads at once: the mean of the worst of them, and a bound on it that needs no trust.

With equally likely workloads s of values f_s, the mean of the worst share a of them is

    CVaR_a = max_t  t - sum_s max(0, t - f_s) / (a S)  =  min_p  sum_s p_s f_s

over the risk envelope ``p >= 0, sum p = 1, p_s <= 1 / (a S)`` (Rockafellar and Uryasev, 2000;
Rockafellar, Uryasev and Zabarankin, 2006, for the envelope). a = 1 is the mean; a <= 1 / S is the
worst workload. For fixed p the value is a sum over units again, so its dual bound holds for the
tail too, whatever p is; the best p and the best price of a byte minimise a convex function, whose
cutting planes are the units' best responses (Kelley, 1960).
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.errors import InputError, SolverError
from kvalloc.problem.dual import DualBound, dual_bound

if TYPE_CHECKING:
    from kvalloc.problem.arrays import AllocationProblem


ROUNDS = 60
"""Linear programs solved for the best weights; any weights give a bound, these a tight one."""

CLOSE = 1e-10
"""Bounds this close, as a share of the range of the values (costs), are the same."""

MOST_WEIGHT = 1e6
"""Largest worth of a target, in ranges of the cost for a range of the values."""

MEAN_TOLERANCE = 1e-9
"""How far the values may be from the mean of the scenarios, relative to the largest of them."""


@dataclass(frozen=True, kw_only=True)
class TailBound(DualBound):
    """A bound on the mean of the worst scenarios, and the weights and price that prove it.

    Attributes
    ----------
    weights : ndarray of float64, (n_scenarios,)
        Weights of the scenarios within the risk envelope; those whose sum problem bounds this one.
    """

    weights: FloatArray


def tail_places(n_scenarios: int, tail_share: float) -> FloatArray:
    """Weight of each place when scenarios are sorted from worst to best.

    Parameters
    ----------
    n_scenarios : int
    tail_share : float
        Share of the scenarios that counts, above 0 and up to 1.

    Returns
    -------
    ndarray of float64, (n_scenarios,)
        Sums to 1.

    Examples
    --------
    >>> tail_places(4, 0.5).tolist(), tail_places(4, 0.1).tolist()
    ([0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0])
    """
    places = np.clip(tail_share * n_scenarios - np.arange(n_scenarios), 0.0, 1.0)
    shares: FloatArray = places / places.sum()
    return shares


def tail_value(values: FloatArray, tail_share: float) -> float:
    """Mean of the worst share of equally likely values, summed without loss.

    Parameters
    ----------
    values : ndarray of float64, (n_scenarios,)
    tail_share : float
        Above 0 and up to 1.

    Returns
    -------
    float

    References
    ----------
    Rockafellar and Uryasev: Optimization of conditional value-at-risk (2000).

    Examples
    --------
    >>> import numpy as np
    >>> tail_value(np.array([0.9, 0.5, 0.7, 0.8]), 0.5)
    0.6
    """
    return math.fsum(np.sort(values) * tail_places(values.size, tail_share))


def scenario_values(problem: AllocationProblem, choice: IntArray) -> FloatArray:
    """Value of a choice in each scenario, ``(n_scenarios,)``, each summed without loss.

    Raises
    ------
    InputError
        If the problem has no scenarios.
    """
    chosen = _scenarios(problem)[:, np.arange(problem.n_units), choice]
    return np.array([math.fsum(row) for row in problem.weights * chosen])


def reweighted(problem: AllocationProblem, weights: FloatArray) -> AllocationProblem:
    """The same problem for one weighted mean of its scenarios, as a sum over units.

    Parameters
    ----------
    problem : AllocationProblem
        With scenarios.
    weights : ndarray of float64, (n_scenarios,)
        Not negative, summing to 1.

    Returns
    -------
    AllocationProblem
        Its values, ``(n_units, n_options)``, are new; everything else is shared.
    """
    kinds = type(problem.aggregate)  # the problem is of a layer above
    scenarios = _scenarios(problem)
    values = np.zeros(scenarios.shape[1:])
    scaled = np.empty_like(values)
    for scenario in np.flatnonzero(weights).tolist():
        values += np.multiply(scenarios[scenario], weights[scenario], out=scaled)
    values.flags.writeable = False
    other = copy.copy(problem)  # shares what was computed from tokens and costs
    for name in ("is_concave", "max_value", "largest_gain"):
        other.__dict__.pop(name, None)
    if problem.scenarios_are_concave:  # and so is every weighted mean
        other.__dict__["is_concave"] = True
    changed = {"values": values, "scenarios": None, "tail_share": 1.0}
    for name, value in (*changed.items(), ("aggregate", kinds.SUM)):
        object.__setattr__(other, name, value)
    return other


def tail_bound(problem: AllocationProblem) -> TailBound:
    """The tightest Lagrangian bound on the mean of the worst scenarios.

    Weights of the scenarios and the price of a byte are found together: a linear program over
    them holds one row for each option that was some unit's best response so far, and its solution
    asks for the next ones. What is returned is the dual bound of the problem for the best weights
    found, so it holds however far the linear programs got.

    Parameters
    ----------
    problem : AllocationProblem
        With `Aggregate.TAIL`. Side constraints are left out: the bound holds with and without
        them.

    Returns
    -------
    TailBound
        Its choice keeps the capacity; it meets the target where keeping everything does.

    Raises
    ------
    InfeasibleError
        If no choice meets the capacity or the target.

    References
    ----------
    Kelley: The cutting-plane method for solving convex programs (1960).
    """
    problem.check_feasible()
    scenarios = _scenarios(problem)
    count = scenarios.shape[0]
    floors = np.zeros(problem.n_units, dtype=np.int64)
    if problem.target is not None and problem.meets_target(problem.objective_value(floors)):
        bound, weights = float(problem.min_cost_bytes), np.full(count, 1.0 / count)
        return TailBound(bound=bound, multiplier=0.0, choice=floors, weights=weights)
    weights = _best_weights(problem)
    proven = dual_bound(reweighted(problem, weights))
    choice = proven.choice
    if problem.target is not None and not problem.meets_target(problem.objective_value(choice)):
        choice = problem.last_options.copy()
    return TailBound(
        bound=proven.bound, multiplier=proven.multiplier, choice=choice, weights=weights
    )


def check_scenarios(problem: AllocationProblem) -> None:
    """Refuse scenarios that do not fit the rest of the problem.

    Raises
    ------
    InputError
    """
    kinds = type(problem.aggregate)  # the problem is of a layer above
    scenarios = problem.scenarios
    if (scenarios is not None) != (problem.aggregate is kinds.TAIL):
        raise InputError("problem: scenarios go with Aggregate.TAIL, and it with scenarios")
    if scenarios is None:
        return
    if not 0 < problem.tail_share <= 1:
        raise InputError(
            f"problem: the tail share is {problem.tail_share:g}, expected a number above 0 and up "
            "to 1"
        )
    if scenarios.ndim != 3 or scenarios.shape[0] < 1 or scenarios.shape[1:] != problem.values.shape:
        raise InputError(
            f"problem: scenarios are shaped {scenarios.shape}, expected (scenarios >= 1, "
            f"{problem.n_units}, {problem.n_options})"
        )
    if not (math.isfinite(float(scenarios.min())) and math.isfinite(float(scenarios.max()))):
        raise InputError("problem: scenarios are not all finite numbers")
    off = np.abs(scenarios.mean(axis=0) - problem.values).max()
    if off > MEAN_TOLERANCE * max(1.0, float(np.abs(problem.values).max())):
        raise InputError(
            f"problem: values must be the mean of the scenarios and are off by up to {off:.3g}"
        )


def most_tail_value(problem: AllocationProblem) -> float:
    """No choice has more: the tail of each scenario's own best; exact where all rows rise."""
    scenarios = _scenarios(problem)
    valid = np.arange(problem.n_options)[None, :] < problem.option_counts[:, None]
    bests = [np.where(valid, rows, -np.inf).max(axis=1) for rows in scenarios]
    most = np.array([math.fsum(problem.weights * best) for best in bests])
    return tail_value(most, problem.tail_share)


def _scenarios(problem: AllocationProblem) -> FloatArray:
    if problem.scenarios is None:
        raise InputError("this problem has no scenarios, only their mean")
    return problem.scenarios


class _Master:
    """The linear program over scenario weights g, the price y of a byte, and the units' worths t.

    Minimise ``sum_u t_u + y C - T sum_s g_s`` with ``t_u >= sum_s g_s v_s[u, k] - y c[u, k]`` for
    the options k seen so far and g in the risk envelope. For most value, ``sum g = 1`` and T = 0;
    for least cost, y = 1 and C = 0, and g is as large as the target is worth. Values and costs
    are counted from each unit's first option, in shares of their ranges.
    """

    def __init__(self, problem: AllocationProblem) -> None:
        self.problem = problem
        self.scenarios = _scenarios(problem)
        self.units = np.arange(problem.n_units)
        first, last = self.scenarios[:, :, 0], self.scenarios[:, self.units, problem.last_options]
        self.floors = np.array([math.fsum(row) for row in problem.weights * first])
        rise = np.abs(problem.weights * (last - first)).sum(axis=1).max()
        self.value_range = float(rise) or 1.0
        self.cost_range = float(problem.max_cost_bytes - problem.min_cost_bytes) or 1.0
        self.seen: set[tuple[int, int]] = set()
        self.of_unit: list[IntArray] = []
        self.rows: list[FloatArray] = []
        self.add(problem.last_options)

    @property
    def goal(self) -> FloatArray:
        """Objective of g and y, ``(n_scenarios + 1,)``."""
        problem, base = self.problem, self.floors
        if problem.target is not None:
            return np.append((base - problem.lowest_accepted_value) / self.value_range, 0.0)
        room = (problem.spendable_bytes - problem.min_cost_bytes) / self.cost_range
        return np.append(base / self.value_range, room)

    def add(self, choice: IntArray) -> bool:
        """Rows for the options of a choice; False where all are there already."""
        fresh = [u for u, k in enumerate(choice.tolist()) if k > 0 and (u, k) not in self.seen]
        if not fresh:
            return False
        self.seen.update((u, int(choice[u])) for u in fresh)
        at = np.asarray(fresh, dtype=np.int64)
        self.of_unit.append(at)
        self.rows.append(self._relative(choice)[at])
        return True

    def _relative(self, choice: IntArray) -> FloatArray:
        """Value in each scenario and minus the cost of chosen options, ``(n_units, S + 1)``."""
        problem, units = self.problem, self.units
        values = self.scenarios[:, units, choice] - self.scenarios[:, :, 0]
        costs = problem.costs[units, choice] - problem.costs[:, 0]
        scaled = problem.weights * values / self.value_range
        return np.vstack([scaled, -costs[None, :] / self.cost_range]).T

    def worth(self, at: FloatArray, choice: IntArray) -> float:
        """The function itself at g and y, given the best response to them."""
        return float(self.goal @ at) + math.fsum(self._relative(choice) @ at)

    def solve(self) -> tuple[FloatArray, float]:
        """The best g and y for the rows there are, and the value: a bound on the best there is."""
        from scipy import sparse
        from scipy.optimize import linprog

        count, n_units = self.floors.size, self.problem.n_units
        of_unit = np.concatenate(self.of_unit)
        n_rows = of_unit.size
        picks = sparse.csr_matrix(
            (-np.ones(n_rows), (np.arange(n_rows), of_unit)), shape=(n_rows, n_units)
        )
        effective = max(1.0, self.problem.tail_share * count)
        envelope = np.hstack([effective * np.eye(count) - 1.0, np.zeros((count, 1))])
        above = sparse.vstack(
            [
                sparse.hstack([sparse.csr_matrix(np.vstack(self.rows)), picks]),
                sparse.hstack([sparse.csr_matrix(envelope), sparse.csr_matrix((count, n_units))]),
            ],
            format="csr",
        )
        total = np.concatenate([np.ones(count), np.zeros(1 + n_units)])[None, :]
        least_cost = self.problem.target is not None
        weight = (0.0, MOST_WEIGHT if least_cost else 1.0)
        price = (1.0, 1.0) if least_cost else (0.0, None)
        answer = linprog(
            np.concatenate([self.goal, np.ones(n_units)]),
            A_ub=above,
            b_ub=np.zeros(n_rows + count),
            A_eq=None if least_cost else total,
            b_eq=None if least_cost else np.ones(1),
            bounds=[weight] * count + [price] + [(0.0, None)] * n_units,
            method="highs",
            options={"primal_feasibility_tolerance": 1e-9, "dual_feasibility_tolerance": 1e-9},
        )
        if answer.status != 0:
            raise SolverError(f"the best scenario weights cannot be found: {answer.message}")
        return np.maximum(answer.x[: count + 1], 0.0), float(answer.fun)


def _best_weights(problem: AllocationProblem) -> FloatArray:
    """Weights of the scenarios whose problem bounds the tail best."""
    master = _Master(problem)
    count = master.floors.size
    if not master.rows:  # one option for each unit: the weights that its own tail has
        weights = np.zeros(count)
        weights[np.argsort(master.floors, kind="stable")] = tail_places(count, problem.tail_share)
        return weights
    best, lowest = np.full(count, 1.0 / count), math.inf
    for _ in range(ROUNDS):
        at, reached = master.solve()
        total = float(at[:count].sum())
        weights = at[:count] / total if total > 0 else np.full(count, 1.0 / count)
        # No weight at all on the target: at any price the first options are best.
        ratio = master.value_range / master.cost_range
        price = float(at[count]) / total * ratio if total > 0 else math.inf
        response = np.zeros(problem.n_units, dtype=np.int64)
        if math.isfinite(price):
            response = reweighted(problem, weights).best_response(price)
        worth = master.worth(at, response)
        if worth < lowest:
            best, lowest = weights, worth
        if lowest - reached <= CLOSE or not master.add(response):
            break
    return _within_envelope(best, problem.tail_share)


def _within_envelope(weights: FloatArray, tail_share: float) -> FloatArray:
    """The weights without what a linear program's tolerance put outside the envelope."""
    most = 1.0 / max(1.0, tail_share * weights.size)
    inside: FloatArray = np.minimum(weights / weights.sum(), most)
    missing, slack = 1.0 - float(inside.sum()), most - inside
    if missing > 0 and float(slack.sum()) > 0:
        inside += slack * (missing / slack.sum())
    return inside
