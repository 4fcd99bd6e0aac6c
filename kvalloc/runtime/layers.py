"""One full-attention layer of a reduced cache: every KV head keeps its own best entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from kvalloc.attention_hook import Observed
from kvalloc.errors import UnsupportedRequestError
from kvalloc.runtime.policies.base import Combined

__all__ = ["BudgetLayer", "gathered"]


class BudgetLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Stores ``n_kept`` entries a KV head, and answers for all the tokens it has seen.

    As long as nothing is evicted this is transformers' own layer, operation for operation, so
    that a budget of 100% is bit-identical. The number of stored entries is the same for all KV
    heads of the layer; which ones they are is up to each head.

    Attributes
    ----------
    keys, values : Tensor, (batch, n_kv_heads, n_stored, head_dim)
        What is stored now.
    evicted_tokens : int
        Tokens seen and not stored any more.
    kept_indices : Tensor of int32 or None, (batch, n_kv_heads, n_kept)
        Original positions of the prompt's kept entries; None while nothing was evicted.
    logit_bias : Tensor of float32 or None, (batch, n_kv_heads, n_kept)
        Added to the logits of the prompt's kept entries; see `Combined`.
    observed : Observed or None
        What the policy noted of the chunks so far of a prompt that is not complete.
    """

    is_croppable = False  # evicted entries cannot come back
    # None before the first update; transformers' own code does not ask either.
    keys: Any
    values: Any

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.evicted_tokens = 0
        self.kept_indices: Tensor | None = None
        self._evict_next = False
        self._prompt: tuple[Tensor, Tensor] | None = None
        self._query_tail: Tensor | None = None
        self.observed: Observed | None = None
        self.logit_bias: Tensor | None = None

    def expect_eviction(self) -> None:
        """The next update completes the prompt, and `evict` will follow it."""
        self._evict_next = True

    def cancel_eviction(self) -> None:
        """The forward that was to complete the prompt failed."""
        self._evict_next = False

    @property
    def awaits_eviction(self) -> bool:
        """Whether a complete prompt is held that has not been reduced yet."""
        return self._prompt is not None

    @property
    def stored_tokens(self) -> int:
        """Entries that each KV head stores now."""
        return 0 if self.keys is None or self.keys.numel() == 0 else int(self.keys.shape[-2])

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add new tokens; returns all keys and values that attention may see.

        Parameters
        ----------
        key_states, value_states : Tensor, (batch, n_kv_heads, n_new_tokens, head_dim)
            The new tokens, positions applied.

        Returns
        -------
        tuple of Tensor, each (batch, n_kv_heads, n_stored + n_new_tokens, head_dim)
        """
        if not self._evict_next:
            return super().update(key_states, value_states, *args, **kwargs)
        # Of this prompt only a part will stay: hold on to what the model made instead of copying
        # it, and let `evict` copy the kept part.
        self._evict_next = False
        if self.stored_tokens:
            key_states = torch.cat([self.keys, key_states], dim=-2)
            value_states = torch.cat([self.values, value_states], dim=-2)
        self._prompt = (key_states, value_states)
        return self._prompt

    def evict(self, kept: Tensor, combined: Combined | None = None) -> None:
        """Keep these entries of the prompt in fresh contiguous storage, and free the rest.

        Parameters
        ----------
        kept : Tensor of bool, (batch, n_kv_heads, n_tokens)
            What stays, the same number for each row and KV head.
        combined : Combined, optional
            Keys and values that hold something of the evicted entries, too.
        """
        assert self._prompt is not None, "evict() follows the update that completes a prompt"
        keys, values = self._prompt
        self._prompt = self._query_tail = self.observed = None
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        if combined is not None:
            keys, values = combined.keys, combined.values
        # `nonzero` lists positions in increasing order, and each head has as many of them.
        indices = kept.nonzero()[:, 2].view(*kept.shape[:2], -1)
        self.keys, self.values = gathered(keys, indices), gathered(values, indices)
        if combined is not None and combined.logit_bias is not None:
            self.logit_bias = combined.logit_bias.gather(-1, indices)
        self.evicted_tokens = int(keys.shape[-2] - indices.shape[-1])
        self.kept_indices = indices.to(torch.int32)

    def with_query_tail(self, queries: Tensor, tokens: int) -> Tensor:
        """The last queries of a prompt that arrives in chunks, old and new.

        Parameters
        ----------
        queries : Tensor, (batch, n_query_heads, n_new_tokens, head_dim)
            Queries of this chunk.
        tokens : int
            How many of the last queries the scorer wants.

        Returns
        -------
        Tensor, (batch, n_query_heads, n, head_dim)
            This chunk's queries, preceded by older ones where the chunk is shorter than
            ``tokens``.
        """
        missing = tokens - int(queries.shape[-2])
        if missing > 0 and self._query_tail is not None:
            return torch.cat([self._query_tail[..., -missing:, :], queries], dim=-2)
        return queries

    def keep_query_tail(self, queries: Tensor, tokens: int) -> None:
        """Remember the last ``tokens`` queries until the prompt is complete."""
        if tokens > 0:
            self._query_tail = self.with_query_tail(queries, tokens)[..., -tokens:, :].clone()

    def get_seq_length(self) -> int:
        """Tokens seen, so that positions stay true after eviction."""
        return self.evicted_tokens + self.stored_tokens

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
        # A slice would keep the cut entries' storage alive.
        self.keys = self.keys[..., :-remove, :].contiguous()
        self.values = self.values[..., :-remove, :].contiguous()

    def crop_count(self, tokens_to_remove: int) -> int:
        """Tokens that `crop` would remove; raises as `crop` does, and changes nothing."""
        if tokens_to_remove > 0:
            remove = self.get_seq_length() - tokens_to_remove
        else:
            remove = -tokens_to_remove
        kept = 0 if self.kept_indices is None else int(self.kept_indices.shape[-1])
        if self.kept_indices is not None and remove > self.stored_tokens - kept:
            raise UnsupportedRequestError(
                f"cannot crop {remove} tokens: only {self.stored_tokens - kept} tokens followed "
                "the compressed prompt, and evicted entries cannot come back; make a new cache"
            )
        return remove

    def reset(self) -> None:
        """Forget everything, and free it."""
        self.keys = self.values = None
        self.is_initialized = False
        self.evicted_tokens = 0
        self.kept_indices = self._prompt = self._query_tail = None
        self.observed = self.logit_bias = None
        self._evict_next = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i continue what row ``beam_idx[i]`` holds (beam search)."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._change_rows(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        super().batch_repeat_interleave(repeats)
        self._change_rows(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows."""
        super().batch_select_indices(indices)
        self._change_rows(lambda rows: rows[indices.to(rows.device)])

    def _change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Do with the book-keeping of the rows what was done with their keys and values."""
        if self.kept_indices is not None:
            self.kept_indices = change(self.kept_indices)
        if self.logit_bias is not None:
            self.logit_bias = change(self.logit_bias)


def gathered(states: Tensor, indices: Tensor) -> Tensor:
    """A contiguous copy of some entries, each KV head its own.

    Parameters
    ----------
    states : Tensor, (batch, n_kv_heads, n_tokens, head_dim)
        Keys or values.
    indices : Tensor of int64, (batch, n_kv_heads, n_wanted)
        The entries.
    """
    wanted = indices.unsqueeze(-1).expand(-1, -1, -1, states.shape[-1])
    return states.gather(2, wanted)
