"""With kernels for kept entries and the rounding of keys, or with torch's operations alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from kvalloc.runtime import key_rounding
from kvalloc.runtime.attention import cpu

WITH, WITHOUT = "with_kernel", "without_kernel"

NO_KERNEL = cpu.CpuBackend().unavailable()

needs_kernel = pytest.mark.skipif(NO_KERNEL is not None, reason=f"no kernel here: {NO_KERNEL}")


@contextlib.contextmanager
def kernel_choice(name: str) -> Iterator[list[int]]:
    """While it is open, the list gets the number of query tokens of each call of the CPU's kernel.

    Without kernels it is as where there is neither a compiler nor Triton. With them is also where
    this machine has none: then torch's operations do all (`NO_KERNEL` tells why).
    """
    calls: list[int] = []
    kernel = cpu.cpu_attention

    def noted(call: Any, kept: Any, **options: Any) -> Any:
        calls.append(int(call.queries.shape[2]))
        return kernel(call, kept, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "cpu_attention", noted)
        if name == WITHOUT:
            for module in (cpu, key_rounding):
                patch.setattr(module, "kernel_library", lambda: "a test wants none")
            patch.setattr("kvalloc.extensions.triton._installed", lambda: False)
        yield calls
