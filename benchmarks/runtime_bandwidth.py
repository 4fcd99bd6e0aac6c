"""Rows of bench_runtime.py on CUDA: a decoded token against the time of reading what it reads."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from _common import quartiles

__all__ = ["bandwidth_row"]

BANDWIDTH_TARGET = 1.25


def bandwidth_row(
    model: Any, retained: int, level: str, seconds: list[float], new: int
) -> dict[str, Any]:
    """Seconds of a decoded token over those of reading what it has to read."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copies = []
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        copies.append(time.perf_counter() - start)
    bandwidth = 2 * source.nbytes / statistics.median(copies)
    table = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is table
    weights = sum(weight.nbytes for weight in model.parameters())
    weights -= 0 if tied else table.nbytes  # of the input table a token reads one row
    bound = (weights + retained) / bandwidth
    each = [one / new / bound for one in seconds]
    low, middle, high = quartiles(each)
    return {
        "name": f"decode by {level}, seconds / bandwidth bound",
        "ratio": middle,
        "ratio_quartile_1": low,
        "ratio_quartile_3": high,
        "target": BANDWIDTH_TARGET,
        "at_most": True,
        "note": f"bound {bound * 1e3:.2f} ms a token: {weights:,} bytes of weights and "
        f"{retained:,} retained at {bandwidth / 1e9:.0f} GB/s",
    }
