"""One forward with a cache, and how each of its layers answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvalloc.accounting import IntArray
from kvalloc.models.attention import AttentionStates, Compute
from kvalloc.models.names import MaskFunction
from kvalloc.runtime.arrival import Step
from kvalloc.runtime.attention.backends import attend
from kvalloc.runtime.attention.call import AttentionCall
from kvalloc.runtime.attention.masks import stored_mask
from kvalloc.runtime.layer import BudgetLayer
from kvalloc.runtime.policies.base import Reader
from kvalloc.runtime.selection import gathered


@dataclass(frozen=True, kw_only=True, eq=False)
class Forward:
    """One forward of a prompt, or of what follows it.

    Attributes
    ----------
    step : Step
        What it is.
    targets : mapping of int to ndarray of int64, (batch, n_kv_heads)
        Number of entries that each layer keeps once it has attended, where any has to go.
    mask_function : MaskFunction
        Makes the masks of the model's attention implementation.
    reader : Reader or None
        Chooses what a decoded token reads.
    full_layers : tuple of int
        Layers that have budgets.
    noted : int or None
        Number of latest queries of each row that are stored; None where they are not, or where the
        forward is of the prompt.
    """

    step: Step
    targets: Mapping[int, IntArray]
    mask_function: MaskFunction
    reader: Reader | None
    full_layers: tuple[int, ...]
    noted: int | None
    _masks: dict[tuple[int, int, torch.device], Any] = field(default_factory=dict)

    def answer(self, layer: BudgetLayer, states: AttentionStates, compute: Compute) -> Any:
        """Return the attention over all that a layer stores, the new tokens included.

        Parameters
        ----------
        layer : BudgetLayer
        states : AttentionStates
            With keys and values of what stands behind the kept entries.
        compute : Compute
        """
        entries, step = layer.entries, self.step
        if entries is None:
            return compute(states.mask)
        visible = step.following_visible(layer.dense_tokens, states.keys.device)
        call = AttentionCall.of(states, visible)
        n_kept = int(entries.lengths[0, 0]) if entries.even else 0
        # one token is attended to without a copy of what is kept in front of what followed
        one = step.new_tokens == 1
        alone = one and step.follows and self.reader is None
        if alone or not n_kept:
            return attend(call, entries.kept), None
        states = _behind(entries.dense, states)
        if self.reader is not None and one and visible is None:
            place = self.full_layers.index(states.layer)
            indices = self.reader.read(states, place=place, kept=entries)
            if indices is None:
                return compute(None, states.keys, states.values)
            return compute(None, gathered(states.keys, indices), gathered(states.values, indices))
        return compute(self.mask(states, n_kept), states.keys, states.values)

    def mask(self, states: AttentionStates, n_kept: int = 0) -> Any:
        """Return the mask of these keys, of which so many entries stand in front.

        It is made once for all layers that store as much.
        """
        n_stored, device = int(states.keys.shape[2]), states.keys.device
        key = (n_stored, n_kept, device)
        if key not in self._masks:
            self._masks[key] = stored_mask(
                self.mask_function,
                int(states.queries.shape[2]),
                n_stored,
                dtype=states.queries.dtype,
                device=device,
                batch=int(states.queries.shape[0]),
                visible=self.step.following_visible(n_stored - n_kept, device),
            )
        return self._masks[key]


def _behind(stored: tuple[Tensor, Tensor], states: AttentionStates) -> AttentionStates:
    """Return the states with keys and values behind those that are stored."""
    pairs = zip(stored, (states.keys, states.values), strict=True)
    keys, values = (torch.cat([own.to(new.dtype), new], dim=2) for own, new in pairs)
    return replace(states, keys=keys, values=values)
