"""H2O, A2SF and TOVA against the whole attention matrix in float64, and by hand."""

import math

import numpy as np
import pytest
import scorer_oracle
import torch
from scorer_oracle import make_states, score_in_chunks

from kvalloc.errors import InputError
from kvalloc.models.attention import AttentionStates
from kvalloc.scorers import column_sums
from kvalloc.scorers.a2sf import A2SF
from kvalloc.scorers.h2o import H2O
from kvalloc.scorers.tova import TOVA


def three_tokens() -> AttentionStates:
    """One head whose rows are (1), (2, 1) / 3 and (2, 1, 1) / 4."""
    return AttentionStates(
        layer=0,
        queries=torch.ones(1, 1, 3, 1),
        keys=torch.tensor([math.log(2.0), 0.0, 0.0]).view(1, 1, 3, 1),
        values=torch.zeros(1, 1, 3, 1),
        scaling=1.0,
        mask=None,
    )


def test_h2o_by_hand():
    scores = H2O(window=1).score(three_tokens(), sinks=0)
    assert scores[0, 0].tolist() == pytest.approx([1 + 2 / 3 + 1 / 2, 1 / 3 + 1 / 4, 0])


def test_a2sf_by_hand():
    scores = A2SF(window=1, forgetting=0.5).score(three_tokens(), sinks=0)
    assert scores[0, 0].tolist() == pytest.approx([1 / 4 + 1 / 3 + 1 / 2, 1 / 6 + 1 / 4, 0])


def test_tova_by_hand():
    scores = TOVA().score(three_tokens(), sinks=0)
    assert scores[0, 0].tolist() == pytest.approx([1 / 2, 1 / 4, 0])


def test_tova_shares_one_ranking_over_all_heads_of_the_layer():
    states = make_states(batch=2)
    scores = TOVA(window=3).score(states, sinks=2)
    assert torch.equal(scores[:, 0], scores[:, 1])
    expected = scorer_oracle.full_attention(states)[:, :, -1].mean(axis=1)
    np.testing.assert_allclose(scores[:, 0, 2:-3].numpy(), expected[:, 2:-3], atol=1e-6)
    assert not scores[..., :2].any()
    assert not scores[..., -3:].any()


@pytest.mark.parametrize("least_rows", [1, 7, 1000])
@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("forgetting", [1.0, 0.8])
def test_agrees_with_the_whole_matrix_in_any_blocks(monkeypatch, forgetting, sinks, least_rows):
    monkeypatch.setattr(column_sums, "_BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(column_sums, "_LEAST_ROWS", least_rows)
    states = make_states(batch=2)
    scorer = H2O(window=5) if forgetting == 1 else A2SF(window=5, forgetting=forgetting)
    expected = scorer_oracle.column_sums(states, sinks=sinks, window=5, forgetting=forgetting)
    found = scorer.score(states, sinks=sinks)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("scorer", [H2O(window=4), A2SF(window=4, forgetting=0.9), TOVA()])
@pytest.mark.parametrize("sizes", [[40], [1, 39], [20, 20], [13, 13, 13, 1]])
def test_chunks_give_the_same_score(scorer, sizes):
    states = make_states(batch=2)
    whole = scorer.score(states, sinks=2)
    in_chunks = score_in_chunks(scorer, states, sizes, sinks=2)
    torch.testing.assert_close(in_chunks, whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("form", ["bool", "additive", "padding only"])
def test_padding_is_no_token(form):
    pads = (0, 9, 36)
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
    masked = make_states(batch=3, mask=mask)
    found = H2O(window=8).score(masked, sinks=3)
    expected = scorer_oracle.column_sums(states, sinks=3, window=8, first=pads, visible=visible)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


def test_memory_stays_far_below_the_square_of_the_prompt(monkeypatch):
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
        H2O().score(states, sinks=4)
    assert max(sizes) <= 6 * column_sums._LEAST_ROWS * 600


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: H2O(window=0), "window is 0"),
        (lambda: TOVA(window=-1), "window is -1"),
        (lambda: A2SF(forgetting=0.0), "forgetting is 0.0"),
        (lambda: A2SF(forgetting=1.5), "forgetting is 1.5"),
        (lambda: A2SF(forgetting=True), "forgetting is True"),
    ],
)
def test_parameters_out_of_range(make, said):
    with pytest.raises(InputError, match=said):
        make()
