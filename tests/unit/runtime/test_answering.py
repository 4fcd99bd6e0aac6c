"""Answers to questions about a text that was read once."""

import pytest
import runtime_oracle as tiny
import torch
from prompt_runs import run
from transformers import DynamicCache

import kvalloc
from kvalloc.extensions.answering import answer

CONTEXT, NEW = 90, 6


@pytest.fixture
def filled(model):
    """A model, and a cache that has read a text."""
    cache = kvalloc.make_cache(model, tiny.make_profile(model, CONTEXT, 0.4))
    run(model, tiny.prompt(CONTEXT), cache)
    return model, cache


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("level", ["layer", "head"])
def test_each_question_finds_the_text_as_it_was_read(family, level):
    model = tiny.tiny_model(family)
    profile = tiny.make_profile(model, CONTEXT, 0.4)
    profile = tiny.by_head(profile) if level == "head" else profile
    ids = tiny.prompt(CONTEXT)
    cache = kvalloc.make_cache(model, profile)
    run(model, ids, cache)
    stored, oracle_kept = cache.retained_bytes, tiny.kept_of(cache)
    for tokens in (1, 5, 2, 5):
        question = tiny.prompt(tokens, seed=tokens)
        found = list(answer(model, cache, question, max_new_tokens=NEW))
        oracle = tiny.Oracle(model, ids, oracle_kept)
        first = oracle.logits(question)[:, -1].argmax(-1, keepdim=True)
        assert found == oracle.greedy(first, NEW)[0].tolist()
        assert (cache.get_seq_length(), cache.retained_bytes) == (CONTEXT, stored)


@pytest.mark.filterwarnings("error")
def test_a_long_question_is_not_taken_for_more_of_the_text(filled):
    model, cache = filled
    assert list(answer(model, cache, tiny.prompt(CONTEXT, seed=2), max_new_tokens=1))


def test_a_repetition_penalty_of_the_model_holds_as_in_generate():
    model, ids = tiny.tiny_model(), tiny.prompt(CONTEXT)

    def answered():
        return list(answer(model, DynamicCache(config=model.config), ids, max_new_tokens=4 * NEW))

    plain = answered()
    model.generation_config.repetition_penalty = 1.8
    expected = model.generate(ids, do_sample=False, max_new_tokens=4 * NEW)
    assert answered() == expected[0, CONTEXT:].tolist() != plain


def test_a_conversation_is_the_whole_text_in_one_piece(model):
    ids, question = tiny.prompt(CONTEXT), tiny.prompt(4, seed=3)[0].tolist()
    cache = DynamicCache(config=model.config)
    run(model, ids, cache)
    first = list(answer(model, cache, question, max_new_tokens=NEW, keep=True))
    second = list(answer(model, cache, [first[-1], *question], max_new_tokens=NEW, keep=True))
    whole = torch.cat([ids, torch.tensor([[*question, *first, *question]])], dim=1)
    with torch.no_grad():
        expected = model.generate(whole, max_new_tokens=NEW, do_sample=False)
    assert second == expected[0, whole.shape[1] :].tolist()
    assert cache.get_seq_length() == CONTEXT + 2 * (4 + NEW) - 1


def test_an_answer_ends_where_the_model_says_so(filled):
    model, cache = filled
    question = tiny.prompt(3, seed=2)[0]
    whole = list(answer(model, cache, question, max_new_tokens=NEW))
    third = whole[: whole.index(whole[2]) + 1]
    assert list(answer(model, cache, question, max_new_tokens=NEW, ends=[whole[2]])) == third
    model.generation_config.eos_token_id = [whole[2], 1]
    assert list(answer(model, cache, question, max_new_tokens=NEW)) == third
    model.generation_config.eos_token_id = whole[2]
    assert list(answer(model, cache, question, max_new_tokens=NEW)) == third


def test_an_answer_that_is_broken_off_leaves_nothing(filled):
    model, cache = filled
    question = tiny.prompt(3, seed=2)[0]
    expected = list(answer(model, cache, question, max_new_tokens=NEW))
    begun = answer(model, cache, question, max_new_tokens=NEW)
    assert next(begun) == expected[0]
    del begun
    assert list(answer(model, cache, question, max_new_tokens=NEW)) == expected
