"""Scorers against the whole attention matrix in float64, against loops, and by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import scorer_oracle
import torch
from scorer_oracle import halves, make_states, score_in_chunks

from kvalloc.errors import UnsupportedModelError
from kvalloc.models.rope import NO_ROTATION, Rotation
from kvalloc.scorers import attention_rows, column_sums, projected_values
from kvalloc.scorers.a2sf import A2SF
from kvalloc.scorers.cake import CAKE
from kvalloc.scorers.criticalkv import CriticalKV
from kvalloc.scorers.expected_attention import ExpectedAttention
from kvalloc.scorers.h2o import H2O
from kvalloc.scorers.keydiff import KeyDiff
from kvalloc.scorers.knorm import KNorm
from kvalloc.scorers.lookahead import Lookahead
from kvalloc.scorers.projected_values import projected_value_norms
from kvalloc.scorers.snapkv import SnapKV
from kvalloc.scorers.streaming import Streaming
from kvalloc.scorers.tova import TOVA
from kvalloc.scorers.xkv import XKV

PAD_BLIND = ("xkv", "snapkv", "criticalkv", "cake", "tova", "knorm", "h2o", "keydiff", "lookahead")
"""Scorers that look at no position: padding moves every token to another one."""


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "more", [{}, {"softcap": 1.5}, {"sink_logits": torch.linspace(0, 12, 6)}], ids=str
)
@pytest.mark.parametrize("group_reduce", ["mean", "max"])
@pytest.mark.parametrize("pooling", ["avg", "max"])
@pytest.mark.parametrize(("window", "pool", "sinks"), [(1, 1, 0), (5, 7, 3), (8, 3, 0)])
def test_agrees_with_the_whole_matrix(window, pool, pooling, group_reduce, sinks, more, masked):
    mask = torch.ones(1, 1, 40, 40).tril().bool() if masked else None
    states = make_states(batch=2, mask=mask, **more)
    options = {"window": window, "pool": pool, "pooling": pooling, "group_reduce": group_reduce}
    found = SnapKV(**options).score(states, sinks=sinks)
    expected = scorer_oracle.window_scores(states, sinks=sinks, **options)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)
    if pooling == "avg":
        xkv = XKV(window=window, pool=pool, group_reduce=group_reduce).score(states, sinks=sinks)
        assert torch.equal(xkv, found)


ARRIVALS = {
    scorer: ("chunks", *(("padded",) if scorer.name in PAD_BLIND else ()))
    for scorer in (
        *(XKV(window=5), SnapKV(window=5), CriticalKV(window=5), CAKE(window=8), TOVA(), KNorm()),
        *(H2O(window=4), A2SF(window=4, forgetting=0.9), KeyDiff(window=4), Streaming(window=3)),
        ExpectedAttention(window=4, future=16),
        Lookahead(window=1, votes=12, ahead=3, group_reduce="mean"),
    )
}


@pytest.mark.parametrize(
    ("scorer", "arrival"),
    [(scorer, arrival) for scorer, arrivals in ARRIVALS.items() for arrival in arrivals],
    ids=lambda one: getattr(one, "name", one),
)
def test_a_score_does_not_depend_on_how_the_prompt_comes(monkeypatch, scorer, arrival):
    """In chunks, or with padding: as at once and alone."""
    monkeypatch.setattr(attention_rows, "_KEY_BLOCK_TOKENS", 7)
    states = make_states(batch=3, rotation=halves(1.0, 0.05), hidden_size=10)
    if arrival == "chunks":
        whole = scorer.score(states, sinks=2)
        assert (whole.dtype, whole.min()) == (torch.float32, 0.0)
        for sizes in ([1, 39], [20, 20], [13, 13, 13, 1]):
            in_chunks = score_in_chunks(scorer, states, sizes, sinks=2)
            torch.testing.assert_close(in_chunks, whole, atol=1e-5, rtol=0)
    else:
        for mask in masks_of(PADS):
            found = scorer.score(replace(states, mask=mask), sinks=2)
            for row, n_pads in enumerate(PADS):
                alone = scorer.score(tokens_of(states, row, n_pads), sinks=2)[0]
                torch.testing.assert_close(found[row, :, n_pads:], alone, atol=1e-5, rtol=1e-5)
                assert not found[row, :, :n_pads].any()


PADS = (0, 9, 36)  # the last row has fewer real tokens than the windows


def tokens_of(states, row, first):
    """One row of a batch from a token on."""
    names = ("queries", "keys", "values")
    return replace(states, **{n: getattr(states, n)[row : row + 1, :, first:] for n in names})


def masks_of(pads):
    """Masks in the forms that transformers has: of booleans, to be added, and of tokens alone."""
    shown = torch.stack([torch.arange(40) >= n_pads for n_pads in pads])
    causal = shown[:, None, None] & torch.ones(40, 40).tril().bool()
    return causal, torch.where(causal, 0.0, torch.finfo(torch.float32).min), shown.long()


def test_a_bias_of_each_query_head_counts():
    states = make_states()
    bias = torch.zeros(1, 6, 40, 40)
    bias[:, 4, :, 10] = 100.0
    bias = bias.masked_fill(torch.ones(40, 40).triu(1).bool(), torch.finfo(torch.float32).min)
    scores = XKV(window=4, pool=1).score(replace(states, mask=bias), sinks=0)
    assert scores[0, 1, 10] > 0.33
    assert scores[0, 0, 10] < 0.33


def test_a_mask_that_is_no_tensor_is_refused():
    states = make_states(mask=object())
    with pytest.raises(UnsupportedModelError, match="sdpa"):
        XKV().score(states, sinks=0)


@pytest.mark.parametrize("least_rows", [1, 7, 1000])
@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("forgetting", [1.0, 0.8])
def test_agrees_with_the_whole_matrix_in_any_blocks(monkeypatch, forgetting, sinks, least_rows):
    monkeypatch.setattr(column_sums, "_BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(attention_rows, "_LEAST_ROWS", least_rows)
    states = make_states(batch=2)
    scorer = H2O(window=5) if forgetting == 1 else A2SF(window=5, forgetting=forgetting)
    expected = scorer_oracle.column_sums(states, sinks=sinks, window=5, forgetting=forgetting)
    found = scorer.score(states, sinks=sinks)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize(("scorer", "rows"), [(XKV(), 8), (H2O(), 16)])
def test_no_tensor_grows_with_the_square_of_the_prompt(monkeypatch, scorer, rows):
    monkeypatch.setattr(column_sums, "_BLOCK_ELEMENTS", 1)
    sizes = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                sizes.append(result.numel())
            return result

    states = make_states(n_tokens=600)
    with Spy():
        scorer.score(states, sinks=4)
    assert max(sizes) <= 6 * rows * 600


def tova(states):
    return scorer_oracle.full_attention(states)[:, :, -1].mean(axis=1)[:, None].repeat(2, axis=1)


def keydiff(states):
    keys = states.keys.double().numpy()
    units = keys / np.maximum(np.linalg.norm(keys, axis=-1, keepdims=True), 1e-12)
    anchor = units.mean(axis=2, keepdims=True)
    return 1 - (units * anchor).sum(axis=-1) / np.linalg.norm(anchor, axis=-1)


def cake(states):
    rows = scorer_oracle.full_attention(states)[:, :, -6:]
    raw = rows.mean(axis=2) + 200 * rows.var(axis=2, ddof=1)
    raw[..., :SINKS] = raw[..., -6:] = 0.0
    padded = np.pad(raw, ((0, 0), (0, 0), (2, 2)))
    pooled = np.mean([padded[..., shift : shift + 40] for shift in range(5)], axis=0)
    return pooled.reshape(2, 2, 3, 40).mean(axis=2)


def criticalkv(states):
    how = {"window": 6, "sinks": SINKS, "pool": 3, "pooling": "max"}
    attention = scorer_oracle.window_scores(states, **how)
    return (attention + 0.01) * projected_value_norms(states).double().numpy()


SINKS = 2
DEFINITIONS = {
    TOVA(window=3): tova,
    Streaming(window=3): lambda states: np.tile(np.arange(1, 41) / 40, (2, 2, 1)),
    KNorm(window=1): lambda states: (
        1 / np.maximum(np.linalg.norm(states.keys.double().numpy(), axis=-1), 1e-6)
    ),
    KeyDiff(window=4): keydiff,
    CAKE(window=6, pool=5, gamma=200.0): cake,
    CriticalKV(window=6, pool=3, epsilon=0.01): criticalkv,
}


@pytest.mark.parametrize("scorer", DEFINITIONS, ids=lambda scorer: scorer.name)
def test_a_scorer_is_its_definition(scorer):
    states = make_states(batch=2, hidden_size=10)
    states.keys[:, :, 7] = 0.0
    expected = np.array(DEFINITIONS[scorer](states))
    expected[..., :SINKS] = expected[..., -scorer.window :] = 0.0
    found = scorer.score(states, sinks=SINKS).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_cake_with_one_row_has_no_variance():
    states = make_states()
    with_variance = CAKE(window=1, pool=1, gamma=200.0).score(states, sinks=0)
    without = CAKE(window=1, pool=1, gamma=0.0).score(states, sinks=0)
    assert torch.equal(with_variance, without)


def turned_by(position, pairs):
    """The matrix that rotates each pair, (first dimension, second one, frequency)."""
    matrix = np.eye(4)
    for i, j, frequency in pairs:
        matrix[i, i] = matrix[j, j] = math.cos(position * frequency)
        matrix[j, i] = math.sin(position * frequency)
        matrix[i, j] = -matrix[j, i]
    return matrix


ROTATIONS = [
    (halves(1.0, 0.05), [(0, 2, 1.0), (1, 3, 0.05)]),
    (halves(0.7), [(0, 1, 0.7)]),
    (Rotation(lambda: torch.tensor([0.7]), slice(3, 4), slice(2, 3)), [(3, 2, 0.7)]),
    (
        Rotation(lambda: torch.tensor([1.0, 0.05]), slice(0, 4, 2), slice(1, 4, 2)),
        [(0, 1, 1.0), (2, 3, 0.05)],
    ),
    (NO_ROTATION, []),
]


@pytest.mark.parametrize(("rotation", "pairs"), ROTATIONS)
def test_expected_attention_agrees_with_loops(rotation, pairs):
    states = make_states(batch=2, rotation=rotation)
    sinks, window, future = 3, 5, 11
    scorer = ExpectedAttention(window=window, future=future, epsilon=0.01)
    found = scorer.score(states, sinks=sinks).numpy()
    ahead = np.mean([turned_by(40 + step, pairs) for step in range(future)], axis=0)
    keys, values = states.keys.double().numpy(), states.values.double().numpy()
    for row in range(2):
        for head in range(2):
            expected = np.zeros(40)
            for member in range(3):
                queries = states.queries[row, head * 3 + member].double().numpy()
                raw = [turned_by(-p, pairs) @ queries[p] for p in range(sinks, 40)]
                mean = ahead @ np.mean(raw, axis=0)
                spread = ahead @ np.cov(np.array(raw).T, bias=True) @ ahead.T
                logits = keys[row, head] @ mean / 2
                logits += np.array([k @ spread @ k for k in keys[row, head]]) / 8
                weights = np.exp(logits[sinks:] - logits[sinks:].max())
                expected[sinks:] += weights / weights.sum() / 3
            expected = (expected + 0.01) * np.linalg.norm(values[row, head], axis=-1)
            expected[:sinks] = expected[-window:] = 0.0
            np.testing.assert_allclose(found[row, head], expected, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "rotate"),
        ({"rotation": halves(1.0, 1.0), "softcap": 30.0}, "caps"),
        ({"rotation": halves(1.0, 1.0), "sink_logits": torch.ones(6)}, "sink"),
    ],
)
def test_expected_attention_refuses_what_it_cannot_expect(more, said):
    with pytest.raises(UnsupportedModelError, match=said):
        ExpectedAttention().score(make_states(**more), sinks=0)


@pytest.mark.parametrize("more", [{}, {"softcap": 1.5}, {"sink_logits": torch.linspace(0, 12, 6)}])
@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize(("rotation", "pairs"), ROTATIONS)
def test_votes_from_behind_the_end_agree_with_loops(rotation, pairs, reduce, more):
    states = make_states(batch=2, rotation=rotation, **more)
    sinks, window, votes, ahead = 3, 5, 9, 4
    reductions = {"row_reduce": reduce, "group_reduce": reduce}
    scorer = Lookahead(window=window, votes=votes, ahead=ahead, **reductions)
    found = scorer.score(states, sinks=sinks).numpy()
    moved = states.queries[:, :, -votes:].double().numpy()
    for place in range(votes):
        matrix = turned_by(votes - 1 - place + ahead, pairs)
        moved[:, :, place] = moved[:, :, place] @ matrix.T
    # one query at a time is the last of its rows, and so sees every key
    rows = [replace(states, queries=torch.tensor(moved[:, :, [place]])) for place in range(votes)]
    weights = np.concatenate([scorer_oracle.full_attention(one) for one in rows], axis=2)
    weights = weights.reshape(2, 2, 3 * votes, 40)
    expected = weights.mean(axis=2) if reduce == "mean" else weights.max(axis=2)
    expected[..., :sinks] = expected[..., -window:] = 0.0
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-6)


def test_votes_stay_in_their_places_if_a_rotation_is_not_known():
    with pytest.raises(UnsupportedModelError, match=r"lookahead has to rotate .*ahead=0"):
        Lookahead(ahead=8).score(make_states(), sinks=0)


def test_projected_value_norms_agree_with_loops(monkeypatch):
    monkeypatch.setattr(projected_values, "_BLOCK_TOKENS", 7)
    states = make_states(batch=2, hidden_size=10)
    weight = states.output_projection.double().numpy()
    found = projected_value_norms(states).numpy()
    for row, head, token in np.ndindex(2, 2, 40):
        value = states.values[row, head, token].double().numpy()
        heads = range(head * 3, head * 3 + 3)
        norms = [np.abs(weight[:, h * 4 : h * 4 + 4] @ value).sum() for h in heads]
        assert found[row, head, token] == pytest.approx(np.mean(norms), rel=1e-5)


@pytest.mark.parametrize(
    "weight", [None, torch.ones(10, 5), torch.ones(10, 24, dtype=torch.uint8), torch.ones(24)]
)
def test_without_a_readable_projection_there_are_no_norms(weight):
    with pytest.raises(UnsupportedModelError, match="output projection"):
        projected_value_norms(replace(make_states(), output_projection=weight))
