"""A decoded token on a device that is not there: what it asks of the device, and launches.

Tensors on torch's device ``meta`` stand for those on CUDA: they have shapes and no data, so whoever
wants a value, which would make the host wait, fails. Triton's kernels are noted and not run.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvalloc.runtime.tail import FIRST_TOKENS

__all__ = ["DeviceWaitError", "Launches", "decoded_on_fake_device", "evicted_on_fake_device"]

_NO_LAUNCH = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach")

WARM = FIRST_TOKENS + 1
"""Tokens that are decoded before: what is made once for each eviction is made then, and what
followed has room for one more."""


class DeviceWaitError(Exception):
    """The host waits for a value of the device, or the device for one of the host."""


class Launches(TorchDispatchMode):
    """Counts what is launched on the device, by name.

    Attributes
    ----------
    counts : collections.Counter of str
    read : int
        Numbers that the host has read, of any device.
    strict : bool
        Whether numbers of the host may not go to the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.strict, self.read = False, 0
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run it, and count it if it launches anything."""
        name = func.overloadpacket.__name__
        try:
            out = func(*args, **(kwargs or {}))
        except (RuntimeError, NotImplementedError) as error:
            raise DeviceWaitError(f"{name} wants a value of the device") from error
        self.read += name == "_local_scalar_dense"
        tensors = [one for one in tree_leaves((args, kwargs, out)) if isinstance(one, Tensor)]
        devices = {one.device.type for one in tensors if one.numel()}
        if self.strict and name in ("_to_copy", "copy_") and len(devices) > 1:
            raise DeviceWaitError(f"{name} goes from the host to the device")
        if "meta" in devices and not func.is_view and name not in _NO_LAUNCH:
            self.counts[name] += 1
        return out


def decoded_on_fake_device(
    make_model: Callable[[], Any], fill: Callable[[Any], Any], make_cache: Callable[[Any], Any]
) -> collections.Counter[str]:
    """What a token launches that is decoded after a prompt and `WARM` tokens.

    Then another one is decoded in place, without the model; what that launches is counted by names
    with "in place, " in front.

    Parameters
    ----------
    make_model : callable
        Makes the model; called once on the CPU and once on the device.
    fill : callable
        ``fill(model)`` gives a cache on the CPU that has read a prompt.
    make_cache : callable
        ``make_cache(model)`` gives an empty cache of the same kind.

    Raises
    ------
    DeviceWaitError
        If a value goes between device and host while it is decoded.
    """
    launches, model = Launches(), make_model()
    with torch.no_grad():
        filled = fill(make_model())
    with contextlib.ExitStack() as stack:
        stack.enter_context(_fake_device(launches))
        cache = make_cache(model)
        _move_model(model)
        for layer, full in zip(cache.layers, filled.layers, strict=True):
            layer.__dict__.update(_moved(full.__dict__))
            layer.device = torch.device("meta")
        if hasattr(cache, "arrival"):
            cache.arrival.__dict__.update(filled.arrival.__dict__)
        rows = int(cache.layers[0].keys.shape[0])
        ids = torch.ones(rows, 1, dtype=torch.long, device="meta")
        for number in range(WARM + 1):
            launches.strict = number == WARM
            launches.counts.clear()
            with launches:
                model(ids, past_key_values=cache)
        counts = launches.counts.copy()
        cache.reserve()
        assert cache.in_place
        launches.counts.clear()
        with launches:
            cache.begin_forward(cache.decoder(), {"input_ids": ids})
            cache.count()
            for index, layer in enumerate(cache.layers):
                heads = layer.attention.queries.shape[1], *[layer.keys.shape[1]] * 2
                sizes = [(rows, own, 1, layer.keys.shape[3]) for own in heads]
                cache.decode(index, *(torch.empty(size, device="meta") for size in sizes))
        return counts + collections.Counter(
            {f"in place, {name}": number for name, number in launches.counts.items()}
        )


def evicted_on_fake_device(model: Any, cache: Any, mask: Tensor, following: int = 0) -> int:
    """How often the host reads the device while a prompt is evicted, or what waits for more.

    What is noted to be checked holds, and counts as one read where it is read.

    Parameters
    ----------
    model, cache : PreTrainedModel and BudgetCache
        On the CPU, the cache empty; the model is moved.
    mask : Tensor, (rows, tokens)
        Of the prompt, on the host: eager attention reads none that is on the device.
    following : int
        How many tokens follow it one by one.

    Raises
    ------
    DeviceWaitError
        If anything else is read.
    """
    launches, reads = Launches(), 0

    def values(flags: list[Tensor]) -> list[bool]:
        nonlocal reads
        reads += 1
        return [True] * len(flags)

    with _fake_device(launches), mock.patch("kvalloc.runtime.checks._values", values), launches:
        _move_model(model)
        for given in (mask, *[None] * following):
            columns = 1 if given is None else given.shape[1]
            ids = torch.ones(mask.shape[0], columns, dtype=torch.long, device="meta")
            model(ids, attention_mask=given, past_key_values=cache)
    return reads


@contextlib.contextmanager
def _fake_device(launches: Launches) -> Iterator[None]:
    """Tensors on ``meta`` are taken for those on CUDA, and no gradients are asked for."""

    def noted(kernel: Any, *arguments: Any, **options: Any) -> None:
        launches.counts[kernel.__name__] += 1

    on_device = property(lambda tensor: tensor.device.type == "meta")
    properties = mock.Mock(multi_processor_count=132)
    with (
        mock.patch("triton.runtime.jit.JITFunction.run", noted),
        mock.patch("torch.autocast", return_value=contextlib.nullcontext()),  # none for meta
        mock.patch("torch.is_autocast_enabled", return_value=False),  # older transformers ask
        mock.patch("torch.cuda.device_of", return_value=contextlib.nullcontext()),
        mock.patch("torch.cuda.get_device_properties", return_value=properties),
        mock.patch.object(torch.Tensor, "is_cuda", on_device),
        torch.no_grad(),
    ):
        yield


def _move_model(model: Any) -> None:
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            own.update({k: None if one is None else _moved(one) for k, one in own.items()})


def _moved(given: Any) -> Any:
    """A copy whose tensors are on the device."""
    if isinstance(given, torch.nn.Parameter):
        return torch.nn.Parameter(given.to("meta"), requires_grad=False)
    if isinstance(given, Tensor):
        return given.to("meta")
    if isinstance(given, torch.device):
        return torch.device("meta")
    if dataclasses.is_dataclass(given) and not isinstance(given, type):
        own = {
            one.name: _moved(getattr(given, one.name))
            for one in dataclasses.fields(given)
            if one.init
        }
        return dataclasses.replace(given, **own)
    if isinstance(given, dict):
        return {name: _moved(one) for name, one in given.items()}
    if isinstance(given, list | tuple) and type(given) in (list, tuple):
        return type(given)(map(_moved, given))
    if hasattr(given, "buffers") and hasattr(given, "tokens"):
        other = copy.copy(given)
        other.__dict__.update(_moved(given.__dict__))
        return other
    return given
