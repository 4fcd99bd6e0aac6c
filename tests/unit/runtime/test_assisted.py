"""Assisted generation: prompt lookup and an assistant give what the cache gives without them."""

import contextlib
import itertools

import numpy as np
import pytest
import runtime_oracle as tiny
import torch
from prompt_runs import run
from runtime_cells import RECORDS, Noted
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import kvalloc
from kvalloc.errors import UnsupportedRequestError
from kvalloc.extensions.making import make_cache

CONTEXT, NEW = 90, 150
LOOKUP = {"prompt_lookup_num_tokens": 6, "max_matching_ngram_size": 1}
DRAFTED = 7


def generate(model, ids, **options):
    """Greedy tokens, never the end: what repeats itself is what prompt lookup finds."""
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": 10**6, **options}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)


def same(found, expected, bits=16):
    """The same tokens, by logits that differ by no more than two orders of summing do.

    At fewer bits a few numbers that lie between two steps are then rounded the other way; if
    other tokens were rounded, logits would differ by 1.
    """
    assert torch.equal(found.sequences, expected.sequences)
    pairs = zip(found.logits, expected.logits, strict=True)
    off = max(float((one - other).abs().max()) for one, other in pairs)
    assert off < (1e-3 if bits == 16 else 0.03)


def profile_of(model, share, bits, **options):
    profile = tiny.make_profile(model, CONTEXT, share, **options)
    profile = tiny.by_head(profile) if share < 1 else profile
    full = list(profile.shape.full_layers)
    widths = np.full_like(profile.budgets, 16)
    widths[full] = bits
    return profile if bits == 16 else profile.replace(bits=widths)


def drafts_of(monkeypatch, answer):
    """Let prompt lookup draft what will be said, but for a wrong token here and there.

    Returns
    -------
    list of int
        Drafts of each call.
    """
    numbers, counts = torch.Generator().manual_seed(0), []

    def get_candidates(self, input_ids, *args, **kwargs):
        first = input_ids.shape[1]
        drafts = answer[:, first : min(first + DRAFTED, self.max_length - 1)].clone()
        wrong = torch.rand(drafts.shape, generator=numbers) < 0.15
        counts.append(drafts.shape[1])
        return torch.cat([input_ids, torch.where(wrong, (drafts + 1) % 50, drafts)], dim=1), None

    monkeypatch.setattr(PromptLookupCandidateGenerator, "get_candidates", get_candidates)
    return counts


@pytest.mark.parametrize(
    ("family", "share", "bits"),
    [
        *itertools.product(["llama"], [1.0, 0.4], [16, 5]),
        ("qwen3", 0.4, 5),
        *itertools.product(["gemma3"] * RECORDS, [0.4], [16, 5]),
    ],
)
def test_assisted_generation_gives_the_tokens_of_greedy_decoding(monkeypatch, family, share, bits):
    """Over settlings and what they round, of drafts that stay and drafts that go."""
    model, ids = tiny.tiny_model(family), tiny.prompt(CONTEXT)
    with kvalloc.apply(model, profile_of(model, share, bits)) as applied:
        expected = generate(model, ids)
        kept = applied.last_cache.kept_tokens
        counts = drafts_of(monkeypatch, expected.sequences)
        same(generate(model, ids, **LOOKUP), expected, bits)
        assert len(counts) < NEW / 2 < NEW < sum(counts)  # some stay, some go
        assert (applied.last_cache.kept_tokens == kept).all()
    if (share, bits) == (1.0, 16):
        same(expected, generate(model, ids))


@pytest.mark.parametrize(("budget", "memory"), [("100%", None), ("30%", None), ("30%", "200 kB")])
def test_assisted_generation_in_the_ways_of_the_default(monkeypatch, budget, memory):
    """And over two turns, of which the second goes on with the first's cache.

    At 64 bits: two orders of summing then hardly ever round a number the other way, of which each
    eviction after it would make more.
    """
    model, ids = tiny.tiny_model().double(), tiny.prompt(CONTEXT)
    question, turns = tiny.prompt(30, seed=5), []
    with kvalloc.apply(model, budget=budget, memory=memory):
        for options in ({}, LOOKUP):
            if options:
                drafts_of(monkeypatch, turns[1].sequences)
            first = generate(model, ids, max_new_tokens=90, **options)
            longer = torch.cat([first.sequences, question], dim=1)
            cache = first.past_key_values
            turns += [first, generate(model, longer, past_key_values=cache, **options)]
            turns.append(cache.kept_tokens)
    same(turns[3], turns[0])
    same(turns[4], turns[1])
    assert (turns[5] == turns[2]).all()


def test_a_cache_that_was_made_by_hand(monkeypatch):
    """Of an announced prompt, or of one that was read first; an empty one knows no prompt."""
    model, ids = tiny.tiny_model(), tiny.prompt(CONTEXT)
    profile, short = profile_of(model, 0.4, 16), {"max_new_tokens": 30}

    def read(cache):
        run(model, ids[:, :-1], cache)
        return cache

    made, announced = make_cache(model, profile), make_cache(model, profile, prompt_tokens=CONTEXT)
    expected = generate(model, ids, past_key_values=made, **short)
    after = generate(model, ids, past_key_values=read(make_cache(model, profile)), **short)
    with pytest.raises(UnsupportedRequestError, match="say how long the prompt is"):
        make_cache(model, profile).activate_past_recording()
    drafts_of(monkeypatch, expected.sequences)
    announced.activate_past_recording()  # as transformers does by itself, but for its oldest
    same(generate(model, ids, past_key_values=announced, **short, **LOOKUP), expected)
    drafts_of(monkeypatch, after.sequences)
    cache = read(make_cache(model, profile))
    cache.activate_past_recording(CONTEXT)
    same(generate(model, ids, past_key_values=cache, **short, **LOOKUP), after)


@pytest.mark.parametrize("whose", ["other", "under apply", "its own", *["early exit"] * RECORDS])
def test_an_assistant_model(whose):
    """It reads the prompt whole, also where it is under `apply` itself: it goes back into it."""
    model, ids = tiny.tiny_model(), tiny.prompt(CONTEXT)
    assistant = model if whose == "its own" else tiny.tiny_model("qwen3")
    profile, short = profile_of(model, 0.4, 5), {"max_new_tokens": 30}
    options = {"assistant_early_exit": 2} if whose == "early exit" else {}
    options = options or {"assistant_model": assistant}
    with kvalloc.apply(model, profile) as applied, contextlib.ExitStack() as stack:
        expected = generate(model, ids, **short)
        if whose == "under apply":
            drafting = stack.enter_context(kvalloc.apply(assistant, budget="20%"))
        same(generate(model, ids, **short, **options), expected, 5)
        assert applied.last_cache.get_seq_length() == CONTEXT + 29
        assert whose != "under apply" or drafting.last_cache is None


def test_what_assisted_generation_returns(monkeypatch):
    """Hidden states, those of the plain model at 100%; a stream; of one token each, a sample."""
    model, ids = tiny.tiny_model(), tiny.prompt(CONTEXT)
    streamer = Noted()
    wanted = {"max_new_tokens": 30, "output_hidden_states": True}
    answer = generate(model, ids, max_new_tokens=30).sequences
    drafts_of(monkeypatch, answer)
    expected = generate(model, ids, **wanted, **LOOKUP)
    drafts_of(monkeypatch, answer)
    with kvalloc.apply(model, profile_of(model, 1.0, 16)):
        found = generate(model, ids, **wanted, **LOOKUP, streamer=streamer)
        assert streamer.tokens == [*expected.sequences[0].tolist(), -1]
        for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
            for level, its in zip(one, other, strict=True):
                assert (level - its).abs().max() < 1e-3
        sampled = generate(model, ids, max_new_tokens=30, **LOOKUP, do_sample=True, top_k=1)
    assert torch.equal(sampled.sequences, expected.sequences)


def test_sliding_layers_stay_small_after_drafts(monkeypatch):
    """They hold what slid out only until what was drafted is known to stay."""
    model, ids = tiny.tiny_model("gemma3"), tiny.prompt(CONTEXT)
    with kvalloc.apply(model, profile_of(model, 0.4, 16)):
        expected = generate(model, ids, max_new_tokens=40)
        drafts_of(monkeypatch, expected.sequences)
        if not RECORDS:
            with pytest.raises(UnsupportedRequestError, match="takes back no drafts"):
                generate(model, ids, **LOOKUP)
            return
        cache = generate(model, ids, max_new_tokens=40, **LOOKUP).past_key_values
    with torch.no_grad():
        for token in expected.sequences[:, -1:].expand(20, 1):
            model(token[None], past_key_values=cache)
    assert (cache.kept_tokens[0] <= model.config.sliding_window).all()
