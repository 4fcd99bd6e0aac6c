"""How a token is decoded on a GPU: the kernels, and that nothing that is kept is copied."""

import pytest
import runtime_oracle as tiny
from runtime_cells import DTYPES, model_of
from test_decoding_attention import (  # noqa: F401  its tests and fixtures
    TOKENS,
    model,
    profile,
    run,
    test_what_is_kept_stays_where_it_is_while_decoding,
)

import kvalloc
from kvalloc.extensions import triton

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_equal_budgets_are_read_in_place(device, family, dtype, monkeypatch):
    """In half precision, too, what is kept stays where it is, and the kernel reads it there."""
    own, tolerance = model_of(family, "sdpa", dtype)
    cache = kvalloc.make_cache(own, tiny.make_profile(own, TOKENS, 0.4))
    shadow, ids = tiny.Shadow(own), tiny.prompt(TOKENS, 2)
    run(own, ids, cache)
    shadow.logits(ids)
    shadow.follow(cache)
    layer = cache.layers[cache.profile.shape.full_layers[0]]
    read = []
    attention = triton.triton_attention

    def noted(call, kept, **options):
        read.append(kept.parts[0].keys.data_ptr())
        return attention(call, kept, **options)

    monkeypatch.setattr(triton, "triton_attention", noted)
    places = []
    for step in range(4):
        token = tiny.prompt(1, 2, seed=step)
        assert tiny.worst(run(own, token, cache), shadow.logits(token)) <= tolerance
        places.append(layer.kept.parts[0].keys.data_ptr())
    assert len(set(places)) == 1
    assert device == "cpu" or places[0] in read
