"""Masks: over the entries that a layer stores, and as models of each attention show them.

Every policy and arrival on each attention is in test_matrix.py.
"""

import pytest
import runtime_oracle as tiny
import tiny_models
import torch
from other_attention import attention_on_cpu
from scorer_oracle import SCORERS

import kvalloc
from kvalloc.models.attention import intercept_attention
from kvalloc.scorers import get_scorer


@pytest.fixture(params=["flex_attention", "padding_only"])
def attention(request):
    with attention_on_cpu(request.param):
        yield request.param


@pytest.mark.parametrize("scorer", [name for name in SCORERS if get_scorer(name).later is None])
def test_scorers_read_masks_of_either_kind(attention, scorer):
    """Padding and causal attention, as the model shows them: the same scores as on sdpa."""
    ids, mask = tiny.prompt(90, 2), torch.ones(2, 90, dtype=torch.long)
    mask[1, :49] = 0
    own = get_scorer(scorer)
    scores = []
    for name in (attention, "sdpa"):
        model = tiny.tiny_model("llama", name)
        seen = []

        def look(states, compute, seen=seen):
            if states.layer == 0:  # later layers differ by rounding
                seen.append(own.score(states, sinks=2))
            return compute(states.mask)

        with torch.no_grad(), intercept_attention(model, look):
            model(ids, attention_mask=mask)
        scores += seen
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-5, atol=1e-7)


def test_profiling_sees_the_same_curves(attention):
    curves = []
    for name in (attention, "sdpa"):
        model = tiny_models.tiny_model(attention=name)
        scores = kvalloc.profile(
            model, tiny_models.WordTokenizer(), [tiny_models.words(300)], samples=2, context=60
        )
        curves.append(torch.from_numpy(scores.curves))
    torch.testing.assert_close(curves[0], curves[1], rtol=1e-4, atol=1e-5)
