"""A model whose layers are not what a cache or its config says is refused before anything runs."""

import itertools

import pytest
import torch
import transformers
from tiny_models import equal_budgets, tiny_model, tiny_profile

import kvalloc
import kvalloc.models.loading
from kvalloc.errors import UnsupportedModelError
from kvalloc.models import names

SIZES = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.4,
}
IDS = torch.arange(2, 62)[None].repeat(1, 3)
OTHERS = "layer {} of {} attends to other {} than its cache returned: {}"
TIMES = "layer 0 of {} makes {} attention calls and {} updates of the cache in one forward"


def made(name, **sizes):
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **sizes})
    kind = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
    torch.manual_seed(0)
    model = kind._from_config(config).eval()
    if not model._supports_attention_backend:
        pytest.skip(f"transformers {transformers.__version__} shows no attention of {name}")
    return model


def logits(model):
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    settings |= {"output_logits": True, "return_dict_in_generate": True}
    return torch.stack(model.generate(IDS, **settings).logits)


def check_refused(model, said, *, runs=True):
    """However it is asked, in one line; and the model is as before, if it runs at all."""
    expected = logits(model) if runs else None
    for way in (
        lambda: kvalloc.apply(model, budget="100%"),
        lambda: kvalloc.apply(model, target_retention=0.9),
        lambda: kvalloc.make_cache(model, equal_budgets(model, 20)),
        lambda: tiny_profile(model),
    ):
        with pytest.raises(UnsupportedModelError) as caught:
            way()
        assert str(caught.value).startswith(said)
        assert "\n" not in str(caught.value)
    assert not runs or torch.equal(logits(model), expected)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        ("JetMoe", {"kv_channels": 8}, OTHERS.format(0, "JetMoeAttention", "keys", "4 heads of 8")),
        ("DiffLlama", {}, TIMES.format("DiffLlamaAttention", 2, 1)),
        ("HrmText", {}, TIMES.format("HrmTextAttention", 8, 1)),
        ("Doge", {}, "layer 0 of DogeAttention adds numbers to its logits"),
    ],
)
def test_families_that_attend_to_others_or_not_once(name, sizes, said):
    assert check_refused(made(name, **sizes), said).endswith("use this model with its full cache")


class Between:
    """A cache as a layer sees it: something happens between it and the layer's attention."""

    def __init__(self, cache, change):
        self._cache, self._change = cache, change

    def update(self, *args, **kwargs):
        return self._change(*self._cache.update(*args, **kwargs))

    def __getattr__(self, name):
        return getattr(self._cache, name)


def changed(change):
    """A model in whose layers something happens to what the cache returned; or layers run twice."""
    model = tiny_model()

    class Own(type(model.model.layers[0].self_attn)):
        def forward(self, *args, **kwargs):
            if (cache := names.cache_among(kwargs)) is not None and change is not None:
                between = names.cache_keyword(model.model, Between(cache, change))
                kwargs = {**names.without_cache(kwargs), **between}
            elif change is None:
                super().forward(*args, **kwargs)
            return super().forward(*args, **kwargs)

    for layer in model.model.layers:
        layer.self_attn.__class__ = Own
    return model


def of_first_layer():
    calls, first = itertools.count(), []

    def change(*states):
        if next(calls) % 3 == 0:
            first[:] = states
        return tuple(first)

    return change


SAME = "of the same size, changed or copied after they were stored"
CHANGES = {
    "keys normalised": (lambda k, v: (k / k.norm(dim=-1, keepdim=True), v), "keys", SAME),
    "values scaled": (lambda k, v: (k, 2 * v), "values", SAME),
    "values scaled in place": (lambda k, v: (k, v.mul_(2)), "values", SAME),
    "another order": (lambda k, v: (k.flip(1), v.flip(1)), "keys", SAME),
    "one head for all": (lambda k, v: (k[:, :1].expand_as(k), v), "keys", SAME),
    "swapped": (lambda k, v: (v, k), "keys", SAME),
    "tiled": (lambda k, v: (k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1)), "keys", "6 heads of 8"),
    "repeated": (lambda k, v: (k, v.repeat_interleave(3, dim=1)), "values", "6 heads of 8"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_layer_that_attends_to_anything_but_what_its_cache_returned(name):
    change, which, found = CHANGES[name]
    said = OTHERS.format(0, "Own", which, found)
    check_refused(changed(change), said, runs=name != "repeated")


def test_a_layer_that_attends_to_another_layers_entries():
    check_refused(changed(of_first_layer()), OTHERS.format(1, "Own", "keys", SAME))


def test_a_layer_that_runs_twice():
    check_refused(changed(None), TIMES.format("Own", 2, 2), runs=False)  # nor does it in 5.2


def test_a_layer_that_changes_nothing_is_served():
    """Also one that becomes another one after a look at it."""
    model = changed(lambda keys, values: (keys[:], values))
    kvalloc.apply(model, budget="30%").remove()
    swapped = changed(CHANGES["swapped"][0]).model.layers[1].self_attn
    model.model.layers[1].self_attn.__class__ = type(swapped)
    with pytest.raises(UnsupportedModelError, match="layer 1 of Own attends"):
        kvalloc.apply(model, budget="30%")


MIMO = {"moe_intermediate_size": 16, "n_routed_experts": 8, "head_dim": 8}


@pytest.mark.parametrize("value_dim", [4, 8, 16])
def test_layers_with_heads_of_their_own(value_dim):
    model = made("MiMoV2Flash", **MIMO, v_head_dim=value_dim)
    shape = kvalloc.models.loading.shape_of(model)
    full, sliding = (shape.by_layer[shape.layer_types.index(kind)] for kind in ("full", "sliding"))
    assert full.sizes == (2, 8, value_dim)
    assert sliding.sizes == (4, 8, value_dim)
    entries = sliding.window  # one more than it needs stays allocated after a decoded token
    with kvalloc.apply(model, budget="100%") as applied:
        logits(model)
    each = [(2, IDS.shape[1] + 3), (4, entries)]
    cache = applied.last_cache
    assert cache.retained_bytes == sum(heads * n * (8 + value_dim) * 4 for heads, n in each)
    assert shape.by_layer[0].sizes[1:] == (8, value_dim)


def test_layers_with_budgets_that_are_not_alike_are_refused():
    model = made("Llama")
    own = model.model.layers[1].self_attn  # as in OpenELM
    own.num_key_value_groups = 4
    own.k_proj, own.v_proj = (torch.nn.Linear(32, 8, bias=False) for _ in range(2))
    said = "layer 1 of LlamaForCausalLM has 1 KV heads with keys of 8 and values of 8 numbers, and"
    check_refused(model, said)


@pytest.mark.parametrize(
    ("name", "sizes", "n_kv_heads"),
    [
        ("GPT2", {"head_dim": 16}, 4),
        ("GPTNeoX", {}, 4),
        ("GPTJ", {"rotary_dim": 4}, 4),
        ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}, 4),
        ("GPTBigCode", {}, 1),
        ("GPTBigCode", {"multi_query": False}, 4),
    ],
)
def test_heads_are_those_that_layers_store_whatever_the_config_says(name, sizes, n_kv_heads):
    model = made(name, **sizes)
    expected, full = logits(model), 2 * n_kv_heads * (IDS.shape[1] + 3) * 2 * 8 * 2
    with kvalloc.apply(model, budget="100%") as applied:
        assert torch.equal(logits(model), expected)
    assert applied.last_cache.full_bytes == full
    with kvalloc.apply(model, budget="40%") as applied:
        logits(model)
    assert full * 0.35 < applied.last_cache.retained_bytes <= full * 0.4
