"""Let a model run on beyond a held prompt, and show scorers what its layers see."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvalloc.errors import InputError, UnsupportedModelError, UnsupportedRequestError
from kvalloc.models.attention import AttentionStates, Compute, Observed, intercept_attention
from kvalloc.models.structure import context_limit
from kvalloc.runtime.attention.backends import apart_attention
from kvalloc.runtime.attention.call import AttentionCall
from kvalloc.runtime.later_cache import HeldPrompt, LaterCache, LaterLayer
from kvalloc.scorers import Scorer
from kvalloc.scorers.later_pass import (
    CARRIED_TOKENS,
    SMALLEST_CHUNK,
    Later,
    LaterStep,
    merged_passes,
)

__all__ = ["LaterNotes", "check_context", "check_draft", "check_repeat", "run_later_passes"]

#: For each layer, what scorers noted, by their `later_key`.
LaterNotes = dict[int, dict[Hashable, Observed]]

Wanted = Mapping[int, Sequence[Scorer]]


@torch.no_grad()
def run_later_passes(prompt: HeldPrompt, wanted: Wanted, *, sinks: int) -> LaterNotes:
    """Make the passes that scorers ask for; the prompt is the same afterwards.

    Parameters
    ----------
    prompt : HeldPrompt
    wanted : mapping of int to sequence of Scorer
        For each layer that is looked at: who looks.
    sinks : int
        First tokens of the prompt that are never evicted.

    Returns
    -------
    LaterNotes

    Raises
    ------
    UnsupportedModelError, UnsupportedRequestError
        If the prompt or its model do not have what a pass needs.
    InputError
        If a pass would go beyond the tokens that the model was made for.
    """
    scorers = {scorer.later_key: scorer for each in wanted.values() for scorer in each}
    notes: LaterNotes = {layer: {} for layer in wanted}
    for later in merged_passes(scorer.later for scorer in scorers.values()):
        served = {
            layer: {s.later_key: s for s in each if s.later and later.serves(s.later)}
            for layer, each in wanted.items()
        }
        looks = {layer: tuple(each.values()) for layer, each in served.items() if each}
        if later.kind == "draft":
            _draft(prompt, later, looks, notes, sinks)
        else:
            _repeat(prompt, later, looks, notes, sinks)
    return notes


def check_draft(head: object) -> None:
    """Refuse to draft without a language-model head.

    Raises
    ------
    UnsupportedModelError
        If there is none.
    """
    if head is None:
        raise UnsupportedModelError(
            "a scorer drafts the answer's first tokens, for which it needs the model's head; make "
            "the cache for the model with its language-model head"
        )


def check_repeat(ids: object) -> None:
    """Refuse to repeat a prompt whose tokens are not known.

    Raises
    ------
    UnsupportedRequestError
        If it came as embeddings.
    """
    if not isinstance(ids, Tensor):
        raise UnsupportedRequestError(
            "a scorer has the model repeat the prompt's tokens, but this prompt came as "
            "inputs_embeds; pass input_ids, or choose another scorer"
        )


def check_context(later: Later, places: Sequence[int], n_tokens: Sequence[int], limit: int) -> None:
    """Refuse a pass that goes beyond the tokens that the model was made for.

    Parameters
    ----------
    later : Later
        The pass.
    places : sequence of int
        Position of the first token after each row of the prompt.
    n_tokens : sequence of int
        Tokens of each row, without padding.
    limit : int
        Positions that the model has.

    Raises
    ------
    InputError
        If a repetition does not fit behind a row, or not one token of a draft does.
    """
    for place, tokens in zip(places, n_tokens, strict=True):
        beyond = later.furthest(tokens)
        if place + beyond <= limit:
            continue
        if later.kind == "draft":
            raise InputError(
                f"a scorer drafts the answer's first tokens, but the prompt's {place} tokens leave "
                f"no room for them in the {limit} that the model was made for; shorten the prompt, "
                "or choose another scorer"
            )
        lead = max(len(later.instruction), len(later.continuation) + CARRIED_TOKENS)
        room = limit - place - lead
        smaller = f"repeat shorter pieces (chunk={room}), " if room >= SMALLEST_CHUNK else ""
        raise InputError(
            f"a scorer has the model repeat the prompt right after it, in pieces of up to "
            f"{later.tokens} tokens: {place} tokens and {beyond} of a repetition are beyond the "
            f"{limit} that the model was made for; {smaller}shorten the prompt, or choose another "
            "scorer"
        )


def _check_room(part: HeldPrompt, later: Later) -> int | None:
    """Refuse as `check_context` does; returns the limit."""
    limit = context_limit(part.decoder)
    if limit is not None:
        tokens = [part.n_prompt] * part.batch
        if part.visible is not None:
            tokens = part.visible.sum(dim=1).tolist()
        check_context(later, part.next_positions.tolist(), tokens, limit)
    return limit


# Draft


@dataclass(slots=True)
class _Drafted:
    """What the layers saw of a draft."""

    states: dict[int, AttentionStates] = field(default_factory=dict)
    queries: dict[int, list[Tensor]] = field(default_factory=dict)


def _draft(prompt: HeldPrompt, later: Later, looks: Wanted, notes: LaterNotes, sinks: int) -> None:
    """Let the model say its next tokens, and show them to the scorers all at once."""
    check_draft(prompt.head)
    assert prompt.head is not None
    assert prompt.first_tokens is not None
    limit = _check_room(prompt, later)
    cache, drafted = prompt.cache(), _Drafted()
    _hold_apart(cache, prompt)
    token = prompt.first_tokens
    ends = torch.tensor(sorted(prompt.ends), dtype=torch.long, device=token.device)
    going = torch.ones_like(token, dtype=torch.bool)
    # a row is cut where its model ends: no answer can be longer
    room = torch.full_like(token, later.tokens)
    if limit is not None:
        room = limit - prompt.next_positions.to(token.device)
    counts: list[Tensor] = []
    with intercept_attention(prompt.decoder, _looking(cache, looks, drafted)):
        for number in range(later.tokens):
            counts.append(going)
            going = going & ~torch.isin(token, ends) & (number + 1 < room)
            hidden = prompt.run(cache, token[:, None], number, limit)
            if not bool(going.any()):
                break
            if number + 1 < later.tokens:
                token = prompt.head(hidden[:, -1]).argmax(dim=-1)
    count = torch.stack(counts, dim=1)
    step = LaterStep(n_prompt=prompt.n_prompt, counts=None if bool(count.all()) else count)
    for layer, scorers in looks.items():
        states = _whole_draft(prompt, cache.layers[layer], drafted, layer)
        for scorer in scorers:
            notes[layer][scorer.later_key] = scorer.observe_later(states, step, sinks=sinks)


def _hold_apart(cache: LaterCache, prompt: HeldPrompt) -> None:
    """Spare the copy of all that is held, where attention over two parts is our own."""
    for layer in cache.layers:
        if isinstance(layer, LaterLayer):
            exact = layer.dtype in (torch.float32, torch.float64)
            layer.apart = prompt.visible is None and exact and layer.device.type == "cpu"


def _looking(cache: LaterCache, looks: Wanted, drafted: _Drafted) -> Any:
    """The layers' own attention; what they see of one drafted token is noted."""

    def handler(states: AttentionStates, compute: Compute) -> Any:
        layer = cache.layers[states.layer]
        if states.layer in looks:
            drafted.states[states.layer] = states
            drafted.queries.setdefault(states.layer, []).append(states.queries)
        if not isinstance(layer, LaterLayer) or not layer.apart:
            return compute(states.mask)
        output = apart_attention(AttentionCall.of(states), layer.held)
        return compute(None, *layer.joined()) if output is None else (output, None)

    return handler


def _whole_draft(
    prompt: HeldPrompt, layer: LaterLayer, drafted: _Drafted, index: int
) -> AttentionStates:
    """What a layer would have seen of all drafted tokens in one forward."""
    queries = torch.cat(drafted.queries[index], dim=2)
    keys, values = layer.joined()
    mask = None
    if prompt.visible is not None:
        n_new, n_keys = int(queries.shape[2]), int(keys.shape[2])
        causal = torch.ones(n_new, n_keys, dtype=torch.bool, device=keys.device)
        visible = torch.nn.functional.pad(prompt.visible, (0, n_new), value=True)
        mask = causal.tril_(n_keys - n_new) & visible.to(keys.device)[:, None, None]
    return replace(drafted.states[index], queries=queries, keys=keys, values=values, mask=mask)


# Repetition


def _repeat(prompt: HeldPrompt, later: Later, looks: Wanted, notes: LaterNotes, sinks: int) -> None:
    """Let the model read the prompt again, piece by piece, each right after the prompt."""
    check_repeat(prompt.ids)
    _check_room(prompt, later)
    for part in prompt.alike():
        found: LaterNotes = {layer: {} for layer in looks}
        for ids, step in _pieces(part, later, sinks):
            with intercept_attention(part.decoder, _repeating(looks, found, step, sinks)):
                part.run(part.cache(), ids, 0)
        for layer, own in found.items():
            for key, noted in own.items():
                _spread(notes[layer], key, noted, prompt, part)


def _pieces(part: HeldPrompt, later: Later, sinks: int) -> list[tuple[Tensor, LaterStep]]:
    """Tokens of each repetition, (n_rows, n), and what they are."""
    assert part.ids is not None
    ids = part.ids
    columns = torch.arange(part.n_prompt, device=ids.device)
    if part.visible is not None:
        columns = columns[part.visible[0].to(ids.device)]
    pieces = []
    for begin in range(0, columns.numel(), later.tokens):
        repeated = columns[begin : begin + later.tokens]
        lead, carried = later.instruction, columns[:0]
        if begin:
            lead, carried = later.continuation, columns[max(begin - CARRIED_TOKENS, 0) : begin]
        asked = ids.new_tensor(lead, dtype=ids.dtype).expand(part.batch, -1)
        text = torch.cat([asked, ids[:, carried], ids[:, repeated]], dim=1)
        leading = columns[: min(sinks, begin)]
        step = LaterStep(
            n_prompt=part.n_prompt,
            repeated=repeated,
            leading=leading if leading.numel() else None,
        )
        pieces.append((text, step))
    return pieces


def _repeating(looks: Wanted, found: LaterNotes, step: LaterStep, sinks: int) -> Any:
    """The layers' own attention, shown to the scorers."""

    def handler(states: AttentionStates, compute: Compute) -> Any:
        own = found.get(states.layer)
        for scorer in looks.get(states.layer, ()) if own is not None else ():
            assert own is not None
            before = replace(states, observed=own.get(scorer.later_key))
            own[scorer.later_key] = scorer.observe_later(before, step, sinks=sinks)
        return compute(states.mask)

    return handler


def _spread(
    notes: dict[Hashable, Observed],
    key: Hashable,
    noted: Observed,
    prompt: HeldPrompt,
    part: HeldPrompt,
) -> None:
    """Put what was noted of some rows in its place among all."""
    if part is prompt:
        notes[key] = noted
        return
    assert part.rows is not None
    before = notes.get(key)

    def placed(name: str | None, own: Tensor | None) -> Tensor | None:
        if own is None:
            return None
        old = None if before is None else before.columns if name is None else before.totals[name]
        whole = own.new_zeros(prompt.batch, *own.shape[1:]) if old is None else old
        whole[list(part.rows or ())] = own
        return whole

    totals = {name: placed(name, total) for name, total in noted.totals.items()}
    notes[key] = Observed(
        n_tokens=noted.n_tokens,
        columns=placed(None, noted.columns),
        totals={name: total for name, total in totals.items() if total is not None},
    )
