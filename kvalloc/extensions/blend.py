"""Caches of documents put behind each other, and brought up to date in part.

A document that was read alone knows nothing of the text in front of it now. Its keys are turned
to their new places; keys and values of some of its tokens are computed anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from kvalloc.models.attention import (
    AttentionResult,
    AttentionStates,
    Compute,
    Handler,
    intercept_attention,
)
from kvalloc.models.rope import rotate
from kvalloc.models.structure import decoder_of, input_device
from kvalloc.runtime.cache import BudgetCache
from kvalloc.runtime.kept import Part
from kvalloc.runtime.store import Store
from kvalloc.scorers.attention_rows import window_attention

CHECK_LAYER = 1
"""Where it is seen how values change: the first layer whose input knows what stands in front."""


See: TypeAlias = Callable[[AttentionStates, Tensor], None]
"""Looks at what a layer's attention sees, and at its mask."""


class _Enough(Exception):
    """Ends a forward early: its result is known."""


@dataclass(kw_only=True)
class DenseLayer:
    """Keys and values of one layer at their places, also of entries that no head keeps.

    Attributes
    ----------
    keys, values : Tensor, (1, n_kv_heads, n_tokens, head_dim)
        Of the model's type; 0 where nothing is kept.
    present : Tensor of bool, (1, n_kv_heads, n_tokens), or None
        Which are kept; None where all are, as they were.
    rounded : bool
        Whether kept entries are stored at other bits than the model computes in.
    """

    keys: Tensor
    values: Tensor
    present: Tensor | None = None
    rounded: bool = False

    @classmethod
    def of(cls, layer: Store) -> DenseLayer:
        """Return what a layer holds of its one row; not a copy where all of it is dense."""
        if layer.kept is None:
            return cls(keys=layer.keys, values=layer.values)
        entries = layer.candidates(np.array([0]), lambda row: slice(None), layer.seen)
        n_heads, seen = int(entries.keys.shape[1]), layer.seen
        _, head, at = (entries.positions < seen).nonzero(as_tuple=True)
        place = entries.positions[0, head, at].long()
        present = torch.zeros(1, n_heads, seen, dtype=torch.bool, device=place.device)
        present[0, head, place] = True
        dense = []
        for states in (entries.keys, entries.values):
            one = states.new_zeros(1, n_heads, seen, states.shape[-1])
            one[0, head, place] = states[0, head, at]
            dense.append(one)
        return cls(keys=dense[0], values=dense[1], present=present, rounded=layer.kept.is_rounded)

    def empty(self, tokens: int) -> DenseLayer:
        """Return room for ``n_tokens`` tokens, of the same sizes."""
        shapes = [(*one.shape[:2], tokens, one.shape[3]) for one in (self.keys, self.values)]
        keys, values = (self.keys.new_zeros(shape) for shape in shapes)
        return DenseLayer(keys=keys, values=values)

    @classmethod
    def joined(cls, parts: Sequence[DenseLayer]) -> DenseLayer:
        """Return a copy of parts that follow each other, as one."""
        present = [
            part.keys.new_ones(part.keys.shape[:3], dtype=torch.bool)
            if part.present is None
            else part.present
            for part in parts
        ]
        any_absent = any(part.present is not None for part in parts)
        return cls(
            keys=torch.cat([part.keys for part in parts], dim=2),
            values=torch.cat([part.values for part in parts], dim=2),
            present=torch.cat(present, dim=2) if any_absent else None,
            rounded=any(part.rounded for part in parts),
        )

    def mask(self, places: Tensor, n_query_heads: int) -> Tensor:
        """Return the additive causal mask of tokens at these places.

        Parameters
        ----------
        places : Tensor of int64, (n,)
        n_query_heads : int

        Returns
        -------
        Tensor, (1, 1 or n_query_heads, n, n_tokens)
        """
        seen = torch.arange(int(self.keys.shape[2]), device=places.device) <= places[:, None]
        seen, lowest = seen[None, None], torch.finfo(self.keys.dtype).min
        if self.present is not None:
            group = n_query_heads // int(self.keys.shape[1])
            seen = seen & self.present.repeat_interleave(group, dim=1)[:, :, None]
        return self.keys.new_zeros(1).masked_fill(~seen, lowest)

    def fill(self, layer: Store, seen: int, bits: Any) -> None:
        """Put the first ``seen`` tokens into an empty layer, at these bits, (n_kv_heads,)."""
        first = 0 if self.present is None else seen
        layer.lazy_initialization(self.keys, self.values)
        layer.keys, layer.values = (
            part[:, :, first:seen].clone(memory_format=torch.contiguous_format)
            for part in (self.keys, self.values)
        )
        layer.seen = seen
        if self.present is None:
            return
        kept = self.present[:, :, :seen]
        positions = torch.arange(seen, dtype=torch.int32, device=kept.device)
        part = Part(
            keys=self.keys[:, :, :seen][kept],
            values=self.values[:, :, :seen][kept],
            positions=positions.expand_as(kept)[kept],
            segments=np.arange(kept.shape[1]),
            lengths=kept.sum(dim=2).cpu().numpy().ravel(),
        )
        row = np.array([0])
        layer.replace(row, layer.as_stored(part, row, bits if self.rounded else None))


@dataclass(kw_only=True)
class Documents:
    """Documents, the tokens before them, and the question behind them.

    Attributes
    ----------
    model : transformers.PreTrainedModel
    ids : Tensor of int64, (n_tokens + n_question,)
        Of all of it, on the host.
    before : int
        Tokens in front of the first document.
    n_tokens : int
        Tokens in front of the question.
    layers : list of DenseLayer
    """

    model: Any
    ids: Tensor
    before: int
    n_tokens: int
    layers: list[DenseLayer]

    @classmethod
    def joined(
        cls,
        model: Any,
        caches: Sequence[BudgetCache],
        ids: Sequence[Tensor],
        frequencies: Sequence[Tensor],
    ) -> Documents:
        """Put caches behind each other, their keys turned to their places.

        Parameters
        ----------
        model : transformers.PreTrainedModel
        caches : sequence of BudgetCache
            One row each, complete.
        ids : sequence of Tensor of int64
            Of the tokens before them, of each document, and of the question.
        frequencies : sequence of Tensor, (n_layers,) of (n_rotated / 2,)
            RoPE inverse frequencies.
        """
        before, layers = len(ids[0]), []
        for index, angles in enumerate(frequencies):
            parts, place = [], before
            for cache in caches:
                part = DenseLayer.of(cache.layers[index])
                if place:
                    by = torch.tensor([place], device=part.keys.device)
                    part.keys = rotate(part.keys, by, angles).to(part.keys.dtype)
                parts.append(part)
                place += cache.get_seq_length()
            rooms = (parts[0].empty(before), parts[0].empty(len(ids[-1])))
            layers.append(DenseLayer.joined([rooms[0], *parts, rooms[1]]))
        return cls(model=model, ids=torch.cat([*ids]), before=before, n_tokens=place, layers=layers)

    def recompute(self, places: Tensor, see: See | None = None) -> None:
        """Compute keys and values of some tokens anew, in all layers.

        Parameters
        ----------
        places : Tensor of int64, (n_computed,)
            Their positions, rising. They attend to kept entries, and to each other as computed.
        see : callable, optional
            ``see(states, mask)`` of each layer, once its keys and values are there.
        """
        if not len(places):
            return
        end = int(places[-1]) + 1  # later tokens are not looked at
        masks: dict[bool, Tensor] = {}

        def attend(states: AttentionStates, compute: Compute) -> AttentionResult:
            layer, at = self.layers[states.layer], places.to(states.keys.device)
            layer.keys[:, :, at], layer.values[:, :, at] = states.keys, states.values
            plain = layer.present is None
            mask = masks.get(plain)
            if mask is None or not plain or mask.device != at.device:
                mask = masks[plain] = layer.mask(at, int(states.queries.shape[1]))[..., :end]
            if see is not None:
                see(states, mask)
            if states.layer == len(self.layers) - 1:
                raise _Enough
            return compute(mask, layer.keys[:, :, :end], layer.values[:, :, :end])

        self._run(places, attend)

    def question_attention(self) -> Tensor:
        """Return what the question attends to in the deeper half of the layers, the mean of heads.

        The tokens before the documents are read on the way.

        Returns
        -------
        Tensor of float32, (n_tokens,)

        References
        ----------
        ProphetKV: the question's attention, fused over the layers, says which tokens matter. The
        first layers look at neighbours and say less.
        """
        end, first = len(self.ids), len(self.layers) // 2
        totals = torch.zeros(self.n_tokens, device="cpu")

        def see(states: AttentionStates, mask: Tensor) -> None:
            if states.layer < first:
                return
            document = replace(states, keys=self.layers[states.layer].keys, mask=mask)
            weights = window_attention(document, end - self.n_tokens)[..., : self.n_tokens]
            totals.add_(weights.mean(dim=(0, 1, 2, 3)).cpu())

        tokens = torch.arange(end, device="cpu")
        self.recompute(torch.cat([tokens[: self.before], tokens[self.n_tokens :]]), see)
        return totals / (len(self.layers) - first)

    def value_change(self) -> Tensor:
        """Return how far the values of each token are from what they would be, at the check layer.

        Returns
        -------
        Tensor of float32, (n_tokens,)
            Squared distance, of all KV heads.

        References
        ----------
        CacheBlend's check layer, of values alone.
        """
        check, n_tokens = min(CHECK_LAYER, len(self.layers) - 1), self.n_tokens
        changes = torch.zeros(n_tokens, device="cpu")

        def attend(states: AttentionStates, compute: Compute) -> AttentionResult:
            layer = self.layers[states.layer]
            if states.layer < check:
                return compute(None)  # causal among themselves: all are computed
            changed = (layer.values[:, :, :n_tokens] - states.values).float().square()
            if layer.present is not None:
                changed = changed * layer.present[:, :, :n_tokens, None]
            changes.add_(changed.sum(dim=(0, 1, 3)).cpu())
            raise _Enough

        self._run(torch.arange(n_tokens, device="cpu"), attend)
        return changes

    def _run(self, places: Tensor, attend: Handler) -> None:
        """Let the model compute the tokens at these places, until `attend` has enough.

        Nothing is cached: what they attend to is what `attend` says.
        """
        device = input_device(self.model)
        ids, positions = self.ids[places].to(device), places.to(device)
        # a mask that is ready is taken as it is, and none is made
        ready = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)
        with suppress(_Enough), torch.no_grad(), intercept_attention(self.model, attend):
            decoder_of(self.model)(
                input_ids=ids[None],
                position_ids=positions[None],
                attention_mask=ready,
                use_cache=False,
            )
