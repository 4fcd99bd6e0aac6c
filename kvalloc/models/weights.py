"""Digests that distinguish models' weights, and other inputs of forwards."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from hashlib import sha256
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from kvalloc.models.names import own_parts, packed_numbers, placement, version
from kvalloc.models.structure import decoder_of, is_packed, plain_weight, rotary_settings
from kvalloc.shape import HALF_BYTES

if TYPE_CHECKING:
    from torch import Tensor, nn

_SAMPLES, _EXPERT_SAMPLES = 64, 8
"""Number of sampled elements of each weight, and of each expert in a weight of several."""

_NO_EFFECT = re.compile(
    "dropout|initializer|name|token_id|use_cache|output_|dtype|architectures|version|quantization|"
    "return|tie_|label|attn_implementation"
)
"""Parts of names of config fields that change no forward, or have their effect in the weights."""


class _Part(NamedTuple):
    """A tensor or a number of a forward.

    Its `stamp` changes with it, as far as this shows without reading; `values` reads tensors or
    texts. While any `source` lives, an equal stamp means the same part.
    """

    stamp: Any
    values: Callable[[], list[Any]]
    source: Any = None


class _Digests(NamedTuple):
    """Digests of exact values, and of values rounded to bfloat16 and to float16.

    A quantized form is never rounded; `rounded` is None if weights are not loaded.
    """

    exact: str
    rounded: tuple[str, ...] | None


_KNOWN: weakref.WeakKeyDictionary[Any, tuple[list[Any], list[Any], _Digests]]
_KNOWN = weakref.WeakKeyDictionary()
"""Stamps of parts, weak references to their holders, and digests, by module."""


def known_weights(model: Any) -> tuple[str, ...] | None:
    """Return digests of decoder and head, which `ModelShape.has_weights_of` compares.

    They are of weights rounded to bfloat16 and to float16, or one digest of a quantized form; None
    if weights are not loaded. They are read again if tensors, adapters, their scales or the config
    changed. Torch does not count writes through ``.data``.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    digests = [_remembered(one) for one in (decoder_of(model), head) if one is not None]
    rounded = [one.rounded for one in digests if one.rounded is not None]
    if len(rounded) < len(digests):
        return None
    if min(map(len, rounded)) == 1:
        rounded = [(one.exact,) for one in digests]
    return tuple(sha256("".join(each).encode()).hexdigest() for each in zip(*rounded, strict=True))


def weights_digest(module: Any) -> str:
    """Return a digest of a model's or decoder's weights in their own types, read now.

    It covers shapes, types and 64 values of each parameter and buffer, the config and active
    adapters. A change of other values is not noticed. Offloaded weights are read; others not loaded
    are left out.
    """
    return _digests(_parts(module)).exact


def _remembered(module: nn.Module) -> _Digests:
    """Return a module's digests; read its parts only if one has changed."""
    parts = _parts(module)
    stamps = [part.stamp for part in parts]
    known = _KNOWN.get(module)
    if known is None or known[0] != stamps or any(holder() is None for holder in known[1]):
        holders = [weakref.ref(part.source) for part in parts if part.source is not None]
        known = _KNOWN[module] = (stamps, holders, _digests(parts))
    return known[2]


def _parts(module: nn.Module) -> list[_Part]:
    from torch import Tensor

    parts: list[_Part] = []
    children = {id(child) for child in module.children()}
    config, rotary = getattr(module, "config", None), ""
    if config is not None:
        fields = {name: value for name, value in vars(config).items() if name[0] != "_"}
        parts.append(_Part(str(fields), lambda: [_effective(config)], config))
        rotary = rotary_settings(config) or ""
    # frequencies that depend on the length of the text
    varies = any(kind in rotary for kind in ("dynamic", "longrope"))

    def collect(module: Any, name: str, hooks: Mapping[str, Any]) -> None:
        if is_packed(module):
            readers = [getattr(module, name, str) for name in ("weight", "bias")]
            stamp = id(packed_numbers(module))
            parts.append(_Part(stamp, lambda: [one() for one in readers], module))
            return
        if (hook := placement(module)) is not None and hook.weights_map is not None:
            hooks = {**hooks, name: hook}
        for key, value in own_parts(module):
            if isinstance(value, Tensor):
                if value.is_meta and (around := [one for one in hooks if name.startswith(one)]):
                    hook, name_below = hooks[around[-1]], f"{name}{key}"[len(around[-1]) :]
                    read = partial(_offloaded, hook, name_below)
                    parts.append(_Part((id(hook), name_below), read, hook))
                elif not (varies and "inv_freq" in key):
                    parts.append(_Part(_stamp(value), partial(_plain_tensors, value), value))
            elif hasattr(value, "named_children"):
                if name and id(value) in children:  # such as kvpress' link to the rotary embedding
                    continue
                collect(value, f"{name}{key}.", hooks)
            else:  # a number, or a setting of an adapter
                text = json.dumps(value, default=lambda one: type(one).__name__)
                text = str(value) if isinstance(value, float) else text
                parts.append(_Part(text, partial(list, [text])))

    collect(module, "", {})
    return parts


def _offloaded(hook: Any, name: str) -> list[Tensor]:
    return _plain_tensors(hook.weights_map[name])


def _effective(config: Any) -> str:
    """Return a config's fields that may change a forward and are not the default."""
    default: dict[str, Any] = {}
    with suppress(Exception):  # a config that cannot be made without values
        default = type(config)().to_dict()
    fields = {
        name: value
        for name, value in config.to_dict().items()
        if name[0] != "_" and not _NO_EFFECT.search(name)
        if name == "model_type" or name not in default or default[name] != value
    }
    return json.dumps(fields, sort_keys=True, default=str)


def _plain_tensors(tensor: Any) -> list[Tensor]:
    if not hasattr(type(tensor), "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [one for name in names for one in _plain_tensors(getattr(tensor, name))]


def _stamp(tensor: Tensor) -> list[tuple[int, int, int]]:
    return [
        (id(one), version(one), 0 if one.is_meta else one.data_ptr())
        for one in _plain_tensors(tensor)
    ]


def _digests(parts: list[_Part]) -> _Digests:
    import torch

    hashers = {dtype: sha256() for dtype in (None, torch.bfloat16, torch.float16)}
    loaded = plain = True
    for value in chain.from_iterable(part.values() for part in parts):
        if not isinstance(value, torch.Tensor):
            for hasher in hashers.values():
                hasher.update(f"{value}\n".encode())
            continue
        loaded &= not value.is_meta
        wide = value.dtype.itemsize >= HALF_BYTES and value.is_floating_point()
        plain &= wide or value.dtype in (torch.bool, torch.int64)  # masks and positions
        sampled = _sampled(value)
        for dtype, hasher in hashers.items():
            rounded = sampled if dtype is None or not wide else sampled.to(dtype)
            hasher.update(f"{tuple(value.shape)} {rounded.dtype}\n".encode())
            hasher.update(rounded.view(torch.uint8).numpy().data)
    exact, *more = (hasher.hexdigest() for hasher in hashers.values())
    if not loaded:
        return _Digests(exact, None)
    return _Digests(exact, tuple(more) if plain else (exact,))


def _sampled(tensor: Tensor) -> Tensor:
    import torch

    if tensor.is_meta or not tensor.numel():
        return torch.empty(0)
    values = plain_weight(tensor.detach()).reshape(-1)
    count = max(_SAMPLES, _EXPERT_SAMPLES * len(tensor) if tensor.ndim > 2 else 0)
    count = min(count, values.numel())
    places = torch.arange(count, device="cpu") * (values.numel() - 1) // max(1, count - 1)
    return values[places.to(values.device)].cpu()
