"""The best price of a byte, and of a byte of each cap: what bounds and reductions rest on.

At given prices every row picks its best option on its own; the sum bounds the whole, for any
prices (Lagrangian relaxation). Without caps the best price is found exactly by a secant search on
the breakpoints of the dual function; with caps it is read from the dual of the linear relaxation,
which has the same optimum (Geoffrion, 1974: a multiple-choice row has the integrality property).
Only options on the upper hull of a row have a part in it.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from kvalloc.accounting import BoolArray, FloatArray, IntArray
from kvalloc.errors import InfeasibleError
from kvalloc.problem.bounds import NOISE, best_price
from kvalloc.solvers._choices import Choices
from kvalloc.solvers._hulls import upper_hull


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices, the bound they prove, and what every option loses at them.

    Attributes
    ----------
    bound : float
        No pick is better: an upper bound on the worth, or a lower bound on the cost in bytes,
        rounded up to the grain of the costs.
    relaxed_bytes : float
        The bound on the cost before it was rounded up and raised to the floors; 0 when the worth
        is maximised.
    per_byte : float
        Worth of a byte, at least 0.
    per_cap : tuple of float
        Worth of a byte of each cap.
    loss : ndarray of float64, (n_rows, n_columns)
        How much less an option nets than its row's best; inf where there is none.
    starts : tuple of ndarray of int64, (n_rows,)
        Picks to repair: feasible ones where that was possible.
    """

    bound: float
    relaxed_bytes: float
    per_byte: float
    per_cap: tuple[float, ...]
    loss: FloatArray
    starts: tuple[IntArray, ...]

    def room(self, choices: Choices, known: float, gap: float = 0.0) -> float:
        """Return the loss beyond which no option is in a pick better than the known objective.

        Parameters
        ----------
        choices : Choices
        known : float
            Objective of a pick that satisfies everything.
        gap : float
            Improvements of at most this share of the objective are not looked for.

        Returns
        -------
        float
            Negative when no better pick can exist.
        """
        tolerance = self.tolerance(known, gap)
        if not choices.minimise:
            return self.bound - known - tolerance + NOISE * max(1.0, abs(known))
        better = known - max(choices.grain, tolerance)
        return self.per_byte * (better - self.relaxed_bytes + 1e-6 * choices.grain)

    def tolerance(self, known: float, gap: float) -> float:
        """Return a share of what the objective may be, from the known one to the bound."""
        return gap * min(abs(known), abs(self.bound)) if known * self.bound > 0 else 0.0

    def beyond_room(self, choices: Choices, known: float, gap: float) -> float:
        """Return what no pick that loses more than the room can beat."""
        tolerance = self.tolerance(known, gap)
        if not choices.minimise:
            return choices.tighter(self.bound, known + tolerance)
        # Costs are whole grains: none is between the known one and the next.
        return choices.tighter(self.bound, known - tolerance * (tolerance > choices.grain))

    def beyond(self, choices: Choices, loss: float) -> float:
        """Return what no pick that loses so much at these prices can beat."""
        if not choices.minimise:
            return self.bound - loss
        return choices.rounded_up(self.relaxed_bytes + loss / self.per_byte)

    def worth_keeping(self, room: float) -> BoolArray:
        """Return the options whose loss is within the room, ``(n_rows, n_columns)``."""
        kept: BoolArray = self.loss <= max(room, 0.0) + NOISE
        return kept


def best_prices(choices: Choices, deadline: float = math.inf) -> Prices:
    """Return the prices of the tightest Lagrangian bound.

    Parameters
    ----------
    choices : Choices
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
        If the caps leave no pick that meets the target.
    """
    if choices.minimise and (choices.target is None or choices.satisfies(choices.floors)):
        return _prices_of_floors(choices)
    if not choices.minimise:
        free = np.argmax(choices.worth, axis=1).astype(np.int64)
        if choices.satisfies(free):
            return prices_at(choices, 0.0, np.zeros(0), free)
    if choices.caps:
        return _by_linear_program(choices, upper_hull(choices), deadline)
    price, under, over = _secant(choices)
    return prices_at(choices, price, np.zeros(0), over if choices.minimise else under)


def _prices_of_floors(choices: Choices) -> Prices:
    """Return prices where only the cost counts: what an option costs beyond its row's cheapest."""
    floors = choices.costs[choices.index, choices.floors]
    loss = np.where(choices.exists, choices.costs - floors[:, None], np.inf)
    least = float(choices.floor_bytes)
    return Prices(
        bound=least,
        relaxed_bytes=least,
        per_byte=1.0,
        per_cap=(0.0,) * len(choices.caps),
        loss=loss,
        starts=(choices.floors,),
    )


def _secant(choices: Choices) -> tuple[float, IntArray, IntArray]:
    """Return the price where the best response crosses the goal, and the picks on both sides."""

    def gain(before: IntArray, after: IntArray) -> tuple[float, int]:
        rows = np.flatnonzero(before != after)
        gained = choices.worth[rows, after[rows]] - choices.worth[rows, before[rows]]
        return float(gained.sum()), choices.cost(after) - choices.cost(before)

    def respond(price: float, low: IntArray, high: IntArray) -> IntArray:
        picked, active = low.copy(), np.flatnonzero(low != high)
        columns = slice(int(low[active].min()), int(high[active].max()) + 1)
        net = choices.worth[active, columns] - price * choices.costs[active, columns]
        picked[active] = np.argmax(net, axis=1) + columns.start
        return picked

    def is_enough(picked: IntArray) -> bool:
        if choices.minimise:
            return float(choices.worth[choices.index, picked].sum()) >= choices.target_value
        return choices.cost(picked) > choices.budget_bytes

    free = np.argmax(choices.worth, axis=1).astype(np.int64)
    return best_price(
        choices.floors,
        free,
        gain=gain,
        respond=respond,
        is_enough=is_enough,
    )


def prices_at(choices: Choices, per_byte: float, per_cap: FloatArray, start: IntArray) -> Prices:
    """Return the Lagrangian bound and the losses at given prices."""
    # Costs above the floors, so that large costs at small prices do not eat the digits.
    floors = choices.costs[choices.index, choices.floors]
    net = choices.worth - per_byte * (choices.costs - floors[:, None])
    paid = 0.0
    for price, cap in zip(per_cap.tolist(), choices.caps, strict=False):
        if price > 0.0:
            net[cap.rows] -= price * cap.costs
            paid += price * cap.capacity_bytes
    net[~choices.exists] = -np.inf
    best = net.max(axis=1)
    loss = best[:, None] - net
    best_worth = math.fsum(best) + paid
    if choices.minimise:
        # Not clipped at the floors: losses add to it even where it lies below them.
        relaxed = choices.floor_bytes + (choices.target_value - best_worth) / per_byte
        bound = choices.rounded_up(relaxed)
    else:
        relaxed = 0.0
        bound = best_worth + per_byte * (choices.budget_bytes - choices.floor_bytes)
    return Prices(
        bound=bound,
        relaxed_bytes=relaxed,
        per_byte=per_byte,
        per_cap=tuple(per_cap.tolist()) or (0.0,) * len(choices.caps),
        loss=loss,
        starts=(start,),
    )


def _by_linear_program(choices: Choices, among: BoolArray, deadline: float) -> Prices:
    """Return prices of the linear relaxation over some options; its solution is rounded down."""
    from scipy import sparse
    from scipy.optimize import linprog

    rows, columns = np.nonzero(among)
    n = rows.size
    costs = choices.costs[rows, columns].astype(np.float64)
    worth = choices.worth[rows, columns]
    worth_scale = max(float(np.abs(worth).max()), 1e-300)
    cost_scale = max(float(costs.max()), 1.0)
    limit = (
        -choices.target_value / worth_scale
        if choices.minimise
        else choices.budget_bytes / cost_scale
    )
    limits = np.array([limit, *(cap.capacity_bytes / cost_scale for cap in choices.caps)])
    one = sparse.csr_matrix((np.ones(n), (rows, np.arange(n))), shape=(choices.n_rows, n))
    goods = (-worth / worth_scale, costs / cost_scale)
    limited = [(np.arange(n), goods[1 - int(choices.minimise)])]  # capacity or target, then caps
    limited += [(where, drawn / cost_scale) for where, drawn in choices.cap_rows(among)]
    at_row = np.repeat(np.arange(len(limited)), [where.size for where, _ in limited])
    at_column = np.concatenate([where for where, _ in limited])
    drawn = np.concatenate([drawn for _, drawn in limited])
    answer = linprog(
        goods[int(choices.minimise)],
        A_ub=sparse.csr_matrix((drawn, (at_row, at_column)), shape=(len(limited), n)),
        b_ub=limits,
        A_eq=one,
        b_eq=np.ones(choices.n_rows),
        method="highs-ds",
        options={"time_limit": min(1e9, max(0.01, deadline - time.monotonic()))},
    )
    if answer.status == 2 and choices.minimise:
        if np.array_equal(among, choices.exists):
            raise _beyond_caps(choices, deadline)
        # Too few options to meet the target; with all of them it may be met.
        return _by_linear_program(choices, choices.exists, deadline)
    if answer.status != 0:  # no time, or it does not know: any prices give a bound
        price = _secant(choices)[0]
        return prices_at(choices, price, np.zeros(len(choices.caps)), choices.floors)
    duals = np.maximum(0.0, -answer.ineqlin.marginals)
    if choices.minimise:  # duals are bytes per unit of worth: turn them round
        per_byte = worth_scale / (max(float(duals[0]), 1e-12) * cost_scale)
        per_cap = duals[1:] * per_byte
    else:
        per_byte = float(duals[0]) * worth_scale / cost_scale
        per_cap = duals[1:] * worth_scale / cost_scale
    shares = np.zeros(choices.worth.shape)
    shares[rows, columns] = answer.x
    # The cheapest option that a row takes a share of: all costs fall, so capacity and caps hold.
    down = np.argmax(shares > 1e-7, axis=1).astype(np.int64)
    return prices_at(choices, per_byte, per_cap, down)


def _beyond_caps(choices: Choices, deadline: float) -> InfeasibleError:
    """Return the error that names the caps in the way of a target, and what can be met."""
    free = choices.with_capacity(choices.problem.max_cost_bytes)
    prices = best_prices(free, deadline)
    priced = [cap.name for cap, price in zip(free.caps, prices.per_cap, strict=True) if price > 0]
    tight = priced or [cap.name for cap in free.caps]
    names = ", ".join(tight[:5]) + (f" and {len(tight) - 5} more" if len(tight) > 5 else "")
    nearest = free.value(prices.starts[0])
    return InfeasibleError(
        f"a target of {choices.problem.target:.15g} cannot be met within the caps of {names}; "
        f"{nearest:.15g} can; raise the caps or ask for that",
        nearest=nearest,
    )
