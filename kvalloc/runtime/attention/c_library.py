"""Compiles a C file of kvalloc's on first use, where there is a compiler, and keeps the result.

The result is kept in the user's cache folder (`kvalloc.files.cache_folder`), else in a folder for
temporary files, under a name made of all that it depends on. What is loaded runs with the user's
rights, so it is taken only from where nobody else can put it. Threads are those of the OpenMP
library that torch itself has loaded: a second one beside it would have its own threads, and both
wait by spinning.
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
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from kvalloc.files import cache_folder

__all__ = ["SWITCH", "Compiled", "compiled", "openmp_libraries"]

SWITCH = "KVALLOC_CPU_KERNEL"
"""Environment variable: at 0 nothing is compiled, and torch's operations do the work."""

_LOG = logging.getLogger(__name__)
_FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-fPIC", "-Wno-psabi")
_X86_64_FLAGS = ("-mavx2", "-mfma", "-mf16c")
_SECONDS = 120
_NOBODY = 65534  # in a container: who owns what belongs to the system outside


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
        return Compiled(library=_library(source))
    except subprocess.CalledProcessError as error:
        reason = f"the C compiler {error.cmd[0]} failed ({_complaint(error)})"
    except subprocess.TimeoutExpired as error:
        reason = f"the C compiler {error.cmd[0]} was not done after {_SECONDS} seconds"
    except (OSError, RuntimeError, ValueError) as error:
        reason = _first_line(str(error))
    _LOG.info("%s is not used, torch's operations are: %s", source.name, reason)
    return Compiled(reason=reason)


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "for no known reason")


def _complaint(error: subprocess.CalledProcessError) -> str:
    """The line that says what is wrong; compilers say first where they were."""
    lines = [line.strip() for line in error.stderr.splitlines() if line.strip()]
    found = [line for line in lines if "error" in line.lower()] or lines
    return found[0] if found else f"exit code {error.returncode}"


def _library(source: Path) -> ctypes.CDLL:
    """The shared library; compiled if it is not there yet, or is there but cannot be loaded."""
    if os.environ.get(SWITCH) == "0":
        raise RuntimeError(f"{SWITCH} is 0")
    if platform.system() != "Linux":
        raise RuntimeError(f"compiled on Linux only, not on {platform.system()}")
    if sys.byteorder != "little":
        raise RuntimeError("packed codes are read on little-endian processors only")
    flags = (*_FLAGS, *_processor_flags())
    compiler = _compiler()
    threads = next(iter(openmp_libraries()), None)
    text, machine = source.read_text(encoding="utf-8"), platform.machine()
    parts = (text, machine, *compiler, *flags, str(threads))
    name = hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:20]
    failed: Exception = RuntimeError(
        "neither the cache folder nor that of temporary files is one that this user alone can "
        "write to and programs run from; set KVALLOC_CACHE to such a folder"
    )
    for folder in filter(None, map(_own_folder, _folders())):
        target = folder / f"{source.stem}-{name}.so"
        if target.is_file() and target.stat().st_uid == os.getuid():
            try:
                return ctypes.CDLL(str(target))
            except OSError as error:  # broken off, or of another system that has the same folder
                _LOG.info("%s cannot be loaded: %s", target, error)
        try:
            _compile(source, target, compiler, flags, threads)
            return ctypes.CDLL(str(target))
        except OSError as error:  # a full disk
            failed = error
    raise failed


def _folders() -> Iterator[Path]:
    """Where a library may be kept, the best place first."""
    with suppress(RuntimeError):  # nobody's home
        yield cache_folder() / "compiled"
    with suppress(OSError):
        yield Path(tempfile.gettempdir()) / f"kvalloc-{os.getuid()}"


def _processor_flags() -> tuple[str, ...]:
    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):  # AVX2, AVX512
        raise RuntimeError("the processor has no AVX2")
    return _X86_64_FLAGS


def _compiler() -> tuple[str, ...]:
    """The command of the C compiler: ``$CC``, gcc, cc, or what Python was built with.

    clang comes last: what it makes calls its own OpenMP library, and torch's is mostly that of gcc.
    """
    for command in (os.environ.get("CC"), "gcc", "cc", sysconfig.get_config_var("CC"), "clang"):
        try:
            words = shlex.split(command) if command else []
        except ValueError as error:
            raise RuntimeError(f"CC is no command ({error}): {command}") from error
        if words and shutil.which(words[0]):
            return tuple(words)
    raise RuntimeError("there is no C compiler (gcc, cc or clang)")


def openmp_libraries() -> list[Path]:
    """The OpenMP libraries that are loaded, torch's own first."""
    maps = os.fsdecode(Path("/proc/self/maps").read_bytes())
    found = set(re.findall(r"(/.*/lib(?:gomp|iomp5|omp)[-.][^/\n]*)$", maps, re.MULTILINE))
    home = str(Path(torch.__file__).parent)
    return sorted(map(Path, found), key=lambda path: (not str(path).startswith(home), path))


def _own_folder(folder: Path) -> Path | None:
    """A folder, made if need be, that only this user can write to and that programs run from.

    None where another user owns or can write to a folder above it, and so could put another in its
    place: nothing is made there, as by an administrator who has a user's home.
    """
    try:
        folder = folder.resolve()
        above = [one for one in (folder, *folder.parents) if one.exists()]
        if not all(map(_is_safe, above)):
            return None
        for missing in reversed([one for one in (folder, *folder.parents) if one not in above]):
            missing.mkdir(mode=0o700, exist_ok=True)
        status, mount = folder.stat(), os.statvfs(folder)
    except (OSError, RuntimeError):  # it cannot be made, or links go round in a circle
        return None
    own = status.st_uid == os.getuid() and not status.st_mode & 0o022
    runs = os.access(folder, os.W_OK) and not mount.f_flag & os.ST_NOEXEC
    return folder if own and runs else None


def _is_safe(folder: Path) -> bool:
    """Whether what is in a folder stays until its owner, or this user, takes it away."""
    status = folder.stat()
    others = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
    return not others and status.st_uid in (os.getuid(), 0, _NOBODY)


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
            _run(command)
        if not library.is_file():
            raise RuntimeError(f"the C compiler {compiler[0]} ended well, but made nothing")
        with library.open("rb") as made:
            os.fsync(made.fileno())  # whole, or not there, also after the power went
        library.replace(target)


def _run(command: Sequence[str]) -> None:
    """Run a compiler; if it takes too long, it ends with all that it started."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as running:
        try:
            _, said = running.communicate(timeout=_SECONDS)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            raise
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, command, stderr=said)
