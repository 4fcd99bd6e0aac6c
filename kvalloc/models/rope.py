"""Rotary position embeddings (RoPE): a layer's inverse frequencies, and rotation by them.

Transformers has no interface that tells whether and how a layer rotates its queries, so a layer is
judged by a run (`kvalloc.models.probe`): its queries of a token at several positions are
compared with those at position 0, rotated by `rotate`. What cannot be compared counts as unknown,
never as plain rotation.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from kvalloc.errors import UnsupportedModelError

if TYPE_CHECKING:
    from torch import Tensor, nn

Rotation: TypeAlias = "tuple[weakref.ref[nn.Module], str] | str"
"""A module and the name of its buffer of inverse frequencies, which the model may replace as a text
grows; or a sentence that says why a layer has none."""

_SMALLEST = 1e-6
"""Smallest size of a pair that is compared by its own size, as a share of the largest pair's."""

_TOLERANCE = 0.02
"""Largest difference of the queries from the expected ones, as a share of their size.

Rotation of neighbours differs by more than 0.5, and by frequencies that are 1% off by more than
0.1. Rotation by the same frequencies in TF32, which a graphics card may round to, differs by less
than 0.005.
"""


def known_frequencies(frequencies: Tensor | str, *, user: str, instead: str) -> Tensor:
    """Return inverse frequencies, or raise if they are not known.

    Parameters
    ----------
    frequencies : Tensor or str
        As `layer_frequencies` returns them.
    user, instead : str
        The part that needs them, such as ``"the scorer expected_attention"``, and what to use
        instead.

    Raises
    ------
    UnsupportedModelError
        If they are not known; names the layer's class, the reason and the way out.
    """
    if isinstance(frequencies, str):
        raise UnsupportedModelError(f"{user} has to rotate queries, but {frequencies}; {instead}")
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


def current_frequencies(rotation: Rotation) -> Tensor | str:
    """Return the inverse frequencies of a layer as they are now, or why it has none."""
    if isinstance(rotation, str):
        return rotation
    module, name = rotation
    return getattr(module(), name, f"the module with its {name} is gone")


def rotation_of(kind: str, queries: Tensor, positions: Tensor, decoder: Any) -> Rotation | None:
    """Return the frequencies that fit the queries of a probe best, or a sentence if none fit.

    None if the queries are zeros or no numbers.

    Parameters
    ----------
    kind : str
        Name of the layer's class.
    queries : Tensor, (n_tokens * n_positions, n_query_heads, 1, head_dim)
        Each token at all positions, then the next one.
    positions : Tensor of int64, (n_positions,)
        The first one is 0.
    decoder : nn.Module
        Has the buffers of frequencies. The result has no strong reference to it.
    """
    import torch

    tolerance = max(_TOLERANCE, 8 * torch.finfo(queries.dtype).eps)
    rows = queries.float().reshape(-1, len(positions), *queries.shape[1:])
    at_zero, places = rows[:, :1].expand_as(rows), positions.to(rows.device)[:, None, None]

    def squares_by_pair(states: Tensor, n_pairs: int) -> Tensor:
        squares = states.square().flatten(0, -2).sum(dim=0)
        first, second, rest = squares.tensor_split((n_pairs, 2 * n_pairs))
        return torch.cat([first + second, rest])

    def error(expected: Tensor, n_pairs: int = 0) -> float:
        """Root of the mean over pairs of the squared difference, as a share of the pair's size."""
        differences = squares_by_pair(rows - expected, n_pairs)
        sizes = squares_by_pair(rows, n_pairs)
        return float((differences / sizes.clamp(min=_SMALLEST * sizes.max())).mean().sqrt())

    unrotated = error(at_zero)
    if not math.isfinite(unrotated):
        return None
    if unrotated < tolerance:
        return f"a layer of {kind} does not rotate its queries"
    best: Rotation = f"{kind} does not rotate halves of its queries by frequencies of the model"
    smallest_error = tolerance
    for part, name in _tables(decoder):
        frequencies = getattr(part, name)
        if frequencies.ndim != 1 or 2 * len(frequencies) > rows.shape[-1]:
            continue
        rotated = rotate(at_zero, places, frequencies.to(rows.device))
        if (rotated_error := error(rotated, len(frequencies))) < smallest_error:
            best, smallest_error = (weakref.ref(part), name), rotated_error
    return best


def _tables(decoder: Any) -> Iterator[tuple[nn.Module, str]]:
    """Yield module and name of each buffer of inverse frequencies."""
    for part in decoder.modules():
        for name, _ in part.named_buffers(recurse=False):
            if name.endswith("inv_freq") and not name.endswith("original_inv_freq"):
                yield part, name
