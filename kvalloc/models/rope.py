"""Rotary position embeddings (RoPE): a layer's inverse frequencies, and rotation by them.

Transformers has no interface that tells whether and how a layer rotates its queries, so the
modeling file is read. What cannot be read there counts as unknown, never as plain rotation.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from kvalloc.errors import UnsupportedModelError

if TYPE_CHECKING:
    from torch import Tensor, nn

_ROTATES: dict[str, Callable[[Any], bool]] = {
    "": lambda layer: True,
    "position_embeddings is not None": lambda layer: True,
    "self.use_rope": lambda layer: layer.use_rope,
    "self.is_local_attention": lambda layer: layer.is_local_attention,
    "self.sliding_window is not None": lambda layer: layer.sliding_window is not None,
    "self.sliding_window is None or self.is_sliding": lambda layer: (
        layer.sliding_window is None or layer.is_sliding
    ),
}
"""Conditions, as modeling files write them, under which a layer rotates its queries."""


def layer_frequencies(layer: nn.Module, rotary: nn.Module | None) -> Tensor | str:
    """Return the RoPE inverse frequencies of a layer, which kinds of layers may differ in.

    Parameters
    ----------
    layer : nn.Module
        The layer's attention.
    rotary : nn.Module or None
        The model's rotary embedding.

    Returns
    -------
    Tensor, (n_rotated / 2,), or str
        As in `kvalloc.models.attention.AttentionStates`: a sentence where the layer does not
        rotate halves of its queries, or where its source does not show it.
    """
    kind: Any = type(layer)
    rotates = _rotation(kind)
    if isinstance(rotates, str):
        return rotates
    if rotary is None or not rotates(layer):
        return f"a layer of {kind.__name__} does not rotate its queries"
    # read from `vars`: a failing attribute search costs much at each layer of each token
    layer_type = vars(layer).get("layer_type")
    known = None if layer_type is None else getattr(rotary, f"{layer_type}_inv_freq", None)
    known = getattr(rotary, "inv_freq", None) if known is None else known
    return f"{type(rotary).__name__} has no inverse frequencies" if known is None else known


def known_frequencies(frequencies: Tensor | str, *, who: str, instead: str) -> Tensor:
    """Return inverse frequencies, or raise if they are not known.

    Parameters
    ----------
    frequencies : Tensor or str
        As `layer_frequencies` returns them.
    who, instead : str
        Who needs them, such as ``"the scorer expected_attention"``, and what to use instead.

    Raises
    ------
    UnsupportedModelError
        If they are not known; names the layer's class, the reason and the way out.
    """
    if isinstance(frequencies, str):
        raise UnsupportedModelError(f"{who} has to rotate queries, but {frequencies}; {instead}")
    return frequencies


def rotate(queries: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Rotate each query by its position, as rotary embeddings rotate the halves of a head.

    Parameters
    ----------
    queries : Tensor, (..., n, head_dim)
    positions : Tensor, (n,) or (..., n)
        By how many positions; a negative number rotates back.
    frequencies : Tensor, (n_rotated / 2,)
        Angle per position of each pair, radians.

    Returns
    -------
    Tensor, the shape of `queries`

    References
    ----------
    RoFormer: Enhanced Transformer with Rotary Position Embedding (Su et al., 2021).
    """
    import torch

    angles = positions.float()[..., None] * frequencies.float()
    half = angles.shape[-1]
    first, second, rest = queries.tensor_split((half, 2 * half), dim=-1)
    cosines, sines = angles.cos(), angles.sin()
    turned = [first * cosines - second * sines, second * cosines + first * sines, rest]
    return torch.cat(turned, dim=-1)


@cache
def _rotation(kind: Any) -> Callable[[Any], bool] | str:
    """Whether a layer of this class rotates halves of its queries, or why that is not known."""
    import torch

    # GLM and Cohere rotate neighbours: the same angles would belong to other pairs
    halves = getattr(sys.modules.get(kind.__module__), "rotate_half", None)
    if halves is None or halves(torch.arange(4.0, device="cpu")).tolist() != [-2.0, -3.0, 0.0, 1.0]:
        return f"{kind.__name__} does not rotate halves of its queries"
    try:
        conditions = _conditions(ast.parse(textwrap.dedent(inspect.getsource(kind.forward))))
    except (OSError, TypeError, SyntaxError):
        conditions, why = None, "cannot be read"
    else:
        why = "does not show it"
    unknown = f"it is not known when {kind.__name__} does so: the source of its forward {why}"
    return unknown if conditions is None else _ROTATES.get(" and ".join(conditions), unknown)


def _conditions(node: ast.AST) -> list[str] | None:
    """Return the conditions around the first call of ``apply_rotary_pos_emb``; None without one."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "apply_rotary_pos_emb":
        return []
    for child in ast.iter_child_nodes(node):
        inner = _conditions(child)
        if inner is None or isinstance(node, ast.Module | ast.FunctionDef | ast.Assign):
            if inner is not None:
                return inner
        elif isinstance(node, ast.If) and child in node.body:
            return [ast.unparse(node.test), *inner]
        else:
            return [type(node).__name__, *inner]  # an "else" or a loop: no known condition
    return None
