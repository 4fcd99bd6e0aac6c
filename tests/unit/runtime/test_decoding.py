"""What follows a prompt competes every so many tokens: what stays, how much, and by what."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import runtime_oracle as tiny
import torch
from prompt_runs import states_seen

import kvalloc
from kvalloc.runtime import make_cache
from kvalloc.scorers import get_scorer

CONTEXT = 60


def feed(model: Any, cache: Any, ids: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    with torch.no_grad():
        parts = [model(part, past_key_values=cache).logits for part in ids.split(sizes, dim=1)]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("level", ["layer", "head", "prompt"])
@pytest.mark.parametrize("every", [1, 4])
def test_the_budget_of_all_tokens_is_met_again_every_so_many(
    model: Any, every: int, level: str
) -> None:
    profile = tiny.make_profile(model, CONTEXT, [CONTEXT, 8, 40, 30])
    profile = tiny.by_head(profile) if level == "head" else profile
    profile = profile.replace(level="head", by_prompt=True) if level == "prompt" else profile
    cache = kvalloc.make_cache(model, profile, decode_every=every)
    feed(model, cache, tiny.prompt(CONTEXT, 2), [CONTEXT])
    entry = profile.retained_bytes // profile.budgets.sum()
    plain, before = profile.shape.plain_bytes_per_entry, profile.budgets
    for step in range(1, 20):
        feed(model, cache, tiny.prompt(1, 2, seed=step), [1])
        if (over := step % every) == 0:  # one token brings no more than one entry
            before = np.minimum(profile.budgets_for(CONTEXT + step), before + every)
        kept = cache.kept_tokens_by_row - over
        assert (kept.sum(axis=(1, 2)) == before.sum()).all()
        assert level == "prompt" or (kept == before).all()
        latest = over * before.size * plain
        assert cache.retained_bytes == 2 * (before.sum() * entry + latest)
    assert cache.get_seq_length() == CONTEXT + 19


def test_a_long_question_is_read_whole_and_then_reduced(model: Any) -> None:
    profile = tiny.make_profile(model, CONTEXT, 0.5)
    often = kvalloc.make_cache(model, profile, decode_every=8)
    seldom = kvalloc.make_cache(model, profile, decode_every=100)
    ids = tiny.prompt(CONTEXT + 30)
    one, other = (feed(model, cache, ids, [CONTEXT, 30]) for cache in (often, seldom))
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    assert (often.kept_tokens == profile.budgets_for(CONTEXT + 30)).all()
    assert (seldom.kept_tokens == profile.budgets + 30).all()
    seldom.end_turn()
    assert (seldom.kept_tokens == often.kept_tokens).all()
    # the window is now the end of the question
    for layer in range(tiny.N_LAYERS):
        kept = often.kept_indices(layer)
        assert (kept[..., : tiny.SINKS] == torch.arange(tiny.SINKS)).all()
        assert (kept[..., -tiny.WINDOW :] == torch.arange(90 - tiny.WINDOW, 90)).all()


@pytest.mark.parametrize("policy", ["h2o", "lookahead", "attention_matching"])
@pytest.mark.usefixtures("unrounded")
def test_a_copy_and_a_reset_cache_go_on_and_tokens_may_come_together(
    model: Any, policy: str
) -> None:
    cache = kvalloc.make_cache(
        model, tiny.make_profile(model, CONTEXT, 0.5), policy=policy, decode_every=4
    )
    ids = tiny.prompt(CONTEXT + 36)
    feed(model, cache, ids[:, : CONTEXT + 18], [CONTEXT, *[1] * 18])
    twin = copy.deepcopy(cache)
    expected = feed(model, cache, ids[:, CONTEXT + 18 :], [1] * 18)
    assert torch.equal(feed(model, twin, ids[:, CONTEXT + 18 :], [1] * 18), expected)
    cache.reset()
    once = feed(model, cache, ids, [CONTEXT, *[1] * 36])
    assert torch.equal(once[:, -18:], expected)
    # up to the next eviction they may
    cache.reset()
    early = {"h2o": 0, "lookahead": 8, "attention_matching": 16}[policy]
    sizes = [CONTEXT, *[early] * bool(early), 4, 4, 4, 4]
    pieces = feed(model, cache, ids[:, : sum(sizes)], sizes)
    torch.testing.assert_close(pieces, once[:, : sum(sizes)], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("policy", "scorer"),
    [
        *(("score", name) for name in ("xkv", "h2o", "a2sf", "lookahead")),
        ("merge", "xkv"),
        *(("attention_matching", name) for name in ("lookahead", "xkv", "h2o", "knorm")),
        ("attention_matching", "expected_attention"),
    ],
)
@pytest.mark.usefixtures("unrounded")
def test_what_followed_competes_as_in_one_long_prompt(policy: str, scorer: str) -> None:
    """Behind a prompt of which nothing goes; the latest vote where a scorer looks beyond it."""
    model, begun = tiny.tiny_model(), tiny.SINKS + tiny.WINDOW
    every = CONTEXT - begun
    profile = tiny.make_profile(model, CONTEXT, 0.5, scorer=scorer)
    cache = kvalloc.make_cache(model, profile, policy=policy, decode_every=every)
    ids = tiny.prompt(CONTEXT)
    feed(model, cache, ids, [begun, 20, every - 20])
    votes = {"tokens": 0, "votes": every, "ahead": 8, "pool": 1}
    votes |= {"row_reduce": "max", "group_reduce": "max"}
    whole = tiny.make_profile(
        model, CONTEXT, 0.5, scorer=scorer, parameters=votes if scorer == "lookahead" else {}
    )
    at_once = kvalloc.make_cache(model, whole, policy=policy if policy == "merge" else "score")
    feed(model, at_once, ids, [CONTEXT])
    assert (cache.kept_tokens == profile.budgets).all()
    assert tiny.same_kept(cache, at_once)
    for one, other in zip(cache.layers, at_once.layers, strict=True):
        pairs = zip(one.entries.dense[:2], other.entries.dense[:2], strict=True)
        for ours, theirs in pairs if one is cache.layers[0] else ():
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["snapkv", "h2o", "expected_attention"])
def test_an_entry_that_stands_for_three_is_scored_like_three(name: str) -> None:
    """Its logit bias gives it the attention of all three, and the others what they had."""
    one, place = states_seen(tiny.tiny_model(), tiny.prompt(30))[1], 10
    for states in (one.keys, one.values):
        states[:, :, place + 1 : place + 3] = states[:, :, place : place + 1]
    there = torch.tensor([*range(place + 1), *range(place + 3, 30)])
    bias = torch.zeros(1, tiny.N_KV_HEADS, 28)
    bias[..., place] = torch.tensor(3.0).log()
    own = {"queries": one.queries[:, :, -8:], "mask": None}
    states = dataclasses.replace(one, **own)
    merged = dataclasses.replace(
        states, keys=one.keys[:, :, there], values=one.values[:, :, there], bias=bias
    )
    options = {} if name != "snapkv" else {"pool": 1}
    scorer = get_scorer(name, window=tiny.WINDOW, **options)
    three, found = (scorer.score(each, sinks=tiny.SINKS) for each in (states, merged))
    expected = three[..., there].clone()
    expected[..., place] = three[..., place : place + 3].sum(dim=-1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["early", "loss", "late_by_head", "bounded", "packed"])
@pytest.mark.usefixtures("unrounded")
def test_rows_of_different_length_decode_as_if_alone(name: str) -> None:
    model = tiny.tiny_model().double()  # else rounding to codes would tell rows apart
    share = 0.4 if name == "bounded" else 0.7
    scorer = "xkv" if name == "early" else "lookahead"
    profile = tiny.make_profile(model, CONTEXT, share, scorer=scorer)
    every = 12 if name == "packed" else 4
    options: dict[str, Any] = {"decode_every": every, "bounded": name == "bounded"}
    if name == "loss":
        profile = profile.replace(level="head", by_prompt=True)
    profile = tiny.by_head(profile) if name == "late_by_head" else profile
    if name == "packed":
        profile = tiny.by_head(profile).replace(bits=np.array([[4, 8], [16, 5], [3, 3], [8, 8]]))
    ids, pads, more = tiny.prompt(CONTEXT, 2), 14, 30
    later = tiny.prompt(more, 2, seed=5)
    mask = torch.ones(2, CONTEXT, dtype=torch.long)
    mask[1, :pads] = 0
    policy = "score" if name == "early" else "attention_matching"

    def make() -> Any:
        return make_cache(model, profile, policy=policy, **options)

    cache, rows = make(), []
    with torch.no_grad():
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        model(ids, attention_mask=mask, position_ids=places, past_key_values=cache)
        for token in later.split(1, dim=1):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            at = mask.sum(-1, keepdim=True) - 1
            out = model(token, attention_mask=mask, position_ids=at, past_key_values=cache)
            rows.append(out.logits)
    for row, first in ((0, 0), (1, pads)):
        alone = make()
        own = torch.cat([ids[row : row + 1, first:], later[row : row + 1]], dim=1)
        expected = feed(model, alone, own, [CONTEXT - first, *[1] * more])[:, -more:]
        torch.testing.assert_close(
            torch.cat(rows, dim=1)[row : row + 1], expected, atol=1e-5, rtol=0
        )


def test_4096_tokens_stay_within_the_share_and_the_stated_slack() -> None:
    """Packed entries, budgets by head: storages read at every token."""
    prompt, every, votes = 512, 64, 128
    model = tiny.tiny_model(num_hidden_layers=2, max_position_embeddings=8192)
    profile = tiny.by_head(tiny.make_profile(model, prompt, 0.2, scorer="lookahead"))
    profile = profile.replace(bits=np.array([[16, 16], [8, 4]]))
    cache = kvalloc.make_cache(model, profile, policy="attention_matching", decode_every=every)
    token = feed(model, cache, tiny.prompt(prompt), [prompt])[:, -1:].argmax(-1)
    awaited, settled = cache.awaited_tokens, prompt
    shape = profile.shape
    slack = 2 * every * shape.n_kv_heads * shape.n_layers * shape.plain_bytes_per_entry
    for seen in range(prompt + 1, prompt + 4097):
        token = feed(model, cache, token, [1])[:, -1:].argmax(-1)
        if seen < prompt + awaited:
            assert cache.retained_bytes <= shape.plain_bytes(seen) + slack
            continue
        settled = seen if seen - settled == every else settled
        assert (cache.kept_tokens == profile.budgets_for(settled) + seen - settled).all()
        assert cache.retained_bytes <= profile.retained_bytes_at(settled) + slack
        for layer in cache.layers:
            held = [queries for _, queries in layer.unfinished.latest.pieces]
            assert sum(own.shape[2] for own in held) <= votes
            assert all(own.untyped_storage().nbytes() <= own.nbytes for own in held)
    assert cache.get_seq_length() == prompt + 4096
