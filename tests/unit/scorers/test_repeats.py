"""Counts of a prompt's repetitions."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvalloc.scorers.repeats import RUN, repeat_counts


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 4))
def test_counts_are_those_of_every_pair_of_runs(ids, times):
    ids = ids * times
    runs = [ids[end + 1 - RUN : end + 1] if end + 1 >= RUN else None for end in range(len(ids))]
    expected = [1 if run is None else runs.count(run) for run in runs]
    assert repeat_counts(np.array(ids, dtype=np.int64)).tolist() == expected
