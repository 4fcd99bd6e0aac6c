"""Answers without loss: those of the full cache, whatever the reduced one drafts."""

import copy
from itertools import islice

import pytest
import runtime_oracle as tiny
import torch
from prompt_runs import padded_rows
from runtime_cells import RECORDS
from scipy.stats import chisquare

import kvalloc
from kvalloc.errors import UnsupportedRequestError
from kvalloc.extensions.answering import answer
from kvalloc.extensions.lossless import LosslessAnswer, Sampling, verify_with
from kvalloc.extensions.making import make_cache

CONTEXT, NEW = 90, 70
ROWS, TEMPERATURE = 10_000, 0.05


def generate(model, ids, **options):
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": 10**6, **options}
    mask = settings.pop("attention_mask", torch.ones_like(ids))
    return model.generate(
        ids, attention_mask=mask, pad_token_id=0, return_dict_in_generate=True, **settings
    )


def lossless(model, **options):
    profile = tiny.make_profile(model, CONTEXT, 0.2, **options)
    return kvalloc.apply(model, tiny.by_head(profile), lossless=True)


@pytest.mark.parametrize(
    ("family", "prompts"), [("llama", 20), ("qwen3", 10), *[("gemma3", 10)] * RECORDS]
)
def test_greedy_answers_are_the_full_caches(family, prompts):
    """Over settlings, by drafts of which some stay and some go."""
    model, tried, accepted = tiny.tiny_model(family), 0, 0
    with lossless(model) as applied:
        for seed in range(prompts):
            ids = tiny.prompt(CONTEXT - seed, seed=seed)
            found = generate(model, ids)
            verifier = applied.last_cache.verifier
            tried, accepted = tried + verifier.tried, accepted + verifier.accepted
            with torch.no_grad():
                logits = model(found.sequences).logits[:, ids.shape[1] - 1 : -1]
            assert torch.equal(logits.argmax(dim=-1), found.sequences[:, ids.shape[1] :])
            assert (verifier.tokens, verifier.ties) == (NEW, 0)
            seen = applied.last_cache.get_seq_length(), verifier.full.get_seq_length()
            assert seen == (ids.shape[1] + NEW - 1,) * 2
            assert (applied.last_cache.kept_tokens < seen[0]).any()
    assert 0 < accepted < tried


@pytest.mark.parametrize("options", [{"scorer": "reconstruction"}, {}])
def test_rows_of_unequal_length_answer_as_alone(options):
    """Also where one ends before the others, and gives padding from then on."""
    model = tiny.tiny_model()
    prompts = [tiny.prompt(n, seed=n) for n in (CONTEXT, 20, 61)]
    alone = [generate(model, ids).sequences[0, ids.shape[1] :].tolist() for ids in prompts]
    end = alone[1][30]
    ids, mask, _ = padded_rows(prompts, "left")
    with lossless(model, **options):
        found = generate(model, ids, attention_mask=mask, eos_token_id=end)
    for row, own in zip(found.sequences[:, CONTEXT:].tolist(), alone, strict=True):
        length = own.index(end) + 1 if end in own else len(own)
        assert row[:length] == own[:length]
        assert not any(row[length:])


def test_turns_go_on_without_loss():
    """Also from a copy, and after a reset."""
    model, ids = tiny.tiny_model(), tiny.prompt(CONTEXT)
    with lossless(model) as applied:
        first = generate(model, ids)
        cache = first.past_key_values
        ids = torch.cat([first.sequences, tiny.prompt(7, seed=7)], dim=1)
        for own in (copy.deepcopy(cache), cache):
            found = generate(model, ids, past_key_values=own).sequences
            assert torch.equal(found, generate(copy.deepcopy(model), ids).sequences)
        cache.reset()
        assert torch.equal(generate(model, ids, past_key_values=cache).sequences, found)
        assert applied.last_cache.verifier.rounds < NEW


def test_sampled_tokens_have_the_full_caches_distribution():
    """10,000 tokens behind one that was drawn, too; drafts of the reduced cache have another."""
    model, ids = tiny.tiny_model(), tiny.prompt(CONTEXT)
    cache = make_cache(model, tiny.by_head(tiny.make_profile(model, CONTEXT, 0.1)))
    verify_with(cache, model)
    [first] = answer(model, cache, ids, keep=True, max_new_tokens=1)
    full = cache.verifier.full
    expected, drafted = (second_token(model, own, first) for own in (full, cache))
    cache.batch_repeat_interleave(ROWS)
    full.batch_repeat_interleave(ROWS)
    ids = torch.cat([ids, torch.tensor([[first]])], dim=1).expand(ROWS, -1)
    sampling = Sampling(
        process=lambda tokens, logits: logits / TEMPERATURE,
        draws=True,
        generator=torch.Generator().manual_seed(0),
    )
    lossless = LosslessAnswer(
        model=model, cache=cache, sampling=sampling, ends=lambda tokens: False, longest=3
    )
    drawn = [*lossless.tokens(ids)][1]
    counts = torch.bincount(drawn[:, 0], minlength=len(expected))
    assert chance(counts, expected) > 1e-3
    assert chance(counts, drafted) < 1e-6


@torch.no_grad()
def second_token(model, cache, first):
    """Return the distribution of the second token that is drawn behind one, with a cache."""

    def shares(own, tokens):
        logits = model(tokens[:, None], past_key_values=own).logits[:, -1].double()
        return (logits / TEMPERATURE).softmax(dim=-1)

    own = copy.deepcopy(cache)
    before = shares(own, torch.tensor([first]))
    own.batch_repeat_interleave(before.shape[1])
    return (before @ shares(own, torch.arange(before.shape[1])))[0]


def chance(counts, shares):
    """Of counts as far off, by a chi-squared test; rare tokens are one."""
    often = shares * counts.sum() >= 20
    found = torch.cat([counts[often], counts[~often].sum()[None]]).double()
    wanted = torch.cat([shares[often], shares[~often].sum()[None]]) * counts.sum()
    return float(chisquare(found.numpy(), (wanted * found.sum() / wanted.sum()).numpy()).pvalue)


def test_an_answer_that_is_broken_off_leaves_both_caches_behind_it():
    model, ids = tiny.tiny_model(), tiny.prompt(CONTEXT)
    cache = make_cache(model, tiny.by_head(tiny.make_profile(model, CONTEXT, 0.2)))
    verify_with(cache, model)
    whole = generate(model, ids).sequences[0, CONTEXT:].tolist()
    for tokens in (1, 6, 11):
        own = copy.deepcopy(cache)
        assert [*islice(answer(model, own, ids, keep=True), tokens)] == whole[:tokens]
        seen = own.get_seq_length(), own.verifier.full.get_seq_length()
        assert seen == (CONTEXT + tokens - 1,) * 2
        rest = [*answer(model, own, whole[tokens - 1 : tokens], max_new_tokens=20, ends=())]
        assert rest == whole[tokens : tokens + 20]
    with pytest.raises(UnsupportedRequestError, match="full one beside it 0"):
        verify_with(own, model)
