"""Rows of bench_runtime.py on fewer bits: the same entries at 16, 8 and 4, decoded in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from kvalloc.formats.budget_profile import BudgetProfile

__all__ = ["FEWER", "at_bits", "bits_rows"]

FEWER = (8, 4)


def at_bits(profile: BudgetProfile, bits: int) -> BudgetProfile:
    """The same budgets, each entry at so many bits."""
    return profile.replace(bits=np.full(profile.budgets.shape, bits, dtype=np.int64))


def bits_rows(
    caches: Mapping[int, Any],
    *,
    prompt: str,
    decode: Callable[[Any], None],
    in_turns: Callable[[Mapping[str, Callable[[], object]]], Any],
    ratio_of: Callable[[Any, str, str], dict[str, float]],
) -> Iterator[dict[str, Any]]:
    """Tokens a second at fewer bits over those at 16, of caches of a prompt by their bits."""
    stored = {bits: cache.retained_bytes for bits, cache in caches.items()}
    calls = {str(bits): lambda cache=cache: decode(cache) for bits, cache in caches.items()}
    found = in_turns(calls)
    for bits in FEWER:
        share = stored[bits] / stored[16]
        yield {
            "name": f"decode by head at {bits} bits / at 16, {prompt}, tokens a second",
            **ratio_of(found, "16", str(bits)),
            "target": None,
            "at_most": False,
            "met": True,  # nothing is asked of it
            "note": f"the same entries of the prompt in {share:.3f} of the bytes",
        }
