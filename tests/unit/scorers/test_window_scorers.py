"""XKV and SnapKV against the whole attention matrix in float64, and by hand."""

import math

import numpy as np
import pytest
import scorer_oracle
import torch
from scorer_oracle import make_states

from kvalloc.errors import InputError, UnsupportedModelError
from kvalloc.models.attention import AttentionStates
from kvalloc.scorers import attention_rows
from kvalloc.scorers.snapkv import SnapKV
from kvalloc.scorers.xkv import XKV


def test_one_head_by_hand():
    # One dimension, scaling 1, one row in the window: logits are the keys themselves.
    keys = torch.tensor([math.log(8.0), 0.0, math.log(2.0), math.log(4.0), 0.0])
    states = AttentionStates(
        layer=0,
        queries=torch.ones(1, 1, 5, 1),
        keys=keys.view(1, 1, 5, 1),
        values=torch.zeros(1, 1, 5, 1),
        scaling=1.0,
        mask=None,
    )
    plain = XKV(window=1, pool=1).score(states, sinks=0)
    assert plain[0, 0].tolist() == pytest.approx([8 / 16, 1 / 16, 2 / 16, 4 / 16, 0])
    # the sink's 8 must not bleed into its neighbour: (0 + 1 + 2) / 3, (1 + 2 + 4) / 3, (2 + 4) / 3
    pooled = XKV(window=1, pool=3).score(states, sinks=1)
    assert pooled[0, 0].tolist() == pytest.approx([0, 3 / 48, 7 / 48, 6 / 48, 0])


def test_query_heads_share_the_right_kv_head():
    # Two KV heads, two query heads each; query head 1 looks at token 0, the others at token 2.
    queries = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]) * 50
    keys = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    states = AttentionStates(
        layer=0,
        queries=queries.view(1, 4, 1, 2).expand(1, 4, 4, 2),
        keys=keys.expand(1, 2, 4, 2),
        values=keys.expand(1, 2, 4, 2),
        scaling=1.0,
        mask=None,
    )
    mean = XKV(window=1, pool=1).score(states, sinks=0)
    assert mean[0].tolist() == [
        pytest.approx([0.5, 0, 0.5, 0], abs=1e-6),
        pytest.approx([0, 0, 1.0, 0], abs=1e-6),
    ]
    most = XKV(window=1, pool=1, group_reduce="max").score(states, sinks=0)
    assert most[0, 0].tolist() == pytest.approx([1.0, 0, 1.0, 0], abs=1e-6)


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("group_reduce", ["mean", "max"])
@pytest.mark.parametrize("pooling", ["avg", "max"])
@pytest.mark.parametrize(("window", "pool"), [(1, 1), (5, 7), (8, 3)])
def test_agrees_with_the_whole_matrix(window, pool, pooling, group_reduce, sinks):
    states = make_states(batch=2)
    options = {"window": window, "pool": pool, "pooling": pooling, "group_reduce": group_reduce}
    found = SnapKV(**options).score(states, sinks=sinks)
    expected = scorer_oracle.window_scores(states, sinks=sinks, **options)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)
    if pooling == "avg":
        xkv = XKV(window=window, pool=pool, group_reduce=group_reduce).score(states, sinks=sinks)
        assert torch.equal(xkv, found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_scored_in_float32_block_by_block(dtype, monkeypatch):
    monkeypatch.setattr(attention_rows, "_KEY_BLOCK_TOKENS", 7)
    states = make_states(dtype=dtype)
    found = XKV(window=5).score(states, sinks=2)
    expected = scorer_oracle.window_scores(states, window=5, sinks=2, pool=7)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("new", [1, 3, 12])
def test_few_new_tokens_after_many_old_ones(new):
    states = make_states(n_new_tokens=new)
    found = XKV(window=8, pool=3).score(states, sinks=2)
    expected = scorer_oracle.window_scores(states, window=8, sinks=2, pool=3)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("form", ["bool", "additive", "padding only"])
def test_padding_is_no_token(form):
    pads = (0, 9, 36)  # the last row has fewer real tokens than the window
    states = make_states(batch=3)
    visible = np.ones((3, 1, 40, 40), dtype=bool)
    for row, n_pads in enumerate(pads):
        visible[row, :, :, :n_pads] = False
    causal = torch.from_numpy(visible & np.tril(np.ones((40, 40), dtype=bool)))
    mask = {
        "bool": causal,
        "additive": torch.where(causal, 0.0, torch.finfo(torch.float32).min),
        "padding only": torch.from_numpy(visible[:, 0, 0]).long(),
    }[form]
    masked = AttentionStates(
        layer=0,
        queries=states.queries,
        keys=states.keys,
        values=states.values,
        scaling=states.scaling,
        mask=mask,
    )
    found = XKV(window=8, pool=7).score(masked, sinks=3)
    expected = scorer_oracle.window_scores(
        states, window=8, sinks=3, pool=7, first=pads, visible=visible
    )
    assert torch.isfinite(found).all()
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)


def test_a_bias_of_each_query_head_counts():
    states = make_states()
    bias = torch.zeros(1, 6, 40, 40)
    bias[:, 4, :, 10] = 100.0
    bias = bias.masked_fill(torch.ones(40, 40).triu(1).bool(), torch.finfo(torch.float32).min)
    masked = AttentionStates(
        layer=0,
        queries=states.queries,
        keys=states.keys,
        values=states.values,
        scaling=states.scaling,
        mask=bias,
    )
    scores = XKV(window=4, pool=1).score(masked, sinks=0)
    assert scores[0, 1, 10] > 0.33
    assert scores[0, 0, 10] < 0.33


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "more", [{"softcap": 1.5}, {"sink_logits": torch.linspace(0, 12, 6)}], ids=["softcap", "sinks"]
)
def test_logits_are_those_of_the_model(more, masked):
    mask = torch.ones(1, 1, 40, 40).tril().bool() if masked else None
    states = make_states(mask=mask, **more)
    found = XKV(window=5, pool=3).score(states, sinks=2)
    expected = scorer_oracle.window_scores(states, window=5, sinks=2, pool=3)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)
    plain = scorer_oracle.window_scores(make_states(), window=5, sinks=2, pool=3)
    assert np.abs(plain - expected).max() > 0.01


def test_a_mask_that_is_no_tensor_is_refused():
    states = make_states(mask=object())  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match="sdpa"):
        XKV().score(states, sinks=0)


@pytest.mark.parametrize("n_tokens", [1, 8, 11, 12])
def test_nothing_to_evict_gives_zeros(n_tokens):
    scores = XKV(window=8).score(make_states(n_tokens=n_tokens), sinks=4)
    assert scores.shape == (1, 2, n_tokens)
    assert not scores.any()


def test_no_tensor_grows_with_the_square_of_the_prompt():
    sizes = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                sizes.append(result.numel())
            return result

    states = make_states(n_tokens=600)
    with Spy():
        XKV().score(states, sinks=4)
    assert max(sizes) <= 6 * 8 * 600


@pytest.mark.parametrize(
    ("scorer", "options", "said"),
    [
        (XKV, {"window": 0}, "window is 0"),
        (XKV, {"window": True}, "window is True"),
        (XKV, {"pool": 4}, "pool is 4"),
        (XKV, {"group_reduce": "sum"}, "mean, max"),
        (SnapKV, {"pooling": "min"}, "avg, max"),
        (SnapKV, {"pool": -1}, "pool is -1"),
    ],
)
def test_parameters_out_of_range(scorer, options, said):
    with pytest.raises(InputError, match=said):
        scorer(**options)
