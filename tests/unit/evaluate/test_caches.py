"""The same questions and tasks through different caches, on random models."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny_models import VOCABULARY, NumberTokenizer, equal_budgets, tiny_model
from transformers import DynamicCache

import kvalloc
from kvalloc.accounting.costs import POSITION_BYTES, head_bytes
from kvalloc.errors import InputError
from kvalloc.evaluate.methods import (
    CacheMethod,
    answer_greedily,
    full_cache,
    needed_bytes,
    rounded_cache,
    stored_bytes,
)
from kvalloc.evaluate.scoring import evaluate, measure, read_turns, row
from kvalloc.measure.kl import divergence
from kvalloc.models.loading import shape_of
from kvalloc.prompts.cases import POSITIONS, Case, Turn
from kvalloc.prompts.tasks import Task

# The same questions through different caches, on random models


PROMPT_TOKENS = 40


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
    return outcomes_of(model, references, lambda: kvalloc.make_cache(model, profile))


def test_a_cache_that_keeps_everything_is_exactly_zero_apart(model, references):
    plain = outcomes_of(model, references, lambda: DynamicCache(config=model.config))
    for outcome, (_, full) in zip(plain, references, strict=True):
        assert outcome.answers == full.outcome.answers
        assert outcome.retained_bytes >= outcome.full_bytes == full.outcome.full_bytes
    for outcome in plain + reduced(model, references, PROMPT_TOKENS):
        assert outcome.kl == 0.0
        assert outcome.top1_agreement == 1.0


def test_an_end_mark_ends_the_answer(model, references):
    class Ending(NumberTokenizer):
        eos_token_id = references[0][1].turns[0].answer.ids[2]

    (_, stopped), _ = references_of(model, tokenizer=Ending())
    ids = references[0][1].turns[0].answer.ids
    assert stopped.turns[0].answer.ids == ids[: ids.index(Ending.eos_token_id) + 1]


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


LONG = 24


@pytest.mark.parametrize("n_question", [0, 3, 9])
def test_kl_by_position_is_that_of_tokens_one_at_a_time(model, references, n_question):
    """And what was predicted before the eviction is said, and never counted as kept."""
    profile = equal_budgets(model, 10)
    case = references[0][0]
    question = case.input_ids[:n_question]
    turn = replace(case.turns[0], question_ids=question, max_new_tokens=LONG)
    case = replace(case, turns=(turn,))
    full = measure(model, TOKENIZER, full_cache(model), case)
    method = CacheMethod(make_cache=lambda: kvalloc.make_cache(model, profile))
    outcome = measure(model, TOKENIZER, method, case, full).outcome
    answer, logits = full.turns[0].answer.ids, []
    for cache in (DynamicCache(config=model.config), kvalloc.make_cache(model, profile)):
        steps = []
        with torch.no_grad():
            output = model(torch.tensor([case.input_ids]), past_key_values=cache)
            if question:
                output = model(torch.tensor([question]), past_key_values=cache)
            steps.append(output.logits[0, -1])
            for token in answer[:-1]:
                output = model(torch.tensor([[token]]), past_key_values=cache)
                steps.append(output.logits[0, -1])
        logits.append(torch.stack(steps))
    compared = divergence(*logits)
    by_hand, agrees = compared.kls, compared.agrees
    exact = 0 if question else 1
    assert [kl is None for kl in outcome.kls[0]] == [place < exact for place in range(LONG)]
    assert outcome.exact_tokens == exact
    # until then the logits are those of the full cache
    assert max(by_hand[:exact], default=0.0) < 1e-6
    assert outcome.kls[0][exact:] == pytest.approx(by_hand[exact:], rel=1e-3, abs=1e-5)
    assert outcome.kl == pytest.approx(sum(by_hand[exact:]) / (LONG - exact), rel=1e-3)
    assert outcome.agrees == ((*[None] * exact, *agrees[exact:]),)
    assert outcome.agreement_at(POSITIONS["16-63"]) == sum(agrees[16:]) / (LONG - 16)
    pieces = {"0-15": by_hand[exact:16], "16-63": by_hand[16:], "64-255": ()}
    for name, kls in pieces.items():
        mean = pytest.approx(sum(kls) / len(kls), rel=1e-3) if kls else None
        assert outcome.kl_at(POSITIONS[name]) == mean


def test_what_opens_a_conversation_is_not_measured(model, references):
    """The second turn alone is, after the full cache's own answer to the first."""
    case = references[0][0]
    later = Turn(question_ids=case.input_ids[:5], answers=("9999",), max_new_tokens=6)
    opened = replace(case, turns=(replace(case.turns[0], measured=False), later))
    both = replace(case, turns=(case.turns[0], later))
    outcomes = {}
    for name, one in {"opened": opened, "both": both}.items():
        full = measure(model, TOKENIZER, full_cache(model), one)
        (outcomes[name],) = reduced(model, [(one, full)], 10)
        quiet = CacheMethod(make_cache=lambda: kvalloc.make_cache(model, equal_budgets(model, 10)))
        unasked = measure(model, TOKENIZER, quiet, one, full, answers=False).outcome
        assert unasked.kls == outcomes[name].kls
        assert (unasked.score, unasked.decoded_tokens) == (None, 0)
    assert outcomes["opened"].kls == outcomes["both"].kls[1:]
    assert len(outcomes["both"].kls) == 2


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("llama", torch.float32), ("llama", torch.bfloat16), ("gemma3", torch.float32)],
)
def test_bytes_at_16_bits_do_not_depend_on_the_type_that_is_computed_in(kind, dtype):
    """Nor on layers with a sliding window, of which no method keeps more or less."""
    model = tiny_model(kind).to(dtype)
    model.generation_config.eos_token_id = None
    references = references_of(model)
    shape = shape_of(model)
    full = references[0][1].outcome
    entries = len(shape.full_layers) * shape.n_kv_heads
    assert full.bytes_at_16_bits == entries * PROMPT_TOKENS * 2 * shape.head_dim * 2
    (ten, _) = reduced(model, references, 10)
    assert ten.bytes_at_16_bits == entries * 10 * (2 * shape.head_dim * 2 + POSITION_BYTES)
    assert ten.full_bytes_at_16_bits == full.bytes_at_16_bits
    for bits in (8, 4):
        make = rounded_cache(model, bits).make_cache
        outcome = outcomes_of(model, references, make)[0]
        packed = int(head_bytes(PROMPT_TOKENS, bits, shape)) * entries
        assert outcome.bytes_at_16_bits == packed
        assert outcome.retained_bytes == packed or kind == "gemma3"
        assert 0 < outcome.kl < ten.kl


# Tasks, and caches put through them, on random models


TEXT_TASK = Task(name="text", build=lambda _: [])
ASKING_TASK = Task(name="asking", build=lambda _: [])


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


@pytest.mark.parametrize(("first_line", "tokens"), [(False, 24), (True, None)])
def test_an_answer_of_one_line_ends_with_its_first_line_that_is_not_empty(
    model, first_line, tokens
):
    """Here each third token of the vocabulary ends a line."""
    lines = {"decode": lambda ids, **_: "".join("\n" if one % 3 == 0 else "w" for one in ids)}
    tokenizer = SimpleNamespace(eos_token_id=None, **lines)
    compressed = full_cache(model).compress(model, list(range(1, PROMPT_TOKENS)))
    answer = answer_greedily(compressed.fork(), tokenizer, (), 24, first_line=first_line)
    longer = answer_greedily(compressed.fork(), tokenizer, (), 24)
    assert answer.ids == longer.ids[: len(answer.ids)]
    text = tokenizer.decode(answer.ids).lstrip()
    assert len(answer.ids) == tokens if tokens else "\n" not in text[:-1]
