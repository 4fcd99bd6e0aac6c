"""What the integer programming search is asked, what it finds, and the bounds it combines."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvalloc.accounting import IntArray
from kvalloc.solvers._choices import Choices
from kvalloc.solvers._ilp_program import Answer, Limits, Program
from kvalloc.solvers._prices import Prices


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked of the solver.

    Attributes
    ----------
    gap : float
        Relative gap at which to stop.
    workers : int
    backend : callable
    reduce : bool
    """

    gap: float
    workers: int
    backend: Callable[[Program, Limits], Answer]
    reduce: bool


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


def lossy_bound(choices: Choices, prices: Prices, loss: float) -> float:
    """What no pick that loses so much at some prices can beat."""
    if not choices.minimise:
        return prices.bound - loss
    bytes_ = prices.relaxed_bytes + loss / prices.per_byte
    grains = math.ceil((bytes_ - choices.floor_bytes) / choices.grain - 1e-6)
    return float(choices.floor_bytes + max(0, grains) * choices.grain)


def combined_bound(choices: Choices, bound: float, inside: float, outside: float | None) -> float:
    """The bound of the whole from those of the core and of what lies outside it."""
    if choices.minimise:
        return max(bound, inside if outside is None else min(inside, outside))
    return min(bound, inside if outside is None else max(inside, outside))
