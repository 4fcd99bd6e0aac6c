"""Retention curves, and checks of measured numbers."""

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
    """Return retention curves, (..., n_evictable + 1), and sums of scores, (...).

    A curve is the n best entries' share of the scores (XKV, Eq. 4): rising, concave, from 0 to 1.
    Without mass it is 1. Scores, (..., n_evictable), are finite and >= 0.

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
    """Return the ranks of curves, strictly rising from 0 to `evictable_tokens`, (n_points,).

    Up to a context of `EXACT_CONTEXT_TOKENS` these are all ranks; above it, half of `GRID_POINTS`
    are the first ranks, the others are spaced geometrically.
    """
    if context_tokens <= EXACT_CONTEXT_TOKENS:
        return np.arange(evictable_tokens + 1, dtype=np.int64)
    dense = GRID_POINTS // 2
    tail = np.geomspace(dense, evictable_tokens, GRID_POINTS - dense)
    return np.unique(np.concatenate([np.arange(dense), np.rint(tail)]).astype(np.int64))


def on_grid(curves: FloatArray, ranks: IntArray) -> tuple[FloatArray, float]:
    """Return exact curves, (..., n_own + 1), at the ranks of a profile, (n_points,), and the error.

    A shorter sample's curve is stretched, linearly. The error is the largest difference from lines
    between stored points.
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
    """Raise `SampleError` with subject `what` for numbers that are not finite or below `low`."""
    if not all(np.isfinite(array).all() and (array >= low).all() for array in arrays):
        limit = f" >= {low:g}" if np.isfinite(low) else ""
        raise SampleError(
            f"{what} are not finite numbers{limit}; load the model in float32 or bfloat16, or "
            "check its weights"
        )


def checked_widths(bits: str | Sequence[int] | None) -> tuple[int, ...]:
    """Return the `BIT_WIDTHS` to measure beside 16, the widest first, or raise `InputError`."""
    if bits is None:
        return ()
    widths = checked_bits(parse_numbers(bits))
    return tuple(width for width in widths if width != 16)
