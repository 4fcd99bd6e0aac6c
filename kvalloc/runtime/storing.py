"""What a layer keeps, copied into storage of its own: dense, ragged, or at fewer bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import IntArray
from kvalloc.models.attention import AttentionStates
from kvalloc.runtime.kept import Piece, RaggedEntries
from kvalloc.runtime.layer import BudgetLayer
from kvalloc.runtime.packed import PackedEntries
from kvalloc.runtime.unfinished import Part

__all__ = ["Choice", "store_choices"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What a piece keeps, and where it is taken from."""

    keys: Tensor
    values: Tensor
    positions: Tensor
    bias: Tensor | None
    kept: Tensor

    def piece(self, row: int, head: int) -> Piece:
        """One head of it, as `RaggedEntries.collect` takes it."""
        bias = None if self.bias is None else self.bias[row, head]
        kept = self.kept[row, head].nonzero()[:, 0]
        return self.keys[row, head], self.values[row, head], self.positions[row, head], bias, kept


def store_choices(
    layer: BudgetLayer,
    targets: IntArray,
    chosen: Iterator[tuple[Part, Choice]],
    states: AttentionStates,
    *,
    bits: IntArray | None,
) -> None:
    """Keep what was chosen, and let go of all else.

    Parameters
    ----------
    layer : BudgetLayer
    targets : ndarray of int64, (batch, n_kv_heads)
        Entries that each head of each row keeps.
    chosen : iterator of (Part, Choice)
        Its pieces in order, made one at a time.
    states : AttentionStates
        What the layer's attention saw: sizes and type.
    bits : ndarray of int64, (n_kv_heads,), or None
        Of a layer that is stored at fewer bits from now on, those of each KV head.
    """
    if bits is not None:
        layer.keep_ragged(PackedEntries.collect(targets, _by_place(chosen), bits))
    elif (targets == targets[0, 0]).all():
        _store_even(layer, targets, chosen, states)
    else:
        _store_ragged(layer, targets, chosen)


def _store_even(
    layer: BudgetLayer,
    targets: IntArray,
    chosen: Iterator[tuple[Part, Choice]],
    states: AttentionStates,
) -> None:
    shape = (*targets.shape, int(targets[0, 0]))
    keys = states.keys.new_empty(*shape, states.keys.shape[-1])
    values = states.values.new_empty(*shape, states.values.shape[-1])
    indices = torch.empty(shape, dtype=torch.int32, device=keys.device)
    bias: Tensor | None = None
    for (part_row, part_head), choice in chosen:
        for row, head in np.ndindex(*choice.kept.shape[:2]):
            place = (
                row if part_row is None else part_row,
                head if part_head is None else part_head,
            )
            own = choice.piece(row, head)
            for target, source in zip((keys, values, indices), own[:3], strict=True):
                torch.index_select(source, 0, own[4], out=target[place])
            if own[3] is not None:
                if bias is None:
                    bias = torch.zeros(shape, dtype=torch.float32, device=keys.device)
                torch.index_select(own[3], 0, own[4], out=bias[place])
    layer.keep_even(keys, values, indices, bias)


def _store_ragged(
    layer: BudgetLayer, targets: IntArray, chosen: Iterator[tuple[Part, Choice]]
) -> None:
    first = next(chosen)
    piece = _by_place(chain([first], chosen))
    biased = first[1].bias is not None
    layer.keep_ragged(RaggedEntries.collect(targets, piece, biased=biased))


def _by_place(chosen: Iterator[tuple[Part, Choice]]) -> Callable[[int, int], Piece]:
    """What is kept of each row and head, asked for in order, from choices of larger pieces."""
    current: tuple[Part, Choice] | None = None

    def piece(row: int, head: int) -> Piece:
        nonlocal current
        if current is None or current[0][0] not in (None, row) or current[0][1] not in (None, head):
            current = None  # freed before the next one is made
            current = next(chosen)
        (part_row, part_head), choice = current
        return choice.piece(row if part_row is None else 0, head if part_head is None else 0)

    return piece
