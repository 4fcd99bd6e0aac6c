"""The same questions through different caches, on random models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import VOCABULARY, equal_budgets, tiny_model
from transformers import DynamicCache

from kvalloc.errors import InputError
from kvalloc.evaluate.caches import needed_bytes, stored_bytes
from kvalloc.evaluate.kl import divergence
from kvalloc.evaluate.methods import CacheMethod, full_cache
from kvalloc.evaluate.scoring import measure
from kvalloc.models.loading import shape_of
from kvalloc.prompts.cases import Case, Turn

PROMPT_TOKENS = 40


class NumberTokenizer:
    """Writes token ids down as numbers; nothing ends an answer."""

    eos_token_id = None

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(str(token) for token in ids)


TOKENIZER = NumberTokenizer()


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request):
    model = tiny_model(request.param)
    model.generation_config.eos_token_id = None
    return model


def references_of(model, *, max_new_tokens=6, tokenizer=TOKENIZER):
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(2, VOCABULARY, (2, PROMPT_TOKENS), generator=generator)
    turn = Turn(answers=("1234567",), max_new_tokens=max_new_tokens)
    cases = [Case(input_ids=tuple(row), turns=(turn,)) for row in ids.tolist()]
    full = full_cache(model)
    return [(case, measure(model, tokenizer, full, case)) for case in cases]


@pytest.fixture(scope="module")
def references(model):
    return references_of(model)


def outcomes_of(model, references, make_cache):
    method = CacheMethod(make_cache=make_cache)
    return [measure(model, TOKENIZER, method, *one).outcome for one in references]


def reduced(model, references, kept):
    profile = equal_budgets(model, kept)
    return outcomes_of(model, references, lambda: profile.cache(model))


def test_the_reference_is_what_generate_says(model, references):
    for case, full in references:
        ids = torch.tensor([case.input_ids])
        generated = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        (turn,) = full.turns
        assert list(turn.answer.ids) == generated[0, PROMPT_TOKENS:].tolist()
        assert full.outcome.answers == (" ".join(map(str, turn.answer.ids)),)
        assert turn.logits.shape == (5, VOCABULARY)


def test_reference_bytes_are_a_plain_caches(model, references):
    for case, full in references:
        full_bytes = full.outcome.full_bytes
        cache = DynamicCache(config=model.config)
        model(torch.tensor([case.input_ids]), past_key_values=cache)
        assert full_bytes == shape_of(model).full_bytes(PROMPT_TOKENS)
        # after the prompt, sliding layers of transformers keep all of it behind a view
        assert (full_bytes < stored_bytes(cache)) == (model.config.model_type != "llama")
        assert needed_bytes(cache) == full_bytes
        model(torch.tensor([[5]]), past_key_values=cache)
        assert needed_bytes(cache) == shape_of(model).full_bytes(PROMPT_TOKENS + 1)


def test_a_cache_that_keeps_everything_is_exactly_zero_apart(model, references):
    plain = outcomes_of(model, references, lambda: DynamicCache(config=model.config))
    for outcome, (_, full) in zip(plain, references, strict=True):
        assert outcome.answers == full.outcome.answers
        assert outcome.retained_bytes >= outcome.full_bytes == full.outcome.full_bytes
    for outcome in plain + reduced(model, references, PROMPT_TOKENS):
        assert outcome.kl == 0.0
        assert outcome.top1_agreement == 1.0


def test_a_reduced_cache_is_measured(model, references):
    outcomes = reduced(model, references, 10)
    granted = equal_budgets(model, 10).retained_bytes
    assert all(one.retained_bytes == granted < one.full_bytes for one in outcomes)
    assert all(one.kl is not None and one.kl > 0 for one in outcomes)
    assert all(one.prefill_seconds > 0 and one.decode_seconds > 0 for one in outcomes)
    assert not any(one.found for one in outcomes)


def test_kl_equals_one_token_at_a_time(model, references):
    """Teacher forcing in one forward is feeding the answer token by token."""
    profile = equal_budgets(model, 10)
    outcomes = reduced(model, references, 10)
    for outcome, (case, full) in zip(outcomes, references, strict=True):
        logits = []
        for cache in (DynamicCache(config=model.config), profile.cache(model)):
            with torch.no_grad():
                model(torch.tensor([case.input_ids]), past_key_values=cache)
                steps = [
                    model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1]
                    for token in full.turns[0].answer.ids[:-1]
                ]
            logits.append(torch.stack(steps))
        by_hand = divergence(*logits)
        assert outcome.kl == pytest.approx(by_hand.kl, rel=1e-3, abs=1e-5)
        assert outcome.top1_agreement == by_hand.top1_agreement


def test_decoding_leaves_no_trace_in_the_teacher_forced_part(model, references):
    short_turn = replace(references[0][0].turns[0], max_new_tokens=1)
    short = [(replace(case, turns=(short_turn,)), full) for case, full in references]
    long_kl = [outcome.kl for outcome in reduced(model, references, 10)]
    assert long_kl == [outcome.kl for outcome in reduced(model, short, 10)]


def test_an_end_mark_ends_the_answer(model, references):
    class Ending(NumberTokenizer):
        eos_token_id = references[0][1].turns[0].answer.ids[2]

    (_, stopped), _ = references_of(model, tokenizer=Ending())
    ids = references[0][1].turns[0].answer.ids
    assert stopped.turns[0].answer.ids == ids[: ids.index(Ending.eos_token_id) + 1]


def test_an_answer_of_one_token_has_no_kl(model):
    for outcome in reduced(model, references_of(model, max_new_tokens=1), 10):
        assert outcome.kl is None
        assert outcome.top1_agreement is None


@pytest.mark.filterwarnings("error")
def test_a_long_question_is_not_taken_for_more_of_the_prompt(model, references):
    case = references[0][0]
    case = replace(case, turns=(replace(case.turns[0], question_ids=case.input_ids),))
    full = measure(model, TOKENIZER, full_cache(model), case)
    assert reduced(model, [(case, full)], 10)[0].kl > 0


def test_an_answer_without_tokens_is_refused(model):
    with pytest.raises(InputError, match="at least 1"):
        references_of(model, max_new_tokens=0)


def test_a_view_counts_with_what_it_keeps_alive():
    cache = DynamicCache()
    whole = torch.zeros(1, 1, 8, 4)
    cache.update(whole[:, :, :2], whole[:, :, :2].clone(), 0)
    cache.layers[0].keys = whole[:, :, :2]
    assert stored_bytes(cache) == whole.nbytes + whole[:, :, :2].nbytes
    assert needed_bytes(cache) == 2 * whole[:, :, :2].nbytes
    cache.layers[0].values = cache.layers[0].keys
    assert stored_bytes(cache) == whole.nbytes
