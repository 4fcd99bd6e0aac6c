"""What holds for the selection of entries whatever the scores."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

torch = pytest.importorskip("torch")

from kvalloc.runtime.selection import select_entries  # noqa: E402


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, int, int, int]:
    tokens = draw(st.integers(1, 40))
    sinks = draw(st.integers(0, tokens))
    window = draw(st.integers(0, tokens - sinks))
    budget = draw(st.integers(sinks + window, tokens))
    # Few distinct values, so that ties are the rule.
    few = st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0e38])
    anything = st.floats(0, 2.0**99, width=32)
    shape = (draw(st.integers(1, 2)), draw(st.integers(1, 3)), tokens)
    scores = draw(hnp.arrays(np.float32, shape, elements=draw(st.sampled_from([few, anything]))))
    return scores, budget, sinks, window


@settings(max_examples=150, deadline=None)
@given(cases())
def test_selection(case: tuple[np.ndarray, int, int, int]) -> None:
    scores, budget, sinks, window = case
    batch, heads, tokens = scores.shape
    kept = select_entries(torch.from_numpy(scores), budget, sinks=sinks, window=window).numpy()
    assert kept.shape == (batch, heads, budget)
    again = select_entries(torch.from_numpy(scores), budget, sinks=sinks, window=window).numpy()
    assert np.array_equal(kept, again)
    must = {*range(sinks), *range(tokens - window, tokens)}
    for row in range(batch):
        for head in range(heads):
            mine = kept[row, head]
            assert np.all(np.diff(mine) > 0)
            assert must <= set(mine.tolist())
            # The plainest statement of the rule: sort by score, then by position.
            free = [t for t in range(tokens) if t not in must]
            free.sort(key=lambda t: (-scores[row, head, t], t))
            best = free[: budget - sinks - window]
            assert set(mine.tolist()) == must | set(best)
