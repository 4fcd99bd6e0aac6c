"""Sums over samples that come out the same, to the bit, in whatever order samples are added.

Numbers are added as integers: each is written as a few digits of 31 bits, and each digit is summed
by itself. Floating-point sums depend on their order; these do not, so that sums over parts of the
samples can be added to those over all of them.
"""

from __future__ import annotations

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.errors import InputError

DIGIT_BITS = 31


def to_digits(values: FloatArray, *, top_bits: int, digits: int) -> IntArray:
    """Split numbers into digits that can be added up.

    Parameters
    ----------
    values : ndarray of float64
        At most ``2 ** top_bits`` in magnitude.
    top_bits : int
    digits : int
        Number of digits; a number is cut off below ``2 ** (top_bits - 31 * digits)``.

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
    split = np.empty((digits, *values.shape), dtype=np.int64)
    for digit in split:
        whole = np.trunc(rest)
        digit[...] = whole
        rest = np.ldexp(rest - whole, DIGIT_BITS)  # exact, as all of these steps
    return split


def from_digits(sums: IntArray, *, top_bits: int) -> FloatArray:
    """Return the numbers of sums of digits, ``(...)``; off by a few roundings of float64."""
    total = np.zeros(sums.shape[1:])
    for digit in sums[::-1]:
        total = np.ldexp(total, -DIGIT_BITS) + digit
    return np.ldexp(total, top_bits - DIGIT_BITS)
