"""The real model on the shipped text."""

import numpy as np
import pytest
import torch

from kvalloc import fit_scorer
from kvalloc.measure import default_texts, profile
from kvalloc.models import loading
from kvalloc.models.attention import intercept_attention
from kvalloc.models.loading import DEMO_MODEL_ID, shape_of

pytestmark = pytest.mark.model

CONTEXT = 256


@pytest.fixture(scope="module")
def demo():
    return loading.load_model("demo")


@pytest.fixture(scope="module")
def scores(demo):
    return profile(demo.model, demo.tokenizer, default_texts(), samples=2, context=CONTEXT)


def test_the_demo_is_known_by_its_hub_id(demo):
    shape = shape_of(demo.model)
    assert demo.model_id == shape.model_id == DEMO_MODEL_ID
    assert (shape.n_layers, shape.n_query_heads, shape.n_kv_heads, shape.head_dim) == (30, 9, 3, 64)
    assert shape.max_context_tokens == 8192


def test_curves_of_real_attention(scores):
    assert scores.curves.shape == (2, 30, 3, CONTEXT - 12 + 1)
    gains = np.diff(scores.curves, axis=-1)
    assert np.all(gains >= 0)
    assert np.all(np.diff(gains, axis=-1) <= 1e-12)
    assert np.all(scores.curves[..., -1] == 1)
    # heads differ: that is what budgets are about
    half = CONTEXT // 10
    assert scores.curves[..., half].min() < 0.5 < 0.8 < scores.curves[..., half].max()
    assert np.all((scores.masses > 0) & (scores.masses <= 1))


def test_masses_are_what_eager_attention_says(demo, scores):
    """The library's own attention weights of the whole prompt, for one sample."""
    from kvalloc.measure.sampling import choose_samples

    chosen = choose_samples(
        default_texts(), demo.tokenizer, context_tokens=CONTEXT, least_tokens=13, samples=2
    )
    assert chosen.digest() == scores.text_digest
    eager = loading.load_model("demo", attention="eager").model
    masses = np.zeros((30, 3))

    def handler(states, compute):
        output, weights = compute(states.mask)
        votes = weights[0, :, -8:, : CONTEXT - 8].mean(dim=1)
        votes[:, :4] = 0
        pooled = torch.nn.functional.avg_pool1d(votes, 7, stride=1, padding=3)
        masses[states.layer] = pooled.view(3, 3, -1).mean(dim=1)[:, 4:].sum(dim=-1).numpy()
        return output, weights

    with torch.inference_mode(), intercept_attention(eager, handler):
        eager(torch.from_numpy(chosen.samples[1].token_ids)[None], use_cache=False)
    np.testing.assert_allclose(scores.masses[1], masses, atol=1e-4)


def test_a_surrogate_of_real_attention(demo):
    """Texts that it was not fitted on, already with little text; noise would be 0."""
    texts = default_texts()
    found = fit_scorer(demo.model, demo.tokenizer, texts, samples=2, context=CONTEXT)
    assert found.weights.shape == (30, 3, 64 + 64 + 32 + 2 + 1)
    assert found.rank_correlation.mean() > 0.3
