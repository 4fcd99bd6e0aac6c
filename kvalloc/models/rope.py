"""Rotary position embeddings (RoPE): a layer's inverse frequencies, and rotation by them.

Transformers has no interface that tells whether and how a layer rotates its queries, so a layer is
judged by what it computes: its queries of a token at several positions are compared with those at
position 0, rotated by `rotate`. What cannot be compared counts as unknown, never as plain rotation.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from kvalloc.errors import UnsupportedModelError, one_line, warn_user
from kvalloc.models.structure import context_limit, has_compiled_layers, input_device, text_config

if TYPE_CHECKING:
    from torch import Tensor, nn

Rotation: TypeAlias = "tuple[weakref.ref[nn.Module], str] | str"
"""A module and the name of its buffer of inverse frequencies, which the model may replace as a text
grows; or a sentence that says why a layer has none."""

_POSITIONS = (0, 1, 17, 200)
"""Positions of a probe: small ones for pairs that rotate fast, large ones for slow pairs."""

_TOKENS = (1, 2)
"""Tokens of a probe: two, because one may be the padding token, whose embedding is zero."""

_SMALLEST = 1e-6
"""Smallest size of a pair that is compared by its own size, as a share of the largest pair's."""

_TOLERANCE = 0.02
"""Largest difference of the queries from the expected ones, as a share of their size.

Rotation of neighbours differs by more than 0.5, and by frequencies that are 1% off by more than
0.1. Rotation by the same frequencies in TF32, which a graphics card may round to, differs by less
than 0.005.
"""


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


def current_frequencies(rotation: Rotation) -> Tensor | str:
    """Return the inverse frequencies of a layer as they are now, or why it has none."""
    if isinstance(rotation, str):
        return rotation
    module, name = rotation
    return getattr(module(), name, f"the module with its {name} is gone")


def probed_rotations(
    decoder: Any,
    layers: Mapping[int, nn.Module],
    intercepting: Callable[[Callable[..., Any]], AbstractContextManager[None]],
) -> tuple[dict[int, Rotation], bool]:
    """Return how each layer rotates its queries, from one forward of a few tokens.

    Warns if the forward fails, since policies that rotate queries are then not used.

    Parameters
    ----------
    decoder : nn.Module
        The model without its language-model head. Its own hooks are skipped, since they may be
        kvalloc's; hooks of its parts run, since they may load weights.
    layers : mapping of int to nn.Module
        The attention module of each layer.
    intercepting : callable
        Takes a handler of attention calls, and returns the ``with`` in which it is called.

    Returns
    -------
    rotations : dict of int to Rotation
        By layer. It has no strong reference to the decoder.
    final : bool
        Whether a later probe would find the same. Not if the forward failed, queries were zeros,
        or the model is in training mode.
    """
    queries: dict[int, Tensor] = {}

    def attend(states: Any, compute: object) -> tuple[Tensor, None]:
        queries[states.layer] = states.queries
        # Attention to a single key returns its value. A layer with sinks would compute something
        # that depends on the position, too.
        group = states.queries.shape[1] // states.values.shape[1]
        return states.values.repeat_interleave(group, dim=1).transpose(1, 2).contiguous(), None

    tables = [
        (part, name)
        for part in decoder.modules()
        for name, _ in part.named_buffers(recurse=False)
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq")
    ]
    rotations: dict[int, Rotation | None] = {}
    reason = "a probe finds zeros or no numbers"
    try:
        with intercepting(attend):
            positions = _run(decoder)
            for layer in queries.keys() & layers.keys():
                # dropout may change its queries then
                kind = type(layers[layer]).__name__ + " in training mode" * decoder.training
                rotations[layer] = _rotation(kind, queries[layer], positions, tables)
    except Exception as error:  # models fail in any way
        reason = f"a probe raises {type(error).__name__}: {one_line(error)}"
        rotations = dict.fromkeys(layers)
        kind = type(decoder).__name__
        warn_user(f"it is not known how {kind} rotates its queries: {reason}")
    final = not decoder.training and None not in rotations.values()
    for layer, module in layers.items():
        if rotations.get(layer) is None:
            why = reason if layer in rotations else "a probe calls no attention of it"
            kind = type(module).__name__
            rotations[layer] = f"it is not known when {kind} rotates its queries: {why}"
    return cast("dict[int, Rotation]", rotations), final


def _run(decoder: Any) -> Tensor:
    """Run a decoder over a few tokens at several positions, and return the positions.

    Each token is a row of its own, so its queries depend on the token and the position alone,
    even if attention, a convolution or a recurrence mixes the tokens of a row.
    """
    import torch

    if has_compiled_layers(decoder):
        raise UnsupportedModelError("its layers are compiled")
    device = input_device(decoder)
    device = torch.device("cpu") if device.type == "meta" else device  # a hook loads the weights
    n_positions = context_limit(decoder) or _POSITIONS[-1] + 1
    if n_positions == 1:
        raise UnsupportedModelError("its context has a single position")
    positions = torch.tensor(_POSITIONS, device=device).clamp(max=n_positions - 1)
    ids = torch.tensor(_TOKENS, device=device).clamp(max=text_config(decoder).vocab_size - 1)
    # a model in training, or a router of experts, may draw random numbers
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        type(decoder).forward(
            decoder,
            input_ids=ids.repeat_interleave(len(positions))[:, None],
            position_ids=positions.repeat(len(ids))[:, None],
            use_cache=False,
        )
    return positions


def _rotation(
    kind: str, queries: Tensor, positions: Tensor, tables: Sequence[tuple[nn.Module, str]]
) -> Rotation | None:
    """Return the table that fits the queries of a probe best, or a sentence if none fits.

    None if the queries are zeros or no numbers.
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
    for part, name in tables:
        frequencies = getattr(part, name)
        if frequencies.ndim != 1 or 2 * len(frequencies) > rows.shape[-1]:
            continue
        rotated = rotate(at_zero, places, frequencies.to(rows.device))
        if (rotated_error := error(rotated, len(frequencies))) < smallest_error:
            best, smallest_error = (weakref.ref(part), name), rotated_error
    return best
