"""Layers of transformers other than full attention: states, and layers that store nothing."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from torch import Tensor

from kvalloc.models.names import has_state, state_class, state_tensors


def with_state(entries: type, other: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a layer of entries that also has the state of another layer.

    Parameters
    ----------
    entries : type
        Class of the layer.
    other : transformers' layer
        Its state is copied.
    *args, **kwargs
        Arguments of the class.
    """
    layer = _class_of(entries, state_class())(other.number_of_states, *args, **kwargs)
    vars(layer).update(vars(_copied(other)))
    return layer


def _copied(layer: Any) -> Any:
    """Return a layer of transformers with a copy of a layer's state."""
    copied = state_class()(layer.number_of_states)
    # torch copies no tensor with a history
    memo: dict[int, Any] = {id(one): one.detach().clone() for one in state_tensors(layer)}
    for name in vars(copied):
        setattr(copied, name, copy.deepcopy(getattr(layer, name), memo))
    return copied


@cache
def _class_of(entries: Any, state: Any) -> Any:
    class WithState(state, entries):  # type: ignore[misc]
        """Entries and a state, each in a layer of its own."""

        def __init__(self, number_of_states: int, *args: Any, **kwargs: Any) -> None:
            state.__init__(self, number_of_states=number_of_states)
            entries.__init__(self, *args, **kwargs)

        def lazy_initialization(self, *arguments: Any, **states: Any) -> None:
            """Initialize the entries if called by position, else the state."""
            (entries if arguments else state).lazy_initialization(self, *arguments, **states)

        def reset(self) -> None:
            """Forget everything."""
            state.__init__(self, number_of_states=self.number_of_states)
            entries.reset(self)

        def reorder_cache(self, beam_idx: Tensor) -> None:
            """Keep only these rows; one may be kept more than once."""
            state.reorder_cache(self, beam_idx)
            entries.reorder_cache(self, beam_idx)

    return WithState


def state_of(layer: Any, rows: Tensor) -> Any:
    """Return a layer of transformers with some rows of a layer's state; None if it has none.

    A layer that stores nothing is returned as it is.
    """
    if not has_state(layer):
        return layer if getattr(layer, "keys", None) is None else None
    copied = _copied(layer)
    copied.reorder_cache(rows)
    return copied
