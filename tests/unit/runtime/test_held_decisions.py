"""Budgets decided from a prompt that is held whole until it is complete."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from prompt_runs import CONTEXT, SINKS, TARGET, generate, read, run

import kvalloc
from kvalloc.errors import InputError, UnsupportedRequestError
from kvalloc.online.per_prompt import PromptTarget, make_adapting_cache, make_prompt_cache


@pytest.fixture
def model(tiny: ModuleType) -> Any:
    return tiny.tiny_model()


def chunks_have_their_positions(model: Any, ids: torch.Tensor) -> bool:
    """Whether `generate` gives chunks their positions, on any cache: not in transformers 5.2."""
    seen: list[int] = []

    def note(module: Any, inputs: Any, named: dict[str, Any]) -> None:
        seen.extend(named["position_ids"][0].tolist())

    watch = model.get_decoder().register_forward_pre_hook(note, with_kwargs=True)
    generate(model, ids, max_new_tokens=1, prefill_chunk_size=25)
    watch.remove()
    right = seen == list(range(ids.shape[1]))
    assert right or transformers.__version__.startswith("5.2.")
    return right


@pytest.mark.parametrize("adapt", [None, 0.4])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_held_prompt_is_decided_as_by_a_mini_prefill(
    tiny: ModuleType, family: str, adapt: float | None
) -> None:
    """In one piece, in chunks that nothing announced, and by `generate` in chunks."""
    model, ids = tiny.tiny_model(family), tiny.prompt(CONTEXT)
    stored = tiny.make_profile(model, CONTEXT, 0.4, sinks=SINKS)

    def make(hold: bool) -> Any:
        if adapt is not None:
            return make_adapting_cache(model, stored, adapt=adapt, hold=hold)
        target = PromptTarget.parse(target_retention=0.7, hold=hold, **TARGET)
        return make_prompt_cache(model, target)

    by_itself, held, opened = make(False), make(True), make(True)
    logits = run(model, ids, by_itself)
    assert torch.equal(run(model, ids, held), logits)
    with opened.prefill():
        for part in ids.split(19, dim=1):
            run(model, part, opened)
    options = {"target_retention": 0.7, **TARGET} if adapt is None else {"adapt": adapt}
    profile = None if adapt is None else stored
    with kvalloc.apply(model, profile, hold=True, **options) as applying:
        generate(model, ids, max_new_tokens=1, prefill_chunk_size=25)
    assert by_itself.retained_bytes < by_itself.full_bytes
    caches = [held, opened]
    if chunks_have_their_positions(model, ids):
        caches.append(applying.last_cache)
    for cache in caches:
        assert (cache.profile.budgets == by_itself.profile.budgets).all()
        assert cache.retained_bytes == by_itself.retained_bytes
        assert cache.decision_seconds > 0
        assert tiny.same_kept(cache, by_itself)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("scorer", ["xkv", "h2o", "lookahead", "reconstruction"])
def test_padded_rows_of_a_held_prompt_are_decided_as_if_alone(
    tiny: ModuleType, model: Any, side: str, scorer: str
) -> None:
    ids, mask = tiny.prompt(CONTEXT, 3), torch.ones(3, CONTEXT, dtype=torch.long)
    for row, pads in enumerate((0, 20, 31)):
        mask[row, slice(0, pads) if side == "left" else slice(CONTEXT - pads, CONTEXT)] = 0
    target = PromptTarget.parse(target_retention=0.8, hold=True, scorer=scorer, **TARGET)
    cache = make_prompt_cache(model, target)
    read(model, ids, cache, mask)
    for row in range(3):
        alone = make_prompt_cache(model, target)
        read(model, ids[row : row + 1, mask[row].bool()], alone)
        assert (cache.row_profiles[row].budgets == alone.profile.budgets).all()
        assert (cache.kept_tokens_by_row[row] == alone.kept_tokens).all()
    assert cache.retained_bytes < cache.full_bytes


def test_a_held_prompt_is_decided_where_gradients_are_recorded(tiny: ModuleType) -> None:
    model, ids = tiny.tiny_model(), tiny.prompt(CONTEXT)
    target = PromptTarget.parse(target_retention=0.8, hold=True, **TARGET)
    cache, expected = make_prompt_cache(model, target), make_prompt_cache(model, target)
    run(model, ids, expected)
    model(ids, past_key_values=cache)
    assert (cache.kept_tokens == expected.kept_tokens).all()
    assert cache.retained_bytes == expected.retained_bytes < cache.full_bytes


def test_what_does_not_go_with_holding_is_refused(tiny: ModuleType, model: Any) -> None:
    stored = tiny.make_profile(model, CONTEXT, 0.4, sinks=SINKS)
    for kind, options, said in (
        (InputError, {}, "nothing is measured; leave out hold, or give adapt"),
        (InputError, {"adapt": 0.3, "measured_tokens": 50}, "measured_tokens spares nothing"),
    ):
        for call in (make_adapting_cache, kvalloc.apply):
            with pytest.raises(kind, match=said):
                call(model, profile=stored, hold=True, **options)
    with pytest.raises(UnsupportedRequestError, match="looks at tokens that come after"):
        PromptTarget.parse(target_retention=0.8, scorer="lookahead", **TARGET)
    embedded = model.get_input_embeddings()(tiny.prompt(CONTEXT)).detach()
    with pytest.raises(UnsupportedRequestError, match="inputs_embeds"):
        model(
            inputs_embeds=embedded,
            past_key_values=make_adapting_cache(model, stored, adapt=0.3, hold=True),
        )
