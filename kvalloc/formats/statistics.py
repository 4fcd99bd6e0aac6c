"""Sums over samples that come out the same, to the bit, in whatever order samples are added.

Numbers are added as integers: each is written as a few digits of 31 bits, and each digit is summed
by itself. Floating-point sums depend on their order; these do not, so that sums over parts of the
samples can be added to those over all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.errors import InputError

DIGIT_BITS = 31

CURVE_BINS = 100
"""Bins of equal width that retention is counted in: a quantile is off by at most half of one."""

CURVE_MARKS = 33
"""Ranks at most at which curves are counted and squared."""

_CURVES = {"top_bits": 0, "digits": 2}
_LOSSES = {"top_bits": 31, "digits": 3}

Sums = dict[str, IntArray]


def to_digits(values: FloatArray, *, top_bits: int, digits: int) -> IntArray:
    """Numbers as digits that can be added up.

    Parameters
    ----------
    values : ndarray of float64
        At most ``2 ** top_bits`` in magnitude.
    top_bits : int
    digits : int
        How many; a number is cut off below ``2 ** (top_bits - 31 * digits)``.

    Returns
    -------
    ndarray of int64, (digits, ...)
        The highest digit first; 2 ** 31 numbers can be added.

    Raises
    ------
    InputError
        If a number is too large, or none.
    """
    if not (np.abs(values) <= 2.0**top_bits).all():
        raise InputError(f"a number to add up is beyond 2 ** {top_bits}, or is not finite")
    rest = np.ldexp(values, DIGIT_BITS - top_bits)
    found = np.empty((digits, *values.shape), dtype=np.int64)
    for digit in found:
        whole = np.trunc(rest)
        digit[...] = whole
        rest = np.ldexp(rest - whole, DIGIT_BITS)  # exact, as all of these steps
    return found


def from_digits(sums: IntArray, *, top_bits: int) -> FloatArray:
    """The numbers that sums of digits stand for, ``(...)``; off by a few roundings of float64."""
    total = np.zeros(sums.shape[1:])
    for digit in sums[::-1]:
        total = np.ldexp(total, -DIGIT_BITS) + digit
    return np.ldexp(total, top_bits - DIGIT_BITS)


def curve_marks(n_points: int) -> IntArray:
    """Points of a curve that are counted, evenly spread, ``(n_marks,)``."""
    return np.unique(np.rint(np.linspace(0, n_points - 1, CURVE_MARKS)).astype(np.int64))


def sample_sums(
    curves: FloatArray, shares: FloatArray, tokens: int, losses: FloatArray | None
) -> Sums:
    """What one sample adds to the sums.

    Parameters
    ----------
    curves : ndarray of float64, (n_layers, n_kv_heads, n_points)
        Retention.
    shares : ndarray of float64, (n_layers, n_kv_heads)
        Of the heads in their layer's score mass.
    tokens : int
        Of the sample.
    losses : ndarray of float64, (n_layers, n_kv_heads or 1, n_kinds, n_levels), or None

    Returns
    -------
    dict
        By the names of `ScoreProfile`'s fields.
    """
    marked = curves[..., curve_marks(curves.shape[-1])]
    squares = to_digits(np.stack([marked, marked**2]), **_CURVES)
    bins = np.minimum(np.trunc(marked * CURVE_BINS), CURVE_BINS - 1)
    sums = {
        "summed": np.array([1, tokens, tokens], dtype=np.int64),
        "summed_contributions": to_digits(shares[..., None] * curves, **_CURVES),
        "summed_curves": squares.reshape(-1, *marked.shape),
        "curve_counts": (bins[..., None] == np.arange(CURVE_BINS)).astype(np.int64),
    }
    return sums if losses is None else sums | {"summed_losses": to_digits(losses, **_LOSSES)}


def head_shares(masses: FloatArray) -> FloatArray:
    """Each head's share of its layer's mass, ``(..., n_kv_heads)``; equal where there is none."""
    totals = masses.sum(axis=-1, keepdims=True)
    even = np.full_like(masses, 1.0 / masses.shape[-1])
    shares: FloatArray = np.divide(masses, totals, out=even, where=totals > 0)
    return shares


def added(one: Mapping[str, IntArray], other: Mapping[str, IntArray]) -> Sums:
    """The sums over the samples of both."""
    sums = {name: one[name] + other[name] for name in one}
    (_, low, high), (_, other_low, other_high) = one["summed"].tolist(), other["summed"].tolist()
    sums["summed"][1:] = min(low, other_low), max(high, other_high)
    return sums


def mean_sample(sums: Mapping[str, IntArray], full_layers: tuple[int, ...]) -> dict[str, Any]:
    """The arrays of a score profile of one sample that stands for the mean of all.

    Returns
    -------
    dict
        ``curves``, ``masses`` and ``sample_tokens``, and ``losses`` of every kind where summed:
        what each head adds to its layer's retention is the mean of what it adds in the samples.
    """
    n_samples = int(sums["summed"][0])
    contributions = from_digits(sums["summed_contributions"], top_bits=0) / n_samples
    found = {
        **sample_of_contributions(contributions, full_layers),
        "sample_tokens": sums["summed"][2:],
    }
    if (losses := sums.get("summed_losses")) is None:
        return found
    means = (from_digits(losses, top_bits=_LOSSES["top_bits"]) / n_samples)[None]
    found["losses"] = np.ascontiguousarray(means[:, :, :, 0])
    if means.shape[3] > 1:
        found["other_losses"] = np.ascontiguousarray(means[:, :, :, 1:])
    return found


def sample_of_contributions(
    contributions: FloatArray, full_layers: tuple[int, ...]
) -> dict[str, Any]:
    """``curves`` and ``masses`` of one sample in which heads add this to their layers' retention.

    Parameters
    ----------
    contributions : ndarray of float64, (n_layers, n_kv_heads, n_points)
    full_layers : tuple of int
        Layers that have curves of their own.
    """
    whole = contributions[..., -1]
    decided = np.zeros(whole.shape, dtype=bool)
    decided[list(full_layers)] = whole[list(full_layers)] > 0
    curves = np.ones_like(contributions)
    np.divide(contributions, whole[..., None], out=curves, where=decided[..., None])
    return {"curves": curves[None], "masses": np.where(decided, whole, 0.0)[None]}


@dataclass(frozen=True, kw_only=True)
class CurveStatistics:
    """How the retention curves of heads differ from sample to sample.

    Attributes
    ----------
    n_samples : int
    ranks : ndarray of int64, (n_marks,)
        Kept evictable entries that the rest is given at.
    mean, variance : ndarray of float64, (n_layers, n_kv_heads, n_marks)
        Of R over the samples; the variance is that of the samples themselves, off by 1e-15.
    counts : ndarray of int64, (n_layers, n_kv_heads, n_marks, CURVE_BINS)
        Samples whose R lies in each of the bins of equal width from 0 to 1.
    """

    n_samples: int
    ranks: IntArray
    mean: FloatArray
    variance: FloatArray
    counts: IntArray

    @classmethod
    def of(cls, sums: Mapping[str, IntArray], ranks: IntArray) -> CurveStatistics:
        """Those of sums over samples, whose curves are given at some ranks."""
        n_samples, digits = int(sums["summed"][0]), _CURVES["digits"]
        by_digit = sums["summed_curves"].reshape(digits, 2, *sums["summed_curves"].shape[1:])
        mean, squares = from_digits(by_digit, top_bits=0) / n_samples
        return cls(
            n_samples=n_samples,
            ranks=ranks[curve_marks(ranks.size)],
            mean=mean,
            variance=np.maximum(squares - mean**2, 0.0),
            counts=sums["curve_counts"],
        )

    def quantile(self, share: float) -> FloatArray:
        """R that this share of the samples has at most, off by at most 0.005 (half a bin).

        Parameters
        ----------
        share : float
            0..1.

        Returns
        -------
        ndarray of float64, (n_layers, n_kv_heads, n_marks)
        """
        wanted = max(1, int(np.ceil(share * self.n_samples)))
        place = (np.cumsum(self.counts, axis=-1) >= wanted).argmax(axis=-1)
        middle: FloatArray = (place + 0.5) / CURVE_BINS
        return middle
