"""Queries at other positions than their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["rotated"]


def rotated(queries: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Queries, each turned by its position, as rotary embeddings turn the halves of a head.

    Parameters
    ----------
    queries : Tensor, (..., n, head_dim)
    positions : Tensor, (n,)
        By how many positions; below 0 turns back.
    frequencies : Tensor, (n_rotated / 2,)
        Angle a position of each pair, radians; see `kvalloc.models.attention.AttentionStates`.

    Returns
    -------
    Tensor, the shape of `queries`

    References
    ----------
    RoFormer: Enhanced Transformer with Rotary Position Embedding (Su et al., 2021).
    """
    import torch

    angles = positions.float()[:, None] * frequencies.float()
    half = angles.shape[-1]
    first, second, rest = (
        queries[..., :half],
        queries[..., half : 2 * half],
        queries[..., 2 * half :],
    )
    cosines, sines = angles.cos(), angles.sin()
    turned = [first * cosines - second * sines, second * cosines + first * sines, rest]
    return torch.cat(turned, dim=-1)
