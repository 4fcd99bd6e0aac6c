"""Budgets inside kvpress and its scores inside kvalloc, by stand-ins with kvpress's interface.

tests/integration/test_kvpress.py has the same with kvpress itself.
"""

import numpy as np
import pytest
import torch
from factories import make_budget_profile
from press_stand_ins import N_PROMPT, BasePress, ScorerPress, install, prompt_ids
from scorer_oracle import make_states
from tiny_models import tiny_model
from transformers import DynamicCache

from kvalloc.errors import InputError, ModelMismatchError, UnsupportedRequestError
from kvalloc.formats.budget_profile import Policy
from kvalloc.interop.kvpress_budgets import PressScorer, budget_press
from kvalloc.models.loading import shape_of
from kvalloc.models.rope import rotate

RECENT = Policy(scorer="streaming", scorer_parameters={"window": 3}, sinks=2, window=3)


class NormPress(ScorerPress):
    def score(self, module, hidden, keys, values, attentions, kwargs):
        return -keys.norm(dim=-1)


class LastPress(ScorerPress):
    """Logits of the last query, from the hidden states and the table of angles."""

    def score(self, module, hidden, keys, values, attentions, kwargs):
        heads = module.config.num_attention_heads
        plain = module.q_proj(hidden).view(*hidden.shape[:2], heads, module.head_dim)[:, -1]
        cos, sin = (table[:, -1, None] for table in kwargs["position_embeddings"])
        half = module.head_dim // 2
        turned = plain * cos + torch.cat([-plain[..., half:], plain[..., :half]], dim=-1) * sin
        repeated = keys.repeat_interleave(module.num_key_value_groups, dim=1)
        logits = torch.einsum("bhd,bhnd->bhn", turned, repeated)
        shown = module.rotary_emb(keys, torch.arange(keys.shape[2])[None])
        torch.testing.assert_close(shown, kwargs["position_embeddings"])
        return logits.view(len(keys), keys.shape[1], -1, keys.shape[2]).mean(dim=2)


class NeedyPress(ScorerPress):
    def score(self, module, hidden, keys, values, attentions, kwargs):
        return module.k_proj(hidden)


class BlindPress(BasePress):
    """Gives no scores."""


@pytest.fixture(autouse=True)
def kvpress(monkeypatch):
    install(monkeypatch, NormPress, LastPress, NeedyPress, BlindPress)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def budgets_of(model, rows, **changes):
    standing = {"shape": shape_of(model), "context_tokens": N_PROMPT, "policy": RECENT}
    return make_budget_profile(np.array(rows), **{**standing, **changes})


def read_prompt(model, press):
    cache = DynamicCache(config=model.config)
    with torch.inference_mode(), press(model):
        model.model(input_ids=torch.tensor([prompt_ids()]), past_key_values=cache)
    return cache


def test_a_press_keeps_the_best_of_each_layer_and_head(model):
    full = read_prompt(model, budget_press(budgets_of(model, [[30, 30]] * 3), NormPress()))
    cache = read_prompt(
        model, budget_press(budgets_of(model, [[9, 9], [7, 30], [30, 30]]), NormPress())
    )
    norms = [layer.keys[0].norm(dim=-1) for layer in full.layers]

    def kept(scores, n):
        best = scores[2:27].topk(n - 5, largest=False).indices + 2
        return sorted([0, 1, 27, 28, 29, *best.tolist()])

    for head in range(2):  # freed: what is left are those of the full cache, in order
        expected = full.layers[0].keys[0, head][kept(norms[0][head], 9)]
        assert torch.equal(cache.layers[0].keys[0, head], expected)
    attention = [layer.self_attn for layer in model.model.layers]
    _, heads, places = attention[1].masked_key_indices
    del attention[1].masked_key_indices
    assert set(heads.tolist()) == {0}
    hidden = {*range(30)} - {*places.tolist()}
    norms = cache.layers[1].keys[0, 0].norm(dim=-1)  # hidden, and still there
    assert sorted(hidden) == kept(norms, 7)
    assert all(getattr(one, "masked_key_indices", None) is None for one in attention)


def test_the_scorer_shows_a_press_its_queries_and_angles():
    frequencies = torch.tensor([1.0, 0.1])
    states = make_states(frequencies=frequencies)
    scores = PressScorer(press="Last", window=4).score(states, sinks=2)
    logits = torch.einsum(
        "bhd,bhnd->bhn", states.queries[:, :, -1], states.keys.repeat_interleave(3, 1)
    )
    expected = logits.view(1, 2, 3, -1).mean(dim=2)
    expected -= expected.min()
    expected[..., :2] = expected[..., -4:] = 0
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)
    plain = rotate(states.queries, -torch.arange(40), frequencies)
    assert not torch.equal(plain, states.queries)
    assert PressScorer(press="Last").query_rows(1000) == 1000


def test_what_cannot_be_is_refused(model):
    fitted = budgets_of(model, [[9, 9]] * 3, policy=RECENT.replace(name="attention_matching"))
    with pytest.raises(InputError, match="plain-scores"):
        budget_press(fitted, NormPress())
    assert budget_press(fitted, NormPress(), accept=["plain-scores"])
    with pytest.raises(InputError, match="BlindPress gives no scores"):
        budget_press(fitted, BlindPress())
    with pytest.raises(InputError, match="BlindPress gives no scores"):
        PressScorer(press="Blind")
    other = make_budget_profile([[9, 9]] * 3, context_tokens=N_PROMPT, policy=RECENT)
    with pytest.raises(ModelMismatchError):
        read_prompt(model, budget_press(other, NormPress()))
    states = make_states(frequencies=torch.tensor([1.0, 0.1]))
    with pytest.raises(UnsupportedRequestError, match="NeedyPress cannot score a prompt of 40"):
        PressScorer(press="Needy").score(states, sinks=2)
