"""However the tokens arrive, the cache keeps its budgets and answers as the oracle does."""

import pytest
import runtime_oracle as tiny
import torch
from prompt_runs import padding_mask, run

from kvalloc.extensions.making import make_cache
from kvalloc.runtime.making import Way, build_rows
from kvalloc.runtime.options import CacheOptions
from kvalloc.scorers import get_scorer

CONTEXT = 150


def profile_of(model, level, share=0.5):
    profile = tiny.make_profile(model, CONTEXT, share)
    return tiny.by_head(profile, spread=40) if level == "head" else profile


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "h2o"},
        {"policy": "expected_attention"},
        {"policy": "nacl:proxy_share=0.5:random_share=0"},
    ],
)
def test_a_row_whose_first_chunk_is_padding_is_as_if_alone(options):
    """Also where what each chunk brings is added up, and where policies look back over chunks."""
    model, tokens = tiny.tiny_model(), 97
    profile = tiny.make_profile(model, CONTEXT, 0.3)
    ids, mask = tiny.prompt(CONTEXT, 2), padding_mask((CONTEXT, tokens))
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = make_cache(model, profile, prompt_tokens=CONTEXT, **options)
    alone = make_cache(model, profile, prompt_tokens=tokens, **options)
    first = CONTEXT - tokens
    with torch.no_grad():
        for end in (first, 100, CONTEXT):
            own = slice(cache.get_seq_length(), end)
            inputs = {"attention_mask": mask[:, :end], "position_ids": places[:, own]}
            model(ids[:, own], past_key_values=cache, **inputs)
            if end > first:
                model(ids[1:, own], past_key_values=alone)
    for layer in range(tiny.N_LAYERS):
        expected = alone.kept_indices(layer)[0] + first
        kept = cache.kept_indices(layer)[1]
        assert torch.equal(kept[:, : expected.shape[1]], expected)
        assert (kept[:, expected.shape[1] :] == -1).all()


@pytest.mark.parametrize(
    "policies", [("h2o", None), (None, "h2o"), ("h2o", "tova"), ("cake", "h2o")]
)
def test_rows_of_two_policies_do_not_touch_each_others_notes(policies):
    """Through chunks of a prompt and the turns after it: each row keeps what it keeps alone."""
    model = tiny.tiny_model()
    profile, ids = tiny.make_profile(model, CONTEXT, 0.4), tiny.prompt(CONTEXT + 30, 2)
    ways = [Way(profile=profile, options=CacheOptions(policy=policy)) for policy in policies]
    both = build_rows(model, ways, prompt_tokens=CONTEXT)
    alone = [build_rows(model, [way], prompt_tokens=CONTEXT) for way in ways]
    for begin, end in ((0, 60), (60, 100), (100, CONTEXT), (CONTEXT, CONTEXT + 30)):
        run(model, ids[:, begin:end], both)
        for row, cache in enumerate(alone):
            run(model, ids[row : row + 1, begin:end], cache)
    for cache in (both, *alone):
        cache.end_turn()
    for layer in range(tiny.N_LAYERS):
        kept = both.kept_indices(layer)
        for row, cache in enumerate(alone):
            assert torch.equal(kept[row], cache.kept_indices(layer)[0])


@pytest.mark.parametrize(
    ("scorer", "name"), [("h2o", "observe"), ("reconstruction", "observe_later")]
)
def test_no_scorer_works_under_autocast(scorer, name, monkeypatch):
    """What it adds up would be rounded; chunks of which nothing goes are added up as well."""
    model, rounded = tiny.tiny_model(), set()
    kind = type(get_scorer(scorer))
    own = getattr(kind, name)

    def watched(*args, **kwargs):
        rounded.add(torch.is_autocast_enabled("cpu"))
        return own(*args, **kwargs)

    monkeypatch.setattr(kind, name, watched)
    profile = tiny.make_profile(model, CONTEXT, 0.5)
    cache = make_cache(model, profile, policy=scorer, prompt_tokens=CONTEXT)
    with torch.autocast("cpu", torch.bfloat16):
        for begin, end in ((0, 50), (50, CONTEXT)):
            run(model, tiny.prompt(CONTEXT)[:, begin:end], cache)
    assert rounded == {False}


def test_what_is_kept_ends_where_a_prompt_was_cropped():
    model = tiny.tiny_model()
    cache = make_cache(model, profile_of(model, "layer", share=1.0))
    run(model, tiny.prompt(20), cache)
    cache.crop(-5)
    assert cache.kept_indices(0)[0, 0].tolist() == list(range(15))


def test_tokens_of_an_image_see_each_other_in_a_later_turn():
    """Also in rows with padding within the turn, behind tokens that followed the prompt."""
    model, new = tiny.tiny_model(), 9
    cache, shadow = make_cache(model, profile_of(model, "head", 0.4)), tiny.Shadow(model)
    ids, mask = tiny.prompt(CONTEXT + 5 + new + 2, 3), torch.ones(3, CONTEXT + 5 + new + 2).long()
    mask[0, CONTEXT + 5 : CONTEXT + 7] = mask[1, CONTEXT + 10 : CONTEXT + 13] = 0
    sees = torch.ones(3, new, new).tril().bool()
    sees[:, 2:6, 2:6] = True
    for begin, end in ((0, CONTEXT), (CONTEXT, CONTEXT + 5), (CONTEXT + 5, -2), (-2, None)):
        turn, shown = ids[:, begin:end], mask[:, :end]
        own = sees if end == -2 else None
        ready = shown
        if own is not None:
            past = torch.ones(3, new, CONTEXT + 5).bool()
            ready = (torch.cat([past, sees], dim=2) & shown[:, None].bool())[:, None]
        found = run(model, turn, cache, ready)
        assert tiny.worst(found, shadow.logits(turn, shown, sees=own), shown) < 1e-4
        if begin == 0:
            shadow.follow(cache)
