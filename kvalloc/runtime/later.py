"""A prompt that is held whole, and the model that runs on beyond it for scorers to see."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from kvalloc.errors import InputError, UnsupportedModelError, UnsupportedRequestError
from kvalloc.models.attention import AttentionStates, Compute, Observed, intercept_attention
from kvalloc.models.structure import context_limit
from kvalloc.runtime.attention.backends import attend
from kvalloc.runtime.attention.call import AttentionCall
from kvalloc.runtime.kept import FlatEntries
from kvalloc.scorers import Scorer
from kvalloc.scorers.later_pass import (
    CARRIED_TOKENS,
    SMALLEST_CHUNK,
    Later,
    LaterStep,
    merged_passes,
)

__all__ = ["HeldPrompt", "LaterNotes", "Wanted", "run_later_passes"]


class LaterLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """What a full-attention layer holds of a prompt, which stays as it is, and later tokens.

    Attributes
    ----------
    keys, values : Tensor, (n_rows, n_kv_heads, n_later, head_dim)
        Of the later tokens alone.
    apart : bool
        Whether `update` returns the later tokens alone: to put them behind the others means to
        copy all that is held, for each token of a draft.
    """

    keys: Any  # transformers calls them optional
    values: Any

    def __init__(self, keys: Tensor, values: Tensor, rows: Sequence[int] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held, self._rows = (keys, values), rows
        self.apart = False
        self.lazy_initialization(keys, values)

    @property
    def held(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the prompt, (n_rows, n_kv_heads, n_prompt, head_dim) each."""
        keys, values = self._held
        if self._rows is None:
            return keys, values
        if len(self._rows) == 1:
            row = slice(self._rows[0], self._rows[0] + 1)
            return keys[row], values[row]
        index = torch.tensor(self._rows, device=keys.device)
        return keys.index_select(0, index), values.index_select(0, index)

    def joined(self) -> tuple[Tensor, Tensor]:
        """Keys and values of prompt and later tokens."""
        held, later = self.held, (self.keys, self.values)
        keys, values = (torch.cat(pair, dim=-2) for pair in zip(held, later, strict=True))
        return keys, values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add later tokens; returns all keys and values, or the later ones."""
        later: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
        return later if self.apart else self.joined()

    def get_seq_length(self) -> int:
        """Tokens of the prompt, padding included, and later ones."""
        later = 0 if self.keys.numel() == 0 else int(self.keys.shape[-2])
        return int(self._held[0].shape[-2]) + later

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Length and offset of what the new tokens may see."""
        new = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self.get_seq_length() + int(new), 0


class LaterCache(Cache):
    """Keys and values of a held prompt, and those of later tokens, which go with this object."""

    layers: list[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldPrompt:
    """A prompt in a full cache, from which the model can run on without changing it.

    Attributes
    ----------
    decoder : nn.Module
        The model without its language-model head.
    head : nn.Module or None
        The head; None where nothing is to be drafted.
    ends : frozenset of int
        Tokens that end the model's turn.
    stored : mapping of int to (Tensor, Tensor)
        Keys and values of each full-attention layer, (batch, n_kv_heads, n_prompt, head_dim).
    sliding : mapping of int to CacheLayerMixin
        transformers' own layers, which a pass copies.
    n_prompt : int
        Columns, padding included.
    visible : Tensor of bool, (batch, n_prompt), or None
        False marks padding; None where there is none.
    next_positions : Tensor of int64, (batch,)
        Position of the token after each row.
    first_tokens : Tensor of int64 or None, (batch,)
        What the model would say next; None where nothing is to be drafted.
    ids : Tensor of int64 or None, (batch, n_prompt)
        The prompt; None where it came as embeddings.
    rows : tuple of int, or None
        Which rows of ``stored`` and ``sliding`` this is about; None for all.
    """

    decoder: nn.Module
    head: nn.Module | None
    ends: frozenset[int]
    stored: dict[int, tuple[Tensor, Tensor]]
    sliding: dict[int, Any]
    n_prompt: int
    visible: Tensor | None
    next_positions: Tensor
    first_tokens: Tensor | None
    ids: Tensor | None
    rows: tuple[int, ...] | None = None

    @property
    def batch(self) -> int:
        """Rows that this is about."""
        return int(self.next_positions.shape[0])

    def cache(self) -> LaterCache:
        """A new cache for tokens after the prompt."""
        layers: list[Any] = []
        for index in range(len(self.stored) + len(self.sliding)):
            if index in self.stored:
                layers.append(LaterLayer(*self.stored[index], self.rows))
                continue
            layer = copy.deepcopy(self.sliding[index])
            if self.rows is not None:
                layer.batch_select_indices(torch.tensor(self.rows, device=layer.keys.device))
            layers.append(layer)
        return LaterCache(layers=layers)

    def alike(self) -> list[HeldPrompt]:
        """The same, one for all rows whose padding is in the same places."""
        if self.visible is None:
            return [self]
        groups: dict[bytes, list[int]] = {}
        for row, shown in enumerate(self.visible.cpu().numpy()):
            groups.setdefault(shown.tobytes(), []).append(row)
        return [self._some(tuple(rows)) for rows in groups.values()]

    def _some(self, rows: tuple[int, ...]) -> HeldPrompt:
        def cut(states: Tensor | None) -> Tensor | None:
            return None if states is None else states[list(rows)]

        visible, positions = cut(self.visible), cut(self.next_positions)
        assert visible is not None
        assert positions is not None
        return replace(
            self,
            rows=rows,
            visible=None if bool(visible.all()) else visible,
            next_positions=positions,
            first_tokens=cut(self.first_tokens),
            ids=cut(self.ids),
        )

    def run(self, cache: LaterCache, ids: Tensor, before: int, limit: int | None = None) -> Tensor:
        """Let the decoder go on.

        Parameters
        ----------
        cache : LaterCache
            From `cache`.
        ids : Tensor of int64, (batch, n_new_tokens)
        before : int
            Later tokens that are in the cache already.
        limit : int, optional
            Positions that the model has: what lies beyond stands at the last one. Only rows whose
            draft has ended run so far, and some models turn all positions another way then.

        Returns
        -------
        Tensor, (batch, n_new_tokens, hidden_size)
        """
        n_new = int(ids.shape[1])
        positions = torch.arange(before, before + n_new, device=ids.device)
        positions = self.next_positions.to(ids.device)[:, None] + positions
        if limit is not None:
            positions = positions.clamp(max=limit - 1)
        mask = None
        if self.visible is not None:
            mask = nn.functional.pad(self.visible.long(), (0, before + n_new), value=1)
            mask = mask.to(ids.device)
        output = self.decoder(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        hidden: Tensor = output[0]
        return hidden


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
        return attend(AttentionCall.of(states), [FlatEntries.even(*layer.held)]), None

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
