"""What runs on beyond a held prompt stays within the tokens that the model was made for."""

from __future__ import annotations

from typing import Any

import pytest
import runtime_oracle as tiny
import torch
from prompt_runs import noted_repetitions, run

from kvalloc.errors import InputError
from kvalloc.runtime import make_cache
from kvalloc.scorers.later_pass import CARRIED_TOKENS

CONTEXT = 90
CHUNK = {"chunk": 37}
REPEATED = CARRIED_TOKENS + 37  # the longest repetition: a further piece


def profile_of(model: Any, name: str, parameters: dict[str, Any]) -> Any:
    profile = tiny.make_profile(model, CONTEXT, 0.4, scorer=name, parameters=parameters)
    return tiny.by_head(profile, spread=9)


def test_how_far_a_pass_goes_is_how_far_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the tokens that the repetition's forwards really have."""
    model, found = tiny.tiny_model(), noted_repetitions(monkeypatch)
    for tokens in (60, 70, 74, 75, 83, CONTEXT):
        found.clear()
        cache = make_cache(model, profile_of(model, "reconstruction", CHUNK))
        run(model, tiny.prompt(tokens), cache)
        (scorer,) = cache._prompt.plan.wanted[0]
        assert scorer.later.furthest(tokens) == max(found)


def with_limit(limit: int) -> Any:
    return tiny.tiny_model(max_position_embeddings=limit)


def test_a_repetition_beyond_the_limit_is_refused_before_anything_runs() -> None:
    ids, least = tiny.prompt(CONTEXT), CONTEXT + REPEATED
    model = with_limit(least)
    cache = make_cache(model, profile_of(model, "reconstruction", CHUNK))
    run(model, ids, cache)
    assert cache.reduced
    model = with_limit(least - 1)
    cache = make_cache(model, profile_of(model, "reconstruction", CHUNK))
    said = r"90 tokens and 45 of a repetition are beyond the 134 .*\(chunk=36\)"
    with pytest.raises(InputError, match=said):
        run(model, ids, cache)
    assert cache.get_seq_length() == 0
    run(model, tiny.prompt(CONTEXT - 1), cache)  # the cache is as it was
    assert cache.reduced
    smaller = make_cache(model, profile_of(model, "reconstruction", {**CHUNK, "chunk": 36}))
    run(model, ids, smaller)  # what the message says fits
    model = with_limit(CONTEXT + 10)
    cache = make_cache(model, profile_of(model, "reconstruction", CHUNK))
    with pytest.raises(InputError, match="made for; shorten the prompt, or choose another"):
        run(model, ids, cache)


def test_chunks_are_refused_as_soon_as_it_is_known() -> None:
    ids = tiny.prompt(CONTEXT)
    model = with_limit(CONTEXT + REPEATED - 1)
    profile = profile_of(model, "reconstruction", CHUNK)
    announced = make_cache(model, profile, prompt_tokens=CONTEXT)
    with pytest.raises(InputError, match="90 tokens and 45 of a repetition"):
        run(model, ids[:, :20], announced)
    assert announced.get_seq_length() == 0
    opened, seen = make_cache(model, profile), 0
    with pytest.raises(InputError, match="90 tokens and 45 of a"), opened.prefill():
        for part in ids.split(30, dim=1):
            run(model, part, opened)
            seen += part.shape[1]
    assert seen == 60


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_count(side: str) -> None:
    """Rows of 41 and 50 tokens, in 90 columns, where positions leave padding out."""
    model = with_limit(50 + 1 + CARRIED_TOKENS + 37)
    columns, count = torch.arange(CONTEXT), torch.tensor([41, 50])[:, None]
    mask = ((columns >= CONTEXT - count) if side == "left" else (columns < count)).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = make_cache(model, profile_of(model, "reconstruction", CHUNK))
    run(model, tiny.prompt(CONTEXT, 2), cache, mask=mask, position_ids=positions)
    assert cache.reduced
    cache = make_cache(model, profile_of(model, "reconstruction", CHUNK))
    with pytest.raises(InputError, match="beyond the 96"):
        run(
            model,
            tiny.prompt(CONTEXT, 2),
            cache,
            mask=mask,
            position_ids=positions + 50,
        )


def test_a_prompt_beyond_the_limit_cannot_wait_for_tokens() -> None:
    """One that fills it can: nothing follows, and nothing is evicted."""
    model = with_limit(CONTEXT)
    profile = profile_of(model, "lookahead", {"tokens": 8})
    cache = make_cache(model, profile)
    run(model, tiny.prompt(CONTEXT), cache)
    assert cache.awaited_tokens == 8
    cache = make_cache(model, profile)
    said = "until 8 tokens have followed it, but its 91 tokens are more than the 90 that the model"
    with pytest.raises(InputError, match=said):
        run(model, tiny.prompt(CONTEXT + 1), cache)
    assert cache.get_seq_length() == 0
    chunked = make_cache(model, profile, prompt_tokens=CONTEXT + 1)
    with pytest.raises(InputError, match=said):
        run(model, tiny.prompt(20), chunked)
