"""Second read of a prompt, in which scorers see the entries that it attends to."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicLayer

from kvalloc.errors import InputError
from kvalloc.models import names
from kvalloc.models.attention import (
    AttentionStates,
    Compute,
    Observed,
    intercept_attention,
    without_autocast,
)
from kvalloc.runtime.kept import index_of
from kvalloc.runtime.notes import of_readers
from kvalloc.runtime.states import state_of, with_state
from kvalloc.scorers import Scorer
from kvalloc.scorers.later_pass import (
    CARRIED_TOKENS,
    SHOWN_FIRST,
    SMALLEST_CHUNK,
    Later,
    LaterStep,
)


class LaterLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Cache layer of a prompt for one forward of later tokens, which it does not store.

    ``prompt`` are keys and values, (n_rows, n_kv_heads, n, head_dim). Later tokens see ``places``,
    (n_shown,), or all.
    """

    def __init__(
        self, prompt: Sequence[Tensor], places: Tensor | None, tokens: int, *, sliding: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held, self._places, self._tokens = prompt, places, tokens
        self.is_sliding = sliding

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return all keys and values."""
        shown: Any = slice(None)
        if self._places is not None:
            shown = index_of(self._places.numpy(), key_states.device)
        pairs = zip(self._held, (key_states, value_states), strict=True)
        keys, values = (torch.cat([prompt[:, :, shown], new], dim=-2) for prompt, new in pairs)
        return keys, values

    def get_seq_length(self) -> int:
        """Return the prompt's tokens."""
        return self._tokens

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return length and offset of visible tokens, shown ones last."""
        new = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        shown = int(self._held[0].shape[2]) if self._places is None else len(self._places)
        return shown + int(new), self._tokens - shown


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLayer:
    """Entries of prompts in `rows` of a source layer.

    `entries` are keys and values, (n_rows, n_kv_heads, n_tokens, head_dim), only the last tokens of
    a sliding layer; None if it stores none.
    """

    source: Any
    rows: Tensor
    entries: Sequence[Tensor] | None = None
    slides: bool = False

    def layer(self, shown: Tensor | None, tokens: int) -> Any:
        """Return a `LaterLayer` with the source's state, if any."""
        other = state_of(self.source, self.rows)
        if self.entries is None:
            return other
        shown = None if self.slides else shown
        make = LaterLayer if other is None else partial(with_state, LaterLayer, other)
        return make(self.entries, shown, tokens, sliding=self.slides)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldPrompt:
    """Prompts of equal length in a full cache, which the model can continue.

    For `positions`, `read` and `features` see `kvalloc.runtime.prompt.ReadTokens`.
    """

    decoder: nn.Module
    layers: Sequence[PromptLayer]
    positions: Tensor
    read: Mapping[str, Tensor]
    features: Sequence[Tensor] = ()

    @property
    def tokens(self) -> int:
        """Tokens of each row."""
        return int(self.positions.shape[2])

    @torch.no_grad()
    def read_again(
        self, scorer: Scorer, layers: Collection[int], reads: Mapping[int, int], *, sinks: int
    ) -> dict[int, Observed]:
        """Let the model read the unchanged prompts again; return the scorer's notes by layer.

        ``reads`` maps layers that read another's entries to that; their notes become one.
        """
        notes: dict[int, Observed] = {}
        assert scorer.later is not None
        for piece, step in _pieces(self.tokens, scorer.later, sinks):

            def look(states: AttentionStates, compute: Compute, step: LaterStep = step) -> Any:
                if reads.get(states.layer, states.layer) in layers:
                    noted_states = replace(states, observed=notes.get(states.layer))
                    with without_autocast(states.keys):
                        note = scorer.observe_later(noted_states, step, sinks=sinks)
                    notes[states.layer] = note
                return compute(states.mask)

            with intercept_attention(self.decoder, look):
                self._run(piece, step.shown)
        for source in {*reads.values()} & {*layers}:
            among = [notes[source], *(notes.pop(one) for one, of in reads.items() if of == source)]
            entries: Any = self.layers[source].entries
            notes[source] = of_readers(among, int(entries[0].shape[1]))
        return notes

    def _run(self, piece: slice, shown: Tensor | None) -> None:
        """Let the decoder read a slice of the prompts after them, in a new cache."""
        cache = Cache(layers=[one.layer(shown, self.tokens) for one in self.layers])
        read: dict[str, Any] = {name: one[:, piece] for name, one in self.read.items()}
        places, device = read.pop(names.IMAGE_PLACES), next(iter(read.values())).device
        if self.features:
            read[names.IMAGE_PLACES] = (places >= 0).to(device)
            read[names.IMAGE_FEATURES] = [one[places[places >= 0]] for one in self.features]
        positions = self.positions[:, :, piece]
        first, end = positions[-3:].amin(dim=(0, 2)), self.positions[-3:].amax(dim=(0, 2)) + 1
        positions = positions + (end - first)[:, None]
        positions = positions if len(positions) > 1 else positions[0]
        self.decoder(
            **read,
            position_ids=positions.to(device),
            use_cache=True,
            **names.cache_keyword(self.decoder, cache),
        )


def check_context(later: Later, place: int, tokens: int, limit: int) -> None:
    """Refuse a row that with its repetition exceeds the model's positions.

    ``place`` is the position of the first token after the row.

    Raises
    ------
    InputError
    """
    extent = later.furthest(tokens)
    if place + extent <= limit:
        return
    room = limit - place - CARRIED_TOKENS
    smaller = f"repeat shorter pieces (chunk={room}), " if room >= SMALLEST_CHUNK else ""
    raise InputError(
        f"a scorer repeats up to {later.tokens} tokens: {place} tokens and {extent} of a "
        f"repetition are beyond the {limit} of the model; {smaller}shorten it or change scorer"
    )


def _pieces(n_prompt: int, later: Later, sinks: int) -> list[tuple[slice, LaterStep]]:
    places, pieces = torch.arange(n_prompt, device="cpu"), []
    for begin in range(0, n_prompt, later.tokens):
        repeated = places[begin : begin + later.tokens]
        read = places[max(begin - CARRIED_TOKENS, 0) : begin + later.tokens]
        leading, shown = places[: min(sinks, begin)], None
        if later.nearby is not None:
            first, end = max(begin - later.nearby, 0), begin + later.tokens + later.nearby
            seen = torch.cat([places[: min(first, max(sinks, SHOWN_FIRST))], places[first:end]])
            shown = seen if len(seen) < n_prompt else None
        step = LaterStep(
            n_prompt=n_prompt,
            repeated=repeated,
            leading=leading if len(leading) else None,
            shown=shown,
        )
        pieces.append((slice(int(read[0]), int(read[-1]) + 1), step))
    return pieces
