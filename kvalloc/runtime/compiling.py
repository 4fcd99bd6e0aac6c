"""Compiles a C file of kvalloc's on first use, where there is a compiler, and keeps the result.

The result is kept in the user's cache folder (`kvalloc.user_cache`), under a name made of all that
it depends on. Threads are those of the OpenMP library that torch itself has
loaded: a second one beside it would have its own threads, and both wait by spinning.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from kvalloc.user_cache import cache_folder

__all__ = ["SWITCH", "Compiled", "compiled", "openmp_libraries"]

SWITCH = "KVALLOC_CPU_KERNEL"
"""Environment variable: at 0 nothing is compiled, and torch's operations do the work."""

_LOG = logging.getLogger(__name__)
_FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-fPIC", "-Wno-psabi")
_X86_64_FLAGS = ("-mavx2", "-mfma")
_SECONDS = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """What became of a C file.

    Attributes
    ----------
    library : ctypes.CDLL or None
        The shared library made of it; None where it cannot be had.
    reason : str
        Why not.
    """

    library: ctypes.CDLL | None = None
    reason: str = ""


@cache
def compiled(source: Path) -> Compiled:
    """The shared library made of a C file, once in a process.

    Parameters
    ----------
    source : Path
        Read as it is; the result of an earlier compilation of the same text is loaded again.

    Returns
    -------
    Compiled
        Without a library where there is no compiler, on another system than Linux, on an x86-64
        processor without AVX2, and where `SWITCH` says so. The reason is also logged.
    """
    try:
        return Compiled(library=ctypes.CDLL(str(_library(source))))
    except subprocess.CalledProcessError as error:
        reason = f"the C compiler failed ({_first_line(error.stderr)})"
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        reason = _first_line(str(error))
    _LOG.info("%s is not used, torch's operations are: %s", source.name, reason)
    return Compiled(reason=reason)


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "for no known reason")


def _library(source: Path) -> Path:
    """Path of the shared library; compiled if it is not there yet."""
    if os.environ.get(SWITCH) == "0":
        raise RuntimeError(f"{SWITCH} is 0")
    if platform.system() != "Linux":
        raise RuntimeError(f"compiled on Linux only, not on {platform.system()}")
    flags = (*_FLAGS, *_processor_flags())
    compiler = _compiler()
    threads = next(iter(openmp_libraries()), None)
    parts = (source.read_text(encoding="utf-8"), *compiler, *flags, str(threads))
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    for folder in (
        cache_folder() / "compiled",
        Path(tempfile.gettempdir()) / f"kvalloc-{os.getuid()}",
    ):
        if _is_ours(folder):
            target = folder / f"{source.stem}-{name}.so"
            if not target.exists():
                _compile(source, target, compiler, flags, threads)
            return target
    raise RuntimeError(
        f"{cache_folder()} cannot be written, or others can write to it; set KVALLOC_CACHE to a "
        "folder of your own"
    )


def _processor_flags() -> tuple[str, ...]:
    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):  # AVX2, AVX512
        raise RuntimeError("the processor has no AVX2")
    return _X86_64_FLAGS


def _compiler() -> tuple[str, ...]:
    """The command of the C compiler: ``$CC``, what Python was built with, or cc."""
    for command in (os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc", "gcc", "clang"):
        words = shlex.split(command) if command else []
        if words and shutil.which(words[0]):
            return tuple(words)
    raise RuntimeError("there is no C compiler (cc, gcc or clang)")


def openmp_libraries() -> list[Path]:
    """The OpenMP libraries that are loaded, torch's own first."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    found = set(re.findall(r"(/\S*/lib(?:gomp|iomp5|omp)[-.][^/\s]*)$", maps, re.MULTILINE))
    home = str(Path(torch.__file__).parent)
    return sorted(map(Path, found), key=lambda path: (not str(path).startswith(home), path))


def _is_ours(folder: Path) -> bool:
    """Whether a folder, made if need be, can be written, and by nobody else."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    status = folder.stat()
    others = status.st_mode & 0o022
    return status.st_uid == os.getuid() and not others and os.access(folder, os.W_OK)


def _compile(
    source: Path,
    target: Path,
    compiler: tuple[str, ...],
    flags: tuple[str, ...],
    threads: Path | None,
) -> None:
    """Compile and link in a folder of its own, and put the result in its place in one step."""
    _LOG.info("compiling %s, once", source.name)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        object_file, library = Path(folder) / "made.o", Path(folder) / "made.so"
        linked = [str(threads)] if threads is not None else ["-fopenmp"]
        for command in (
            [*compiler, *flags, "-fopenmp", "-c", str(source), "-o", str(object_file)],
            [*compiler, "-shared", str(object_file), *linked, "-lm", "-o", str(library)],
        ):
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
        library.replace(target)
