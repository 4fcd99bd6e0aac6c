"""Sums over samples: the same bits in any order."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvalloc.errors import InputError
from kvalloc.measure.exact_sums import from_digits, to_digits

NUMBERS = st.floats(-1e9, 1e9, allow_nan=False, width=64)


@settings(deadline=None)
@given(values=st.lists(NUMBERS, min_size=1, max_size=30), data=st.data())
def test_sums_are_the_same_bits_in_any_order_and_tree(values, data):
    def total(numbers):
        if len(numbers) == 1:
            return to_digits(np.array(numbers), top_bits=31, digits=3)[:, 0]
        cut = data.draw(st.integers(1, len(numbers) - 1))
        return total(numbers[:cut]) + total(numbers[cut:])

    one, other = total(values), total(data.draw(st.permutations(values)))
    assert np.array_equal(one, other)
    exact = sum(map(Fraction, values))
    found = Fraction(float(from_digits(one[:, None], top_bits=31)[0]))
    # cut off below 2 ** -62 each, and a few roundings of float64
    largest = max(abs(exact), Fraction(1, 2**40), *map(abs, map(Fraction, values)))
    assert abs(found - exact) <= Fraction(len(values), 2**62) + largest * Fraction(
        len(values), 2**51
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, 2.5])
def test_numbers_that_cannot_be_added_are_refused(value):
    with pytest.raises(InputError, match=r"beyond 2 \*\* 1, or is not finite"):
        to_digits(np.array([value]), top_bits=1, digits=2)
