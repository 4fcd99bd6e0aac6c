"""Layers of transformers that have a state, or store nothing."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from torch import Tensor

from kvalloc.models.names import has_state, state_class, state_tensors


def with_state(entries: type, other: Any, *args: Any, **kwargs: Any) -> Any:
    """Return ``entries(*args, **kwargs)`` with a copy of another layer's state."""
    layer = _class_of(entries, state_class())(other.number_of_states, *args, **kwargs)
    vars(layer).update(vars(_copied(other)))
    return layer


def _copied(layer: Any) -> Any:
    copied = state_class()(layer.number_of_states)
    # torch copies no tensor with a history
    memo: dict[int, Any] = {id(one): one.detach().clone() for one in state_tensors(layer)}
    for name in vars(copied):
        setattr(copied, name, copy.deepcopy(getattr(layer, name), memo))
    return copied


@cache
def _class_of(entries: Any, state: Any) -> Any:
    class WithState(state, entries):  # type: ignore[misc]
        def __init__(self, number_of_states: int, *args: Any, **kwargs: Any) -> None:
            state.__init__(self, number_of_states=number_of_states)
            entries.__init__(self, *args, **kwargs)

        def lazy_initialization(self, *arguments: Any, **states: Any) -> None:
            """Initialize the entries if called by position, else the state."""
            (entries if arguments else state).lazy_initialization(self, *arguments, **states)

        def reset(self) -> None:
            state.__init__(self, number_of_states=self.number_of_states)
            entries.reset(self)

        def reorder_cache(self, beam_idx: Tensor) -> None:
            state.reorder_cache(self, beam_idx)
            entries.reorder_cache(self, beam_idx)

    return WithState


def state_of(layer: Any, rows: Tensor) -> Any:
    """Return a new layer with some rows of a layer's state, or None.

    A layer that stores nothing is returned itself.
    """
    if not has_state(layer):
        return layer if getattr(layer, "keys", None) is None else None
    copied = _copied(layer)
    copied.reorder_cache(rows)
    return copied
