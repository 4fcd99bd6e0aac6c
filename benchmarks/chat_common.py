"""Texts, bytes of a cache, and rows: shared by the parts of bench_chat.py."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator
from importlib import resources
from typing import Any

from _common import Row
from torch import Tensor, nn

from kvalloc.accounting.stored import storages
from kvalloc.models.loading import LoadedModel
from kvalloc.shape import HALF_BYTES

TEXTS = ("ford_1976", "hayes_1878", "hoover_1930", "truman_1950", "argparse.py")
SHARE, LARGEST = 0.2, 0.22
"""What is to be kept, and the largest share that counts as kept."""


def held_out(loaded: LoadedModel, tokens: int, texts: int) -> Iterator[tuple[str, Tensor]]:
    """Yield names and first tokens of texts that nothing was calibrated on, each (1, tokens)."""
    folder = resources.files("kvalloc.data.texts")
    for name in TEXTS[:texts]:
        speech = folder / f"heldout_{name}.txt"
        text = inspect.getsource(argparse) if name.endswith(".py") else speech.read_text("utf-8")
        yield name, loaded.tokenizer(text, return_tensors="pt")["input_ids"][:, :tokens]


def tensors_in(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield every tensor that an object refers to, weights of modules left out."""
    if isinstance(thing, nn.Module) or callable(thing) or id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, list | tuple | dict):
        for inner in thing.values() if isinstance(thing, dict) else thing:
            yield from tensors_in(inner, seen)
    elif hasattr(thing, "__dict__"):
        yield from tensors_in(vars(thing), seen)


def layer_bytes(cache: Any, *, half: bool = False) -> int:
    """Return the bytes of all storages in a cache's layers; by half, at most 16 bits a number."""
    return sum(
        storage.nbytes() * (min(one.itemsize, HALF_BYTES) if half else one.itemsize) // one.itemsize
        for storage, _, one in storages(tensors_in(cache.layers, set()))
    )


def ratio_row(name: str, ratio: float, ratios: Tensor, target: float, note: str) -> Row:
    """Return a row with the smallest and the largest ratio of a text beside the ratio."""
    spread = {"low": float(ratios.min()), "high": float(ratios.max())}
    return {"name": name, "figure": ratio, **spread, "at_most": target, "note": note}
