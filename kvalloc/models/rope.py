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
from typing import TYPE_CHECKING, Any, TypeAlias

from kvalloc.errors import UnsupportedModelError, one_line
from kvalloc.models.structure import context_limit, has_compiled_layers, input_device, text_config

if TYPE_CHECKING:
    from torch import Tensor, nn

Rotation: TypeAlias = "tuple[weakref.ref[nn.Module], str] | str"
"""A module and the name of its buffer of inverse frequencies, which the model may replace as a text
grows; or a sentence that says why a layer has none."""

_POSITIONS = (0, 1, 17, 200)
"""Positions of a probe: small ones for pairs that rotate fast, large ones for slow pairs."""

_TOKENS = (1, 2)
"""Tokens of a probe: two, because the embedding of a padding token is zero."""

_TOLERANCE = 0.02
"""Largest difference from the expected queries, as a share of the queries' length.

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

    Parameters
    ----------
    decoder : nn.Module
        The model without its language-model head. Its own hooks do not run; those of its parts do.
    layers : mapping of int to nn.Module
        The attention module of each layer.
    intercepting : callable
        Takes a handler of attention calls, and returns the ``with`` in which it is called.

    Returns
    -------
    rotations : dict of int to Rotation
        By layer. Nothing in it keeps the decoder alive.
    complete : bool
        Whether the forward succeeded. If not, a later one may: memory may have been short.
    """
    queries: dict[int, Tensor] = {}

    def attend(states: Any, compute: object) -> tuple[Tensor, None]:
        queries[states.layer] = states.queries
        # Attention to a single key returns its value. A layer with sinks would compute something
        # that depends on the position, too.
        group = states.queries.shape[1] // states.values.shape[1]
        return states.values.repeat_interleave(group, dim=1).transpose(1, 2).contiguous(), None

    found: dict[int, Rotation] = {}
    reason = "a probe calls no attention of it"
    tables = [
        (part, name)
        for part in decoder.modules()
        for name, _ in part.named_buffers(recurse=False)
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq")
    ]
    try:
        with intercepting(attend):
            positions = _run(decoder)
            for layer in queries.keys() & layers.keys():
                kind = type(layers[layer]).__name__
                found[layer] = _rotation(kind, queries[layer], positions, tables)
        if decoder.training and any(isinstance(one, str) for one in found.values()):
            raise UnsupportedModelError("in training mode dropout may change the queries")
        complete = True
    except Exception as error:  # models fail in any way; a policy then goes without rotation
        complete, reason = False, f"a probe raises {type(error).__name__}: {one_line(error)}"
        found.clear()
    for layer, module in layers.items():
        unknown = f"it is not known when {type(module).__name__} rotates its queries: {reason}"
        found.setdefault(layer, unknown)
    return found, complete


def _run(decoder: Any) -> Tensor:
    """Run a decoder over a few tokens at several positions, and return the positions.

    Each token is a row of its own, so that its queries depend on the token and the position alone,
    whatever mixes the tokens of a row: attention, a convolution or a recurrence.
    """
    import torch

    if has_compiled_layers(decoder):
        raise UnsupportedModelError("its layers are compiled")
    device = input_device(decoder)
    device = torch.device("cpu") if device.type == "meta" else device  # a hook loads the weights
    last, vocabulary = context_limit(decoder), text_config(decoder).vocab_size
    positions = torch.tensor(_POSITIONS, device=device).clamp(max=last and last - 1)
    ids = torch.tensor(_TOKENS, device=device).clamp(max=vocabulary - 1)
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
) -> Rotation:
    """Return the table that fits the queries of a probe best, or a sentence if none fits."""
    import torch

    tolerance = max(_TOLERANCE, 8 * torch.finfo(queries.dtype).eps)
    rows = queries.float().reshape(-1, len(positions), *queries.shape[1:])
    at_zero, places = rows[:, :1].expand_as(rows), positions.to(rows.device)[:, None, None]

    def error(expected: Tensor) -> float:
        return float((rows - expected).norm() / rows.norm())

    unrotated = error(at_zero)
    if not math.isfinite(unrotated):
        return f"it is not known when {kind} rotates its queries: a probe finds zeros or no numbers"
    if unrotated < tolerance:
        return f"a layer of {kind} does not rotate its queries"
    best: Rotation = f"{kind} does not rotate halves of its queries by frequencies of the model"
    for part, name in tables:
        frequencies = getattr(part, name)
        if frequencies.ndim != 1 or 2 * len(frequencies) > rows.shape[-1]:
            continue
        rotated = rotate(at_zero, places, frequencies.to(rows.device))
        if (different := error(rotated)) < tolerance:
            best, tolerance = (weakref.ref(part), name), different
    return best
