"""Rows of one batch that are kept in different ways: each group of them in a cache of its own."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache
from typing_extensions import override

from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.models.attention import AttentionStates, Compute
from kvalloc.runtime import refusals
from kvalloc.runtime.cache import BudgetCache
from kvalloc.runtime.layer import row_numbers
from kvalloc.runtime.prompt import Prompt

__all__ = ["GroupedCache"]

_BY_ROW = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")
"""Arguments of a forward that are of rows."""


class GroupedCache(BudgetCache):
    """A cache of rows that are kept in different ways.

    Each group of rows has a cache of its own, which keeps what it would keep without the others.
    The model reads all rows in one forward. As long as no group has evicted anything of a layer,
    its attention is that of the whole batch; then it is computed group by group.

    Parameters
    ----------
    groups : sequence of (sequence of int, BudgetCache)
        Rows of the batch, each in one group, and their empty cache; all of one model.
    """

    def __init__(self, groups: Sequence[tuple[Sequence[int], BudgetCache]]) -> None:
        self._caches = [cache for _, cache in groups]
        Cache.__init__(self, layers=self._caches[0].layers)
        self.decoder = self._caches[0].decoder
        self._states: list[tuple[Tensor, Tensor]] = []  # of the layer that runs now, by group
        self._regroup([list(rows) for rows, _ in groups])

    def _regroup(self, rows: list[list[int]]) -> None:
        """Note which rows belong to each group."""
        self._rows = rows
        every = [row for own in rows for row in own]
        self._order = torch.tensor(every).argsort()
        self._places = [torch.tensor(own) for own in rows]

    def _joined(self, states: Sequence[Tensor]) -> Tensor:
        """States of each group as those of the batch."""
        joined = torch.cat([*states])
        return joined[self._order.to(joined.device)]

    @override
    def _in_order(self, several: Sequence[Any]) -> Any:
        if isinstance(several[0], Tensor):
            return self._joined(several)
        if isinstance(several[0], np.ndarray):
            joined = np.concatenate(several)
            return joined[self._order.numpy()] if self.batch else joined
        rows = [own for of_group in several for own in of_group]
        return [rows[place] for place in self._order.tolist()] if self.batch else rows

    @property
    def _prompt(self) -> Prompt:  # type: ignore[override]
        """That of the first group, for what is the same in all."""
        return self._caches[0]._prompt

    @property
    @override
    def _prompts(self) -> Sequence[Prompt]:
        return [cache._prompt for cache in self._caches]

    @property
    @override
    def groups(self) -> Sequence[tuple[Any, BudgetCache]]:
        return [*zip(self._places, self._caches, strict=True)]

    # The prompt

    @property
    @override
    def profile(self) -> BudgetProfile:
        """That of the first group; its detail tells of all."""
        details = "; ".join(cache.profile.detail for cache in self._caches)
        return self._caches[0].profile.replace(detail=details)

    @override
    def decide(self, inputs: Mapping[str, Any]) -> None:
        for place, cache in zip(self._places, self._caches, strict=True):
            cache.decide(self._of(inputs, place))

    # What the hooks call

    @override
    def begin_forward(
        self, decoder: nn.Module, arguments: Mapping[str, Any]
    ) -> Mapping[str, Any] | None:
        rows, held = refusals.new_tokens_shape(arguments)[0], len(self._order)
        refusals.refuse(other_batch=rows != held and (held, rows))
        masks = []
        with ExitStack() as begun:
            for place, cache in zip(self._places, self._caches, strict=True):
                changed = cache.begin_forward(decoder, self._of(arguments, place))
                masks += [] if changed is None else [changed["attention_mask"]]
                begun.callback(cache.end_forward, completed=False)
            begun.pop_all()
        steps = [cache._prompt.step for cache in self._caches]
        visible = self._joined([step.visible for step in steps if step is not None])
        return {"attention_mask": visible.to(masks[0])} if masks else None

    @override
    def _cuts(self, end: int) -> list[int]:
        return sorted({cut for cache in self._caches for cut in cache._cuts(end)})

    def _of(self, arguments: Mapping[str, Any], place: Tensor) -> dict[str, Any]:
        """Arguments of a forward for the rows of one group."""
        own, batch = dict(arguments), len(self._order)
        for name in _BY_ROW:
            given = own.get(name)
            if isinstance(given, Tensor) and len(given) == batch:
                own[name] = given[place]
        return own

    @override
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self._states = [
            cache.update(key_states[place], value_states[place], layer_idx, *args, **kwargs)
            for place, cache in zip(self._places, self._caches, strict=True)
        ]
        if self._is_split(layer_idx) or self._states[0][0].shape[2] == key_states.shape[2]:
            return key_states, value_states
        keys, values = zip(*self._states, strict=True)
        return self._joined(keys), self._joined(values)

    def _is_split(self, layer: int) -> bool:
        """Whether any group has evicted something of a layer, so that they differ."""
        return any(getattr(cache.layers[layer], "reduced", False) for cache in self._caches)

    @override
    def attend(self, states: AttentionStates, compute: Compute) -> Any:
        together = None if self._is_split(states.layer) else compute(states.mask)[0]
        outputs = []
        for place, cache, (keys, values) in zip(
            self._places, self._caches, self._states, strict=True
        ):
            own = replace(states, queries=states.queries[place], keys=keys, values=values)
            if together is None:
                own = replace(own, mask=cache.stored_mask(own))
            own_rows = partial(_attention, compute, own, place, together)
            outputs.append(cache.attend(own, own_rows)[0])
        self._states = []
        return self._joined(outputs), None

    @override
    def end_forward(self, *, completed: bool) -> None:
        self._states = []
        with ExitStack() as stack:  # whatever fails in one
            for cache in self._caches:
                stack.callback(cache.end_forward, completed=completed)

    # What transformers calls

    @override
    def save(self, path: str | Path) -> None:
        refusals.refuse(saved_in_groups=len(self._caches))

    @override
    def crop(self, tokens_to_remove: int) -> None:
        for cache in self._caches:
            cache.check_crop(tokens_to_remove)
        for cache in self._caches:
            cache.crop(tokens_to_remove)

    @override
    def batch_select_indices(self, indices: Tensor) -> None:
        rows = row_numbers(indices).tolist() if self.batch else []
        caches, groups = [], []
        for own, cache in zip(self._rows, self._caches, strict=True):
            if now := [row for row, was in enumerate(rows) if was in own]:
                cache.batch_select_indices(torch.tensor([own.index(rows[row]) for row in now]))
                caches.append(cache)
                groups.append(now)
        if caches:
            self._caches, self.layers = caches, caches[0].layers
            self._regroup(groups)

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> GroupedCache:
        caches = [copy.deepcopy(cache, memo) for cache in self._caches]
        clone = GroupedCache([*zip(self._rows, caches, strict=True)])
        clone.verifier = copy.deepcopy(self.verifier, memo)
        return clone


def _attention(
    compute: Compute,
    own: AttentionStates,
    place: Tensor,
    together: Tensor | None,
    mask: Any,
    keys: Tensor | None = None,
    values: Tensor | None = None,
) -> Any:
    """Return what the model's own attention gives the rows of one group."""
    if together is not None:
        return together[place], None
    keys, values = own.keys if keys is None else keys, own.values if values is None else values
    return compute(mask, keys, values, place)
