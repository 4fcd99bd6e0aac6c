"""K-norm, KeyDiff, CAKE, expected attention and ||V W_O|| against loops, and by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import scorer_oracle
import torch
from scorer_oracle import make_states, score_in_chunks

from kvalloc.errors import InputError, UnsupportedModelError
from kvalloc.scorers import projected_values
from kvalloc.scorers.cake import CAKE
from kvalloc.scorers.criticalkv import CriticalKV
from kvalloc.scorers.expected_attention import ExpectedAttention
from kvalloc.scorers.keydiff import KeyDiff
from kvalloc.scorers.knorm import KNorm
from kvalloc.scorers.projected_values import projected_value_norms


def test_knorm_by_hand():
    states = make_states(n_kv_heads=1, n_tokens=3, head_dim=2)
    keys = torch.tensor([[3.0, 4.0], [0.0, 0.5], [1.0, 0.0]]).view(1, 1, 3, 2)
    scores = KNorm(window=1).score(replace(states, keys=keys), sinks=0)
    assert scores[0, 0].tolist() == pytest.approx([0.2, 2.0, 0.0])


def test_knorm_of_a_zero_key_is_finite():
    states = make_states(n_tokens=5)
    assert torch.isfinite(KNorm().score(replace(states, keys=states.keys * 0), sinks=0)).all()


def test_keydiff_by_hand():
    states = make_states(n_kv_heads=1, n_tokens=4, head_dim=2)
    # two keys along x, one along y, one along -x: the anchor is along (1, 1)
    keys = torch.tensor([[9.0, 0.0], [1.0, 0.0], [0.0, 5.0], [-2.0, 0.0]]).view(1, 1, 4, 2)
    scores = KeyDiff(window=1).score(replace(states, keys=keys), sinks=0)
    half = 1 - math.sqrt(0.5)
    assert scores[0, 0].tolist() == pytest.approx([half, half, half, 0.0], abs=1e-6)


def test_keydiff_agrees_with_loops():
    states = make_states(batch=2)
    keys = states.keys.double().numpy()
    found = KeyDiff(window=4).score(states, sinks=3).numpy()
    for row in range(2):
        for head in range(2):
            units = [key / np.linalg.norm(key) for key in keys[row, head]]
            anchor = np.mean(units, axis=0)
            anchor /= np.linalg.norm(anchor)
            expected = [1 - unit @ anchor if 3 <= i < 36 else 0.0 for i, unit in enumerate(units)]
            np.testing.assert_allclose(found[row, head], expected, atol=1e-6)


def test_keydiff_leaves_padding_out_of_the_anchor():
    states = make_states()
    whole = KeyDiff(window=4).score(states, sinks=3)
    pads = torch.full((1, 2, 9, 4), 50.0)
    mask = torch.ones(1, 49, dtype=torch.long)
    mask[:, :9] = 0
    padded = make_states(
        n_tokens=49,
        mask=mask,
    )
    padded = replace(padded, keys=torch.cat([pads, states.keys], dim=2))
    found = KeyDiff(window=4).score(padded, sinks=3)
    torch.testing.assert_close(found[..., 9:], whole)
    assert not found[..., :9].any()


def test_cake_agrees_with_loops():
    states = make_states(batch=2)
    window, gamma, sinks = 6, 200.0, 2
    found = CAKE(window=window, pool=5, gamma=gamma).score(states, sinks=sinks)
    attention = scorer_oracle.full_attention(states)[:, :, -window:]
    last = 40 - window
    expected = np.zeros((2, 2, 40))
    for row in range(2):
        for query_head in range(6):
            rows = attention[row, query_head]
            raw = rows.mean(axis=0) + gamma * rows.var(axis=0, ddof=1)
            raw = np.array([raw[i] if sinks <= i < last else 0.0 for i in range(last)])
            padded = np.concatenate([[0, 0], raw, [0, 0]])
            pooled = [padded[i : i + 5].sum() / 5 for i in range(last)]
            expected[row, query_head // 3, sinks:last] += np.array(pooled)[sinks:] / 3
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-6)


def test_cake_with_one_row_has_no_variance():
    states = make_states()
    with_variance = CAKE(window=1, pool=1, gamma=200.0).score(states, sinks=0)
    without = CAKE(window=1, pool=1, gamma=0.0).score(states, sinks=0)
    assert torch.equal(with_variance, without)


def rotation(angles: np.ndarray) -> np.ndarray:
    """The matrix that turns dimension i and i + half by each angle; the rest stays."""
    size = 4
    matrix = np.eye(size)
    half = len(angles)
    for i, angle in enumerate(angles):
        matrix[i, i] = matrix[i + half, i + half] = math.cos(angle)
        matrix[i, i + half], matrix[i + half, i] = -math.sin(angle), math.sin(angle)
    return matrix


@pytest.mark.parametrize("frequencies", [[1.0, 0.05], [0.7]])
@pytest.mark.parametrize("covariance", [True, False])
@pytest.mark.parametrize("value_norm", [True, False])
def test_expected_attention_agrees_with_loops(frequencies, covariance, value_norm):
    states = make_states(batch=2, frequencies=torch.tensor(frequencies))
    sinks, window, future = 3, 5, 11
    scorer = ExpectedAttention(
        window=window, future=future, covariance=covariance, value_norm=value_norm, epsilon=0.01
    )
    found = scorer.score(states, sinks=sinks).numpy()
    turns = np.array(frequencies)
    ahead = np.mean([rotation((40 + step) * turns) for step in range(future)], axis=0)
    keys, values = states.keys.double().numpy(), states.values.double().numpy()
    for row in range(2):
        for head in range(2):
            expected = np.zeros(40)
            for member in range(3):
                queries = states.queries[row, head * 3 + member].double().numpy()
                raw = [rotation(-p * turns) @ queries[p] for p in range(sinks, 40)]
                mean = ahead @ np.mean(raw, axis=0)
                spread = ahead @ np.cov(np.array(raw).T, bias=True) @ ahead.T
                logits = keys[row, head] @ mean / 2
                if covariance:
                    logits += np.array([k @ spread @ k for k in keys[row, head]]) / 8
                weights = np.exp(logits[sinks:] - logits[sinks:].max())
                expected[sinks:] += weights / weights.sum() / 3
            if value_norm:
                expected = (expected + 0.01) * np.linalg.norm(values[row, head], axis=-1)
            expected[:sinks] = expected[-window:] = 0.0
            np.testing.assert_allclose(found[row, head], expected, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("sizes", [[2, 38], [20, 20], [13, 13, 13, 1]])
def test_expected_attention_in_chunks(sizes):
    states = make_states(batch=2, frequencies=torch.tensor([1.0, 0.05]))
    scorer = ExpectedAttention(window=4, future=16)
    whole = scorer.score(states, sinks=3)
    torch.testing.assert_close(score_in_chunks(scorer, states, sizes, sinks=3), whole)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "rotate"),
        ({"frequencies": torch.ones(2), "softcap": 30.0}, "caps"),
        ({"frequencies": torch.ones(2), "sink_logits": torch.ones(6)}, "sink"),
    ],
)
def test_expected_attention_refuses_what_it_cannot_expect(more, said):
    with pytest.raises(UnsupportedModelError, match=said):
        ExpectedAttention().score(make_states(**more), sinks=0)


def test_projected_value_norms_agree_with_loops(monkeypatch):
    monkeypatch.setattr(projected_values, "_BLOCK_TOKENS", 7)
    states = make_states(batch=2, hidden_size=10)
    weight = states.output_projection.double().numpy()
    found = projected_value_norms(states).numpy()
    for row in range(2):
        for head in range(2):
            for token in range(40):
                value = states.values[row, head, token].double().numpy()
                heads = range(head * 3, head * 3 + 3)
                norms = [np.abs(weight[:, h * 4 : h * 4 + 4] @ value).sum() for h in heads]
                assert found[row, head, token] == pytest.approx(np.mean(norms), rel=1e-5)


def test_criticalkv_is_attention_times_what_reaches_the_output():
    states = make_states(batch=2, hidden_size=10)
    found = CriticalKV(window=6, pool=3, epsilon=0.01).score(states, sinks=2).numpy()
    attention = scorer_oracle.window_scores(states, window=6, sinks=2, pool=3, pooling="max")
    weight = states.output_projection.double().numpy()
    for row in range(2):
        for head in range(2):
            values = states.values[row, head].double().numpy()
            heads = range(head * 3, head * 3 + 3)
            norms = [np.abs(values @ weight[:, h * 4 : h * 4 + 4].T).sum(axis=1) for h in heads]
            expected = (attention[row, head] + 0.01) * np.mean(norms, axis=0)
            expected[:2] = expected[-6:] = 0.0
            np.testing.assert_allclose(found[row, head], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "weight", [None, torch.ones(10, 5), torch.ones(10, 24, dtype=torch.uint8), torch.ones(24)]
)
def test_without_a_readable_projection_there_are_no_norms(weight):
    with pytest.raises(UnsupportedModelError, match="output projection"):
        projected_value_norms(replace(make_states(), output_projection=weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "scorer",
    [KNorm(), KeyDiff(), CAKE(window=8), ExpectedAttention()],
    ids=lambda scorer: scorer.name,
)
def test_half_precision_is_scored_in_float32(scorer, dtype):
    states = make_states(dtype=dtype, frequencies=torch.tensor([1.0, 0.05]))
    whole = replace(
        states,
        queries=states.queries.float(),
        keys=states.keys.float(),
        values=states.values.float(),
    )
    found = scorer.score(states, sinks=2)
    assert found.dtype == torch.float32
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found, scorer.score(whole, sinks=2))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: CAKE(gamma=-1.0), "gamma is -1.0"),
        (lambda: CAKE(pool=2), "pool is 2"),
        (lambda: ExpectedAttention(future=0), "future is 0"),
        (lambda: ExpectedAttention(epsilon=float("nan")), "epsilon is nan"),
        (lambda: KeyDiff(window=0), "window is 0"),
        (lambda: KNorm(window=0), "window is 0"),
        (lambda: CriticalKV(epsilon=-1.0), "epsilon is -1.0"),
        (lambda: CriticalKV(pooling="sum"), "avg, max"),
    ],
)
def test_parameters_out_of_range(make, said):
    with pytest.raises(InputError, match=said):
        make()
