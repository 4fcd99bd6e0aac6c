"""Atomic writing of files, and their provenance."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvalloc.errors import InputError, nearest, option

_fcntl: Any = None  # on Windows, where what killed processes leave stays
with suppress(ImportError):
    import fcntl

    _fcntl = fcntl

_RANDOM, ENDING = 8, ".tmp"
"""Random characters in the name of temporary files, and its ending."""


_SPECIAL = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}
"""Kinds of paths that are no plain files."""


@contextmanager
def atomic_write(path: str | Path, *, stream: bool = False) -> Iterator[Path]:
    """Give a temporary path and move it over the target on success; delete it on an error.

    A link is written through. ``stream`` accepts a FIFO or device, which gets the finished content
    in one go; opening a FIFO waits for its reader.

    Yields
    ------
    Path
        In a folder of `temporary_beside`.

    Raises
    ------
    InputError
    """
    check_writable(path, stream=stream)
    target = _destination(path)
    special = _mode(path) != stat.S_IFREG
    folder = Path(tempfile.gettempdir()) if special else target.parent
    try:
        with temporary_beside(folder, f".{target.name}.") as hidden:
            # safetensors replaces the file that it writes, and a lock on it would go with it
            temporary = hidden / target.name
            yield temporary
            if special:
                with open(temporary, "rb") as whole, open(path, "wb") as into:
                    shutil.copyfileobj(whole, into)
                return
            with open(temporary, "r+b") as written:  # Windows flushes what is open for writing only
                os.fsync(written.fileno())
            # safetensors makes private files; a profile is as readable as any other output
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(temporary, 0o666 & ~mask)
            os.replace(temporary, target)
    except OSError as error:  # a full disk, a file system that turned read-only
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def write_text(path: str | Path, text: str) -> None:
    """Write a text with one line end, by `atomic_write`."""
    with atomic_write(path, stream=True) as temporary:
        temporary.write_text(f"{text.rstrip()}\n", encoding="utf-8")


@contextmanager
def temporary_beside(parent: Path, prefix: str) -> Iterator[Path]:
    """Give a new folder in ``parent``, deleted in the end and locked until then.

    Folders of that prefix without a lock, of killed processes, are deleted.
    """
    size = len(prefix) + _RANDOM + len(ENDING)
    names: list[str] = []
    with suppress(OSError):  # a folder that may be written to and not read
        names = os.listdir(parent)
    for name in names:
        ours = len(name) == size and name.startswith(prefix) and name.endswith(ENDING)
        if ours and _mode(parent / name, follow_links=False) == stat.S_IFDIR:
            with _lock(parent / name, wait=False) as locked:
                if locked:
                    shutil.rmtree(parent / name, ignore_errors=True)
    while True:
        made = Path(tempfile.mkdtemp(suffix=ENDING, prefix=prefix, dir=parent))
        with _lock(made, wait=True):
            if not made.exists():
                continue  # unlocked for a moment, it was taken for one that was left
            try:
                yield made
            finally:
                shutil.rmtree(made, ignore_errors=True)
            return


@contextmanager
def _lock(path: Path, *, wait: bool) -> Iterator[bool]:
    """Hold a folder's lock; False if it cannot be taken."""
    if _fcntl is None:
        yield False
        return
    handle, locked = -1, False
    try:
        with suppress(OSError):  # another process has it or has deleted the file, or none is had
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            _fcntl.flock(handle, _fcntl.LOCK_EX | (0 if wait else _fcntl.LOCK_NB))
            locked = True
        yield locked
    finally:
        if handle >= 0:
            os.close(handle)


def check_writable(path: str | Path, *, stream: bool = False) -> None:
    """Raise before hours of work if an output, or a link's target, cannot be written.

    ``stream`` accepts a FIFO or device.

    Raises
    ------
    InputError
    """
    try:
        mode = _mode(path)
    except OSError as error:  # a link that leads to itself
        raise InputError(f"cannot write {path}: {error.strerror}") from error
    if mode == stat.S_IFDIR:
        raise InputError(f"cannot write {path}: it is a folder; name a file in it")
    if mode != stat.S_IFREG:
        if not (stream and mode in (stat.S_IFIFO, stat.S_IFCHR)):
            raise InputError(
                f"cannot write {path}: it is {_SPECIAL.get(mode, 'special')}, expected a plain "
                "file; name another one"
            )
        if not os.access(path, os.W_OK):
            raise InputError(f"cannot write {path}: no permission")
        return
    folder = _destination(path).parent
    if not folder.is_dir():
        raise InputError(
            f"cannot write {path}: the folder {folder} does not exist; create it first"
        )
    if not os.access(folder, os.W_OK):
        raise InputError(f"cannot write {path}: no permission in the folder {folder}")


def _mode(path: str | Path, *, follow_links: bool = True) -> int:
    """Return the kind of a path; a missing one is a plain file."""
    try:
        return stat.S_IFMT(os.stat(path, follow_symlinks=follow_links).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return stat.S_IFREG


def _destination(path: str | Path) -> Path:
    return Path(os.path.realpath(path) if os.path.islink(path) else path)


def delete_file(path: Path) -> None:
    """Delete a path if it is a plain file."""
    if _mode(path, follow_links=False) == stat.S_IFREG:
        with suppress(OSError):
            path.unlink()


def make_folder(folder: Path) -> None:
    """Make an output's folder if it is missing.

    Raises
    ------
    InputError
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise InputError(f"{folder} is a file; name a folder") from None
    except OSError as error:
        raise InputError(f"cannot make the folder {folder}: {error.strerror}") from error


def near_file(path: str | Path) -> str:
    """Return the way out for a missing file, or "".

    It is a file of nearly that name, a broken link's target, or how to continue an unfinished job.
    """
    if os.path.islink(path) and not os.path.exists(path):
        return f"it is a link to {os.readlink(path)}, which leads nowhere; "
    if os.path.isdir(unfinished := checkpoint_folder(path)):
        way_out = f"the same command and {option('resume', True)}"
        return f"its job is not finished ({unfinished.name}), go on with {way_out}; "
    paths: list[str] = []
    with suppress(OSError, ValueError):  # no folder, or a name that no folder can have
        paths = [str(one) for one in Path(path).parent.glob("*")]
    return nearest(str(path), paths)


def checkpoint_folder(output: str | Path) -> Path:
    """Return the folder of an unfinished output's pieces: ``OUTPUT.partial``."""
    return Path(f"{output}.partial")


def provenance(*packages: str) -> dict[str, Any]:
    """Return ``versions`` of packages, or of "python", and ``created``.

    A version is "source" if not installed. ``created`` is only the day in UTC: one day's files
    compare equal.
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
    """Return the cache folder: ``$KVALLOC_CACHE``, else the platform's."""
    from platformdirs import user_cache_path  # only models in GGUF and the CPU kernel need it

    chosen = os.environ.get("KVALLOC_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return user_cache_path("kvalloc", appauthor=False, opinion=False)
