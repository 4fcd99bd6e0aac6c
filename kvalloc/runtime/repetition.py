"""A held prompt that the model reads once more, for scorers to see what it looks up."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from kvalloc.errors import InputError, UnsupportedRequestError
from kvalloc.models.attention import AttentionStates, Compute, Observed, intercept_attention
from kvalloc.models.structure import context_limit
from kvalloc.runtime.arrival import row_tokens
from kvalloc.scorers import Scorer
from kvalloc.scorers.base import repetitions
from kvalloc.scorers.later_pass import (
    CARRIED_TOKENS,
    SHOWN_FIRST,
    SMALLEST_CHUNK,
    Later,
    LaterStep,
)

__all__ = [
    "HeldPrompt",
    "LaterNotes",
    "Wanted",
    "check_context",
    "repeated_tokens",
    "repeat_prompt",
]


class LaterLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """What a full-attention layer holds of a prompt, which stays as it is, and later tokens.

    Attributes
    ----------
    keys, values : Tensor, (n_rows, n_kv_heads, n_later, head_dim)
        Of the later tokens alone.
    """

    keys: Any  # transformers calls them optional
    values: Any

    def __init__(
        self, keys: Tensor, values: Tensor, rows: Sequence[int] | None, shown: Tensor | None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held, self._rows, self._shown = (keys, values), rows, shown
        self.lazy_initialization(keys, values)

    @property
    def held(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the prompt, (n_rows, n_kv_heads, n_shown, head_dim) each."""
        keys, values = self._held
        if self._shown is not None:
            shown = self._shown.to(keys.device)
            keys, values = keys.index_select(2, shown), values.index_select(2, shown)
        if self._rows is None:
            return keys, values
        if len(self._rows) == 1:
            row = slice(self._rows[0], self._rows[0] + 1)
            return keys[row], values[row]
        index = torch.tensor(self._rows, device=keys.device)
        return keys.index_select(0, index), values.index_select(0, index)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add later tokens; returns all keys and values."""
        later = super().update(key_states, value_states, *args, **kwargs)
        keys, values = (torch.cat(pair, dim=-2) for pair in zip(self.held, later, strict=True))
        return keys, values

    def get_seq_length(self) -> int:
        """Tokens of the prompt, padding included, and later ones."""
        later = 0 if self.keys.numel() == 0 else int(self.keys.shape[-2])
        return int(self._held[0].shape[-2]) + later

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Length and offset of what the new tokens may see: what is shown counts as the last."""
        new = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        hidden = 0
        if self._shown is not None:
            hidden = int(self._held[0].shape[-2]) - int(self._shown.numel())
        return self.get_seq_length() - hidden + int(new), hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldPrompt:
    """A prompt in a full cache, from which the model can run on without changing it.

    Attributes
    ----------
    decoder : nn.Module
        The model without its language-model head.
    stored : mapping of int to (Tensor, Tensor)
        Keys and values of each full-attention layer, (batch, n_kv_heads, n_prompt, head_dim).
    sliding : mapping of int to CacheLayerMixin
        transformers' own layers, which a pass copies.
    visible : Tensor of bool, (batch, n_prompt)
        False marks padding.
    next_positions : Tensor of int64, (batch,)
        Position of the token after each row.
    ids : Tensor of int64, (batch, n_prompt)
        The prompt.
    rows : tuple of int, or None
        Which rows of ``stored`` and ``sliding`` this is about; None for all.
    shown : Tensor of int64, (n_shown,), or None
        Columns that the later tokens see in full-attention layers, none of them padding; None for
        all that are not.
    """

    decoder: nn.Module
    stored: dict[int, tuple[Tensor, Tensor]]
    sliding: dict[int, Any]
    visible: Tensor
    next_positions: Tensor
    ids: Tensor
    rows: tuple[int, ...] | None = None
    shown: Tensor | None = None

    @property
    def batch(self) -> int:
        """Rows that this is about."""
        return int(self.visible.shape[0])

    @property
    def n_prompt(self) -> int:
        """Columns, padding included."""
        return int(self.visible.shape[1])

    @property
    def ends_alike(self) -> bool:
        """Whether one mask can tell sliding and other layers what later tokens see.

        It has one column for the last entries of both, which are of different tokens where some of
        the prompt are not shown; so none of these may be padding.
        """
        return not self.sliding or bool(self.visible[:, -1].all())

    def cache(self) -> Cache:
        """A new cache for tokens after the prompt, which go with it."""
        layers: list[Any] = []
        for index in range(len(self.stored) + len(self.sliding)):
            if index in self.stored:
                layers.append(LaterLayer(*self.stored[index], self.rows, self.shown))
                continue
            layer = copy.deepcopy(self.sliding[index])
            if self.rows is not None:
                layer.batch_select_indices(torch.tensor(self.rows, device=layer.keys.device))
            layers.append(layer)
        return Cache(layers=layers)

    def alike(self) -> list[HeldPrompt]:
        """The same, one for all rows whose padding is in the same places.

        Of a row of padding alone nothing is kept, so it may be read like any other.
        """
        whole = replace(self, visible=self.visible | ~self.visible.any(dim=1, keepdim=True))
        groups: dict[bytes, list[int]] = {}
        for row, shown in enumerate(whole.visible.numpy()):
            groups.setdefault(shown.tobytes(), []).append(row)
        return [whole] if len(groups) == 1 else [whole._some(rows) for rows in groups.values()]

    def _some(self, rows: list[int]) -> HeldPrompt:
        return replace(
            self,
            rows=tuple(rows),
            visible=self.visible[rows],
            next_positions=self.next_positions[rows],
            ids=self.ids[rows],
        )

    def run(self, cache: Cache, ids: Tensor) -> None:
        """Let the decoder read tokens, (batch, n_new_tokens), right after the prompt."""
        n_new = int(ids.shape[1])
        positions = torch.arange(n_new, device=ids.device)
        mask = None
        if not self.visible.all() and (self.shown is None or self.sliding):
            mask = nn.functional.pad(self.visible.long(), (0, n_new), value=1).to(ids.device)
        self.decoder(
            input_ids=ids,
            attention_mask=mask,
            position_ids=self.next_positions.to(ids.device)[:, None] + positions,
            past_key_values=cache,
            use_cache=True,
        )


#: For each layer, what scorers noted, by their `later_key`.
LaterNotes = dict[int, dict[Hashable, Observed]]

Wanted = Mapping[int, Sequence[Scorer]]


@torch.no_grad()
def repeat_prompt(prompt: HeldPrompt, wanted: Wanted, *, sinks: int) -> LaterNotes:
    """Make the repetitions that scorers ask for; the prompt is the same afterwards.

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
    InputError
        If a repetition goes beyond the tokens that the model was made for.
    """
    notes: LaterNotes = {layer: {} for layer in wanted}
    for later in repetitions(scorer for each in wanted.values() for scorer in each):
        served = {
            layer: tuple({one.later_key: one for one in each if one.later == later}.values())
            for layer, each in wanted.items()
        }
        looks = {layer: each for layer, each in served.items() if each}
        if (limit := context_limit(prompt.decoder)) is not None:
            tokens = row_tokens(prompt.visible)
            check_context(later, prompt.next_positions.tolist(), tokens.tolist(), limit)
        noted: list[LaterNotes] = []
        for part in (parts := prompt.alike()):
            noted.append({layer: {} for layer in looks})
            for ids, step in _pieces(part, later, sinks):
                view = replace(part, shown=step.shown)
                with intercept_attention(part.decoder, _repeating(looks, noted[-1], step, sinks)):
                    view.run(view.cache(), ids)
        for layer, own in noted[0].items():
            for key in own:
                notes[layer][key] = _together([each[layer][key] for each in noted], parts)
    return notes


def repeated_tokens(arguments: Mapping[str, Any]) -> Tensor:
    """Return the tokens of a forward whose prompt will be repeated, (batch, n_tokens).

    Raises
    ------
    UnsupportedRequestError
        If it came as embeddings.
    """
    ids = arguments.get("input_ids")
    if arguments.get("inputs_embeds") is not None or not isinstance(ids, Tensor):
        raise UnsupportedRequestError(
            "a scorer has the model repeat the prompt's tokens, but this prompt came as "
            "inputs_embeds; pass input_ids, or choose another scorer"
        )
    return ids


def check_context(later: Later, places: Sequence[int], n_tokens: Sequence[int], limit: int) -> None:
    """Refuse a prompt that does not fit, with its repetition, what the model was made for.

    Parameters
    ----------
    later : Later
        What comes after the prompt.
    places : sequence of int
        Position of the first token after each row of the prompt.
    n_tokens : sequence of int
        Tokens of each row, without padding.
    limit : int
        Positions that the model has.

    Raises
    ------
    InputError
        If a row, or the repetition behind it, does not fit.
    """
    for place, tokens in zip(places, n_tokens, strict=True):
        beyond = later.furthest(tokens)
        if place + beyond <= limit:
            continue
        if later.kind == "following":
            raise InputError(
                f"this policy holds the prompt until {later.tokens} tokens have followed it, but "
                f"its {place} tokens are more than the {limit} that the model was made for; "
                "shorten the prompt, or choose a policy that evicts while it is read"
            )
        room = limit - place - CARRIED_TOKENS
        smaller = f"repeat shorter pieces (chunk={room}), " if room >= SMALLEST_CHUNK else ""
        raise InputError(
            f"a scorer has the model repeat the prompt right after it, in pieces of up to "
            f"{later.tokens} tokens: {place} tokens and {beyond} of a repetition are beyond the "
            f"{limit} that the model was made for; {smaller}shorten the prompt, or choose another "
            "scorer"
        )


def _pieces(part: HeldPrompt, later: Later, sinks: int) -> list[tuple[Tensor, LaterStep]]:
    """Tokens of each repetition, (n_rows, n), and what they are."""
    ids = part.ids
    columns = part.visible[0].nonzero()[:, 0].to(ids.device)
    pieces = []
    for begin in range(0, columns.numel(), later.tokens):
        repeated = columns[begin : begin + later.tokens]
        text = ids[:, columns[max(begin - CARRIED_TOKENS, 0) : begin + later.tokens]]
        leading = columns[: min(sinks, begin)]
        shown = None
        if later.nearby is not None and part.ends_alike:
            first, end = max(begin - later.nearby, 0), begin + later.tokens + later.nearby
            shown = torch.cat([columns[: min(first, max(sinks, SHOWN_FIRST))], columns[first:end]])
        step = LaterStep(
            n_prompt=part.n_prompt,
            repeated=repeated,
            leading=leading if leading.numel() else None,
            shown=shown,
        )
        pieces.append((text, step))
    return pieces


def _repeating(looks: Wanted, notes: LaterNotes, step: LaterStep, sinks: int) -> Any:
    """The layers' own attention, shown to the scorers."""

    def handler(states: AttentionStates, compute: Compute) -> Any:
        for scorer in looks.get(states.layer, ()):
            own = notes[states.layer]
            before = replace(states, observed=own.get(scorer.later_key))
            own[scorer.later_key] = scorer.observe_later(before, step, sinks=sinks)
        return compute(states.mask)

    return handler


def _together(noted: Sequence[Observed], parts: Sequence[HeldPrompt]) -> Observed:
    """What was noted of some rows each, for all of them in their order."""
    first = noted[0]
    if len(noted) == 1:
        return first
    columns = [one.columns for one in noted if one.columns is not None]
    totals = {name: torch.cat([one.totals[name] for one in noted]) for name in first.totals}
    joined = replace(first, columns=torch.cat(columns) if columns else None, totals=totals)
    return joined.rows(torch.tensor([row for part in parts for row in part.rows or ()]).argsort())
