"""What an option costs: bytes stored, bytes read per generated token, or bytes communicated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvalloc.accounting import IntArray
from kvalloc.accounting.stored_bytes import stored_bytes
from kvalloc.errors import InputError
from kvalloc.shape import ModelShape

Cost = Literal["bytes", "decode-bytes", "communication"]

COSTS: dict[Cost, str] = {
    "bytes": "bytes stored after prefill, in whole pages",
    "decode-bytes": "bytes of K and V read for one generated token of every row",
    "communication": "bytes communicated for one generated token in private inference (MPCache)",
}

GATHER_CLUSTER_TOKENS = 16
"""Cluster of MPCache's example: T = 1024 tokens in C = 64 clusters (Table 2)."""

GATHER_SHARE = 0.25
"""Share of the clusters that each step selects: k2 = 0.25 C (Table 2)."""

GATHER_CONSTANT_BYTES = 192
"""Bytes per k2 * C * log2(C): what the example of Table 2, 1.125 MB at C = 64, comes to in MiB."""

MOST_BYTES = 2**60
"""Sums of costs are int64, and solvers scale them: above this they could overflow."""


def head_cost(
    cost: Cost, tokens: npt.ArrayLike, bits: npt.ArrayLike, shape: ModelShape, page_tokens: int = 1
) -> IntArray:
    """Cost of budgets of one KV head, one row.

    ``bytes``: what is allocated, in whole pages (`kvalloc.accounting.stored_bytes`).
    ``decode-bytes``: K and V
    of every kept entry are read once for each generated token; a page that is not full is read as
    far as it is full. ``communication``: `gather_bytes`.

    Parameters
    ----------
    cost : {"bytes", "decode-bytes", "communication"}
    tokens, bits : array_like of int
        Entries, and bits of each number; broadcast against each other.
    shape : ModelShape
    page_tokens : int

    Returns
    -------
    ndarray of int64
        Rising with ``tokens``; strictly so for the first two.
    """
    count = np.asarray(tokens, dtype=np.int64)
    if cost == "communication":
        sent, _ = np.broadcast_arrays(gather_bytes(count), np.asarray(bits))
        return sent
    if cost == "bytes":
        count = -(-count // page_tokens) * page_tokens
    return stored_bytes(count, bits, shape)


def gather_bytes(tokens: npt.ArrayLike) -> IntArray:
    """Bytes that gathering the selected entries of one KV head sends for one generated token.

    MPCache keeps n entries after prefill and selects some of them at every step: C = ceil(n / 16)
    clusters, of which k2 = ceil(0.25 C) are taken, each by a one-hot vector over C that takes C
    comparisons of ceil(log2 C) bits. Table 2 gives O(k2 C log C) for the communication, and 1.125
    MB for C = 64, k2 = 16, which is 192 bytes for each of the 16 * 64 * 6 steps (MB read as 2**20
    bytes; its unclustered row, 416.0 MB at k1 = 256 of T = 1024, comes to 166.4).

    The paper leaves open, and this takes: that the constant does not depend on C; that the example
    is one KV head of one layer (its Algorithm 2 leaves out the head dimension); that k2 is rounded
    up and log C to whole bits. The similarity, the top-k ranking, the hierarchy of two cluster
    sizes and the sharing of indices between layers are not in Table 2 and not in here.

    Parameters
    ----------
    tokens : array_like of int
        Entries kept after prefill.

    Returns
    -------
    ndarray of int64
        0 for a single cluster: there is nothing to select.

    Examples
    --------
    >>> gather_bytes([16, 32, 1024]).tolist()
    [0, 384, 1179648]

    References
    ----------
    MPCache: MPC-Friendly KV Cache Eviction for Efficient Private LLM Inference, Table 2,
    Algorithm 2 and Sec. 4.3.
    """
    clusters = -(-np.asarray(tokens, dtype=np.int64) // GATHER_CLUSTER_TOKENS)
    taken = np.ceil(GATHER_SHARE * clusters).astype(np.int64)
    width = np.ceil(np.log2(np.maximum(clusters, 1))).astype(np.int64)
    sent: IntArray = GATHER_CONSTANT_BYTES * taken * clusters * width
    return sent


def check_size(
    shape: ModelShape, cost: Cost, context_tokens: int, page_tokens: int, batch: int
) -> None:
    """Refuse a cache whose bytes are more than can be counted, whatever is kept of it.

    Raises
    ------
    InputError
    """
    pages = -(-context_tokens // page_tokens) * page_tokens
    whole = shape.full_bytes(pages, batch)
    if cost == "communication":
        clusters = -(-context_tokens // GATHER_CLUSTER_TOKENS)
        one = GATHER_CONSTANT_BYTES * clusters * clusters * max(1, math.ceil(math.log2(clusters)))
        whole = max(whole, one * shape.n_layers * shape.n_kv_heads * batch)
    if whole > MOST_BYTES:
        raise InputError(
            f"a cache of {whole:,} bytes is more than can be counted; ask for a smaller batch, a "
            "shorter context or smaller pages"
        )


@dataclass(frozen=True, kw_only=True)
class CacheCosts:
    """What a whole cache costs, for targets that are a size.

    Attributes
    ----------
    shape : ModelShape
    cost : {"bytes", "decode-bytes", "communication"}
    context_tokens : int
        Length of each prompt.
    batch : int
        Prompts.
    page_tokens : int
    """

    shape: ModelShape
    cost: Cost
    context_tokens: int
    batch: int
    page_tokens: int

    @property
    def unit(self) -> str:
        """What is counted."""
        return {
            "bytes": "bytes",
            "decode-bytes": "bytes read per token",
            "communication": "bytes communicated per token",
        }[self.cost]

    @cached_property
    def full(self) -> int:
        """Cost of keeping everything in full-attention layers, at the model's own precision."""
        return self.of_budget(self.context_tokens, self.page_tokens)

    @property
    def grain(self) -> int:
        """Cost of one entry of all rows; 1 where the cost is no multiple of it."""
        entry = self.shape.bytes_per_entry * self.batch
        return entry if self.full % entry == 0 else 1

    @property
    def sliding_layer_bytes(self) -> int:
        """Bytes of one sliding layer in whole pages, which no budget changes."""
        pages = -(-self.shape.sliding_entries(self.context_tokens) // self.page_tokens)
        entries = pages * self.page_tokens
        return self.shape.n_kv_heads * entries * self.shape.bytes_per_entry * self.batch

    @property
    def sliding_bytes(self) -> int:
        """Bytes of all sliding layers."""
        return (self.shape.n_layers - len(self.shape.full_layers)) * self.sliding_layer_bytes

    def of_budget(self, tokens: int, page_tokens: int = 1) -> int:
        """Cost of the same budget in every KV head of the full-attention layers."""
        return self._heads * int(head_cost(self.cost, tokens, 16, self.shape, page_tokens))

    def fewest_tokens(self, cost: int) -> int:
        """Smallest budget that, given to every KV head, makes up a cost."""
        every = head_cost(self.cost, np.arange(self.context_tokens + 1), 16, self.shape)
        return int(np.searchsorted(every * self._heads, cost))

    @property
    def _heads(self) -> int:
        return len(self.shape.full_layers) * self.shape.n_kv_heads * self.batch
