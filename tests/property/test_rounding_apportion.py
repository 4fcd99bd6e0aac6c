"""The one rounding rule: exact, within limits, near what was wanted, and stable."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvalloc.accounting.rounding import apportion

limits = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda p: (min(p), max(p)))
rows = st.lists(st.tuples(st.floats(-10, 60), limits), min_size=1, max_size=12)


@settings(max_examples=300)
@given(rows=rows, share=st.floats(0, 1))
def test_exact_and_within_limits(rows, share):
    wanted = np.array([number for number, _ in rows])
    low = np.array([limit[0] for _, limit in rows])
    high = np.array([limit[1] for _, limit in rows])
    total = int(low.sum()) + int(share * (int(high.sum()) - int(low.sum())))
    result = apportion(wanted, total, minimum=low, maximum=high)
    assert result.dtype == np.int64
    assert int(result.sum()) == total
    assert np.all(result >= low)
    assert np.all(result <= high)


@settings(max_examples=200)
@given(wanted=st.lists(st.floats(0, 1000), min_size=1, max_size=20), up=st.booleans())
def test_less_than_one_away_when_the_total_fits(wanted, up):
    """Without active limits and with a total that fits, rounding moves nobody by a whole entry."""
    shares = np.array(wanted)
    total = int(np.ceil(shares.sum()) if up else np.floor(shares.sum()))
    result = apportion(shares, total)
    assert int(result.sum()) == total
    free = shares >= 1  # below that, the shift meets the limit at zero and others carry it
    assume(bool(np.all(free)))
    assert np.all(np.abs(result - shares) < 1 + 1 / len(wanted) + 1e-6)


@pytest.mark.parametrize(
    ("wanted", "total", "limits", "result"),
    [
        ([0.5] * 4, 2, {}, [1, 1, 0, 0]),  # ties go to the lower index
        ([1.0] * 5, 7, {}, [2, 2, 1, 1, 1]),
        ([7, 0, 50, 3], 60, {}, [7, 0, 50, 3]),  # whole numbers that fit stay
        ([10.0, 1.0, 1.0], 9, {"maximum": 5}, [5, 2, 2]),  # limits take what others leave
        ([6.5, 1.0, 1.0], 9, {"minimum": [0, 3, 0]}, [6, 3, 0]),
        ([], 0, {}, []),
    ],
)
def test_by_hand(wanted, total, limits, result):
    assert apportion(wanted, total, **limits).tolist() == result
