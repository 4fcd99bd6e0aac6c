"""The best price of a byte, and of a byte of each cap: what bounds and reductions rest on.

At given prices every unit picks its best option on its own; the sum bounds the whole, for any
prices (Lagrangian relaxation). Without caps the best price is that of `dual_bound`; with caps it is
read from the dual of the linear relaxation, which has the same optimum (Geoffrion, 1974: a
multiple-choice row has the integrality property). Only options on the upper hull of a unit have a
part in it.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from kvalloc.accounting import BoolArray, FloatArray, IntArray
from kvalloc.accounting.rounding import round_up_to_grain
from kvalloc.errors import InfeasibleError
from kvalloc.problem import AllocationProblem, dual_bound
from kvalloc.problem.bounds import NOISE
from kvalloc.solvers._hulls import upper_hull


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices, the bound they prove, and what every option loses at them.

    Attributes
    ----------
    problem : AllocationProblem
    bound : float
        No choice is better: an upper bound on the value, or a lower bound on the cost in bytes,
        rounded up to the grain of the costs.
    relaxed_bytes : float
        The bound on the cost before it was rounded up and raised to the floors; 0 when the value
        is maximised.
    per_byte : float
        Value of a byte, at least 0.
    per_cap : tuple of float
        Value of a byte of each cap.
    loss : ndarray of float64, (n_units, n_options)
        Net value of a unit's best option less that of each option; inf in the padding.
    start : ndarray of int64, (n_units,)
        A choice to repair: a feasible one if that was possible.
    """

    problem: AllocationProblem
    bound: float
    relaxed_bytes: float
    per_byte: float
    per_cap: tuple[float, ...]
    loss: FloatArray
    start: IntArray

    def room(self, known: float, gap: float = 0.0) -> float:
        """Return the loss beyond which no option is in a choice better than the known objective.

        Parameters
        ----------
        known : float
            Objective of a choice that satisfies everything.
        gap : float
            Improvements of at most this share of the objective are not looked for.

        Returns
        -------
        float
            Negative when no better choice can exist.
        """
        tolerance = self.tolerance(known, gap)
        if self.problem.target is None:
            return self.bound - known - tolerance + NOISE * max(1.0, abs(known))
        grain = self.problem.lattice_bytes
        better = known - max(grain, tolerance)
        return self.per_byte * (better - self.relaxed_bytes + 1e-6 * grain)

    def tolerance(self, known: float, gap: float) -> float:
        """Return a share of what the objective may be, from the known one to the bound."""
        return gap * min(abs(known), abs(self.bound)) if known * self.bound > 0 else 0.0

    def bound_outside(self, known: float, gap: float) -> float:
        """Return a bound on the choices that lose more than the room."""
        tolerance = self.tolerance(known, gap)
        if self.problem.target is None:
            return min(self.bound, known + tolerance)
        # Costs are whole grains: none is between the known one and the next.
        return max(self.bound, known - tolerance * (tolerance > self.problem.lattice_bytes))

    def bound_beyond(self, loss: float) -> float:
        """Return a bound on the choices that lose this much at these prices."""
        if self.problem.target is None:
            return self.bound - loss
        return _rounded_up(self.problem, self.relaxed_bytes + loss / self.per_byte)

    def worth_keeping(self, room: float) -> BoolArray:
        """Return the options whose loss is within the room, ``(n_units, n_options)``."""
        kept: BoolArray = (self.loss <= max(room, 0.0) + NOISE) & self.problem.exists
        return kept


def _rounded_up(problem: AllocationProblem, relaxed_bytes: float) -> float:
    """Return the smallest cost of a choice that is not below a relaxed one."""
    floors = problem.min_cost_bytes
    return float(floors + round_up_to_grain(relaxed_bytes - floors, problem.lattice_bytes))


def best_prices(problem: AllocationProblem, deadline: float = math.inf) -> Prices:
    """Return the prices of the tightest Lagrangian bound.

    Parameters
    ----------
    problem : AllocationProblem
        With or without caps; few distinct budgets are left out, so the bound holds with
        and without them.
    deadline : float
        ``time.monotonic()`` after which caps have no price.

    Returns
    -------
    Prices

    Raises
    ------
    InfeasibleError
        If the caps leave no choice that meets the target.
    """
    floors = np.zeros(problem.n_units, dtype=np.int64)
    if problem.target is not None and problem.meets_target(problem.objective_value(floors)):
        return _prices_of_floors(problem, floors)
    if not problem.caps:
        dual = dual_bound(problem)
        return prices_at(problem, dual.multiplier, np.zeros(0), dual.choice)
    if problem.target is None and problem.fits(free := np.argmax(problem.worth, axis=1)):
        return prices_at(problem, 0.0, np.zeros(len(problem.caps)), free)
    return _by_linear_program(problem, upper_hull(problem), deadline)


def _prices_of_floors(problem: AllocationProblem, floors: IntArray) -> Prices:
    """Return prices where only the cost counts: the cost of an option above its unit's cheapest."""
    loss = np.where(problem.exists, problem.costs - problem.costs[:, :1], np.inf)
    cheapest = float(problem.min_cost_bytes)
    return Prices(
        problem=problem,
        bound=cheapest,
        relaxed_bytes=cheapest,
        per_byte=1.0,
        per_cap=(0.0,) * len(problem.caps),
        loss=loss,
        start=floors,
    )


def prices_at(
    problem: AllocationProblem, per_byte: float, per_cap: FloatArray, start: IntArray
) -> Prices:
    """Return the Lagrangian bound and the losses at given prices; one for each cap, or none."""
    # Costs above the floors, so that large costs at small prices do not eat the digits.
    above = problem.costs - problem.costs[:, :1]
    net = problem.worth - per_byte * above
    paid = 0.0
    for price, cap in zip(per_cap.tolist(), problem.caps, strict=False):
        units = list(cap.units)
        net[units] -= price * above[units]
        paid += price * (cap.capacity_bytes - int(problem.costs[units, 0].sum()))
    best = net.max(axis=1)
    best_worth = math.fsum(best) + paid
    if problem.target is None:
        relaxed = 0.0
        bound = best_worth + per_byte * (problem.spendable_bytes - problem.min_cost_bytes)
    else:
        # Not clipped at the floors: losses add to it even where it lies below them.
        relaxed = problem.min_cost_bytes + (problem.lowest_accepted_value - best_worth) / per_byte
        bound = _rounded_up(problem, relaxed)
    return Prices(
        problem=problem,
        bound=bound,
        relaxed_bytes=relaxed,
        per_byte=per_byte,
        per_cap=tuple(per_cap.tolist()) or (0.0,) * len(problem.caps),
        loss=best[:, None] - net,
        start=start,
    )


def _by_linear_program(problem: AllocationProblem, among: BoolArray, deadline: float) -> Prices:
    """Return prices of the linear relaxation over some options; its solution is rounded down."""
    from scipy import sparse
    from scipy.optimize import linprog

    rows, columns = np.nonzero(among)
    n, minimise = rows.size, problem.target is not None
    costs = problem.costs[rows, columns].astype(np.float64)
    worth = problem.worth[rows, columns]
    worth_scale = max(float(np.abs(worth).max()), 1e-300)
    cost_scale = max(float(costs.max()), 1.0)
    limit = problem.spendable_bytes / cost_scale
    if minimise:
        limit = -problem.lowest_accepted_value / worth_scale
    limits = np.array([limit, *(cap.capacity_bytes / cost_scale for cap in problem.caps)])
    one = sparse.csr_matrix((np.ones(n), (rows, np.arange(n))), shape=(problem.n_units, n))
    goods = (-worth / worth_scale, costs / cost_scale)
    limited = [goods[1 - int(minimise)]]  # the capacity or the target, then the caps
    limited += [np.where(np.isin(rows, cap.units), goods[1], 0.0) for cap in problem.caps]
    answer = linprog(
        goods[int(minimise)],
        A_ub=sparse.csr_matrix(np.stack(limited)),
        b_ub=limits,
        A_eq=one,
        b_eq=np.ones(problem.n_units),
        method="highs-ds",
        options={"time_limit": min(1e9, max(0.01, deadline - time.monotonic()))},
    )
    if answer.status == 2 and minimise:
        if np.array_equal(among, problem.exists):
            raise _beyond_caps(problem, deadline)
        # Too few options to meet the target; with all of them it may be met.
        return _by_linear_program(problem, problem.exists, deadline)
    if answer.status != 0:  # no time, or it does not know: any prices give a bound
        dual = dual_bound(problem)
        floors = np.zeros(problem.n_units, dtype=np.int64)
        return prices_at(problem, dual.multiplier, np.zeros(len(problem.caps)), floors)
    duals = np.maximum(0.0, -answer.ineqlin.marginals)
    if minimise:  # duals are bytes per unit of worth: turn them round
        per_byte = worth_scale / (max(float(duals[0]), 1e-12) * cost_scale)
        per_cap = duals[1:] * per_byte
    else:
        per_byte = float(duals[0]) * worth_scale / cost_scale
        per_cap = duals[1:] * worth_scale / cost_scale
    shares = np.zeros(problem.worth.shape)
    shares[rows, columns] = answer.x
    # The cheapest option that a unit takes a share of: all costs fall, so capacity and caps hold.
    down = np.argmax(shares > 1e-7, axis=1).astype(np.int64)
    return prices_at(problem, per_byte, per_cap, down)


def _beyond_caps(problem: AllocationProblem, deadline: float) -> InfeasibleError:
    """Return the error that names the caps in the way of a target, and what can be met."""
    free = problem.with_capacity(problem.max_cost_bytes)
    prices = best_prices(free, deadline)
    priced = [cap.name for cap, price in zip(free.caps, prices.per_cap, strict=True) if price > 0]
    tight = priced or [cap.name for cap in free.caps]
    names = ", ".join(tight[:5]) + (f" and {len(tight) - 5} more" if len(tight) > 5 else "")
    nearest = free.objective_value(prices.start)
    return InfeasibleError(
        f"a target of {problem.target:.15g} cannot be met within the caps of {names}; "
        f"{nearest:.15g} can; raise the caps or ask for that",
        nearest=nearest,
    )
