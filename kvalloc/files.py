"""Writing a file so that nobody ever sees half of it, and what every file says of its making."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvalloc.errors import InputError, nearest

_fcntl: Any = None  # on Windows, where what killed processes leave stays
with suppress(ImportError):
    import fcntl

    _fcntl = fcntl

_RANDOM, ENDING = 8, ".tmp"
"""Characters by chance in the name of what is temporary, and its end."""


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Give a temporary path in the target's folder and move it over the target on success.

    Parameters
    ----------
    path : str or Path
        Where the finished file shall stand.

    Yields
    ------
    Path
        A temporary file beside it, see `temporary_beside`. What is written there is flushed to the
        disk and renamed when the block ends, and deleted when the block raises.

    Raises
    ------
    InputError
        If the folder does not exist or cannot be written to, or writing fails.
    """
    target = Path(path)
    check_writable(target)
    try:
        with temporary_beside(target.parent, f".{target.name}.") as temporary:
            yield temporary
            with open(temporary, "r+b") as written:  # Windows flushes what is open for writing only
                os.fsync(written.fileno())
            # mkstemp makes private files; a profile should be as readable as any other output
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(temporary, 0o666 & ~mask)
            os.replace(temporary, target)
    except OSError as error:  # a full disk, a file system that turned read-only
        raise InputError(f"cannot write {target}: {error.strerror or error}") from error


@contextmanager
def temporary_beside(parent: Path, prefix: str, *, folder: bool = False) -> Iterator[Path]:
    """Give a new file or folder, which is deleted in the end if it is still there.

    It is locked meanwhile, and the system takes the lock back when this process ends in any way:
    what is there of that prefix and without a lock was left by a killed process, and is deleted.

    Parameters
    ----------
    parent : Path
        Where it shall be.
    prefix : str
        How its name begins.
    folder : bool
        Whether it is a folder.

    Yields
    ------
    Path
    """
    size = len(prefix) + _RANDOM + len(ENDING)
    beside: list[str] = []
    with suppress(OSError):  # a folder that may be written to and not read
        beside = os.listdir(parent)
    for name in beside:
        if len(name) == size and name.startswith(prefix) and name.endswith(ENDING):
            with _lock(parent / name, wait=False) as locked:
                if locked:
                    _remove(parent / name)
    while True:
        if folder:
            made = Path(tempfile.mkdtemp(suffix=ENDING, prefix=prefix, dir=parent))
        else:
            handle, name = tempfile.mkstemp(suffix=ENDING, prefix=prefix, dir=parent)
            os.close(handle)
            made = Path(name)
        with _lock(made, wait=True):
            if not made.exists():
                continue  # unlocked for a moment, it was taken for one that was left
            try:
                yield made
            finally:
                _remove(made)
            return


@contextmanager
def _lock(path: Path, *, wait: bool) -> Iterator[bool]:
    """Hold the lock of a file or folder; False where it cannot be had."""
    if _fcntl is None:
        yield False
        return
    handle, locked = -1, False
    try:
        with suppress(OSError):  # another process has it or has deleted the file, or none is had
            mode = os.O_RDONLY if path.is_dir() else os.O_RDWR
            handle = os.open(path, mode | os.O_NOFOLLOW)
            _fcntl.flock(handle, _fcntl.LOCK_EX | (0 if wait else _fcntl.LOCK_NB))
            locked = True
        yield locked
    finally:
        if handle >= 0:
            os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def check_writable(path: str | Path) -> None:
    """Raise before hours of work are spent on an output that cannot be written.

    Raises
    ------
    InputError
        If the folder of ``path`` is missing or read-only, or ``path`` is a folder.
    """
    target = Path(path)
    if target.is_dir():
        raise InputError(f"cannot write {target}: it is a folder; name a file in it")
    if not target.parent.is_dir():
        raise InputError(
            f"cannot write {target}: the folder {target.parent} does not exist; create it first"
        )
    if not os.access(target.parent, os.W_OK):
        raise InputError(f"cannot write {target}: no permission in the folder {target.parent}")


def near_file(path: str | Path) -> str:
    """A file or folder of nearly that name beside it, see `nearest`; empty where there is none."""
    beside: list[str] = []
    with suppress(OSError, ValueError):  # no folder, or no name that could be one's
        beside = [str(one) for one in Path(path).parent.glob("*")]
    return nearest(str(path), beside)


def provenance(*packages: str) -> dict[str, Any]:
    """What every file says of its making.

    Parameters
    ----------
    *packages : str
        Names of distributions, such as ``"torch"``, or ``"python"``.

    Returns
    -------
    dict
        ``versions`` of kvalloc and of the packages, by name, "source" for what is not installed;
        and ``created``, today in ISO 8601 and UTC, so that one day's files compare equal.
    """
    return {
        "versions": {name: _version(name) for name in ("kvalloc", *packages)},
        "created": datetime.now(UTC).date().isoformat(),
    }


@functools.cache
def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # a tenth of the start-up time

    if name == "python":
        return platform.python_version()
    try:
        return version(name)
    except PackageNotFoundError:
        return "source"


def cache_folder() -> Path:
    """Where kvalloc keeps what it made once: ``$KVALLOC_CACHE``, else the platform's folder."""
    from platformdirs import user_cache_path  # only models in GGUF and the CPU kernel need it

    chosen = os.environ.get("KVALLOC_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return user_cache_path("kvalloc", appauthor=False, opinion=False)
