"""A whole prompt that the model reads once more, for scorers to see what it looks up."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicLayer

from kvalloc.accounting import IntArray
from kvalloc.errors import InputError
from kvalloc.models.attention import AttentionStates, Compute, Observed, intercept_attention
from kvalloc.models.names import cache_keyword
from kvalloc.models.structure import context_limit
from kvalloc.runtime.arrival import Step, row_tokens
from kvalloc.runtime.refusals import new_tokens, refuse
from kvalloc.scorers import Scorer
from kvalloc.scorers.later_pass import (
    CARRIED_TOKENS,
    SHOWN_FIRST,
    SMALLEST_CHUNK,
    Later,
    LaterStep,
)


class LaterLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """What a layer holds of some rows of a prompt, for one forward that repeats a piece of it.

    Nothing of either is stored, so that what both are together goes with the layer's attention.

    Parameters
    ----------
    held : (Tensor, Tensor)
        Keys and values of the prompt, (batch, n_kv_heads, n_columns, head_dim) each.
    rows : Tensor of int64, (n_rows,)
    columns : Tensor of int64, (n_shown,)
        Those of `held` that the piece sees: the last ones of the rows' tokens, or of full
        attention any.
    tokens : int
        Tokens of each row.
    sliding : bool
        Whether its attention is that of a sliding window.
    """

    def __init__(
        self,
        held: tuple[Tensor, Tensor],
        rows: Tensor,
        columns: Tensor,
        tokens: int,
        *,
        sliding: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held, self._rows, self._columns, self._tokens = held, rows, columns, tokens
        self.is_sliding = sliding

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return all keys and values, those of the piece behind."""
        held = (_taken(_taken(own, 0, self._rows), 2, self._columns) for own in self._held)
        pairs = zip(held, (key_states, value_states), strict=True)
        keys, values = (torch.cat(pair, dim=-2) for pair in pairs)
        return keys, values

    def get_seq_length(self) -> int:
        """Return the number of tokens of the prompt."""
        return self._tokens

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return length and offset of what new tokens see: what is shown counts as the last."""
        new = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        hidden = self._tokens - len(self._columns)
        return self._tokens - hidden + int(new), hidden


def _taken(states: Tensor, axis: int, places: Tensor) -> Tensor:
    """Return increasing places of an axis: a view where they follow each other."""
    count = len(places)
    if count and int(places[-1] - places[0]) == count - 1:
        return states.narrow(axis, int(places[0]), count)
    return states.index_select(axis, places.to(states.device))


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldPrompt:
    """A prompt in a full cache, from which the model can run on without changing it.

    Attributes
    ----------
    decoder : nn.Module
        The model without its language-model head.
    layers : sequence of CacheLayerMixin
        Those of the cache: keys and values of the whole prompt, (batch, n_kv_heads, n_prompt,
        head_dim); of a sliding layer those of the last columns.
    visible : Tensor of bool, (batch, n_prompt)
        False marks padding.
    next_positions : Tensor of int64, (batch,)
        Position of the token after each row.
    read : Tensor of int64, (batch, n_prompt), or (batch, n_prompt, hidden_size)
        The prompt, as token ids or as embeddings.
    """

    decoder: nn.Module
    layers: Sequence[Any]
    visible: Tensor
    next_positions: Tensor
    read: Tensor

    def parts(self) -> list[tuple[Tensor, Tensor]]:
        """Return all rows whose padding is in the same places, and the columns that are none.

        Of a row of padding alone nothing is kept, so it may be read like any other.
        """
        visible = self.visible | ~self.visible.any(dim=1, keepdim=True)
        groups: dict[bytes, list[int]] = {}
        for row, shown in enumerate(visible.numpy()):
            groups.setdefault(shown.tobytes(), []).append(row)
        return [
            (torch.tensor(own, device="cpu"), visible[own[0]].nonzero()[:, 0])
            for own in groups.values()
        ]

    def cache(self, rows: Tensor, columns: Tensor, shown: Tensor) -> Cache:
        """Return a new cache for a piece that some rows read again, which goes with it.

        Parameters
        ----------
        rows, columns : Tensor of int64
            One of `parts`.
        shown : Tensor of int64, (n_shown,)
            Columns that the piece sees in full-attention layers.
        """
        layers: list[Any] = []
        for own in self.layers:
            held, sliding, places = (own.keys, own.values), own.is_sliding, shown
            if sliding:
                places = columns - (self.visible.shape[1] - own.keys.shape[2])
                places = places[places >= 0]
            layers.append(LaterLayer(held, rows, places, len(columns), sliding=sliding))
        return Cache(layers=layers)

    def run(self, cache: Cache, read: Tensor, rows: Tensor) -> None:
        """Let the decoder read some tokens, (n_rows, n_new_tokens, ...), right after some rows."""
        positions = self.next_positions[rows].to(read.device)[:, None]
        self.decoder(
            **{"input_ids" if read.ndim == 2 else "inputs_embeds": read},
            position_ids=positions + torch.arange(read.shape[1], device=read.device),
            use_cache=True,
            **cache_keyword(self.decoder, cache),
        )


class WholePrompt:
    """What is known of a prompt that is whole until all of its layers evict at once.

    Attributes
    ----------
    positions : Tensor of int64, (batch, n_tokens)
        On the host.
    read : Tensor of int64, (batch, n_tokens), or (batch, n_tokens, hidden_size)
        Its tokens or embeddings, if the model is to repeat them.
    """

    def __init__(self) -> None:
        self.positions = self.read = torch.empty(0, 0, dtype=torch.long, device="cpu")

    def add(self, arguments: Mapping[str, Any], step: Step, *, repeats: bool) -> None:
        """Note a forward of the prompt; one that has failed may come again.

        Parameters
        ----------
        arguments : mapping
        step : Step
        repeats : bool
            Whether the model is to repeat the prompt.

        Raises
        ------
        UnsupportedRequestError
            If the model is to repeat a prompt that is token ids in part and embeddings in part.
        """
        seen, end = step.seen, step.seen + step.new_tokens
        if repeats:
            read = new_tokens(arguments).detach()
            refuse(repeats_both=seen > 0 and self.read.ndim != read.ndim)
            self.read = torch.cat([self.read[:, :seen], read], dim=1) if seen else read
        positions = arguments.get("position_ids")
        if not isinstance(positions, Tensor):
            positions = torch.arange(seen, end, device="cpu")[None]
        positions = positions.cpu()  # (n_axes, batch, n_tokens) where a model has several axes
        positions = positions.reshape(-1, *positions.shape[-2:]).amax(dim=0).expand(step.batch, -1)
        before = self.positions[:, :seen]
        self.positions = torch.cat([before, positions], dim=1) if seen else positions

    def select(self, rows: Tensor) -> None:
        """Let row i go on with what is known of row ``rows[i]``."""
        self.positions = self.positions[rows.cpu()]
        if len(self.read):
            self.read = self.read[rows.to(self.read.device)]

    def next_positions(self, visible: Tensor) -> Tensor:
        """Return the position of what follows each row, (batch,), on the host."""
        return self.positions.masked_fill(~visible, -1).amax(dim=1) + 1

    def check_room(
        self, visible: Tensor, tokens: IntArray, later: Later, limit: int | None
    ) -> None:
        """Refuse a prompt whose second read does not fit the model's limit.

        Parameters
        ----------
        visible : Tensor of bool, (batch, n_tokens)
        tokens : ndarray of int64, (batch,)
            Of each row of the complete prompt, padding left out.
        later : Later
            How the prompt is read again.
        limit : int or None
            Tokens that the model was made for.
        """
        if limit is None:
            return
        places = self.next_positions(visible) + torch.from_numpy(tokens - row_tokens(visible))
        check_context(later, places.tolist(), tokens.tolist(), limit)

    def held(self, decoder: nn.Module, layers: list[Any], visible: Tensor) -> HeldPrompt:
        """Return the complete prompt, (batch, n_tokens), in the layers of a cache."""
        return HeldPrompt(
            decoder=decoder,
            layers=layers,
            visible=visible,
            next_positions=self.next_positions(visible),
            read=self.read,
        )


@torch.no_grad()
def repeat_prompt(
    prompt: HeldPrompt, scorer: Scorer, later: Later, layers: Collection[int], *, sinks: int
) -> dict[int, Observed]:
    """Repeat the prompt as a scorer asks; the prompt is the same afterwards.

    Parameters
    ----------
    prompt : HeldPrompt
    scorer : Scorer
        Sees the repetition.
    later : Later
        The scorer's.
    layers : collection of int
        Those that it sees.
    sinks : int
        First tokens of the prompt that are never evicted.

    Returns
    -------
    dict of int to Observed
        What the scorer noted of each layer.

    Raises
    ------
    InputError
        If the repetition goes beyond the tokens that the model was made for.
    """
    if (limit := context_limit(prompt.decoder)) is not None:
        tokens = row_tokens(prompt.visible)
        check_context(later, prompt.next_positions.tolist(), tokens.tolist(), limit)
    noted: list[dict[int, Observed]] = []
    for rows, columns in (parts := prompt.parts()):
        noted.append({})
        for again, step in _pieces(prompt, rows, columns, later, sinks):
            shown = columns if step.shown is None else step.shown
            handler = _repeating(scorer, layers, noted[-1], step, sinks)
            with intercept_attention(prompt.decoder, handler):
                prompt.run(prompt.cache(rows, columns, shown), again, rows)
    return {layer: _together([each[layer] for each in noted], parts) for layer in noted[0]}


def check_context(later: Later, places: Sequence[int], n_tokens: Sequence[int], limit: int) -> None:
    """Refuse a prompt that does not fit, with its repetition, what the model was made for.

    Parameters
    ----------
    later : Later
        How the prompt is read again.
    places : sequence of int
        Position of the first token after each row of the prompt.
    n_tokens : sequence of int
        Tokens of each row, without padding.
    limit : int
        Positions that the model has.

    Raises
    ------
    InputError
        If the repetition behind a row does not fit.
    """
    for place, tokens in zip(places, n_tokens, strict=True):
        beyond = later.furthest(tokens)
        if place + beyond <= limit:
            continue
        room = limit - place - CARRIED_TOKENS
        smaller = f"repeat shorter pieces (chunk={room}), " if room >= SMALLEST_CHUNK else ""
        raise InputError(
            f"a scorer has the model repeat the prompt right after it, in pieces of up to "
            f"{later.tokens} tokens: {place} tokens and {beyond} of a repetition are beyond the "
            f"{limit} that the model was made for; {smaller}shorten the prompt, or choose another "
            "scorer"
        )


def _pieces(
    prompt: HeldPrompt, rows: Tensor, columns: Tensor, later: Later, sinks: int
) -> list[tuple[Tensor, LaterStep]]:
    """Return what each repetition of some rows reads, (n_rows, n, ...), and what it is."""
    own, n_prompt = prompt.read[rows.to(prompt.read.device)], int(prompt.visible.shape[1])
    pieces = []
    for begin in range(0, columns.numel(), later.tokens):
        repeated = columns[begin : begin + later.tokens]
        again = columns[max(begin - CARRIED_TOKENS, 0) : begin + later.tokens]
        leading, shown = columns[: min(sinks, begin)], columns
        if later.nearby is not None:
            first, end = max(begin - later.nearby, 0), begin + later.tokens + later.nearby
            shown = torch.cat([columns[: min(first, max(sinks, SHOWN_FIRST))], columns[first:end]])
        step = LaterStep(
            n_prompt=n_prompt,
            repeated=repeated,
            leading=leading if leading.numel() else None,
            shown=shown if len(shown) < n_prompt else None,
        )
        pieces.append((own[:, again.to(own.device)], step))
    return pieces


def _repeating(
    scorer: Scorer,
    layers: Collection[int],
    notes: dict[int, Observed],
    step: LaterStep,
    sinks: int,
) -> Any:
    """Return a handler that shows a scorer a layer's attention, and answers as the model does."""

    def handler(states: AttentionStates, compute: Compute) -> Any:
        if states.layer in layers:
            before = replace(states, observed=notes.get(states.layer))
            notes[states.layer] = scorer.observe_later(before, step, sinks=sinks)
        return compute(states.mask)

    return handler


def _together(noted: Sequence[Observed], parts: Sequence[tuple[Tensor, Tensor]]) -> Observed:
    """Return what was noted of some rows each, for all of them in their order."""
    first = noted[0]
    if len(noted) == 1:
        return first
    columns = [one.columns for one in noted if one.columns is not None]
    totals = {name: torch.cat([one.totals[name] for one in noted]) for name in first.totals}
    joined = replace(first, columns=torch.cat(columns) if columns else None, totals=totals)
    return joined.rows(torch.cat([rows for rows, _ in parts]).argsort())
