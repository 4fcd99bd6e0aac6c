"""What the arrays of a problem must be like."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvalloc.accounting import BoolArray
from kvalloc.accounting.costs import MOST_BYTES
from kvalloc.errors import InputError

if TYPE_CHECKING:
    from kvalloc.problem.arrays import AllocationProblem


def is_broadcast(array: npt.NDArray[np.generic]) -> bool:
    """Whether all rows are views of one."""
    return array.ndim == 2 and (array.shape[0] == 1 or array.strides[0] == 0)


def valid_options(problem: AllocationProblem) -> BoolArray:
    """Which options a unit really has, ``(n_units, n_options)``; the rest is padding."""
    return np.arange(problem.n_options)[None, :] < problem.option_counts[:, None]


def check_arrays(problem: AllocationProblem) -> None:
    """Refuse arrays that do not fit each other, or hold what no problem can.

    Raises
    ------
    InputError
    """
    values = problem.values
    if values.ndim != 2 or values.shape[0] < 1 or values.shape[1] < 1:
        raise InputError(f"problem: values are shaped {values.shape}, expected (units, options)")
    for name in ("tokens", "costs"):
        array = getattr(problem, name)
        if array.shape != values.shape or array.dtype != np.int64:
            raise InputError(
                f"problem: {name} are {array.dtype} shaped {array.shape}, expected int64 shaped "
                f"{values.shape}"
            )
    for name in ("bits", "policies"):
        array = getattr(problem, name)
        if array is not None and (array.shape != values.shape or array.dtype != np.int64):
            raise InputError(
                f"problem: {name} are {array.dtype} shaped {array.shape}, expected int64 shaped "
                f"{values.shape}"
            )
    for name in ("option_counts", "weights", "layers", "heads"):
        if getattr(problem, name).shape != values.shape[:1]:
            raise InputError(f"problem: {name} must have one number for each unit")
    counts = problem.option_counts
    if int(counts.min()) < 1 or int(counts.max()) > values.shape[1]:
        unit = int(np.argmin(counts))
        raise InputError(f"problem: unit {unit} has {int(counts[unit])} options, expected >= 1")
    if not (math.isfinite(float(values.min())) and math.isfinite(float(values.max()))):
        raise InputError("problem: values are not all finite numbers")
    if not np.all(np.isfinite(problem.weights)) or np.any(problem.weights < 0):
        raise InputError("problem: weights must be finite and not negative")
    for name in ("tokens", "costs"):
        array = getattr(problem, name)
        rows = array[:1] if is_broadcast(array) else array
        rising = np.diff(rows, axis=1) > 0
        if rows.shape[0] > 1:
            rising |= ~valid_options(problem)[:, 1:]
        if name == "tokens" and problem.bits is not None:
            rising = np.ones_like(rising)
        if not np.all(rising) or int(rows[:, 0].min()) < 0:
            raise InputError(f"problem: {name} must be >= 0 and rise from option to option")
    dearest = problem.costs[np.arange(problem.n_units), problem.last_options].tolist()
    if sum(dearest) > MOST_BYTES:  # of Python's numbers, which do not overflow
        raise InputError(
            f"problem: costs add up to more than the {MOST_BYTES:,} bytes that can be counted with"
        )
