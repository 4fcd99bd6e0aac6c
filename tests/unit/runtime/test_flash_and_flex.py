"""Flash attention's masks (a stand-in on the CPU) and flex attention, against the oracle.

Every policy and arrival on both is in test_matrix.py; here is what is particular about them.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import tiny_models
import torch
from prompt_runs import run
from scorer_oracle import SCORERS
from transformers import DynamicCache

import kvalloc
from kvalloc.models.attention import AttentionStates, intercept_attention
from kvalloc.runtime import make_cache
from kvalloc.scorers import get_scorer

CONTEXT = 90
LENGTHS = (CONTEXT, 41)


@pytest.fixture(params=["flex_attention", "padding_only"])
def attention(request: pytest.FixtureRequest, attention_on_cpu: Any) -> Iterator[str]:
    with attention_on_cpu(request.param):
        yield request.param


def profile_of(tiny: ModuleType, model: Any, level: str) -> Any:
    profile = tiny.make_profile(model, CONTEXT, 0.4)
    return tiny.by_head(profile, spread=9) if level == "head" else profile


@pytest.mark.parametrize("level", ["layer", "head"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_questions_after_a_padded_prompt(
    tiny: ModuleType, attention: str, family: str, level: str
) -> None:
    """Padding on either side, then questions; one of them of two lengths, padded as well."""
    # flash attention cuts padding out and counts a sliding window without it
    gaps = not (family == "gemma3" and attention == "padding_only")
    model = tiny.tiny_model(family, attention)
    profile = profile_of(tiny, model, level)
    ids = tiny.prompt(CONTEXT, 2)
    columns, count = torch.arange(CONTEXT), torch.tensor(LENGTHS)[:, None]
    for mask in (columns >= CONTEXT - count, columns < count)[: 2 if gaps else 1]:
        mask = mask.long()
        cache, shadow = make_cache(model, profile), tiny.Shadow(model)
        assert tiny.worst(run(model, ids, cache, mask), shadow.logits(ids, mask), mask) < 1e-4
        shadow.follow(cache)
        for tokens, pads in ((5, 0), (1, 0), (6, 2), (1, 0), (30, 0)):
            own = torch.ones(2, tokens, dtype=torch.long)
            own[1, : pads if gaps else 0] = 0
            mask = torch.cat([mask, own], dim=1)
            question = tiny.prompt(tokens, 2, seed=tokens)
            found, expected = run(model, question, cache, mask), shadow.logits(question, mask)
            assert tiny.worst(found, expected, mask) < 1e-4


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_budget_of_everything_changes_no_bit(
    tiny: ModuleType, attention: str, family: str
) -> None:
    model = tiny.tiny_model(family, attention)
    profile = tiny.make_profile(model, CONTEXT, 1.0).replace(level="head")
    cache, plain = make_cache(model, profile), DynamicCache(config=model.config)
    for tokens in (CONTEXT, 5, 1, 1):
        ids = tiny.prompt(tokens, 2, seed=tokens)
        assert torch.equal(run(model, ids, cache), run(model, ids, plain))


@pytest.mark.parametrize("scorer", [name for name in SCORERS if get_scorer(name).later is None])
def test_scorers_read_masks_of_either_kind(tiny: ModuleType, attention: str, scorer: str) -> None:
    """Padding and causal attention, as the model shows them: the same scores as on sdpa."""
    ids, mask = tiny.prompt(CONTEXT, 2), torch.ones(2, CONTEXT, dtype=torch.long)
    mask[1, :49] = 0
    own = get_scorer(scorer)
    scores = []
    for name in (attention, "sdpa"):
        model = tiny.tiny_model("llama", name)
        seen: list[torch.Tensor] = []

        def look(states: AttentionStates, compute: Any, seen: list[torch.Tensor] = seen) -> Any:
            if states.layer == 0:  # later layers differ by rounding
                seen.append(own.score(states, sinks=2))
            return compute(states.mask)

        with torch.no_grad(), intercept_attention(model, look):
            model(ids, attention_mask=mask)
        scores += seen
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-5, atol=1e-7)


HELD = {
    "lookahead": {"tokens": 5, "pool": 3},
    "reconstruction": {"chunk": 37, "nearby": 5, "instruction": "7+8+9", "continuation": "10"},
}


@pytest.mark.parametrize(
    ("family", "side"), [("llama", "none"), ("llama", "right"), ("gemma3", "left")]
)
@pytest.mark.parametrize("scorer", list(HELD))
def test_prompts_that_are_held_whole(
    tiny: ModuleType, attention: str, scorer: str, family: str, side: str
) -> None:
    """Repeated or waiting for what follows: the entries of sdpa, and the oracle's word.

    In one piece and in chunks, which come to the same.
    """
    columns, count = torch.arange(CONTEXT), torch.tensor(LENGTHS)[:, None]
    mask = {
        "none": torch.ones(2, CONTEXT, dtype=torch.bool),
        "left": columns >= CONTEXT - count,
        "right": columns < count,
    }[side].long()
    ids, kept = tiny.prompt(CONTEXT, 2), []
    for name, chunk in (("sdpa", CONTEXT), (attention, CONTEXT), (attention, 30)):
        model = tiny.tiny_model(family, name)
        profile = tiny.make_profile(model, CONTEXT, 0.4, scorer=scorer, parameters=HELD[scorer])
        cache = make_cache(model, tiny.by_head(profile, spread=9), prompt_tokens=CONTEXT)
        shadow, own = tiny.Shadow(model), mask[:, :0]
        for part in ids.split(chunk, dim=1):
            own = mask[:, : own.shape[1] + part.shape[1]]
            found = run(model, part, cache, own if side != "none" else None)
            assert tiny.worst(found, shadow.logits(part, own), own) < 1e-4
        for tokens in (5, 1):
            shadow.follow(cache)
            own = torch.nn.functional.pad(own, (0, tokens), value=1)
            question = tiny.prompt(tokens, 2, seed=tokens)
            found = run(model, question, cache, own if side != "none" else None)
            assert tiny.worst(found, shadow.logits(question, own)) < 1e-4
        assert cache.retained_bytes < 0.6 * cache.full_bytes
        kept.append(cache)
    assert tiny.same_kept(*kept)


def test_budgets_that_a_prompt_hands_out(tiny: ModuleType, attention: str) -> None:
    """The budgets of all heads are those of sdpa."""
    ids, mask = tiny.prompt(CONTEXT, 2), torch.ones(2, CONTEXT, dtype=torch.long)
    mask[1, :49] = 0
    found = []
    for name in (attention, "sdpa"):
        model = tiny.tiny_model("llama", name)
        profile = profile_of(tiny, model, "head").replace(by_prompt=True)
        cache, shadow = make_cache(model, profile), tiny.Shadow(model)
        run(model, ids, cache, mask)
        shadow.logits(ids, mask)
        shadow.follow(cache)
        own = torch.nn.functional.pad(mask, (0, 3), value=1)
        question = tiny.prompt(3, 2, seed=3)
        assert tiny.worst(run(model, question, cache, own), shadow.logits(question, own)) < 1e-4
        assert (cache.kept_tokens_by_row[0] - 3 != profile.budgets).any()  # row 1 is shorter
        found.append(cache)
    assert tiny.same_kept(*found)


def test_profiling_sees_the_same_curves(attention: str) -> None:
    curves = []
    for name in (attention, "sdpa"):
        model = tiny_models.tiny_model(attention=name)
        scores = kvalloc.profile(
            model, tiny_models.WordTokenizer(), [tiny_models.words(300)], samples=2, context=60
        )
        curves.append(torch.from_numpy(scores.curves))
    torch.testing.assert_close(curves[0], curves[1], rtol=1e-4, atol=1e-5)
