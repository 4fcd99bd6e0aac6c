"""Stand-ins with the interface of kvpress' presses: context managers that hook the layers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY

from kvalloc.models.names import cache_among

N_PROMPT = 30


class BasePress:
    """As kvpress': a hook after each layer's attention, which changes what its cache stores."""

    def __init__(self, compression_ratio: float = 0.0) -> None:
        self.compression_ratio = compression_ratio

    def post_init_from_model(self, model: Any) -> None:
        """Nothing to prepare."""

    def forward_hook(self, module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        layer, hidden = cache_among(kwargs).layers[module.layer_idx], kwargs["hidden_states"]
        assert hidden.shape[1] == layer.keys.shape[2]
        stored = (layer.keys, layer.values)
        layer.keys, layer.values = self.compress(module, hidden, *stored, None, kwargs)
        return output

    @contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        self.post_init_from_model(model)
        layers = [layer.self_attn for layer in model.model.layers]
        hooks = [one.register_forward_hook(self.forward_hook, with_kwargs=True) for one in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class ScorerPress(BasePress):
    """Base of presses that score entries."""


def install(monkeypatch: pytest.MonkeyPatch, *presses: type) -> None:
    """Let ``import kvpress`` find these presses."""
    module = ModuleType("kvpress")
    module.__spec__ = ModuleSpec("kvpress", None)
    for press in (BasePress, ScorerPress, *presses):
        setattr(module, press.__name__, press)
    monkeypatch.setitem(sys.modules, "kvpress", module)


def prompt_ids(seed: int = 3) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(2, VOCABULARY, (N_PROMPT,), generator=generator).tolist())
