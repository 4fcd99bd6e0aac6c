"""How bench_runtime.py measures: in turns, on the clock and in processor time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

from _common import quartiles

__all__ = ["InTurns", "in_turns", "ratio_of"]

InTurns: TypeAlias = Mapping[str, tuple[list[float], list[float]]]
"""Of each thing compared, seconds on the clock and of the processor in each round."""


def in_turns(calls: Mapping[str, Callable[[], object]], *, repeats: int) -> InTurns:
    """Seconds on the clock and of the processor of each call, in another order in each round."""
    for call in calls.values():
        call()
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in calls}
    names = list(calls)
    for repeat in range(repeats):
        shift = repeat % len(names)
        for name in names[shift:] + names[:shift]:
            wall, processor = time.perf_counter(), time.process_time()
            calls[name]()
            found[name][0].append(time.perf_counter() - wall)
            found[name][1].append(time.process_time() - processor)
    return found


def ratio_of(found: InTurns, name: str, reference: str) -> dict[str, float]:
    """Median and quartiles of the ratios of each round, and the median in processor time."""
    clock, processor = (
        [a / b for a, b in zip(found[name][kind], found[reference][kind], strict=True)]
        for kind in range(2)
    )
    low, middle, high = quartiles(clock)
    return {
        "ratio": middle,
        "ratio_quartile_1": low,
        "ratio_quartile_3": high,
        "rounds": len(clock),
        "processor_ratio": statistics.median(processor),
    }
