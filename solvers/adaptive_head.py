"""Ada-KV: a layer's budget goes to the best entries of all its heads."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.accounting.rounding import apportion
from kvalloc.errors import InputError
from kvalloc.problem import AllocationProblem
from kvalloc.solvers._rules import Rule, SharingRule
from kvalloc.solvers._thresholds import largest_gains

SAFEGUARDS = ("reference", "floor")


class AdaptiveHead(SharingRule):
    """Equal layer budgets, each for the best scores of all its heads.

    The H heads of a layer share H * B entries, with B the mean evictable budget of a head. Head h
    has ``count_h`` of the layer's largest scores.

    Parameters
    ----------
    alpha : float
        0..1.
    safeguard : {"reference", "floor"}
        ``"reference"``, as the authors' code: ``B_h = (1 - alpha) * count_h + alpha * B``.
        ``"floor"``, as kvpress: each head's best ``floor(alpha * B)`` entries, then the best of all
        others. A layer's sum is exact.

    Raises
    ------
    InputError
        If an option is out of range.

    References
    ----------
    Ada-KV: Adaptive Budget Allocation, Algorithm 1.
    """

    name: ClassVar[str] = "adaptive_head"
    summary: ClassVar[str] = "equal layers; inside a layer the best scores over all heads"
    reference: ClassVar[str] = "Ada-KV, Algorithm 1"
    needs_heads: ClassVar[bool] = True
    needs_concave: ClassVar[bool] = True

    def __init__(self, alpha: float = 0.2, safeguard: str = "reference") -> None:
        if not 0 <= alpha <= 1:
            raise InputError(f"adaptive_head: alpha is {alpha:g}, expected 0..1")
        if safeguard not in SAFEGUARDS:
            raise InputError(
                f"adaptive_head: safeguard is {safeguard!r}, expected one of "
                f"{', '.join(SAFEGUARDS)}"
            )
        self.alpha = alpha
        self.safeguard = safeguard

    def rule(self, problem: AllocationProblem, deadline: float) -> tuple[Rule, int]:
        """Return budgets by their sum in steps."""
        members = [np.flatnonzero(problem.layers == layer) for layer in np.unique(problem.layers)]
        room = np.array([int(problem.last_options[units].sum()) for units in members])

        def adaptive(steps: int) -> IntArray:
            choice = np.zeros(problem.n_units, dtype=np.int64)
            heads = np.array([units.size for units in members], dtype=np.float64)
            per_layer = apportion(steps * heads / heads.sum(), steps, maximum=room)
            for units, share in zip(members, per_layer, strict=True):
                choice[units] = self._share_layer(problem, units, int(share))
            return choice

        return adaptive, problem.spendable_steps

    def _share_layer(self, problem: AllocationProblem, units: IntArray, steps: int) -> IntArray:
        last = problem.last_options[units]
        if self.safeguard == "floor":
            floors = np.minimum(int(self.alpha * steps / units.size), last)
            return largest_gains(problem, steps, units, last, floors)
        counts = largest_gains(problem, steps, units, last)
        mixed = (1 - self.alpha) * counts + self.alpha * steps / units.size
        return apportion(mixed, steps, maximum=last)
