"""Writing a file so that nobody ever sees half of it, and what every file says of its making."""

from __future__ import annotations

import functools
import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvalloc.errors import InputError, nearest


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
        A temporary file beside it. What is written there is flushed to the disk and renamed when
        the block ends, and deleted when the block raises.

    Raises
    ------
    InputError
        If the folder does not exist or cannot be written to, or writing fails.
    """
    target = Path(path)
    check_writable(target)
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        os.close(handle)
        temporary = Path(name)
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
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)  # gone already when it was renamed


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
    return nearest(str(path), map(str, Path(path).parent.glob("*")))


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
