"""Where measuring a loss is worth its price: around the solutions that are still undecided."""

from __future__ import annotations

from collections.abc import Sequence
from math import erfc, exp, pi, sqrt

import numpy as np

from kvalloc.accounting import BoolArray, FloatArray, IntArray

OPERATING_SHARES = (0.1, 0.2, 0.5)
"""Shares of all entries around whose solutions figures are measured."""

ESTIMATE_ERROR = 0.5
"""Relative error that an estimate from one backward pass is believed to have."""


def choose_probes(
    losses: FloatArray,
    tokens: IntArray,
    most: int,
    *,
    shares: Sequence[float] = OPERATING_SHARES,
) -> BoolArray:
    """The figures whose measurement is most likely to change what is chosen.

    At the price of an entry that a size stands for, every unit takes the option of the least loss
    and price together. An option that is worse by a gap g, with an uncertainty u of its loss, may
    turn out to be better: by ``u * (phi(g / u) - g / u * Q(g / u))`` on average, phi being the
    normal density and Q its upper tail. That is what measuring it may gain; the sum over the sizes
    ranks the figures. u is the standard error over the samples and `ESTIMATE_ERROR` of the loss.

    Parameters
    ----------
    losses : ndarray of float64, (n_samples, n_units, n_options)
        Estimates, nats per token.
    tokens : ndarray of int64, (n_options,)
        Budget of each option; the largest one keeps everything and is never measured.
    most : int
        How many figures.
    shares : sequence of float
        Sizes, as shares of all entries.

    Returns
    -------
    ndarray of bool, (n_units, n_options)
        At most `most` True.

    References
    ----------
    D. R. Jones, M. Schonlau and W. J. Welch, Efficient Global Optimization of Expensive Black-Box
    Functions (1998), Eq. 15: the expected improvement.
    """
    mean = losses.mean(axis=0)
    spread = losses.std(axis=0, ddof=1) / sqrt(losses.shape[0]) if losses.shape[0] > 1 else 0.0
    uncertain = np.sqrt(spread**2 + (ESTIMATE_ERROR * mean) ** 2)
    gain = np.zeros_like(mean)
    for share in shares:
        total = mean + _price(mean, tokens, share) * tokens
        gain += _expected_improvement(total - total.min(axis=1, keepdims=True), uncertain)
    gain[:, tokens == tokens.max()] = -1.0
    wanted = np.zeros(mean.shape, dtype=np.bool_)
    order = np.argsort(-gain, axis=None, kind="stable")[:most]
    wanted.flat[order] = gain.flat[order] > 0
    return wanted


def scaled_to_probes(estimates: FloatArray, probed: FloatArray, where: BoolArray) -> FloatArray:
    """Measured losses where there are some, and estimates scaled to them elsewhere.

    The factor of a curve is the mean measured over the mean estimated loss at its own probed
    levels, linear in between and constant beyond them; a curve without any takes that of all
    curves together.

    Parameters
    ----------
    estimates : ndarray of float64, (n_samples, n_curves, n_levels)
    probed : ndarray of float64, (n_samples, n_curves, n_levels)
        Measured losses; of no meaning where there are none.
    where : ndarray of bool, (n_curves, n_levels)
        Where there are some.

    Returns
    -------
    ndarray of float64, (n_samples, n_curves, n_levels)
    """
    estimated, measured = estimates.mean(axis=0), probed.mean(axis=0)
    whole = float(estimated[where].sum())
    common = max(0.0, float(measured[where].sum())) / whole if whole > 0 else 1.0
    levels = np.arange(where.shape[1])
    result = estimates.copy()
    for curve, own in enumerate(where):
        usable = own & (estimated[curve] > 0)
        factors = np.full(levels.size, common)
        if usable.any():
            at = levels[usable]
            ratio = np.maximum(measured[curve, at], 0.0) / estimated[curve, at]
            factors = np.interp(levels, at, ratio)
        result[:, curve] *= factors
        result[:, curve, own] = probed[:, curve, own]
    return result


def _price(mean: FloatArray, tokens: IntArray, share: float) -> float:
    """What an entry costs, in nats, where the units take about a share of all entries."""
    wanted = share * float(tokens.max()) * mean.shape[0]
    low, high = 0.0, float(np.abs(mean).max()) + 1e-12
    for _ in range(60):
        price = (low + high) / 2
        taken = tokens[np.argmin(mean + price * tokens, axis=1)].sum()
        low, high = (price, high) if taken > wanted else (low, price)
    return high


def _expected_improvement(gap: FloatArray, uncertain: FloatArray) -> FloatArray:
    """What an option that is worse by a gap is better by on average, where it is better."""
    found = np.zeros_like(gap)
    for place in np.argwhere(uncertain > 0):
        at = tuple(place)
        away = float(gap[at] / uncertain[at])
        density = exp(-away * away / 2) / sqrt(2 * pi)
        found[at] = uncertain[at] * max(0.0, density - away * erfc(away / sqrt(2)) / 2)
    return found
