"""One full-attention layer of a reduced cache: every row and KV head keeps its own entries."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from kvalloc.accounting import IntArray
from kvalloc.errors import UnsupportedRequestError
from kvalloc.runtime.kept import RaggedEntries, Segment
from kvalloc.runtime.packed import LayerEntries
from kvalloc.runtime.unfinished import Unfinished

__all__ = [
    "LATEST_TOKENS",
    "SPARE",
    "BudgetLayer",
    "cropped_tokens",
    "row_numbers",
]

SPARE = 8
"""Of so many tokens that were decoded, one more has room: they are not copied for each new one."""

LATEST_TOKENS = 64
"""Latest tokens after a prompt at fewer bits that stay as the model made them: what was said last
is read most, and a block of keys (64 tokens) is rounded when it is full. As in KIVI, whose residual
has up to 128."""


class Following:
    """Keys and values in storage with some room, to which a token is added in place.

    Attributes
    ----------
    buffers : tuple of Tensor, each (batch, n_kv_heads, room, head_dim)
    tokens : int
        So many of the first ones are there.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.buffers, self.tokens = (keys[:, :, :0], values[:, :, :0]), 0
        self._decoded = 0
        self.add(keys, values)

    @property
    def states(self) -> tuple[Tensor, Tensor]:
        """Keys and values, (batch, n_kv_heads, tokens, head_dim) each, as views."""
        keys, values = self.buffers
        return keys[:, :, : self.tokens], values[:, :, : self.tokens]

    def add(self, *states: Tensor) -> None:
        """Add keys and values, (batch, n_kv_heads, n_new, head_dim) each."""
        n_new = int(states[0].shape[2])
        end, self._decoded = self.tokens + n_new, self._decoded + (n_new == 1)
        if end > int(self.buffers[0].shape[2]) or self._frozen(states):
            room = (*states[0].shape[:2], self._decoded // SPARE)
            keys, values = (
                torch.cat([old, new, new.new_empty(*room, new.shape[-1])], dim=2)
                for old, new in zip(self.states, states, strict=True)
            )
            self.buffers = keys, values
        else:
            for buffer, new in zip(self.buffers, states, strict=True):
                buffer[:, :, self.tokens : end] = new
        self.tokens = end

    def _frozen(self, states: tuple[Tensor, ...]) -> bool:
        """Whether the storage must not change: gradients go through it, or torch forbids it."""
        if self.buffers[0].is_inference() and not torch.is_inference_mode_enabled():
            return True
        needs = torch.is_grad_enabled() and any(one.requires_grad for one in states)
        return needs or any(one.requires_grad for one in self.buffers)


class BudgetLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Stores what is kept of the prompt and all that followed, and answers for all tokens seen.

    It is in one of four states. *Whole*: nothing was evicted, and this is transformers' own
    layer, operation for operation, so that a budget of 100% is bit-identical. *Even*: all rows and
    KV heads keep the same number of entries; they stand at the front of ``keys`` and ``values``,
    and attention is the model's own. *Ragged*: the numbers differ; what is kept stands in
    `entries`, without padding, and ``keys`` and ``values`` hold only what followed. *Packed*: the
    same at fewer bits, even or not; of what followed the latest 64 to 127 tokens are in ``keys``
    and ``values``, older ones have been rounded and added to `entries`.

    Attributes
    ----------
    keys, values : Tensor, (batch, n_kv_heads, n_stored, head_dim)
        Dense storage, see above.
    entries : LayerEntries or None
        What a ragged or packed layer keeps of the prompt.
    packed_following : int
        Tokens in a packed layer's `entries` that followed the latest eviction.
    kept_indices : Tensor of int32 or None, (batch, n_kv_heads, n_kept)
        Columns of an even layer's kept entries; None in other states.
    logit_bias : Tensor of float32 or None, (batch, n_kv_heads, n_kept)
        Added to the logits of an even layer's kept entries.
    seen_tokens : int
        Tokens seen, kept or not, padding included.
    unfinished : Unfinished
        What is remembered until the prompt is complete.
    """

    is_croppable = False  # evicted entries cannot come back

    def __init__(self) -> None:
        self._dense: tuple[Any, Any] = (None, None)
        self._apart: Following | None = None
        super().__init__()  # type: ignore[no-untyped-call]
        self._forget()

    @property
    def keys(self) -> Any:
        """Dense keys, see above; None before the first update."""
        self._join()
        return self._dense[0]

    @keys.setter
    def keys(self, states: Any) -> None:
        self._join()
        self._dense = (states, self._dense[1])

    @property
    def values(self) -> Any:
        """Dense values, see above; None before the first update."""
        self._join()
        return self._dense[1]

    @values.setter
    def values(self, states: Any) -> None:
        self._join()
        self._dense = (self._dense[0], states)

    def _join(self) -> None:
        """Bring the latest tokens that were held apart behind the others."""
        if self._apart is not None:
            latest, self._apart = self._apart.states, None
            keys, values = (
                torch.cat(pair, dim=-2) for pair in zip(self._dense, latest, strict=True)
            )
            self._dense = (keys, values)

    def _forget(self) -> None:
        self.entries: LayerEntries | None = None
        self.packed_following = 0
        self.kept_indices: Tensor | None = None
        self.logit_bias: Tensor | None = None
        self.seen_tokens = 0
        self.unfinished = Unfinished()
        self._evict_next = False
        self._apart_next = False
        self._held: tuple[Tensor, Tensor] | None = None

    def expect_apart(self) -> None:
        """Let the next update hold its tokens apart, and return only what is held apart.

        To add one token, transformers copies all that is stored. Here the latest tokens are
        stored by themselves (`Following`), and attention reads both. Whoever asks for ``keys`` or
        ``values`` gets them joined.
        """
        self._apart_next = True

    @property
    def holds_apart(self) -> bool:
        """Whether the latest tokens of an even layer are stored by themselves now."""
        return self._apart is not None and self.entries is None

    @property
    def kept_apart(self) -> tuple[Tensor, Tensor]:
        """Keys and values stored beside the tokens held apart, which come after them."""
        return self._dense

    def expect_eviction(self) -> None:
        """`evict` will follow the next update."""
        self._evict_next = True

    def cancel_eviction(self) -> None:
        """The forward that was to end in an eviction, or to hold tokens apart, failed."""
        self._evict_next = self._apart_next = False

    @property
    def awaits_eviction(self) -> bool:
        """Whether tokens are held that still have to be reduced."""
        return self._held is not None

    @property
    def reduced(self) -> bool:
        """Whether anything was evicted, padding included."""
        return self.entries is not None or self.kept_indices is not None

    @property
    def dense_tokens(self) -> int:
        """Tokens in the dense storage."""
        keys = self._dense[0]
        apart = 0 if self._apart is None else self._apart.tokens
        return apart if keys is None or keys.ndim < 4 else apart + int(keys.shape[-2])

    @property
    def batch(self) -> int:
        """Rows that are stored; 0 before the first update."""
        keys = self._dense[0]
        return 0 if keys is None or keys.ndim < 4 else int(keys.shape[0])

    @property
    def following_tokens(self) -> int:
        """Tokens stored after the latest eviction, or all of them if there was none."""
        kept = 0 if self.kept_indices is None else int(self.kept_indices.shape[-1])
        return self.dense_tokens - kept + self.packed_following

    @property
    def stored(self) -> bool:
        """Whether there is anything, kept or following."""
        return self.entries is not None or self.dense_tokens > 0

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
        latest = self.seen_tokens - self.following_tokens
        end = max(prompt_tokens, latest)  # after the prompt, where decoding evicts as well
        new = torch.arange(latest, end, dtype=torch.int32, device=self.keys.device)
        new = new.expand(*self.keys.shape[:2], -1)
        if self.entries is None:
            return new if self.kept_indices is None else torch.cat([self.kept_indices, new], dim=-1)
        found = self.entries.padded_positions()
        if self.packed_following:
            found = found.masked_fill(found >= latest, -1)
            found = found[..., : int((found >= 0).sum(dim=-1).max())]
        if not new.numel():
            return found
        # A head that keeps fewer has its -1 before the new ones: let them sort behind all columns.
        joined = torch.cat([found.masked_fill(found < 0, self.seen_tokens), new], dim=-1)
        joined = joined.sort(dim=-1).values
        return joined.masked_fill(joined == self.seen_tokens, -1)

    def stored_counts(self) -> IntArray | None:
        """Entries stored now, ``(batch, n_kv_heads)``; None before the first update."""
        keys = self._dense[0]
        if keys is None or keys.ndim < 4:
            return None
        dense = np.full(tuple(keys.shape[:2]), self.dense_tokens, dtype=np.int64)
        return dense if self.entries is None else dense + self.entries.lengths

    def stored_tensors(self) -> list[Tensor]:
        """All K and V tensors that are allocated now."""
        tensors = [] if self._dense[0] is None else [*self._dense]
        tensors += () if self._apart is None else self._apart.buffers
        if self.entries is not None:
            tensors += self.entries.tensors()
        return [*tensors, *(self._held or ())]

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
        tuple of Tensor, each (batch, n_kv_heads, n_dense + n_new_tokens, head_dim)
            After `expect_apart` only those held apart, and of a ragged or packed layer only those
            that followed; the new ones last.
        """
        self.seen_tokens += int(key_states.shape[-2])
        if self._apart_next or (self.entries is not None and not self._evict_next):
            return self._hold_apart(key_states, value_states)
        if not self._evict_next:
            return super().update(key_states, value_states, *args, **kwargs)
        # Of these only a part will stay: hold on to what the model made instead of copying it,
        # and let `evict` copy the kept part.
        self._evict_next = False
        if self.dense_tokens:
            key_states = torch.cat([self.keys, key_states], dim=-2)
            value_states = torch.cat([self.values, value_states], dim=-2)
            # What was stored is in the copy: until `evict` one of them is enough.
            self.keys = key_states[..., :0, :].clone()
            self.values = value_states[..., :0, :].clone()
        self._held = (key_states, value_states)
        return self._held

    def _hold_apart(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self._apart_next = False
        if self._apart is None and self.entries is not None:
            self._apart, self._dense = Following(*self._dense), self.entries.nothing()
        if self._apart is None:
            self._apart = Following(keys, values)
        else:
            self._apart.add(keys, values)
        return self._apart.states

    def keep_even(self, entries: RaggedEntries, following: int = 0) -> None:
        """From now on store these entries, as many for each row and KV head, and the latest tokens.

        Those stand apart from what is kept; all else is freed.
        """
        shape = (*entries.lengths.shape, int(entries.lengths[0, 0]))
        latest = Following(*self.latest(following)) if following else None
        keys, values = (own.view(*shape, own.shape[-1]) for own in (entries.keys, entries.values))
        self._initialize(keys, values)
        self._held = self.entries = None
        self._dense, self._apart = (keys, values), latest
        self.kept_indices = entries.positions.view(shape)
        self.logit_bias = None if entries.bias is None else entries.bias.view(shape)

    def latest(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the latest tokens, (batch, n_kv_heads, tokens, head_dim), as views."""
        keys, values = (self.keys, self.values) if self._held is None else self._held
        first = int(keys.shape[-2]) - tokens
        return keys[..., first:, :], values[..., first:, :]

    def keep_ragged(self, entries: LayerEntries, following: int = 0) -> None:
        """From now on store these entries and the latest tokens, and free the rest."""
        keys, values = entries.nothing()
        if following:
            keys, values = (
                own.clone(memory_format=torch.contiguous_format) for own in self.latest(following)
            )
        self._initialize(keys, values)
        self._held = self.kept_indices = self.logit_bias = None
        self.entries, self.packed_following = entries, 0
        self.keys, self.values = keys, values

    def pack(self, bits: IntArray) -> None:
        """Store all that there is at fewer bits, ``(n_kv_heads,)``: the prompt is complete."""
        counts = self.stored_counts()
        if counts is None or (self.entries is not None and self.entries.is_packed):
            return
        self.keep_ragged(LayerEntries.packed(counts.shape, self._piece, bits))

    def _piece(self, row: int, head: int) -> Segment:
        """Everything that one head stores of a row."""
        keys, values = self.keys[row, head], self.values[row, head]
        kept = 0 if self.kept_indices is None else int(self.kept_indices.shape[-1])
        new = int(keys.shape[0]) - kept
        positions = torch.arange(self.seen_tokens - new, self.seen_tokens, device=keys.device)
        positions = positions.to(torch.int32)
        bias = None
        if self.kept_indices is not None:
            positions = torch.cat([self.kept_indices[row, head], positions])
            if self.logit_bias is not None:
                bias = torch.nn.functional.pad(self.logit_bias[row, head], (0, new))
        if self.entries is not None:
            old_keys, old_values, old_positions, bias, _ = self.entries.piece(row, head)
            keys, values = torch.cat([old_keys, keys]), torch.cat([old_values, values])
            positions = torch.cat([old_positions, positions])
            bias = None if bias is None else torch.nn.functional.pad(bias, (0, new))
        return Segment(keys, values, positions, bias)

    def pack_following(self, visible: Tensor | None, latest: int = LATEST_TOKENS) -> None:
        """Round what followed a packed prompt, but for the latest tokens, a block at a time.

        Parameters
        ----------
        visible : Tensor of bool, (batch, n_dense), or None
            False marks padding among the dense tokens, which is left out.
        latest : int
            So many tokens stay as they are at least.
        """
        dense = self.dense_tokens
        count = (dense - latest) // LATEST_TOKENS * LATEST_TOKENS
        if self.entries is None or not self.entries.is_packed or count <= 0:
            return
        keys, values = self.keys, self.values
        first = self.seen_tokens - dense
        columns = torch.arange(first, first + count, dtype=torch.int32, device=keys.device)
        shown = torch.ones(keys.shape[0], count, dtype=torch.bool)
        shown = shown if visible is None else visible[:, :count]
        older = (keys[:, :, :count], values[:, :, :count])
        self.entries = self.entries.and_then(*older, columns, shown)
        self.packed_following += count
        # A slice would keep the rounded tokens' storage alive.
        self.keys = keys[:, :, count:].clone(memory_format=torch.contiguous_format)
        self.values = values[:, :, count:].clone(memory_format=torch.contiguous_format)

    def _initialize(self, keys: Tensor, values: Tensor) -> None:
        if not self.is_initialized:
            self.lazy_initialization(keys, values)

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
        """Remove tokens that followed the compressed prompt.

        Parameters
        ----------
        tokens_to_remove : int
            Negative: remove that many tokens. Positive: keep that many (older transformers).

        Raises
        ------
        UnsupportedRequestError
            If the cut would reach into a prompt whose entries are partly evicted.
        """
        remove = self.crop_count(tokens_to_remove)
        if remove <= 0:
            return
        self.seen_tokens -= remove
        packed = remove - self.dense_tokens
        if packed > 0 and self.entries is not None:
            self.entries = self.entries.before(self.seen_tokens)
            self.packed_following -= packed
            remove = self.dense_tokens
        if not remove:
            return
        # A slice would keep the cut entries' storage alive.
        self.keys = self.keys[..., :-remove, :].clone(memory_format=torch.contiguous_format)
        self.values = self.values[..., :-remove, :].clone(memory_format=torch.contiguous_format)

    def crop_count(self, tokens_to_remove: int) -> int:
        """Tokens that `crop` would remove; raises as `crop` does, and changes nothing."""
        remove = cropped_tokens(tokens_to_remove, self.get_seq_length())
        if self.reduced and remove > self.following_tokens:
            raise UnsupportedRequestError(
                f"cannot crop {remove} tokens: only {self.following_tokens} tokens followed "
                "the compressed prompt, and evicted entries cannot come back; make a new cache"
            )
        return remove

    def reset(self) -> None:
        """Forget everything, and free it."""
        self._apart = None
        self.keys = self.values = None
        self.is_initialized = False
        self._forget()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i continue what row ``beam_idx[i]`` holds (beam search)."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._select_kept(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        super().batch_repeat_interleave(repeats)
        if self.keys is not None and self.keys.ndim == 4:
            batch = int(self.keys.shape[0]) // repeats
            self._select_kept(torch.arange(batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows."""
        super().batch_select_indices(indices)
        self._select_kept(row_numbers(indices))

    def _select_kept(self, rows: Tensor) -> None:
        """Bring what belongs to the kept entries in line with the rows of ``keys``."""
        if self.kept_indices is not None:
            self.kept_indices = self.kept_indices[rows.to(self.kept_indices.device)]
        if self.logit_bias is not None:
            self.logit_bias = self.logit_bias[rows.to(self.logit_bias.device)]
        if self.entries is not None:
            self.entries = self.entries.rows(rows)
        self.unfinished.select(rows)


def cropped_tokens(tokens_to_remove: int, seen: int) -> int:
    """How many tokens a crop takes off: those it names if negative, all but those if positive."""
    return seen - tokens_to_remove if tokens_to_remove > 0 else min(-tokens_to_remove, seen)


def row_numbers(indices: Tensor) -> Tensor:
    """Rows that are named by their numbers, or by a mask, as numbers."""
    return indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
