"""What solver options share: lists of numbers, from code or from a command line."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvalloc.accounting import FloatArray
from kvalloc.errors import InputError


def numbers(given: Sequence[float] | str, *, what: str) -> FloatArray:
    """A list of numbers that an option of a solver holds.

    Parameters
    ----------
    given : sequence of float or str
        Numbers, or a text such as ``"0.5,0.3"``.
    what : str
        How to call it in an error, such as ``"proportional: weights"``.

    Returns
    -------
    ndarray of float64, (n,)

    Raises
    ------
    InputError
        If it is empty, or not all are finite numbers >= 0.

    Examples
    --------
    >>> numbers("0.5, 0.25", what="demo: weights").tolist()
    [0.5, 0.25]
    """
    try:
        parts = given.replace(",", " ").split() if isinstance(given, str) else given
        found = np.asarray([float(part) for part in parts], dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(
            f"{what} are {str(given)[:80]!r}, expected numbers such as 0.5,0.3"
        ) from None
    if found.size == 0 or not np.all(np.isfinite(found)) or float(found.min()) < 0:
        raise InputError(f"{what} must be finite numbers >= 0, at least one")
    return found
