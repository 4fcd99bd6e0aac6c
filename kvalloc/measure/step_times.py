"""Seconds of a decoding step: measured, or published."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import DynamicCache

from kvalloc.accounting.costs import plain_bytes
from kvalloc.extensions.making import make_cache
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.models.loading import shape_of
from kvalloc.models.names import cache_keyword
from kvalloc.units import duration

DEVICES = {
    "a100": (2.039e12, 312e12),
    "h100": (3.35e12, 989.4e12),
    "h200": (4.8e12, 989.4e12),
}
"""Bytes of memory a second, and multiply-adds at 16 bits a second, from NVIDIA's data sheets: A100
80GB SXM, H100 SXM, H200 SXM, without sparsity."""

ROWS = (1, 2, 4, 8, 16, 32)
"""Rows of the measured steps of the model."""

CACHE_ROWS, ROUNDS, FEW_TOKENS, FOLLOWED = 8, 6, 8, 32
"""Rows of the measured caches, rounds of each step, tokens of a cache of no cost, and new tokens
after a prompt."""


class Line(NamedTuple):
    """Seconds of one row, linear in its bytes or tokens."""

    fixed: float
    slope: float

    def at(self, count: float) -> float:
        """Return the seconds of some bytes or tokens."""
        return self.fixed + self.slope * count

    @classmethod
    def through(cls, low: tuple[float, float], high: tuple[float, float]) -> Line:
        """Return the rising line through two points, never below 0."""
        (first, fast), (last, slow) = low, high
        slope = min(max(slow - fast, 0.0) / (last - first), slow / last) if last > first else 0.0
        return cls(max(slow - slope * last, 0.0), slope)


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of a decoding step, for model and row caches.

    Attributes
    ----------
    rows : tuple of int
        Measured numbers of rows, rising; linear between and beyond.
    model_seconds : tuple of float
        With an empty cache.
    plain, kept, followed : Line
        For a plain cache, kept entries, and newer entries, over bytes.
    evicting, entered : Line
        For an eviction, over tokens seen before, and over new ones.
    """

    rows: tuple[int, ...]
    model_seconds: tuple[float, ...]
    plain: Line
    kept: Line
    followed: Line
    evicting: Line
    entered: Line
    source: str

    def of_model(self, rows: int) -> float:
        """Return the seconds of a step with an empty cache."""
        if rows <= self.rows[-1]:
            return float(np.interp(rows, self.rows, self.model_seconds))
        (first, last), (fast, slow) = self.rows[-2:], self.model_seconds[-2:]
        return slow + max(slow - fast, 0.0) / (last - first) * (rows - last)


def device_steps(model: Any, name: str) -> StepTimes:
    """Return the times of one of `DEVICES` by published figures, a lower bound.

    A step reads the weights, or takes its products' longer time, and reads each row's cache.
    """
    bandwidth, products = DEVICES[name]
    table = model.get_input_embeddings().weight
    read = [weight for weight in model.parameters() if weight is not table]
    if model.get_output_embeddings().weight is table:
        read.append(table)  # else one row of it is read
    n_weights, n_bytes = sum(one.numel() for one in read), sum(one.nbytes for one in read)
    balanced = max(round(n_bytes / bandwidth * products / (2 * n_weights)), 1)
    rows = (1, balanced + 1, 2 * (balanced + 1))
    once = Line(0.0, 1 / bandwidth)
    return StepTimes(
        rows=rows,
        model_seconds=tuple(max(n_bytes / bandwidth, 2 * n_weights * n / products) for n in rows),
        plain=once,
        kept=once,
        followed=once,
        evicting=Line(0.0, 0.0),
        entered=Line(0.0, 0.0),
        source=f"published figures of {name.upper()}, which no run reaches",
    )


@torch.inference_mode()
def measure_steps(
    model: Any, profiles: tuple[BudgetProfile, BudgetProfile], plain_tokens: int
) -> StepTimes:
    """Measure steps on the model's device.

    The profiles have different prompts and shares; a plain cache is one row.
    """
    begun, shape = time.perf_counter(), shape_of(model)

    def read(cache: Any, tokens: int, rows: int) -> Callable[[int], object]:
        def forward(rows: int, tokens: int) -> None:
            ids = torch.ones((rows, tokens), dtype=torch.long, device=model.device)
            model(input_ids=ids, logits_to_keep=1, **cache_keyword(model, cache))

        forward(1, tokens)
        cache.batch_repeat_interleave(rows)
        return lambda tokens: forward(rows, tokens)

    def plain(rows: int, tokens: int = FEW_TOKENS) -> Callable[[int], object]:
        cache: Any = DynamicCache(config=model.config)
        add = read(cache, FEW_TOKENS, rows)
        more = (1, 1, -(-tokens // FEW_TOKENS) - 1, 1)
        for place, layer in enumerate(cache.layers):
            cache.update(layer.keys.repeat(more), layer.values.repeat(more), place)
        return add

    lengths = [one.context_tokens for one in profiles]
    reduced = [make_cache(model, one, allow_other_model=True) for one in profiles]
    adding: dict[Any, Callable[[int], object]] = {rows: plain(rows) for rows in ROWS}
    adding["plain"] = plain(1, plain_tokens)
    for place, cache in enumerate(reduced):
        adding[f"reduced {place}"] = read(cache, lengths[place], CACHE_ROWS)
    steps = {name: partial(add, 1) for name, add in adding.items()}
    seconds = _in_turns(steps)

    def of_row(name: str, step: Mapping[Any, float]) -> float:
        return max(step[name] - step[CACHE_ROWS], 0.0) / CACHE_ROWS

    def eviction(place: int, followed: int) -> float:
        taken = []
        for _ in range(2):
            adding[f"reduced {place}"](followed)
            taken.append(_seconds(reduced[place].end_turn))
        return min(taken) / CACHE_ROWS

    kept = [
        (cache.retained_bytes / CACHE_ROWS, of_row(f"reduced {place}", seconds))
        for place, cache in enumerate(reduced)
    ]
    evicting = [(tokens, eviction(place, 1)) for place, tokens in enumerate(lengths)]
    added = eviction(1, FOLLOWED) - evicting[1][1]
    adding["reduced 1"](FOLLOWED)
    followed = _in_turns({name: steps[name] for name in (CACHE_ROWS, "reduced 1")})
    slower = of_row("reduced 1", followed) - kept[1][1]
    return StepTimes(
        rows=ROWS,
        model_seconds=tuple(seconds[rows] for rows in ROWS),
        plain=Line(0.0, max(seconds["plain"] - seconds[1], 0.0) / plain_bytes(shape, plain_tokens)),
        kept=Line.through(*kept),
        followed=Line(0.0, max(slower, 0.0) / plain_bytes(shape, FOLLOWED)),
        evicting=Line.through(*evicting),
        entered=Line(0.0, max(added, 0.0) / FOLLOWED),
        source=f"measured on this {model.device.type} in {duration(time.perf_counter() - begun)}",
    )


def _in_turns(calls: Mapping[Any, Callable[[], object]]) -> dict[Any, float]:
    """Return the lowest seconds of each call."""
    rounds = [{name: _seconds(call) for name, call in calls.items()} for _ in range(ROUNDS)]
    return {name: min(one[name] for one in rounds) for name in calls}


def _seconds(call: Callable[[], object]) -> float:
    _wait()
    begun = time.perf_counter()
    call()
    _wait()
    return time.perf_counter() - begun


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
