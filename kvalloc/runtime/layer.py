"""One full-attention layer of a reduced cache: every row and KV head keeps its own entries."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicLayer

from kvalloc.accounting import BoolArray, IntArray
from kvalloc.models.attention import AttentionStates
from kvalloc.runtime.kept import KeptEntries
from kvalloc.runtime.packed import NO_COLUMN, LayerEntries
from kvalloc.runtime.tail import BLOCK_TOKENS, Tail
from kvalloc.runtime.unfinished import Unfinished


class BudgetLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Stores what is kept of the prompt and all that followed, and answers for all tokens seen.

    It is in one of three states. *Whole*: nothing was evicted, and this is transformers' own
    layer, operation for operation, so that a budget of 100% is bit-identical. *Reduced*: what is
    kept stands in `entries`, and ``keys`` and ``values`` hold what followed. *Packed*: the same at
    fewer bits.

    Attributes
    ----------
    keys, values : Tensor, (batch, n_kv_heads, n_stored, head_dim)
        Dense storage, see above.
    entries : LayerEntries or None
        What a reduced or packed layer keeps of all that had come at the latest eviction.
    evicts_next : bool
        Whether an eviction follows the next `update`, which then copies nothing that may go.
    seen_tokens : int
        Tokens seen, kept or not, padding included.
    tail : Tail or None
        Whose states keys and values are, once tokens have followed what is kept.
    every : int
        Tokens between two evictions of what followed, for which it gets room.
    unfinished : Unfinished
        What is remembered until the prompt is complete.
    attention : AttentionStates or None
        What of its attention is the same in all forwards of a prompt: no tokens.
    """

    is_croppable = True  # `BudgetCache.crop` refuses to go behind the latest eviction

    keys: Any  # transformers calls them optional
    values: Any
    every = BLOCK_TOKENS

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._forget()

    def _forget(self) -> None:
        self.entries: LayerEntries | None = None
        self.seen_tokens = 0
        self.unfinished = Unfinished()
        self.attention: AttentionStates | None = None
        self.evicts_next = False
        self.tail: Tail | None = None

    @property
    def reduced(self) -> bool:
        """Whether anything was evicted, padding included."""
        return self.entries is not None

    @property
    def kept_lengths(self) -> IntArray:
        """Entries that were kept, (batch, n_kv_heads); (1, 1) of 0 where nothing was evicted."""
        if self.entries is None:
            return np.zeros((1, 1), np.int64)
        return self.entries.lengths

    @property
    def dense_tokens(self) -> int:
        """Tokens in the dense storage."""
        return int(self.keys.shape[-2]) if self.batch else 0

    @property
    def batch(self) -> int:
        """Rows that are stored; 0 before the first update."""
        return 0 if self.keys is None or self.keys.ndim < 4 else int(self.keys.shape[0])

    def kept_positions(self, prompt_tokens: int) -> Tensor:
        """Columns of the entries that the latest eviction kept, and of all prompt tokens after it.

        Of a prompt in chunks the last ones may come without an eviction.

        Parameters
        ----------
        prompt_tokens : int
            Columns of the prompt that have been seen.

        Returns
        -------
        Tensor of int32, (batch, n_kv_heads, n_kept)
            Increasing; -1 beyond the end of a head that keeps fewer than another.
        """
        prompt_tokens = min(prompt_tokens, self.seen_tokens)  # `crop` may have gone into it
        latest = self.seen_tokens - self.dense_tokens
        end = max(prompt_tokens, latest)  # after the prompt, where decoding evicts as well
        new = torch.arange(latest, end, dtype=torch.int32, device=self.keys.device)
        new = new.expand(*self.keys.shape[:2], -1)
        if self.entries is None:
            return new
        found = torch.cat([self.entries.padded()[2], new], dim=-1).sort(dim=-1).values
        found = found[..., : int((found != NO_COLUMN).sum(dim=-1).max())]
        return found.masked_fill(found == NO_COLUMN, -1)

    def stored_tensors(self) -> list[Tensor]:
        """Return all tensors that are allocated now, positions of kept entries too."""
        tensors = [] if self.keys is None else [self.keys, self.values]
        tensors += () if self.tail is None else self.tail.tensors()
        return tensors if self.entries is None else [*tensors, *self.entries.tensors()]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add new tokens; returns the dense keys and values, those of a whole layer all there are.

        Parameters
        ----------
        key_states, value_states : Tensor, (batch, n_kv_heads, n_new_tokens, head_dim)
            The new tokens, positions applied.

        Returns
        -------
        tuple of Tensor, each (batch, n_kv_heads, n, head_dim)
            The dense ones, the new ones last.
        """
        self.seen_tokens += int(key_states.shape[-2])
        if self.evicts_next and not self.dense_tokens:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            self.tail = None
            self.keys, self.values = key_states, value_states
        elif self.entries is None:
            super().update(key_states, value_states, *args, **kwargs)
        else:
            self.tail = self.tail or Tail(self.keys, self.values)
            self.keys, self.values = self.tail.add(key_states, value_states, every=self.every)
        return self.keys, self.values

    def keep_numbers(
        self, entries: KeptEntries, bits: IntArray | None, *, stays: BoolArray
    ) -> None:
        """Keep entries, rounded to these bits; free the rest.

        Parameters
        ----------
        entries : KeptEntries
            Of all rows and KV heads.
        bits : ndarray of int64, (n_kv_heads,), or None
            None stores them as they are.
        stays : ndarray of bool, (batch,)
            Rows in which what was kept before stays in front of them, with the bits that it has.
        """
        self.keep(self._with(entries, bits, stays))

    def _with(self, entries: KeptEntries, bits: IntArray | None, stays: BoolArray) -> LayerEntries:
        """Return entries, in some rows behind what was kept before; see `keep_numbers`."""

        def fresh(some: KeptEntries, before: LayerEntries | None) -> LayerEntries:
            if bits is None:
                return LayerEntries.whole(some)
            return LayerEntries.packed(some, bits, before)

        before = self.entries
        if before is None or not stays.any():
            return fresh(entries, before)
        if stays.all():
            return before.with_more(entries)
        rows = np.flatnonzero(stays), np.flatnonzero(~stays)
        more, others = (entries.of_rows(own) for own in rows)
        held, gone = (before.rows(torch.from_numpy(own)) for own in rows)
        parts = [held.with_more(more), fresh(others, gone)]
        return LayerEntries.joined(parts, np.concatenate(rows).argsort())

    def keep(self, entries: LayerEntries) -> None:
        """From now on store these entries alone, and free the rest."""
        self._store(self.keys[..., :0, :], self.values[..., :0, :])
        self.entries, self.evicts_next = entries, False

    def _store(self, keys: Tensor, values: Tensor) -> None:
        """Copies, as dense ones: a slice would keep the storage of what is cut off alive."""
        self.tail = None
        self.keys, self.values = (
            own.clone(memory_format=torch.contiguous_format) for own in (keys, values)
        )

    def get_seq_length(self) -> int:
        """Tokens seen, so that positions stay true after eviction."""
        return self.seen_tokens

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Sizes as if nothing had been evicted, which is what a 2-D attention mask covers.

        Where entries are gone, the cache replaces the mask by one of the stored length.

        Parameters
        ----------
        query_length : int or Tensor
            New tokens; older transformers pass their positions instead.
        """
        new = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self.get_seq_length() + int(new), 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the latest tokens, their number being negative; see `Prompt.check_crop`."""
        self.seen_tokens += tokens_to_remove
        self._store(self.keys[..., :tokens_to_remove, :], self.values[..., :tokens_to_remove, :])

    def reset(self) -> None:
        """Forget everything, and free it."""
        self.keys = self.values = None
        self.is_initialized = False
        self._forget()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows; one may be kept more than once."""
        super().batch_select_indices(indices)
        self.tail = None
        if self.entries is not None:
            self.entries = self.entries.rows(indices)
        self.unfinished.select(indices)
