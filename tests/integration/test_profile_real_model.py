"""The real model on the shipped text."""

import pytest
from surrogates import fit_surrogate

from kvalloc.measure import default_texts
from kvalloc.models import loading
from kvalloc.models.loading import DEMO_MODEL_ID, shape_of

pytestmark = pytest.mark.model

CONTEXT = 256


@pytest.fixture(scope="module")
def demo():
    return loading.load_model("demo")


def test_the_demo_is_known_by_its_hub_id(demo):
    shape = shape_of(demo.model)
    assert demo.model_id == shape.model_id == DEMO_MODEL_ID
    assert (shape.n_layers, shape.n_query_heads, shape.n_kv_heads, shape.head_dim) == (30, 9, 3, 64)
    assert shape.max_context_tokens == 8192


def test_a_surrogate_of_real_attention(demo):
    """Texts that it was not fitted on, already with little text; noise would be 0."""
    texts = default_texts()
    found = fit_surrogate(demo.model, demo.tokenizer, texts, samples=2, context=CONTEXT)
    assert found.weights.shape == (30, 3, 64 + 64 + 32 + 2 + 1)
    assert found.rank_correlation.mean() > 0.3
