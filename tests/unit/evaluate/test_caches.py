"""The same questions through different caches, on random models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY, tiny_model
from transformers import DynamicCache

from kvalloc.errors import InputError
from kvalloc.evaluate.caches import evaluate_cache, measure_references, needed_bytes, stored_bytes
from kvalloc.evaluate.kl import divergence
from kvalloc.formats.budget_profile import BudgetProfile, Policy
from kvalloc.models.loading import shape_of
from kvalloc.prompts.needle import NeedleCase

PROMPT_TOKENS = 40


class NumberTokenizer:
    """Writes token ids down as numbers; nothing ends an answer."""

    eos_token_id = None

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(str(token) for token in ids)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request):
    model = tiny_model(request.param)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def tokenizer():
    return NumberTokenizer()


@pytest.fixture(scope="module")
def cases():
    ids = torch.randint(
        2, VOCABULARY, (2, PROMPT_TOKENS), generator=torch.Generator().manual_seed(5)
    )
    return [
        NeedleCase(input_ids=tuple(row), key="k", number="1234567", depth=0.5, source="random")
        for row in ids.tolist()
    ]


@pytest.fixture(scope="module")
def references(model, tokenizer, cases):
    return measure_references(model, tokenizer, cases, max_new_tokens=6)


def profile_of(model, kept: int) -> BudgetProfile:
    shape = shape_of(model, model_id="tests/tiny")
    budgets = np.full((shape.n_layers, shape.n_kv_heads), kept, dtype=np.int64)
    sliding = [i for i in range(shape.n_layers) if i not in shape.full_layers]
    budgets[sliding] = shape.sliding_entries(PROMPT_TOKENS)
    policy = Policy(scorer="xkv", scorer_parameters={"window": 4, "pool": 3}, sinks=2, window=4)
    return BudgetProfile(
        shape=shape, level="layer", context_tokens=PROMPT_TOKENS, budgets=budgets, policy=policy
    )


def rows_of(model, tokenizer, references, profile, max_new_tokens=6):
    return list(
        evaluate_cache(
            model,
            tokenizer,
            references,
            lambda: profile.cache(model, allow_other_model=True),
            max_new_tokens=max_new_tokens,
        )
    )


def test_the_reference_is_what_generate_says(model, references):
    for reference in references:
        ids = torch.tensor([reference.case.input_ids])
        generated = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        assert list(reference.answer_ids) == generated[0, PROMPT_TOKENS:].tolist()
        assert reference.answer == " ".join(map(str, reference.answer_ids))
        assert reference.logits.shape == (5, VOCABULARY)


def test_reference_bytes_are_a_plain_caches(model, references):
    for reference in references:
        cache = DynamicCache(config=model.config)
        model(torch.tensor([reference.case.input_ids]), past_key_values=cache)
        assert reference.full_bytes == shape_of(model).full_bytes(PROMPT_TOKENS)
        # after the prompt, sliding layers of transformers keep all of it behind a view
        assert (reference.full_bytes < stored_bytes(cache)) == (model.config.model_type != "llama")
        assert needed_bytes(cache) == reference.full_bytes
        model(torch.tensor([[5]]), past_key_values=cache)
        assert needed_bytes(cache) == shape_of(model).full_bytes(PROMPT_TOKENS + 1)


def test_an_identical_cache_is_exactly_zero_apart(model, tokenizer, references):
    rows = list(
        evaluate_cache(
            model,
            tokenizer,
            references,
            lambda: DynamicCache(config=model.config),
            max_new_tokens=6,
        )
    )
    for row, reference in zip(rows, references, strict=True):
        assert row.kl == 0.0
        assert row.top1_agreement == 1.0
        assert row.answer == reference.answer
        assert row.retained_bytes >= row.full_bytes == reference.full_bytes


def test_a_profile_of_100_percent_is_exactly_zero_apart(model, tokenizer, references):
    for row in rows_of(model, tokenizer, references, profile_of(model, PROMPT_TOKENS)):
        assert row.kl == 0.0
        assert row.top1_agreement == 1.0


def test_a_reduced_cache_is_measured(model, tokenizer, references):
    profile = profile_of(model, 10)
    rows = rows_of(model, tokenizer, references, profile)
    assert all(row.retained_bytes == profile.retained_bytes for row in rows)
    assert all(row.retained_bytes < row.full_bytes for row in rows)
    assert all(row.kl is not None and row.kl > 0 for row in rows)
    assert all(row.prefill_seconds > 0 and row.decode_seconds > 0 for row in rows)
    assert not any(row.found for row in rows)


def test_kl_equals_one_token_at_a_time(model, tokenizer, references):
    """Teacher forcing in one forward is feeding the answer token by token."""
    profile = profile_of(model, 10)
    for row, reference in zip(
        rows_of(model, tokenizer, references, profile), references, strict=True
    ):
        logits = []
        for cache in (
            DynamicCache(config=model.config),
            profile.cache(model, allow_other_model=True),
        ):
            with torch.no_grad():
                model(torch.tensor([reference.case.input_ids]), past_key_values=cache)
                steps = [
                    model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1]
                    for token in reference.answer_ids[:-1]
                ]
            logits.append(torch.stack(steps))
        by_hand = divergence(*logits)
        assert row.kl == pytest.approx(by_hand.kl, rel=1e-3, abs=1e-5)
        assert row.top1_agreement == by_hand.top1_agreement


def test_decoding_leaves_no_trace_in_the_teacher_forced_part(model, tokenizer, references):
    profile = profile_of(model, 10)
    long = rows_of(model, tokenizer, references, profile, max_new_tokens=6)
    short = rows_of(model, tokenizer, references, profile, max_new_tokens=1)
    assert [row.kl for row in long] == [row.kl for row in short]


def test_an_end_mark_ends_the_answer(model, tokenizer, cases, references):
    class Ending(NumberTokenizer):
        eos_token_id = references[0].answer_ids[2]

    (stopped,) = measure_references(model, Ending(), cases[:1], max_new_tokens=6)
    first = references[0].answer_ids.index(Ending.eos_token_id)
    assert stopped.answer_ids == references[0].answer_ids[: first + 1]


def test_an_answer_of_one_token_has_no_kl(model, tokenizer, cases):
    references = measure_references(model, tokenizer, cases, max_new_tokens=1)
    for row in rows_of(model, tokenizer, references, profile_of(model, 10)):
        assert row.kl is None
        assert row.top1_agreement is None


def test_found_is_read_from_the_answer(model, tokenizer, references):
    answer_ids = references[0].answer_ids
    digits = replace(references[0].case, number=str(answer_ids[0]))
    reference = replace(references[0], case=digits, answer=f"it is {answer_ids[0]}")
    assert reference.found
    assert not replace(reference, answer="no idea").found


def test_an_answer_without_tokens_is_refused(model, tokenizer, cases):
    with pytest.raises(InputError, match="at least 1"):
        measure_references(model, tokenizer, cases, max_new_tokens=0)


def test_a_view_counts_with_what_it_keeps_alive():
    cache = DynamicCache()
    whole = torch.zeros(1, 1, 8, 4)
    cache.update(whole[:, :, :2], whole[:, :, :2].clone(), 0)
    cache.layers[0].keys = whole[:, :, :2]
    assert stored_bytes(cache) == whole.nbytes + whole[:, :, :2].nbytes
    assert needed_bytes(cache) == 2 * whole[:, :, :2].nbytes
    cache.layers[0].values = cache.layers[0].keys
    assert stored_bytes(cache) == whole.nbytes
