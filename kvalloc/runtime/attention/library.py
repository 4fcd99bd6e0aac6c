"""Compiled C for the CPU: attention over kept entries, and rounding of keys.

It is built at installation if there is a compiler (setup.py), and by ``make kernel``, on x86 twice:
the faster that runs is loaded. Without it torch does the same, slower.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import re
import sys
from functools import cache
from pathlib import Path

import torch

SWITCH = "KVALLOC_CPU_KERNEL"
"""Environment variable: 0 selects torch's operations, a path another build."""

_LOG = logging.getLogger(__name__)
_SOURCES = [Path(__file__).with_name(name) for name in ("cpu.c", "rounding.c")]


@cache
def kernel_library() -> ctypes.CDLL | str:
    """Load the library once, or return why not, which is logged."""
    kernel = _load()
    if isinstance(kernel, str):
        _LOG.info("the compiled C is not used, torch's operations are: %s", kernel)
        return kernel
    symbols = ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads")
    loaded = map(ctypes.CDLL, openmp_libraries())
    openmp = next((one for one in loaded if all(hasattr(one, name) for name in symbols)), None)
    if openmp is not None:
        kernel.use_openmp(*(ctypes.cast(getattr(openmp, one), ctypes.c_void_p) for one in symbols))
    # The threads of a process do not follow it into a fork: there the kernel works alone.
    os.register_at_fork(after_in_child=lambda: kernel.use_openmp(None, None, None, None))
    return kernel


def _load() -> ctypes.CDLL | str:
    switch = os.environ.get(SWITCH)
    if switch == "0":
        return f"{SWITCH} is 0"
    if sys.platform != "linux" or sys.byteorder != "little":
        return f"it is for Linux on little-endian processors, and this is {platform.platform()}"
    capability = torch.backends.cpu.get_cpu_capability()  # AVX2, AVX512
    if platform.machine() == "x86_64" and not capability.startswith("AVX"):
        return "the processor has no AVX2"
    reason = "it was not built: install kvalloc where there is a C compiler, or 'make kernel'"
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in _SOURCES)).hexdigest().encode()
    for path in [Path(switch)] if switch else built():
        try:
            library = ctypes.CDLL(str(path))
            stored = (ctypes.c_char * len(digest)).in_dll(library, "source_digest").raw
        except (OSError, ValueError) as error:
            reason = f"{path.name} cannot be loaded ({error})"
            continue
        if stored == digest:
            return library
        reason = f"{path.name} was built from other sources; install kvalloc anew, or 'make kernel'"
    return reason


def built() -> list[Path]:
    """Return builds for this processor, the fastest first."""
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    names = ("_cpu_avx512", "_cpu") if wide else ("_cpu",)
    return [path for name in names for path in sorted(_SOURCES[0].parent.glob(f"{name}.*so"))]


def openmp_libraries() -> list[str]:
    """Return the loaded OpenMP libraries, torch's own first."""
    maps = os.fsdecode(Path("/proc/self/maps").read_bytes())
    paths = set(re.findall(r"(/.*/lib(?:gomp|iomp5|omp)[-.][^/\n]*)$", maps, re.MULTILINE))
    home = str(Path(torch.__file__).parent)
    return sorted(paths, key=lambda path: (not path.startswith(home), path))
