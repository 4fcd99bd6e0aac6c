"""Rows of bench_runtime.py on the CPU's kernel: the same caches with it and without, in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

from kvalloc.runtime.attention import cpu

__all__ = ["kernel_rows", "state"]


def state() -> str:
    """Whether the kernel is there, in words."""
    reason = cpu.unavailable()
    return "kernel of the CPU compiled" if reason is None else f"no kernel of the CPU: {reason}"


def kernel_rows(
    caches: Mapping[str, Any],
    *,
    prompt: str,
    decode: Callable[[Any], None],
    in_turns: Callable[[Mapping[str, Callable[[], object]]], Any],
    ratio_of: Callable[[Any, str, str], dict[str, float]],
) -> Iterator[dict[str, Any]]:
    """Tokens a second with the kernel over those of torch's operations, of caches by their name."""

    def without(cache: Any) -> None:
        with mock.patch.object(cpu.CpuBackend, "refusal", return_value="torch is measured"):
            decode(cache)

    if cpu.unavailable() is not None:
        return
    calls: dict[str, Callable[[], object]] = {}
    for name, cache in caches.items():
        calls[name] = lambda cache=cache: decode(cache)
        calls[f"{name} without"] = lambda cache=cache: without(cache)
    found = in_turns(calls)
    for name in caches:
        yield {
            "name": f"decode {name} with the CPU's kernel / without, {prompt}, tokens a second",
            **ratio_of(found, f"{name} without", name),
            "target": None,
            "at_most": False,
            "met": True,  # nothing is asked of it
            "note": "the same cache in turns",
        }
