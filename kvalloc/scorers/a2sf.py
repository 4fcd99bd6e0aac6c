"""A2SF: accumulated attention that forgets."""

from __future__ import annotations

from dataclasses import dataclass

from kvalloc.scorers.base import ShareAbove0
from kvalloc.scorers.h2o import H2O


@dataclass(frozen=True, kw_only=True)
class A2SF(H2O):
    """Sums an entry's attention over all rows, with less weight for older rows.

    ``A[k] = sum over rows q of forgetting ** (last - q) * S[q, k]``: 1 gives H2O, towards 0 only
    the last row counts. The paper tunes the factor for each model and task; the default here is
    ours, over about a hundred rows. A prompt in chunks gives the same score, if nothing is evicted
    before it is complete.

    Parameters
    ----------
    window : int
        Last tokens that are never evicted.
    forgetting : float
        Factor a row, above 0 and at most 1.

    References
    ----------
    A2SF: Accumulative Attention Scoring with Forgetting Factor for Token Pruning in Transformer
    Decoder (Jo and Shin, 2024).
    """

    name = "a2sf"
    summary = "sum of the attention of all rows, fading with their age"
    reference = "A2SF (Jo and Shin, 2024)"

    forgetting: ShareAbove0 = 0.99
