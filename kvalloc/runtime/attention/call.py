"""Contract of a backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvalloc.runtime.kept import Kept

KERNEL_TYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Types of entries that kernels read."""


@dataclass(kw_only=True, slots=True, eq=False)
class AttentionCall:
    """New tokens of one layer, and tokens since the latest eviction.

    New tokens see all kept entries, which precede these; only later tokens need a mask.

    Attributes
    ----------
    queries : Tensor, (batch, n_query_heads, n_new_tokens, head_dim)
        Positions applied.
    keys, values : Tensor, (batch, n_kv_heads, n_following, head_dim)
        Tokens since the latest eviction, new ones last.
    scaling : float
        Factor on the logits.
    starts : Tensor of int64, (batch,), or None
        Each row's first token among these; None for 0. A token always sees itself.
    softcap : float or None
        Logits are ``softcap * tanh(logits / softcap)``.
    sink_logits : Tensor, (n_query_heads,), or None
        One more logit a query head, without a value.
    sees : Tensor of bool, (batch, n_new_tokens, n_new_tokens), or None
        Which new tokens see which, as in an image; None if causal.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    scaling: float
    starts: Tensor | None = None
    softcap: float | None = None
    sink_logits: Tensor | None = None
    sees: Tensor | None = None

    @property
    def work_type(self) -> torch.dtype:
        """Type in which torch's operations compute: at least float32."""
        return torch.promote_types(self.queries.dtype, torch.float32)

    def capped(self, logits: Tensor) -> Tensor:
        """Return logits within the soft cap, if any."""
        cap = self.softcap
        return logits if cap is None else (logits / cap).tanh() * cap

    def with_dense_vectors(self) -> AttentionCall:
        """Return the call with contiguous vectors; copies only if needed."""
        queries, keys, values = (
            one if one.stride(-1) == 1 else one.contiguous()
            for one in (self.queries, self.keys, self.values)
        )
        return replace(self, queries=queries, keys=keys, values=values)

    def kernel_refusal(self, kept: Kept) -> str | None:
        """Return a sentence if no kernel serves this call, else None."""
        if self.sees is not None:
            return "new tokens see others than those before them"
        if not self.queries.dtype == self.keys.dtype == self.values.dtype:
            # as under autocast where a model normalises queries and keys
            return "queries, keys and values have several types"
        stored = [
            tensor for part in kept.parts if part.bits == 16 for tensor in (part.keys, part.values)
        ]
        for one in (self.queries, *stored):
            if one.dtype not in KERNEL_TYPES:
                return f"it does not read {one.dtype}"
        if torch.is_grad_enabled() and any(
            one.requires_grad for one in (self.queries, self.keys, self.values, *stored)
        ):
            return "it gives no gradients"
        return None


class Backend(ABC):
    """One way to attend to kept entries."""

    name: ClassVar[str]

    def unavailable(self) -> str | None:
        """Return a sentence if it serves nothing on this machine, else None."""
        return None

    def refusal(self, call: AttentionCall, kept: Kept) -> str | None:
        """Return a sentence if it cannot serve this call, else None."""
        return None

    @abstractmethod
    def attend(self, call: AttentionCall, kept: Kept) -> Tensor:
        """Return the attention output, (batch, n_new_tokens, n_query_heads, value_dim).

        It is contiguous, and of the queries' type.
        """
