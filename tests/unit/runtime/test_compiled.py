"""Decoding in one graph of `torch.compile`, whatever a cache keeps, and uncompiled all else."""

import copy
import gc
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest
import runtime_oracle as tiny
import torch
from prompt_runs import padding_mask
from torch._dynamo.testing import CompileCounter
from transformers import CompileConfig

import kvalloc
from kvalloc.errors import UnsupportedRequestError

LENGTHS = (60, 41, 77)
WIDTHS = {"16": [16], "5": [5], "8+5+4+3": [8, 5, 4, 3]}


@pytest.fixture(autouse=True)
def no_graphs():
    torch.compiler.reset()
    with torch.no_grad():
        yield
    torch.compiler.reset()


class Compiler(CompileCounter):
    """Counts graphs; what operations of ours have read is overwritten, as compilers reuse it."""

    def __call__(self, graph, inputs):
        super().__call__(graph, inputs)
        return _Reusing(graph).run


class _Reusing(torch.fx.Interpreter):
    def call_function(self, target, args, kwargs):
        found = super().call_function(target, args, kwargs)
        if target is torch.ops.kvalloc.attend:
            for states in args[1:4]:
                states.fill_(float("nan"))
        return found


def profile_for(model, tokens, widths=None, **options):
    """By head, at widths that follow each other over heads and layers."""
    profile = tiny.by_head(tiny.make_profile(model, tokens, 0.5, **options), 6)
    if widths is None:
        return profile
    every = np.resize(np.array(widths), profile.budgets.shape)
    return profile.replace(bits=every + np.zeros_like(profile.budgets))


def decoded(forward, cache, logits, tokens, **inputs):
    """Logits of tokens that are decoded one after the other, (batch, tokens, vocabulary)."""
    found = []
    for _ in range(tokens):
        if "attention_mask" in inputs:
            inputs["attention_mask"] = torch.nn.functional.pad(
                inputs["attention_mask"], (0, 1), value=1
            )
        output = forward(logits[:, -1:].argmax(dim=-1), past_key_values=cache, **inputs)
        assert output.past_key_values is cache
        logits = output.logits
        found.append(logits)
    return torch.cat(found, dim=1)


def both(model, compiled, make, ids, tokens, *, exact=True, **inputs):
    """Decode after a prompt with the model and compiled, to the same bit; returns the cache."""
    logits, caches = [], []
    for forward in (model, compiled):
        cache = make()
        first = model(ids, past_key_values=cache, **inputs).logits
        logits.append(decoded(forward, cache, first, tokens, **inputs))
        caches.append(cache)
    if exact:
        assert torch.equal(*logits)
    assert torch.allclose(*logits, atol=1e-5)
    one, other = caches
    assert one.get_seq_length() == other.get_seq_length() == ids.shape[1] + tokens
    assert (one.kept_tokens_by_row == other.kept_tokens_by_row).all()
    assert tiny.same_kept(one, other)
    return other


@pytest.mark.parametrize("widths", WIDTHS)
def test_one_graph_serves_all_prompts(widths):
    """Of other ragged lengths, with evictions between the tokens, and where no cache is left."""
    model, graphs = tiny.tiny_model(num_key_value_heads=4, num_attention_heads=4), Compiler()
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    for tokens in LENGTHS:
        profile = profile_for(model, tokens, WIDTHS[widths])
        cache = both(
            model,
            compiled,
            partial(kvalloc.make_cache, model, profile),
            tiny.prompt(tokens, batch=2, seed=tokens),
            66,  # an eviction comes after 64
        )
        assert cache.reduced
        del cache
        gc.collect()
        assert not model.model._forward_hooks
    assert graphs.frame_count == 1
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("family", "attention", "padded", "options"),
    [
        ("llama", "sdpa", True, {}),
        ("phi3", "eager", False, {}),
        ("qwen3", "sdpa", False, {}),
        ("gemma3", "sdpa", True, {}),
        ("gemma3", "eager", True, {}),
        ("gemma3", "sdpa", False, {}),
        *(("llama", "sdpa", False, {"dtype": one}) for one in (torch.bfloat16, torch.float16)),
        *(
            ("llama", "sdpa", False, {"policy": one})
            for one in ("mpcache", "merge", "attention_matching", "tova", "h2o")
        ),
    ],
)
def test_padding_sliding_layers_families_types_and_policies(family, attention, padded, options):
    options = dict(options)
    model = tiny.tiny_model(family, attention, options.pop("dtype", torch.float32))
    graphs = CompileCounter()
    compiled, ids = torch.compile(model, fullgraph=True, backend=graphs), tiny.prompt(60, batch=3)
    inputs = {}
    if padded:
        inputs["attention_mask"] = padding_mask((60, 53, 40))
    profile = tiny.make_profile(model, 60, 0.5) if options else profile_for(model, 60)
    # of sliding layers transformers makes a mask that hides nothing, which we leave out
    exact = family != "gemma3" or attention == "eager"
    make = partial(kvalloc.make_cache, model, profile, **options)
    both(model, compiled, make, ids, 40 if options else 12, exact=exact, **inputs)
    # a mask that grows makes torch give its length a symbol at the second token
    assert graphs.frame_count == 1 + padded


@pytest.mark.parametrize("wrap", ["model", "decoder", "inside"])
def test_what_is_no_single_token_runs_uncompiled(model, wrap):
    """Prompts, chunks, turns and forwards with gradients, whatever is compiled."""
    profile, ids = profile_for(model, 60), tiny.prompt(60)
    plain = kvalloc.make_cache(model, profile)
    compiled, graphs = model, CompileCounter()
    expected = [model(part, past_key_values=plain).logits for part in ids.split([55, 5], dim=1)]
    expected += [model(ids[:, :n], past_key_values=plain).logits for n in (1, 7, 1, 1)]
    if wrap == "model":
        compiled = torch.compile(model, backend=graphs)
    elif wrap == "decoder":
        model.model.compile(backend=graphs)
    else:
        model.model = torch.compile(model.model, backend=graphs)
    cache = kvalloc.make_cache(compiled, profile)
    found = [compiled(part, past_key_values=cache).logits for part in ids.split([55, 5], dim=1)]
    found += [compiled(ids[:, :n], past_key_values=cache).logits for n in (1, 7, 1)]
    assert bool(graphs.frame_count) == (wrap == "model")  # torch gives a decoder alone up
    with torch.enable_grad():
        found.append(compiled(ids[:, :1], past_key_values=cache).logits)
        found[-1].sum().backward()
    assert model.lm_head.weight.grad is not None
    assert all(map(torch.equal, found[:-1], expected))
    assert torch.allclose(found[-1], expected[-1], atol=1e-5)  # torch's operations, with gradients
    assert model.config._attn_implementation == "sdpa"


def test_fullgraph_says_what_a_graph_holds(model):
    cache = kvalloc.make_cache(model, profile_for(model, 60))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="one token that follows a complete"):
        compiled(tiny.prompt(60), past_key_values=cache)
    logits = model(tiny.prompt(60), past_key_values=cache).logits
    decoded(compiled, cache, logits, 3)
    assert cache.get_seq_length() == 63


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_compiled_token_that_fails_can_be_repeated(model, monkeypatch, error):
    profile, ids = profile_for(model, 60), tiny.prompt(60)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    caches = [kvalloc.make_cache(model, profile) for _ in range(2)]
    logits = [model(ids, past_key_values=cache).logits for cache in caches]
    expected = decoded(model, caches[0], logits[0], 5)
    first = decoded(compiled, caches[1], logits[1], 2)
    update = type(caches[1].layers[2]).update

    def fail(*args, **kwargs):
        raise error("amid a token")

    monkeypatch.setattr(type(caches[1].layers[2]), "update", fail)
    with pytest.raises(error, match="amid a token"):
        compiled(ids[:, :1], past_key_values=caches[1])
    monkeypatch.setattr(type(caches[1].layers[2]), "update", update)
    assert torch.equal(torch.cat([first, decoded(compiled, caches[1], first, 3)], dim=1), expected)


def test_what_is_wrong_is_said_as_uncompiled(model):
    """By the operation, in our own words; a mask that hides the token is followed, too."""
    cache = kvalloc.make_cache(model, profile_for(model, 60))
    model(tiny.prompt(60, batch=2), past_key_values=cache)
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(UnsupportedRequestError, match="holds a batch of 2"):
        compiled(tiny.prompt(1), past_key_values=cache)
    with pytest.raises(UnsupportedRequestError, match="expected 61"):
        compiled(tiny.prompt(1, 2), past_key_values=cache, attention_mask=torch.ones(2, 60))
    mask = torch.ones(2, 61)
    mask[1, -1] = 0
    twin = copy.deepcopy(cache)
    one, other = (
        forward(tiny.prompt(1, 2), past_key_values=own, attention_mask=mask).logits
        for forward, own in ((model, twin), (compiled, cache))
    )
    assert torch.equal(one[0], other[0])
    assert cache.rows[1].seen < cache.rows[0].seen


@pytest.mark.parametrize("how", ["cache", "profile", "rows of different ways"])
def test_generate_of_a_compiled_model(model, how):
    """The prompt and a later turn are read outside of the graph, all tokens decoded in it."""
    profile, lengths = profile_for(model, 60), (60,) if "rows" not in how else (60, 53, 10)
    mask = padding_mask(lengths)
    ids, turn = tiny.prompt(60, len(mask)), tiny.prompt(9, len(mask), seed=5)
    own = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    own["output_logits"] = True
    answers, graphs = [], CompileCounter()
    with ExitStack() as stack:
        if how == "profile":
            stack.enter_context(kvalloc.apply(model, profile))
        elif how != "cache":
            stack.enter_context(kvalloc.apply(model, budget="30%"))
        for _ in range(2):
            cache = kvalloc.make_cache(model, profile) if how == "cache" else None
            first = model.generate(
                ids, attention_mask=mask, past_key_values=cache, max_new_tokens=30, **own
            )
            cache, more = first.past_key_values, torch.cat([first.sequences, turn], dim=1)
            assert cache.reduced
            assert (len({row.method for row in cache.rows}) > 1) == (len(mask) > 1)
            shown = torch.nn.functional.pad(mask, (0, more.shape[1] - 60), value=1)
            out = model.generate(
                more, attention_mask=shown, past_key_values=cache, max_new_tokens=12, **own
            )
            answers.append(torch.stack([*first.logits, *out.logits]))
            model.compile(backend=graphs)
    assert torch.equal(*answers)
    # at most one for a mask that grows, and what follows the decoder for prompts of two lengths
    assert 1 <= graphs.frame_count <= 4


def test_compile_config_is_served_uncompiled(model):
    """transformers compiles for caches of a fixed size alone, and says that it does not here."""
    cache = kvalloc.make_cache(model, profile_for(model, 60))
    config = CompileConfig(backend="eager")
    own = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    expected = model.generate(tiny.prompt(60), past_key_values=copy.deepcopy(cache), **own)
    found = model.generate(tiny.prompt(60), past_key_values=cache, compile_config=config, **own)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("whole", [True, False])
def test_a_model_that_breaks_the_graph_decodes_all_the_same(model, whole):
    profile, ids = profile_for(model, 60), tiny.prompt(60)
    caches = [kvalloc.make_cache(model, profile) for _ in range(2)]
    logits = [model(ids, past_key_values=cache).logits for cache in caches]
    expected = decoded(model, caches[0], logits[0], 6)
    handle = model.model.layers[2].mlp.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    (model if whole else model.model).compile(backend="eager")
    assert torch.equal(decoded(model, caches[1], logits[1], 6), expected)
    handle.remove()
    assert model.config._attn_implementation == "sdpa"
    assert caches[1].interrupted is None


@pytest.mark.parametrize("family", ["llama4", "llama"])
def test_what_no_graph_holds_runs_uncompiled(family):
    """A layer that sees its chunk alone; a mask of queries and keys."""
    model, ids, inputs = tiny.tiny_model(family), tiny.prompt(60), {}
    caches = [kvalloc.make_cache(model, tiny.make_profile(model, 60, 0.5)) for _ in range(2)]
    logits = [model(ids, past_key_values=cache).logits for cache in caches]
    if family == "llama":
        inputs = {"attention_mask": torch.ones(1, 1, 1, 60, dtype=torch.bool)}
    expected = decoded(model, caches[0], logits[0], 6, **inputs)
    model.compile(backend="eager")
    assert torch.equal(decoded(model, caches[1], logits[1], 6, **inputs), expected)


def test_a_cache_may_go_while_a_graph_is_made(model):
    """What Dynamo leaves keeps a cache alive until Python collects it, at any time."""

    def collecting(graph, inputs):
        gc.collect()
        return graph

    ids = [tiny.prompt(tokens) for tokens in (20, 50, 33)]
    expected = [model(one, use_cache=False).logits for one in ids]
    model.compile(backend=collecting)
    for one, logits in zip(ids, expected, strict=True):
        assert torch.equal(model(one, use_cache=False).logits, logits)
        with kvalloc.apply(model, budget="50%"):
            model.generate(one, max_new_tokens=4)
