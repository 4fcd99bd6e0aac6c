"""A prompt that is held whole, and the cache in which the model runs on beyond it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import DynamicLayer

__all__ = ["HeldPrompt", "LaterCache", "LaterLayer"]


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
