"""A2SF, the scorer."""

from __future__ import annotations

from dataclasses import dataclass

from kvalloc.scorers.base import ShareAbove0
from kvalloc.scorers.h2o import H2O


@dataclass(frozen=True, kw_only=True)
class A2SF(H2O):
    """Sum of an entry's attention over all rows, older ones with less weight.

    ``A[k] = sum over rows q of forgetting ** (last - q) * S[q, k]``: 1 gives `H2O`, towards 0 only
    the last row counts.

    Parameters
    ----------
    window : int
    forgetting : float
        Factor a row, above 0 and at most 1. The paper tunes it; the default is ours.

    References
    ----------
    A2SF (Jo and Shin, 2024).
    """

    name = "a2sf"
    summary = "sum of the attention of all rows, fading with their age"
    reference = "A2SF (Jo and Shin, 2024)"

    forgetting: ShareAbove0 = 0.99
