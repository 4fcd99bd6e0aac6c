"""One hook pair a model, as long as there are caches for it, and no longer."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import runtime_oracle as tiny
import torch
from other_attention import attention_on_cpu
from prompt_runs import failing_with, run
from transformers import DynamicCache, StaticCache

import kvalloc
from kvalloc.errors import (
    ModelMismatchError,
    UnsupportedModelError,
    UnsupportedRequestError,
)
from kvalloc.models import names
from kvalloc.runtime import forwards, hooks

CONTEXT = 60


def hook_counts(model):
    return len(model.model._forward_pre_hooks), len(model.model._forward_hooks)


def test_hooks_are_counted_and_go_with_the_last_cache(model):
    """Right after use, without the garbage collector."""
    profile = tiny.make_profile(model, CONTEXT, 0.3)
    gc.disable()
    try:
        first, second = kvalloc.make_cache(model, profile), kvalloc.make_cache(model, profile)
        assert hook_counts(model) == (1, 1)
        for tokens in (CONTEXT, 3):
            run(model, tiny.prompt(tokens), first)
        del first
        assert hook_counts(model) == (1, 1)
        del second
        assert hook_counts(model) == (0, 0)
    finally:
        gc.enable()


def test_a_cache_does_not_keep_its_model_alive():
    model = tiny.tiny_model()
    cache = kvalloc.make_cache(model, tiny.make_profile(model, CONTEXT, 0.3))
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    assert cache.retained_bytes == 0


def test_nothing_but_the_hooks_is_on_the_model(model):

    def everything():
        return {(name, key) for name, module in model.named_modules() for key in vars(module)}

    before = everything()
    config = model.config.to_dict()
    cache = kvalloc.make_cache(model, tiny.make_profile(model, CONTEXT, 0.3))
    run(model, tiny.prompt(CONTEXT), cache)
    lent = {("model", name) for name in ("__getstate__", "_kvalloc_installed")}
    assert everything() - before == lent
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == "sdpa"
    assert model.model.layers[0].self_attn.config is model.config
    del cache
    assert everything() == before


def test_another_model_may_go_while_one_is_compiled(model):
    """Between what Dynamo reads and what it notes of it, where the garbage collector may run."""
    others = [tiny.tiny_model()]
    caches = [kvalloc.make_cache(one, tiny.make_profile(one, 60, 0.3)) for one in (*others, model)]

    def backend(graph, _):
        others.clear()
        del caches[:-1]
        gc.collect()
        return graph

    expected = model(tiny.prompt(5)).logits
    compiled = torch.compile(model, backend=backend)
    assert torch.equal(compiled(tiny.prompt(5)).logits, expected)
    assert not others


def test_a_compiled_model_sees_nothing_of_a_cache_that_is_alive(model):
    """In one graph, the same before, beside and after it, and where a forward of it broke off."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    compiled, ids = torch.compile(model, fullgraph=True, backend=backend), tiny.prompt(CONTEXT)
    with torch.no_grad():
        expected = model(ids).logits
        assert torch.equal(compiled(ids).logits, expected)
        cache = kvalloc.make_cache(model, tiny.make_profile(model, CONTEXT, 0.3))
        model(ids, past_key_values=cache)
        assert torch.equal(compiled(ids).logits, expected)
        assert len(graphs) == 1
        torch.compiler.reset()
        assert torch.equal(compiled(ids).logits, expected)
        decoder = torch.compile(model.model, fullgraph=True, backend=backend)
        assert torch.equal(decoder(ids)[0], model.model(ids)[0])
        static = StaticCache(config=model.config, max_cache_len=CONTEXT)
        assert torch.allclose(compiled(ids, past_key_values=static).logits, expected, atol=1e-5)
        with failing_with(KeyboardInterrupt, model):
            model(tiny.prompt(3), past_key_values=cache)
        torch.compiler.reset()
        assert torch.equal(compiled(ids).logits, expected)
        model(ids[:, :1])
        del cache
        assert hook_counts(model) == (0, 0)
        assert torch.equal(compiled(ids).logits, expected)


def test_an_interrupted_cache_that_is_dropped_is_tidied_up(model):
    cache = kvalloc.make_cache(model, tiny.make_profile(model, CONTEXT, 0.3))
    with failing_with(KeyboardInterrupt, model):
        model(tiny.prompt(CONTEXT), past_key_values=cache)
    del cache
    with torch.no_grad():
        model(tiny.prompt(5))
    gc.collect()
    assert hook_counts(model) == (0, 0)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("made", ["another", "a copy"])
def test_another_model_cannot_use_the_cache(model, made):
    """Without hooks of its own, and with them; beside a cache of its own the first one works."""
    profile, ids = tiny.make_profile(model, CONTEXT, 0.3), tiny.prompt(CONTEXT)
    cache = kvalloc.make_cache(model, profile)
    other = tiny.tiny_model() if made == "another" else copy.deepcopy(model)
    refused = r"kvalloc\.make_cache\(model, profile\)"
    assert hook_counts(other) == (0, 0)
    with pytest.raises(ModelMismatchError, match=refused):
        run(other, ids, cache)
    others = kvalloc.make_cache(other, profile)
    assert hook_counts(other) == (1, 1)
    with pytest.raises(ModelMismatchError, match=refused):
        run(other, ids, cache)
    assert cache.retained_bytes == others.retained_bytes == 0
    run(model, ids, cache)
    run(other, ids, others)
    assert cache.retained_bytes == others.retained_bytes == profile.retained_bytes
    del others
    assert (hook_counts(other), hook_counts(model)) == ((0, 0), (1, 1))


def test_a_pickle_of_a_hooked_model_knows_nothing_of_kvalloc(model):
    """Also while a forward is within it, and where only its decoder is copied."""
    ids, pickles = tiny.prompt(CONTEXT), [pickle.dumps(model)]
    cache = kvalloc.make_cache(model, tiny.make_profile(model, CONTEXT, 0.3))
    pickles += map(pickle.dumps, (model, model.model, copy.copy(model.model)))
    handle = model.model.layers[2].mlp.register_forward_pre_hook(
        lambda *_: pickles.extend(
            map(pickle.dumps, (model.model.layers[1], model.model.rotary_emb))
        )
    )
    run(model, ids, cache)
    handle.remove()
    assert len(pickles) == 6
    assert all(b"kvalloc" not in one and b"config" in one for one in pickles)


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention", "padding_only"])
def test_threads_over_one_model_answer_as_one_after_the_other(request, attention, threads):
    """Each with its own cache, beside a plain forward of the same model: equal in every bit."""
    with attention_on_cpu(attention):
        model = tiny.tiny_model("llama", attention)
        profile = tiny.make_profile(model, CONTEXT, 0.4)
        profiles = (profile, tiny.by_head(profile, 9))
        plain = tiny.prompt(CONTEXT, seed=99)

        def answer(number):
            cache = kvalloc.make_cache(model, profiles[number % 2])
            prompt = tiny.prompt(CONTEXT + number, seed=number)
            with attention_on_cpu(attention), torch.no_grad():
                return [
                    model(ids, past_key_values=cache).logits
                    for ids in (prompt, tiny.prompt(3, seed=number), tiny.prompt(1, seed=number))
                ]

        def beside():
            with attention_on_cpu(attention), torch.no_grad():
                logits = model(plain, use_cache=False).logits
            return logits

        expected, alone = [answer(number) for number in range(threads)], beside()
        with ThreadPoolExecutor(threads + 1) as pool:
            for _ in range(request.config.getoption("--thread-rounds")):
                other = pool.submit(beside)
                found = list(pool.map(answer, range(threads)))
                assert torch.equal(other.result(), alone)
                for mine, wanted in zip(found, expected, strict=True):
                    assert all(map(torch.equal, mine, wanted))
    assert model.config._attn_implementation == attention
    own = model.model.layers[0].self_attn
    gc.collect()
    assert own.config is model.config
    assert hook_counts(model) == (0, 0)


def test_a_cache_of_two_threads_at_once_is_refused(model):
    cache = kvalloc.make_cache(model, tiny.make_profile(model, CONTEXT, 0.3))
    ids, within, go_on = tiny.prompt(CONTEXT), threading.Event(), threading.Event()

    def wait(*_):
        within.set()
        assert go_on.wait(60)

    def forward():
        with torch.no_grad():
            logits = model(ids, past_key_values=cache).logits
        return logits

    with torch.no_grad():
        expected = model(ids).logits
    handle = model.model.layers[2].register_forward_pre_hook(wait)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(forward)
        assert within.wait(60)
        with pytest.raises(UnsupportedRequestError, match=r"another thread.*copy\.deepcopy"):
            forward()
        go_on.set()
        assert torch.equal(first.result(), expected)
    handle.remove()
    assert cache.get_seq_length() == CONTEXT
    run(model, tiny.prompt(3), cache)


def test_a_forward_that_ends_while_another_begins_disturbs_nobody(model, monkeypatch):
    """A second thread is within a forward, and ends it while the first one looks who is."""
    profile, ids = tiny.make_profile(model, CONTEXT, 0.3), tiny.prompt(CONTEXT)
    within, end = threading.Event(), threading.Event()

    class Looked(forwards.Forward):
        """Whoever compares its cache lets the other thread go on first."""

        @property
        def cache(self) -> Any:
            end.set()
            second.join(0.5)  # it waits for the lock by now, or has ended
            return None

        @cache.setter
        def cache(self, value: Any) -> None:
            pass

    def other():
        within.set()
        assert end.wait(60)
        entry.close(completed=False)

    own = kvalloc.make_cache(model, profile)
    entry = vars(model.model)["_kvalloc_installed"]
    second = threading.Thread(target=other)
    second.start()
    assert within.wait(60)
    assert second.ident is not None
    entry.open_forwards[second.ident] = Looked(None)
    run(model, ids, own)
    second.join(60)
    assert own.retained_bytes == profile.retained_bytes
    assert entry.open_forwards == {}


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 80,
}


@pytest.mark.parametrize("whose", ["apply", "make_cache"])
def test_phi3_beyond_its_original_context_uses_the_cache_that_it_was_given(whose):
    """transformers begins a text there without the given cache, and gives it up within one."""
    model = tiny.tiny_model("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=80)
    profile = tiny.make_profile(model, CONTEXT, 0.4)

    def generate(tokens):
        cache = kvalloc.make_cache(model, profile)
        given = {"past_key_values": cache} if whose == "make_cache" else {}
        options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
        with kvalloc.apply(model, profile) if whose == "apply" else contextlib.nullcontext() as on:
            used = model.generate(tiny.prompt(tokens), **given, **options).past_key_values
            return used, on.last_cache if on else cache

    for tokens in (50, 100):
        used, own = generate(tokens)
        assert used is own
        assert own.get_seq_length() == tokens + 11
    with pytest.raises(UnsupportedRequestError, match="cache with 80 tokens was given to Phi3"):
        generate(75)


def test_a_cache_that_a_wrapper_does_not_pass_on_is_used_or_refused(model):
    kind, argument = type(model), names.cache_argument(model)

    class Forgets(kind):
        def forward(self, input_ids=None, **given):
            given[argument] = DynamicCache(config=self.config) if self.copies else None
            return super().forward(input_ids, **given)

    model.__class__, profile = Forgets, tiny.make_profile(model, CONTEXT, 0.4)
    cache, ids = kvalloc.make_cache(model, profile), tiny.prompt(CONTEXT)
    with torch.no_grad():
        model.copies = True
        with pytest.raises(UnsupportedRequestError, match="given to Forgets, but .* DynamicCache"):
            model(ids, **{argument: cache})
        model.copies = False
        assert names.cache_among(model(ids, **{argument: cache})) is cache
        with pytest.raises(UnsupportedRequestError, match=f"with {CONTEXT} tokens .* got none"):
            model(ids[:, :1], **{argument: cache})
        assert cache.get_seq_length() == CONTEXT
        model(ids)  # with none, as it is asked


def test_unsupported_models_get_no_hooks():
    module = torch.nn.Linear(2, 2)
    with pytest.raises(UnsupportedModelError, match="Linear"):
        hooks.retain(object(), module)
    assert not module._forward_pre_hooks
