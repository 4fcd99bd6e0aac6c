"""What holds for every scorer and every curve."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scorer_oracle import SCORERS, make_states

from kvalloc.measure.curves import on_grid, retention_curves
from kvalloc.scorers import get_scorer, scorer_class
from kvalloc.scorers.later_pass import LaterStep
from kvalloc.scorers.pooled import PooledScorer

OPTIONS = {
    "snapkv": {"pooling": "max", "group_reduce": "max"},
    "a2sf": {"forgetting": 0.5},
    "expected_attention": {"future": 3},
    "lookahead": {"votes": 3, "row_reduce": "mean"},
}


def after_a_later_pass(scorer, states, sinks):
    """The states with what the scorer notes of five random tokens after them."""
    n_tokens = states.keys.shape[2]
    more = make_states(
        seed=1, n_tokens=n_tokens + 5, n_new_tokens=5, group=states.queries.shape[1] // 2, batch=2
    )
    keys = torch.cat([states.keys, more.keys[:, :, n_tokens:]], dim=2)
    step = LaterStep(n_prompt=n_tokens, repeated=torch.arange(n_tokens))
    noted = scorer.observe_later(replace(more, keys=keys), step, sinks=sinks)
    return replace(states, later=noted)


@given(
    seed=st.integers(0, 10**6),
    n_tokens=st.integers(1, 40),
    n_new=st.integers(1, 40),
    window=st.integers(1, 12),
    sinks=st.integers(0, 6),
    pool=st.sampled_from([1, 3, 5, 7]),
    group=st.integers(1, 3),
    kind=st.sampled_from(SCORERS),
)
def test_scores_keep_the_contract(seed, n_tokens, n_new, window, sinks, pool, group, kind):
    states = make_states(
        seed=seed,
        n_tokens=n_tokens,
        n_new_tokens=min(n_new, n_tokens),
        group=group,
        batch=2,
        hidden_size=5,
        frequencies=torch.tensor([1.0, 0.1]),
    )
    pooled = {"pool": pool} if issubclass(scorer_class(kind), PooledScorer) else {}
    scorer = get_scorer(kind, window=window, **pooled, **OPTIONS.get(kind, {}))
    if scorer.later is not None:
        states = after_a_later_pass(scorer, states, sinks)
    scores = scorer.score(states, sinks=sinks)
    assert scores.shape == (2, 2, n_tokens)
    assert scores.dtype == torch.float32
    assert torch.isfinite(scores).all()
    assert (scores >= 0).all()
    assert not scores[..., :sinks].any()
    assert not scores[..., max(n_tokens - window, 0) :].any()


finite_scores = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.integers(1, 30)),
    elements=st.floats(0, 1, width=32),
)


@given(finite_scores, st.integers(1, 60))
def test_curves_rise_are_concave_and_end_at_one_stretched_or_not(scores, n_wanted):
    exact, masses = retention_curves(scores)
    stretched, error = on_grid(exact, np.arange(n_wanted + 1))
    assert error == 0
    for curves, slack in ((exact, 1e-12), (stretched, 1e-9)):
        gains = np.diff(curves, axis=-1)
        assert np.all(gains >= (0 if curves is exact else -1e-12))
        assert np.all(np.diff(gains, axis=-1) <= slack)
        assert np.all(curves[..., -1] == 1)
        assert np.all((curves >= 0) & (curves <= 1))
    np.testing.assert_allclose(masses, scores.astype(np.float64).sum(axis=-1), rtol=1e-12)
