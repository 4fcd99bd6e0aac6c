"""By which angles a position a layer turns its queries, and whether it does so at all."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["frequencies_of"]

# On which a model turns its queries in some layers and not in others: as its source has it.
_ROTATES: dict[str, Callable[[Any], bool]] = {
    "self.use_rope": lambda own: own.use_rope,
    "self.is_local_attention": lambda own: own.is_local_attention,
    "self.sliding_window is not None": lambda own: own.sliding_window is not None,
    "self.sliding_window is None or self.is_sliding": lambda own: (
        own.sliding_window is None or own.is_sliding
    ),
}
_ROTATED_IF = re.compile(r"if (self\.[^\n#]*):[^\n]*\n\s*(?:cos, sin = .*\n)?[^\n]*= apply_rotary")


def frequencies_of(module: nn.Module, rotary: nn.Module | None) -> Tensor | None:
    """Angles of a layer's rotary embedding, also where kinds of layers have their own (Gemma 3).

    Parameters
    ----------
    module : nn.Module
        The layer's attention.
    rotary : nn.Module or None
        The model's table of angles.

    Returns
    -------
    Tensor or None, (n_rotated / 2,)
        As in `kvalloc.models.attention.AttentionStates`; None where the layer does not turn its
        queries, or in another way, or on a condition that is not known here.
    """
    if rotary is None or not _rotates_halves(type(module).__module__):
        return None
    attention: Any = type(module)
    condition = _condition_to_rotate(attention)
    if condition is not None and not _ROTATES.get(condition, _never)(module):
        return None
    # what a module lacks it searches for and raises over, at each layer of each token
    kind = vars(module).get("layer_type")
    found = None if kind is None else getattr(rotary, f"{kind}_inv_freq", None)
    return getattr(rotary, "inv_freq", None) if found is None else found


@cache
def _rotates_halves(modeling_file: str) -> bool:
    """Whether dimension i turns with i + half of them, asked of the modeling file itself.

    Others (GLM, Cohere) turn neighbours, and the same angles would mean other pairs.
    """
    import torch

    rotate = getattr(sys.modules.get(modeling_file), "rotate_half", None)
    if rotate is None:
        return False
    turned: list[float] = rotate(torch.arange(4.0)).tolist()
    return turned == [-2.0, -3.0, 0.0, 1.0]


@cache
def _condition_to_rotate(kind: Any) -> str | None:
    """The ``if`` right before a layer turns its queries, where it asks for the layer's own kind."""
    with suppress(OSError, TypeError):  # no source to read: taken for a plain one
        found = _ROTATED_IF.search(inspect.getsource(kind.forward))
        return found[1].strip() if found else None
    return None


def _never(module: object) -> bool:
    return False
