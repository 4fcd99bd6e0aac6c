"""How a token is decoded on a GPU: the kernels, and that nothing that is kept is copied."""

import numpy as np
import pytest
import runtime_oracle as tiny
import torch
from runtime_cells import DTYPES, model_of
from test_decoding_attention import (  # noqa: F401  its tests and fixtures
    TOKENS,
    model,
    profile,
    run,
    test_what_is_kept_stays_where_it_is_while_decoding,
)

import kvalloc
from kvalloc.runtime import hooks, in_place
from kvalloc.runtime.attention import triton

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_equal_budgets_are_read_in_place(device, family, dtype, monkeypatch):
    """In half precision, too, what is kept stays where it is, and the kernel reads it there."""
    own, tolerance = model_of(family, "sdpa", dtype, "alone")
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
        places.append(layer.entries.parts[0].keys.data_ptr())
    assert len(set(places)) == 1
    assert device == "cpu" or places[0] in read


def test_cuda_graphs_hold_what_is_decoded_in_place(device, on_cpu, monkeypatch):
    """Nothing of a token is skipped, and Python runs for few of them, also over evictions."""
    monkeypatch.setattr(hooks, "GRAPHED", (device,))
    ran, decode = [], in_place.decode
    monkeypatch.setattr(in_place, "decode", lambda *given: ran.append(1) or decode(*given))
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    own = on_cpu(num_key_value_heads=4, num_attention_heads=4).to(device)
    mode = "reduce-overhead" if device == "cuda" else None
    compiled = torch.compile(own, mode=mode, fullgraph=True)
    kept = tiny.by_head(tiny.make_profile(own, TOKENS, 0.5), 6)
    kept = kept.replace(bits=np.resize([16, 8], kept.budgets.shape))
    logits, tokens = [], 100
    for forward in (own, compiled):
        with torch.no_grad():
            cache = kvalloc.make_cache(own, kept)
            own(tiny.prompt(TOKENS, 2).to(device), past_key_values=cache)
            ids = [tiny.prompt(1, 2, seed=step).to(device) for step in range(tokens)]
            found = [forward(one, past_key_values=cache).logits.cpu() for one in ids]
        logits.append(torch.stack(found))
    assert torch.allclose(*logits, atol=1e-4)
    assert cache.in_place
    skipped = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    calls = len(ran) // tiny.N_LAYERS
    assert skipped == 0
    assert calls == tokens - 9 if device == "cpu" else calls < 10
