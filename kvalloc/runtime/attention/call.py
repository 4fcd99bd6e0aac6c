"""What is asked of attention over kept entries: one record for every backend."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from kvalloc.models.attention import AttentionStates
from kvalloc.runtime.kept import FlatEntries

__all__ = ["AttentionCall", "Kernel"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCall:
    """What one layer's new tokens ask, beside the entries that are kept of the prompt.

    All kept entries lie before all tokens that followed, so every new token sees each of them, and
    only the tokens that followed need a causal mask.

    Attributes
    ----------
    queries : Tensor, (batch, n_query_heads, n_new_tokens, head_dim)
        The new tokens, positions applied.
    keys, values : Tensor, (batch, n_kv_heads, n_following, head_dim)
        The tokens that followed the kept entries, the new ones last.
    scaling : float
        Factor on the logits.
    visible : Tensor of bool, (batch, n_following), or None
        False hides padding among the tokens that followed; a token always sees itself, so that no
        row is empty.
    softcap : float or None
        Logits are ``softcap * tanh(logits / softcap)``.
    sink_logits : Tensor, (n_query_heads,), or None
        One more logit a query head, without a value.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    scaling: float
    visible: Tensor | None = None
    softcap: float | None = None
    sink_logits: Tensor | None = None

    @classmethod
    def of(cls, states: AttentionStates, visible: Tensor | None = None) -> AttentionCall:
        """From what a layer's attention sees, whose keys and values are those that followed."""
        return cls(
            queries=states.queries,
            keys=states.keys,
            values=states.values,
            scaling=states.scaling,
            visible=None if visible is None else visible.to(states.keys.device),
            softcap=states.softcap,
            sink_logits=states.sink_logits,
        )

    @property
    def changes_logits(self) -> bool:
        """Whether the model caps its logits or adds one of a sink."""
        return self.softcap is not None or self.sink_logits is not None

    @property
    def plain(self) -> bool:
        """Whether it is one new token that sees everything, with unchanged logits."""
        return self.queries.shape[2] == 1 and self.visible is None and not self.changes_logits

    def heads(self, heads: Tensor, query_heads: Tensor) -> AttentionCall:
        """The same of some KV heads and of the query heads that belong to them."""
        sinks = self.sink_logits
        return replace(
            self,
            queries=self.queries.index_select(1, query_heads),
            keys=self.keys.index_select(1, heads),
            values=self.values.index_select(1, heads),
            sink_logits=None if sinks is None else sinks.index_select(0, query_heads),
        )

    def cut(self, rows: slice, heads: slice, query_heads: slice) -> AttentionCall:
        """The same of some rows and heads that stand together."""
        return replace(
            self,
            queries=self.queries[rows, query_heads],
            keys=self.keys[rows, heads],
            values=self.values[rows, heads],
            visible=None if self.visible is None else self.visible[rows],
            sink_logits=None if self.sink_logits is None else self.sink_logits[query_heads],
        )


class Kernel(Protocol):
    """Attention in one pass over what is stored."""

    def __call__(self, call: AttentionCall, kept: FlatEntries) -> Tensor:
        """The attention output, (batch, n_new_tokens, n_query_heads, head_dim), contiguous."""
