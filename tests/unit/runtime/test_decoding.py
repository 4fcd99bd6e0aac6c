"""The budget kept while decoding: what stays, how much, and what it is made from."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

import pytest
import torch
from cli_tools import run as run_command
from scorer_oracle import SCORERS
from transformers import DynamicCache

from kvalloc import apply
from kvalloc.errors import InputError, UnsupportedRequestError
from kvalloc.models.attention import intercept_attention
from kvalloc.runtime.policies import policy_names
from kvalloc.scorers import get_scorer

CONTEXT = 60
MERGING = {"merge", "compensate", "attention_matching"}
NAMES = [
    *(name for name in policy_names() if name not in MERGING),
    # the others look at what comes right after the prompt, and are refused with decode_every
    *(name for name in SCORERS if get_scorer(name).later is None),
]


def feed(model: Any, cache: Any, ids: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    with torch.no_grad():
        parts = [model(part, past_key_values=cache).logits for part in ids.split(sizes, dim=1)]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("level", ["layer", "head"])
@pytest.mark.parametrize("every", [1, 4])
def test_the_budget_is_met_again_every_so_many_tokens(
    tiny: ModuleType, every: int, level: str
) -> None:
    model = tiny.tiny_model()
    profile = tiny.make_profile(model, CONTEXT, [CONTEXT, 8, 40, 30])
    profile = tiny.by_head(profile) if level == "head" else profile
    cache = profile.cache(model, decode_every=every)
    feed(model, cache, tiny.prompt(CONTEXT, 2), [CONTEXT])
    assert (cache.kept_tokens == profile.budgets).all()
    per_entry = profile.shape.bytes_per_entry
    for step in range(1, 10):
        feed(model, cache, tiny.prompt(1, 2, seed=step), [1])
        over = step % every
        assert (cache.kept_tokens == profile.budgets + over).all()
        assert cache.retained_bytes == 2 * int((profile.budgets + over).sum()) * per_entry
    assert cache.get_seq_length() == CONTEXT + 9


def test_a_long_question_is_read_whole_and_then_reduced(tiny: ModuleType) -> None:
    model = tiny.tiny_model()
    profile = tiny.make_profile(model, CONTEXT, 0.5)
    capped = profile.cache(model, decode_every=8)
    free = profile.cache(model)
    ids = tiny.prompt(CONTEXT + 30)
    one, other = (feed(model, cache, ids, [CONTEXT, 30]) for cache in (capped, free))
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    assert (capped.kept_tokens == profile.budgets).all()
    assert (free.kept_tokens == profile.budgets + 30).all()
    # the window is now the end of the question
    for layer in range(tiny.N_LAYERS):
        kept = capped.kept_indices(layer)
        assert (kept[..., : tiny.SINKS] == torch.arange(tiny.SINKS)).all()
        assert (kept[..., -tiny.WINDOW :] == torch.arange(90 - tiny.WINDOW, 90)).all()


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_attends_to_exactly_what_it_kept(tiny: ModuleType, name: str) -> None:
    """A plain cache of transformers' own that holds the same entries gives the same answer.

    (Not one that hides them: decoded tokens were made while less was visible.)
    """
    model = tiny.tiny_model()
    cache = tiny.make_profile(model, CONTEXT, 0.5).cache(model, policy=name, decode_every=3)
    ids = tiny.prompt(CONTEXT + 7)
    made: dict[int, list[torch.Tensor]] = {layer: [] for layer in range(tiny.N_LAYERS)}

    def note(layer: int) -> Any:
        update = cache.layers[layer].update

        def noted(keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
            made[layer].append(torch.stack([keys, values]))
            return update(keys, values, *args, **kwargs)

        return noted

    for layer in range(tiny.N_LAYERS):
        cache.layers[layer].update = note(layer)
    feed(model, cache, ids[:, :-1], [CONTEXT, 1, 1, 1, 1, 1, 1])
    plain = DynamicCache()
    for layer in range(tiny.N_LAYERS):
        positions = cache.kept_indices(layer)
        assert (positions.diff(dim=-1) > 0).all()
        assert int(positions.max()) == CONTEXT + 5
        wanted = positions.long()[None, ..., None].expand(2, -1, -1, -1, tiny.HEAD_DIM)
        plain.update(*torch.cat(made[layer], dim=3).gather(3, wanted), layer)
        assert torch.equal(plain.layers[layer].keys, cache.layers[layer].keys)
    place = torch.tensor([[CONTEXT + 6]])
    with torch.no_grad():
        expected = model(ids[:, -1:], past_key_values=plain, position_ids=place).logits
        logits = model(ids[:, -1:], past_key_values=cache).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["h2o", "a2sf"])
def test_column_sums_go_on_while_decoding(tiny: ModuleType, name: str) -> None:
    """With a budget that evicts nothing before, the notes are those of one long prompt."""
    model = tiny.tiny_model()
    n_decoded = 6
    ids = tiny.prompt(CONTEXT + n_decoded)
    profile = tiny.make_profile(model, CONTEXT, [CONTEXT] * tiny.N_LAYERS, scorer=name)
    cache = profile.cache(model, decode_every=n_decoded)
    feed(model, cache, ids, [CONTEXT, *[1] * n_decoded])
    scores = {}
    scorer = get_scorer(name, window=tiny.WINDOW)

    def note(states: Any, compute: Any) -> Any:
        scores[states.layer] = scorer.score(states, sinks=tiny.SINKS)
        return compute(states.mask)

    with torch.no_grad(), intercept_attention(model, note):
        model(ids)
    total = CONTEXT + n_decoded
    must = {*range(tiny.SINKS), *range(total - tiny.WINDOW, total)}
    for layer, score in scores.items():
        for head in range(tiny.N_KV_HEADS):
            free = sorted(set(range(total)) - must, key=lambda t: -score[0, head, t].item())
            expected = must | set(free[: CONTEXT - len(must)])
            assert set(cache.kept_indices(layer)[0, head].tolist()) == expected


def test_the_window_scorers_see_the_latest_rows(tiny: ModuleType) -> None:
    model = tiny.tiny_model()
    ids = tiny.prompt(CONTEXT + 6)
    profile = tiny.make_profile(model, CONTEXT, [CONTEXT] * tiny.N_LAYERS)
    cache = profile.cache(model, decode_every=6)
    feed(model, cache, ids, [CONTEXT, 1, 1, 1, 1, 1, 1])
    # of one prompt of the same length and budgets, read at once
    longer = tiny.make_profile(model, CONTEXT + 6, [CONTEXT] * tiny.N_LAYERS)
    at_once = longer.cache(model)
    feed(model, at_once, ids, [CONTEXT + 6])
    assert tiny.same_kept(cache, at_once)


@pytest.mark.parametrize("name", ["h2o", "xkv", "nacl", "expected_attention"])
@pytest.mark.parametrize("level", ["layer", "head"])
def test_rows_are_independent_and_can_be_reordered(tiny: ModuleType, name: str, level: str) -> None:
    model = tiny.tiny_model()
    profile = tiny.make_profile(model, CONTEXT, 0.5)
    profile = tiny.by_head(profile) if level == "head" else profile
    ids = tiny.prompt(CONTEXT + 9, 2)
    cache = profile.cache(model, policy=name, decode_every=4)
    feed(model, cache, ids[:, : CONTEXT + 2], [CONTEXT, 1, 1])
    cache.reorder_cache(torch.tensor([1, 0]))
    swapped = feed(model, cache, ids[[1, 0], CONTEXT + 2 :], [1] * 7)
    for row in range(2):
        alone = profile.cache(model, policy=name, decode_every=4)
        expected = feed(model, alone, ids[row : row + 1], [CONTEXT, *[1] * 9])[:, -7:]
        torch.testing.assert_close(swapped[1 - row : 2 - row], expected, atol=1e-4, rtol=0)


def test_generate_keeps_the_budget(tiny: ModuleType) -> None:
    model = tiny.tiny_model()
    profile = tiny.make_profile(model, CONTEXT, 0.5)
    ids = tiny.prompt(CONTEXT, 2)
    with apply(model, profile, decode_every=1, policy="h2o") as applied:
        model.generate(ids, max_new_tokens=12, do_sample=False)
    assert applied.last_cache is not None
    assert (applied.last_cache.kept_tokens == profile.budgets).all()
    # beams reorder rows at every step
    with apply(model, profile, decode_every=3) as applied:
        model.generate(ids, max_new_tokens=10, num_beams=3, do_sample=False)
    assert (applied.last_cache.kept_tokens == profile.budgets).all()


def test_left_padded_rows_keep_the_budgets_of_their_own_prompt(tiny: ModuleType) -> None:
    model = tiny.tiny_model()
    profile = tiny.make_profile(model, CONTEXT, 0.5)
    ids, pads = tiny.prompt(CONTEXT, 2), 20
    mask = torch.ones(2, CONTEXT, dtype=torch.long)
    mask[1, :pads] = 0
    cache = profile.cache(model, decode_every=2)
    cache_alone = profile.cache(model, decode_every=2)
    more = tiny.prompt(4, 2, seed=5)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
        for step in range(4):
            mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1)
            positions = mask.sum(-1, keepdim=True) - 1
            logits = model(
                more[:, step : step + 1],
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
            ).logits
    expected = feed(
        model,
        cache_alone,
        torch.cat([ids[1:, pads:], more[1:]], dim=1),
        [CONTEXT - pads, 1, 1, 1, 1],
    )
    torch.testing.assert_close(logits[1:], expected[:, -1:], atol=1e-4, rtol=0)
    assert (cache.kept_tokens_by_row[1] == profile.budgets_for(CONTEXT - pads)).all()


def test_a_copy_goes_on_by_itself(tiny: ModuleType) -> None:
    model = tiny.tiny_model()
    cache = tiny.make_profile(model, CONTEXT, 0.5).cache(model, policy="h2o", decode_every=4)
    ids = tiny.prompt(CONTEXT + 12)
    feed(model, cache, ids[:, : CONTEXT + 2], [CONTEXT, 1, 1])
    twin = copy.deepcopy(cache)
    expected = feed(model, cache, ids[:, CONTEXT + 2 :], [1] * 10)
    assert torch.equal(feed(model, twin, ids[:, CONTEXT + 2 :], [1] * 10), expected)


@pytest.mark.parametrize("every", [0, -1, True, 2.5])
def test_numbers_of_steps_that_cannot_be_are_refused(tiny: ModuleType, every: Any) -> None:
    model = tiny.tiny_model()
    with pytest.raises(InputError, match="decode_every"):
        tiny.make_profile(model, CONTEXT, 0.5).cache(model, decode_every=every)


@pytest.mark.parametrize("name", sorted(MERGING))
def test_merging_policies_are_refused(tiny: ModuleType, name: str) -> None:
    model = tiny.tiny_model()
    with pytest.raises(UnsupportedRequestError, match=f"{name} merges"):
        tiny.make_profile(model, CONTEXT, 0.5).cache(model, policy=name, decode_every=4)


def test_saving_cropping_and_padding_afterwards_are_refused(
    tiny: ModuleType, tmp_path: Any
) -> None:
    model = tiny.tiny_model()
    cache = tiny.make_profile(model, CONTEXT, 0.5).cache(model, decode_every=4)
    feed(model, cache, tiny.prompt(CONTEXT, 2), [CONTEXT])
    with pytest.raises(UnsupportedRequestError, match="decode_every"):
        cache.save(tmp_path / "c.safetensors")
    with pytest.raises(UnsupportedRequestError, match="crop"):
        cache.crop(-1)
    mask = torch.ones(2, CONTEXT + 3, dtype=torch.long)
    mask[0, CONTEXT] = 0
    with pytest.raises(UnsupportedRequestError, match="padding"), torch.no_grad():
        model(tiny.prompt(3, 2), attention_mask=mask, past_key_values=cache)


def test_the_command_line_does_not_take_it_with_the_full_cache(tmp_path: Any) -> None:
    ran = run_command("generate", "demo", "--full", "--prompt", "hello", "--decode-every", 4)
    assert ran.code == 2
    assert "--decode-every" in ran.err
