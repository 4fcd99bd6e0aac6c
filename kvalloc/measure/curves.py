"""Retention curves of a layer, and checks of measured numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.accounting.costs import checked_bits
from kvalloc.errors import SampleError
from kvalloc.formats.score_profile import interpolate_curves
from kvalloc.units import parse_numbers

EXACT_CONTEXT_TOKENS = 4096
"""Largest context with all ranks on the curves; above it they have a grid."""

GRID_POINTS = 4097
"""Largest number of ranks on that grid."""


def retention_curves(scores: npt.NDArray[Any]) -> tuple[FloatArray, FloatArray]:
    """Return the share of the score mass in the best entries, for each number of entries.

    ``R(n) = sum of the n largest scores / sum of all scores``. A head without any mass has the
    curve 1.

    Parameters
    ----------
    scores : ndarray, (..., n_evictable)
        Finite scores >= 0 of evictable entries.

    Returns
    -------
    curves : ndarray of float64, (..., n_evictable + 1)
        Rising, concave, from 0 to 1.
    masses : ndarray of float64, (...)
        The sums of the scores.

    References
    ----------
    XKV, Eq. 4.

    Examples
    --------
    >>> import numpy as np
    >>> curves, masses = retention_curves(np.array([1.0, 5.0, 2.0]))
    >>> curves.tolist(), masses.tolist()
    ([0.0, 0.625, 0.875, 1.0], 8.0)
    """
    best_first = np.sort(scores, axis=-1)[..., ::-1]
    curves = np.zeros((*scores.shape[:-1], scores.shape[-1] + 1))
    np.cumsum(best_first, axis=-1, dtype=np.float64, out=curves[..., 1:])
    masses = curves[..., -1].copy()
    empty = masses == 0.0
    np.divide(curves, masses[..., None], out=curves, where=~empty[..., None])
    curves[empty] = 1.0
    return curves, masses


def rank_grid(evictable_tokens: int, context_tokens: int) -> IntArray:
    """Return the ranks at which curves are stored.

    Parameters
    ----------
    evictable_tokens : int
        Largest rank.
    context_tokens : int
        Reference context: up to `EXACT_CONTEXT_TOKENS` all ranks are stored. Above it, half of
        `GRID_POINTS` are the first ranks, where a curve bends most; the others are spaced
        geometrically.

    Returns
    -------
    ndarray of int64, (n_points,)
        Strictly rising from 0 to ``evictable_tokens``.
    """
    if context_tokens <= EXACT_CONTEXT_TOKENS:
        return np.arange(evictable_tokens + 1, dtype=np.int64)
    dense = GRID_POINTS // 2
    tail = np.geomspace(dense, evictable_tokens, GRID_POINTS - dense)
    return np.unique(np.concatenate([np.arange(dense), np.rint(tail)]).astype(np.int64))


def on_grid(curves: FloatArray, ranks: IntArray) -> tuple[FloatArray, float]:
    """Return exact curves at the ranks of a profile.

    Parameters
    ----------
    curves : ndarray of float64, (..., n_own + 1)
        Exact curves, one value for each number of entries.
    ranks : ndarray of int64, (n_points,)
        Requested ranks, from 0 to the profile's evictable entries. The curve of a shorter sample is
        stretched by the kept share, linear in between.

    Returns
    -------
    values : ndarray of float64, (..., n_points)
    error : float
        The largest difference between a curve and the straight lines between its stored points.
    """
    n_own, n_wanted = curves.shape[-1] - 1, int(ranks[-1])
    every_rank = ranks.size == n_wanted + 1
    if n_own == n_wanted and every_rank:
        return curves, 0.0
    at = ranks * (n_own / n_wanted)
    at[-1] = n_own  # a product may miss the end by a rounding
    values = interpolate_curves(curves, np.arange(n_own + 1, dtype=np.int64), at)
    if every_rank:
        return values, 0.0
    everywhere = np.arange(n_own + 1)
    rows = zip(values.reshape(-1, ranks.size), curves.reshape(-1, n_own + 1), strict=True)
    error = max(
        float(np.abs(np.interp(everywhere, at, stored) - exact).max()) for stored, exact in rows
    )
    return values, error


def check_finite(what: str, *arrays: npt.NDArray[Any], low: float = -np.inf) -> None:
    """Refuse arrays of a sample with numbers that are not finite, or below a limit.

    Raises
    ------
    SampleError
        With ``what`` as the subject.
    """
    if not all(np.isfinite(array).all() and (array >= low).all() for array in arrays):
        limit = f" >= {low:g}" if np.isfinite(low) else ""
        raise SampleError(
            f"{what} are not finite numbers{limit}; load the model in float32 or bfloat16, or "
            "check its weights"
        )


def checked_widths(bits: str | Sequence[int] | None) -> tuple[int, ...]:
    """Return bit widths to measure beside 16, the widest first; none by default.

    Raises
    ------
    InputError
        If one is not of `BIT_WIDTHS`, or there is none in a list.
    """
    if bits is None:
        return ()
    widths = checked_bits(parse_numbers(bits))
    return tuple(width for width in widths if width != 16)
