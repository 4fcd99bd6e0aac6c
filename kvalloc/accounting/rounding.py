"""Rounding rules: largest remainder within limits, and up to the grain of the costs."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.errors import InputError


def apportion(
    shares: npt.ArrayLike,
    total: int,
    *,
    minimum: npt.ArrayLike = 0,
    maximum: npt.ArrayLike | None = None,
) -> IntArray:
    """Round numbers (n,) so that they add up to the total exactly.

    One amount is added to all shares, clipped at the limits, scalar or (n,). Then they are rounded
    down, and missing units go to the largest remainders, ties to the lower index.

    Raises
    ------
    InputError
        If the limits cannot hold the total, or a share is not finite.

    Examples
    --------
    >>> apportion([10.0, 1.0, 1.0], 9, maximum=5).tolist()
    [5, 2, 2]
    """
    shares = np.asarray(shares, dtype=np.float64)
    low = np.broadcast_to(np.asarray(minimum, dtype=np.int64), shares.shape)
    ceiling = np.maximum(total, low) if maximum is None else np.asarray(maximum, dtype=np.int64)
    high = np.broadcast_to(ceiling, shares.shape)
    if not np.all(np.isfinite(shares)):
        raise InputError("cannot share out entries by weights that are not finite")
    if np.any(low > high) or not int(low.sum()) <= total <= int(high.sum()):
        raise InputError(
            f"cannot share out {total} between limits that add up to {int(low.sum())} and "
            f"{int(high.sum())}"
        )
    real = _shift_to_total(shares, float(total), low, high)
    result = np.clip(np.floor(real + 1e-9).astype(np.int64), low, high)
    while (missing := total - int(result.sum())) != 0:
        # A shift leaves fewer than n units over, so one or two rounds end it.
        step = 1 if missing > 0 else -1
        movable = np.flatnonzero(result < high) if step > 0 else np.flatnonzero(result > low)
        order = movable[np.argsort(-step * (real - result)[movable], kind="stable")]
        result[order[: abs(missing)]] += step
    return result


def round_up_to_grain(above: float, grain: int) -> int:
    """Round bytes above the smallest cost up to whole grains, 0 or more.

    A millionth of a grain counts as a rounding error.
    """
    return max(0, math.ceil(above / grain - 1e-6)) * grain


def _shift_to_total(
    shares: FloatArray,
    total: float,
    low: IntArray,
    high: IntArray,
) -> FloatArray:
    """Return ``clip(shares + t, low, high)`` with the t that makes it sum to the total."""
    clipped = np.clip(shares, low, high)
    if abs(float(clipped.sum()) - total) <= 1e-9 * max(1.0, total):
        return clipped
    below = float(np.min(low - shares))
    above = float(np.max(high - shares))
    for _ in range(200):
        middle = 0.5 * (below + above)
        if middle in (below, above):
            break
        less = float(np.clip(shares + middle, low, high).sum()) < total
        below, above = (middle, above) if less else (below, middle)
    return np.clip(shares + above, low, high)
