"""How losses are measured beside retention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.errors import InputError

LossLevel = Literal["layer", "head"]
LossMethod = Literal["measured", "fast"]

DEFAULT_SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7)
"""Shares of the evictable entries that a unit is reduced to, besides keeping all of them."""


@dataclass(frozen=True, kw_only=True)
class LossPlan:
    """How losses are measured.

    Attributes
    ----------
    method : {"measured", "fast"}
        A forward for every unit and level, or the second-order estimate from one backward pass.
    level : {"layer", "head"}
        The unit that is reduced alone.
    shares : tuple of float
        Shares of the evictable entries that each unit is reduced to.
    continuation_tokens : int
        Tokens after the prompt on which the distributions are compared, at most.

    Raises
    ------
    InputError
        If a value is out of range.
    """

    method: LossMethod = "measured"
    level: LossLevel = "layer"
    shares: tuple[float, ...] = DEFAULT_SHARES
    continuation_tokens: int = 24

    def __post_init__(self) -> None:
        for name, choices in (("method", LossMethod), ("level", LossLevel)):
            if getattr(self, name) not in get_args(choices):
                raise InputError(
                    f"the loss {name} is {getattr(self, name)!r}, expected "
                    f"{' or '.join(get_args(choices))}"
                )
        if self.continuation_tokens < 1:
            raise InputError("a loss needs a continuation of at least 1 token")
        if not self.shares or not all(0 <= share <= 1 for share in self.shares):
            raise InputError(
                f"the loss levels {self.shares} are not shares within 0..1; give some such"
            )

    def levels(self, context_tokens: int, protected_tokens: int) -> IntArray:
        """Return the budgets at which losses are measured.

        Parameters
        ----------
        context_tokens, protected_tokens : int
            Reference context; sinks and window, which every budget includes.

        Returns
        -------
        ndarray of int64, (n_levels,)
            Rising; the last one is the context.
        """
        evictable = context_tokens - protected_tokens
        tokens = [protected_tokens + round(share * evictable) for share in self.shares]
        return np.unique([*tokens, context_tokens]).astype(np.int64)
