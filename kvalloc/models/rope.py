"""Rotary position embeddings (RoPE): the pairs of dimensions that a layer rotates, and how fast.

Transformers has no interface for this: `kvalloc.models.probe` compares states at several positions.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvalloc.errors import UnsupportedModelError

if TYPE_CHECKING:
    from torch import Tensor, nn

_SMALLEST = 1e-6
"""Smallest size of a pair that is compared by its own size, as a share of the largest pair's."""

_TOLERANCE = 0.02
"""Largest difference of queries and keys from the expected ones, as a share of their size.

Rotation of other pairs differs by more than 0.5, and by frequencies that are 1% off by more than
0.1. Rotation by the same frequencies in TF32, which a graphics card may round to, differs by less
than 0.005, and in bfloat16 by less than 0.003.
"""


@dataclass(frozen=True)
class Buffer:
    """A module's buffer or weight, which the model may replace."""

    module: weakref.ref[nn.Module]
    name: str

    def __call__(self) -> Tensor:
        """Return the current buffer."""
        module = self.module()
        if module is None:
            raise UnsupportedModelError(
                f"the module whose {self.name} rotated queries is gone; make the cache again"
            )
        return getattr(module, self.name)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Rotation:
    """Pairs of a head's dimensions that a layer rotates by the position.

    Attributes
    ----------
    first, second : slice
        Dimensions of the pairs.
    fixed : str or None
        Sentence why no query can be rotated to another position.
    known : bool
        If not, `fixed` says why.
    scales : (Buffer, Buffer) or None
        Factors of queries and of keys after the rotation, (head_dim,).
    error : float
        See `rotation_of`.
    """

    source: Callable[[], Tensor]
    first: slice
    second: slice
    fixed: str | None = None
    known: bool = True
    scales: tuple[Buffer, Buffer] | None = None
    error: float = field(default=math.inf, compare=False)

    @property
    def frequencies(self) -> Tensor:
        """Current angle per position of each pair, radians, (n_pairs,)."""
        return self.source()


def _no_frequencies() -> Tensor:
    import torch

    return torch.zeros(0)


NO_ROTATION = Rotation(_no_frequencies, slice(0), slice(0))
"""The rotation of a layer without positions: `rotate` changes nothing."""

UNKNOWN = replace(NO_ROTATION, fixed="it is not known when the model does so", known=False)
"""Rotation of a layer that no probe has seen."""


def known_rotation(rotation: Rotation, *, user: str, instead: str) -> Rotation:
    """Return a rotation to other positions.

    Raises
    ------
    UnsupportedModelError
        If there is none; names the `user`, which needs it, and the way out.
    """
    if rotation.fixed is not None:
        raise UnsupportedModelError(
            f"{user} has to rotate queries, but {rotation.fixed}; {instead}"
        )
    return rotation


def rotate(states: Tensor, positions: Tensor, rotation: Rotation, *, keys: bool = False) -> Tensor:
    """Rotate queries or keys, (..., n, head_dim), by positions, (n,) or (..., n).

    References
    ----------
    RoFormer: Enhanced Transformer with Rotary Position Embedding (Su et al., 2021).
    """
    if rotation.scales is not None:
        scales = rotation.scales[keys]().detach().float().to(states.device)
        unscaled = replace(rotation, scales=None)
        return (scales * rotate(states / scales, positions, unscaled)).type_as(states)
    angles = positions.float()[..., None] * rotation.frequencies.float().to(states.device)
    cosines, sines = angles.cos(), angles.sin()
    first, second = states[..., rotation.first], states[..., rotation.second]
    turned = states.clone()
    turned[..., rotation.first] = first * cosines - second * sines
    turned[..., rotation.second] = second * cosines + first * sines
    return turned


def layer_rotation(
    layer: nn.Module, queries: Tensor, keys: Tensor, positions: Tensor, decoder: Any
) -> Rotation | None:
    """Return `rotation_of` a layer, which may apply norms of queries and keys after it."""
    import torch

    kind, states = type(layer).__name__, [queries, keys]
    rotation = rotation_of(kind, torch.cat(states, dim=1), positions, decoder)
    norms = [
        Buffer(weakref.ref(layer.get_submodule(name.removesuffix(".weight"))), "weight")
        for name, weight in layer.named_parameters()
        if name.endswith(".weight") and weight.shape == keys.shape[-1:] and not weight.is_meta
    ]
    if rotation is not None and len(norms) == 2:
        states = [one / norm().detach() for one, norm in zip(states, norms, strict=True)]
        before = rotation_of(kind, torch.cat(states, dim=1), positions, decoder)
        if before is not None and before.error < rotation.error / 2:  # not by chance
            return replace(before, scales=(norms[0], norms[1]))
    return rotation


def rotation_of(kind: str, states: Tensor, positions: Tensor, decoder: Any) -> Rotation | None:
    """Return the rotation that best fits a probe's queries and keys, or why none does.

    None for zeros, numbers that are not finite, or one position. Sizes are ignored: some models let
    them grow with the position. The error is the root mean square of pairs' relative differences.
    States are (n_tokens * n_positions, n_heads, 1, head_dim): each token at all positions, the
    first one 0, then the next.
    """
    import torch

    rows = torch.nn.functional.normalize(states.float(), dim=-1)
    rows = rows.reshape(-1, len(positions), *states.shape[1:])
    at_zero, places = rows[:, :1].expand_as(rows), positions.to(rows.device)[:, None, None]

    def judged(rotation: Rotation) -> Rotation:
        differences, sizes = (
            _squares_by_pair(one, rotation)
            for one in (rows - rotate(at_zero, places, rotation), rows)
        )
        shares = differences / sizes.clamp(min=_SMALLEST * sizes.max())
        return replace(rotation, error=float(shares.mean().sqrt()))

    unrotated = judged(NO_ROTATION)
    if not (math.isfinite(unrotated.error) and positions.any()):
        return None
    by_buffers = (one for table in _tables(decoder) for one in _layouts(table, rows.shape[-1]))
    for candidates in ([NO_ROTATION, *by_buffers], _measured(rows, places)):
        best = min(map(judged, candidates), key=lambda one: one.error)
        if best.error < _TOLERANCE:
            return best
    why = f"queries and keys of {kind} change with the position, and not by one rotation"
    return replace(UNKNOWN, fixed=why)


def _layouts(source: Callable[[], Tensor], head_dim: int) -> Iterator[Rotation]:
    """Yield the usual rotations by these frequencies, halves of a head first."""
    n_rotated = 2 * len(source())
    for start in sorted({0, head_dim - n_rotated} if n_rotated <= head_dim else {}):
        middle, end = start + n_rotated // 2, start + n_rotated
        halves = slice(start, middle), slice(middle, end)
        neighbours = slice(start, end, 2), slice(start + 1, end, 2)
        for first, second in (halves, neighbours):
            yield Rotation(source, first, second)
            yield Rotation(source, second, first)


def _measured(rows: Tensor, places: Tensor) -> Iterator[Rotation]:
    """Yield rotations of the whole head by measured frequencies.

    Each position gives the next digits; the digits so far give the whole turns.
    """
    import torch

    for layout in _layouts(partial(torch.zeros, rows.shape[-1] // 2), rows.shape[-1]):
        pairs = torch.complex(rows[..., layout.first], rows[..., layout.second])
        turns = (pairs * pairs[:, :1].conj()).sum(dim=(0, 2, 3))
        frequencies = torch.zeros_like(turns[0].real)
        for place, turn in zip(places.flatten()[1:], turns[1:], strict=True):
            back = torch.polar(torch.ones_like(frequencies), -place * frequencies)
            frequencies = frequencies + (turn * back).angle() / place
        yield replace(layout, source=partial(torch.clone, frequencies))


def _squares_by_pair(states: Tensor, rotation: Rotation) -> Tensor:
    squares = states.square().flatten(0, -2).sum(dim=0)
    pairs = squares[rotation.first] + squares[rotation.second]
    squares[rotation.first] = squares[rotation.second] = pairs
    return squares


def _tables(decoder: Any) -> Iterator[Buffer]:
    for part in decoder.modules():
        for name, buffer in part.named_buffers(recurse=False):
            named = name.endswith("inv_freq") and not name.endswith("original_inv_freq")
            if named and buffer.ndim == 1:
                yield Buffer(weakref.ref(part), name)
