"""A2SF: accumulated attention that forgets."""

from __future__ import annotations

from dataclasses import dataclass

from kvalloc.scorers.base import ShareAbove0
from kvalloc.scorers.h2o import H2O


@dataclass(frozen=True, kw_only=True)
class A2SF(H2O):
    """Sum of an entry's attention over all rows, each row worth less the longer ago it was.

    ``A[k] = sum over rows q of forgetting ** (last - q) * S[q, k]``: with 1 it is H2O, towards 0
    it is the last row alone. The paper tunes the factor for each model and task; the default here
    is ours, and looks back over some hundred rows. A prompt in chunks gives the same score, as
    long as nothing is evicted before it is complete.

    Parameters
    ----------
    window : int
        Last tokens that are never evicted, tokens.
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
