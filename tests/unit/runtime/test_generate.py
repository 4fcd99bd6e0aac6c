"""`generate()` with a reduced cache, and the context manager that supplies one."""

from __future__ import annotations

from typing import Any

import pytest
import runtime_oracle as tiny
import torch
from prompt_runs import NEW, generate
from transformers import DynamicCache, GenerationConfig

import kvalloc
from kvalloc.errors import (
    InputError,
    ModelMismatchError,
    UnsupportedModelError,
    UnsupportedRequestError,
)
from kvalloc.models.loading import LoadedModel
from kvalloc.runtime import BudgetCache

CONTEXT = 90


def test_apply_gives_each_call_a_fresh_cache(model: Any) -> None:
    profile = tiny.make_profile(model, CONTEXT, 0.3)
    ids = [tiny.prompt(CONTEXT, seed=1), tiny.prompt(CONTEXT - 20, seed=2)]
    expected = [
        generate(model, one, past_key_values=kvalloc.make_cache(model, profile)) for one in ids
    ]
    plain = generate(model, ids[0])
    with kvalloc.apply(model, profile) as applied:
        assert applied.last_cache is None
        found = [generate(model, one) for one in ids]
        assert isinstance(applied.last_cache, BudgetCache)
        assert applied.last_cache.get_seq_length() == CONTEXT - 20 + NEW - 1
        mine = DynamicCache(config=model.config)
        assert torch.equal(generate(model, ids[0], past_key_values=mine), plain)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
    assert "generate" not in vars(model)
    assert torch.equal(generate(model, ids[0]), plain)


def test_apply_nests_and_survives_exceptions() -> None:
    model = tiny.tiny_model()
    outer, inner = (tiny.make_profile(model, CONTEXT, share) for share in (0.5, 0.2))
    ids = tiny.prompt(CONTEXT)
    with pytest.raises(ZeroDivisionError), kvalloc.apply(model, outer) as first:
        with pytest.raises(KeyError), kvalloc.apply(model, inner) as second:
            generate(model, ids)
            assert second.last_cache is not None
            assert second.last_cache.profile is inner
            assert first.last_cache is None
            raise KeyError
        generate(model, ids)
        assert first.last_cache is not None
        assert first.last_cache.profile is outer
        raise ZeroDivisionError
    assert "generate" not in vars(model)
    del first, second
    assert not model.model._forward_pre_hooks
    assert model.config._attn_implementation == "sdpa"


def test_apply_reads_a_generation_config_that_comes_by_its_place(model: Any) -> None:
    profile = tiny.make_profile(model, CONTEXT, 0.3)
    ids = tiny.prompt(CONTEXT)
    chunked = GenerationConfig(max_new_tokens=NEW, do_sample=False, prefill_chunk_size=32)
    with kvalloc.apply(model, profile) as applied:
        model.generate(ids, chunked)
        assert applied.last_cache is not None
        expected = profile.budgets_for(CONTEXT + NEW - 1)
        assert (applied.last_cache.kept_tokens == expected).all()
        with pytest.raises(UnsupportedRequestError, match="cannot be offloaded"):
            model.generate(ids, GenerationConfig(cache_implementation="offloaded"))


def test_apply_refuses_on_entering() -> None:
    model = tiny.tiny_model()
    other = tiny.make_profile(model, CONTEXT, 0.3, shape=tiny.shape_of(model, model_id="giant"))
    with pytest.raises(ModelMismatchError, match="giant"), kvalloc.apply(model, other):
        pass
    profile = tiny.make_profile(model, CONTEXT, 0.3)
    with (
        pytest.raises(UnsupportedModelError, match="cannot generate"),
        kvalloc.apply(model.model, profile),
    ):
        pass
    loaded = LoadedModel(model=model, tokenizer=None, model_id="tiny")
    with pytest.raises(UnsupportedModelError, match="a LoadedModel .*pass its .model"):
        kvalloc.apply(loaded, budget="20%")
    with pytest.raises(UnsupportedModelError, match="a LoadedModel .*pass its .model"):
        kvalloc.profile(loaded, None, ["words"])
    wide = tiny.make_profile(model, CONTEXT, 0.3, parameters={"window": tiny.WINDOW + 1})
    with pytest.raises(InputError, match="window"), kvalloc.apply(model, wide):
        pass
    assert "generate" not in vars(model)
    assert not model.model._forward_pre_hooks
