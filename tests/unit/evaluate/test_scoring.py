"""Tasks, and caches put through them, on random models."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_models import VOCABULARY, NumberTokenizer, equal_budgets, tiny_model
from transformers import DynamicCache

import kvalloc
from kvalloc.errors import InputError
from kvalloc.evaluate.methods import CacheMethod
from kvalloc.evaluate.scoring import evaluate, read_turns, row
from kvalloc.prompts.cases import Case, Turn
from kvalloc.prompts.tasks import Task

TOKENIZER = NumberTokenizer()
TEXT_TASK = Task(name="text", build=lambda _: [])
ASKING_TASK = Task(name="asking", build=lambda _: [])


@pytest.fixture(scope="module")
def model():
    model = tiny_model()
    model.generation_config.eos_token_id = None
    return model


def ids(count, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(2, VOCABULARY, (count,), generator=generator).tolist())


def scores_of(model, task, cases, **caches):
    made = {
        name: CacheMethod(make_cache=lambda p=profile: kvalloc.make_cache(model, p))
        for name, profile in caches.items()
    }
    result = evaluate(model, TOKENIZER, [(task, cases)], made, context=40)
    return {score.name: row([score]) for score in result}


def test_perplexity_is_that_of_what_follows(model):
    case = Case(input_ids=ids(40), turns=(Turn(continuation_ids=ids(6, seed=4)),))
    result = scores_of(model, TEXT_TASK, [case])["full"]
    follows = case.turns[0].continuation_ids
    with torch.no_grad():
        logits = model(torch.tensor([case.input_ids + follows])).logits[0]
    likely = logits[40:45].double().log_softmax(-1)
    expected = -likely[torch.arange(5), list(follows[1:])].mean()
    assert result["perplexity"] == pytest.approx(math.exp(float(expected)), rel=1e-4)


def test_the_full_cache_keeps_its_name(model):
    with pytest.raises(InputError, match="'full'"):
        scores_of(model, TEXT_TASK, [], full=equal_budgets(model, 8))


def test_the_question_after_compression_and_later_turns_are_teacher_forced(model):
    prompt, first, second = ids(40), ids(5, seed=6), ids(4, seed=7)
    case = Case(
        input_ids=prompt,
        turns=(
            Turn(question_ids=first, answers=("t1",), max_new_tokens=3),
            Turn(question_ids=second, answers=("t1",), max_new_tokens=3),
        ),
    )
    compressed = CacheMethod(make_cache=lambda: DynamicCache(config=model.config)).compress(
        model, prompt
    )
    turns = read_turns(compressed, TOKENIZER, case)
    asked = prompt + first
    for turn, question in zip(turns, (first, second), strict=True):
        if question is second:
            asked += turns[0].continuation_ids + second
        with torch.no_grad():
            whole = model(torch.tensor([asked + turn.continuation_ids])).logits[0]
        expected = whole[len(asked) - 1 : len(asked) + 2]
        assert turn.logits.shape == expected.shape
        torch.testing.assert_close(turn.logits, expected, atol=1e-4, rtol=1e-4)
        assert turn.answer.ids == turn.continuation_ids == tuple(expected.argmax(-1).tolist())
    rows = scores_of(
        model, ASKING_TASK, [case], all=equal_budgets(model, 40), few=equal_budgets(model, 8)
    )
    assert rows["all"]["kl"] == 0
    assert rows["few"]["kl"] > 0
