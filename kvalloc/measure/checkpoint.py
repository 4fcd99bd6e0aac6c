"""Finished pieces of a job on disk, which survive a killed job."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from kvalloc.errors import InputError, one_line, option
from kvalloc.files import ENDING, atomic_write, check_writable, checkpoint_folder, delete_file
from kvalloc.formats.record import digest_over

if TYPE_CHECKING:
    from filelock import BaseFileLock

Array = npt.NDArray[Any]

_KIND, _FORMAT = "kvalloc.unfinished", 6
_MANIFEST = "manifest.json"
_LOCK = "lock"
_PIECE = ".safetensors"
_DIGEST = "kvalloc.digest"


class Checkpoint:
    """Folder of one process, with its job's manifest and a file for each piece.

    ``OUTPUT.partial`` stays after the ``with`` if it holds a finished piece and `finish` was not
    called. `job` has all settings that decide the numbers, as JSON values.

    Raises
    ------
    InputError
        On entering, before changes: if the folder is in use, a link, not writable, or holds another
        job's pieces, pieces without `resume`, or foreign files.
    """

    def __init__(self, output: str | Path, job: Mapping[str, Any], *, resume: bool) -> None:
        check_writable(output)
        self.output, self.folder = Path(output), checkpoint_folder(output)
        self._prefix = ""
        self._job: dict[str, Any] = json.loads(
            json.dumps({**job, "kind": _KIND, "format": _FORMAT})
        )
        self._resume = resume

    def __enter__(self) -> Self:
        _check_unfinished(self.folder, resume=self._resume)
        while True:
            try:
                self.folder.mkdir(exist_ok=True)
            except OSError as error:
                raise InputError(
                    f"cannot create the folder {self.folder} for finished work ({error.strerror}); "
                    "write to another folder"
                ) from error
            with suppress(FileNotFoundError):  # another process has just left, and its folder went
                self._lock = _locked(self.folder)
                break
        try:
            self._begin()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        kept = _holds_pieces(self.folder)
        self._leave()
        if kept and isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(
                f"interrupted; what was finished is in {self.folder}: go on with the same command "
                f"and {option('resume', True)}"
            ) from None

    def _leave(self) -> None:
        if not _holds_pieces(self.folder):
            self._clear()
            delete_file(self.folder / _LOCK)
            with suppress(OSError):
                self.folder.rmdir()
        self._lock.release()

    def _clear(self) -> None:
        for ours in (f"*{_PIECE}", _MANIFEST):
            for file in self.folder.glob(ours):
                delete_file(file)
        for left in self.folder.glob(f".*{ENDING}"):
            shutil.rmtree(left, ignore_errors=True)

    def save(self, name: str, arrays: Mapping[str, Array]) -> None:
        """Store a finished piece, whole or not at all, or raise `InputError`."""
        from safetensors.numpy import save

        stored = {key: np.asarray(arrays[key], order="C") for key in sorted(arrays)}
        with atomic_write(self._file(name)) as temporary:
            temporary.write_bytes(save(stored, {_DIGEST: digest_over("", stored)}))

    def load(
        self, name: str, shapes: Mapping[str, tuple[int, ...]] | None = None
    ) -> dict[str, Array] | None:
        """Return a finished piece, None if damaged; with `shapes`, it has them and is finite."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self._file(name), framework="np") as file:
                arrays = {key: file.get_tensor(key) for key in sorted(file.keys())}
                whole = (file.metadata() or {})[_DIGEST] == digest_over("", arrays)
        except (OSError, SafetensorError, LookupError, ValueError, TypeError, AttributeError):
            return None  # missing or damaged
        if shapes is not None:
            whole &= {key: array.shape for key, array in arrays.items()} == shapes
            whole = whole and all(np.isfinite(array).all() for array in arrays.values())
        return arrays if whole else None

    def finish(self, result: Any) -> None:
        """Save the result, by its ``save``, and delete all pieces."""
        result.save(self.output)
        for file in self.folder.glob(f"*{_PIECE}"):
            delete_file(file)

    def stage(self, name: str) -> Self:
        """Return a stage's checkpoint, with its own names."""
        staged = copy.copy(self)
        staged._prefix = f"{name}-"
        return staged

    def _file(self, name: str) -> Path:
        return self.folder / f"{self._prefix}{name}{_PIECE}"

    def _begin(self) -> None:
        manifest = self.folder / _MANIFEST
        with suppress(OSError):  # for another process's message; a full disk does not matter
            (self.folder / _LOCK).write_text(str(os.getpid()), encoding="ascii")
        if not _holds_pieces(self.folder):
            self._clear()
            with atomic_write(manifest) as temporary:
                temporary.write_text(json.dumps(self._job, indent=1), encoding="utf-8")
            return
        begun = _begun(self.folder)
        for field in sorted({*begun, *self._job}):
            before, now = begun.get(field), self._job.get(field)
            if before != now:
                raise InputError(
                    f"cannot resume {self.folder}: it was begun with {one_line(field, 60)} "
                    f"{one_line(before, 60)}, now it is {one_line(now, 60)}; "
                    "repeat the first command, or delete the folder to start over"
                )


def kept_work(
    output: str | Path | None, job: Callable[[], Mapping[str, Any]], *, resume: bool
) -> AbstractContextManager[Checkpoint | None]:
    """Return the `Checkpoint` of an output, or a context of None; `resume` needs an output."""
    if output is not None:
        return Checkpoint(output, job(), resume=resume)
    if resume:
        raise InputError("there is nothing to resume from; name the output")
    return nullcontext()


def check_output(output: str | Path, *, resume: bool) -> None:
    """Raise `InputError` for an output not writable, in use, or with pieces and no `resume`."""
    check_writable(output)
    _check_unfinished(checkpoint_folder(output), resume=resume)


def _check_unfinished(folder: Path, *, resume: bool) -> None:
    if folder.is_symlink() or folder.exists():
        _check_made_here(folder)
    if (folder / _LOCK).exists():
        with suppress(FileNotFoundError):
            _locked(folder).release()
    if not resume and _holds_pieces(folder):
        raise InputError(
            f"{folder} holds unfinished work; go on with {option('resume', True)}, or delete the "
            "folder to start over"
        )


def _check_made_here(folder: Path) -> None:
    """Refuse a folder that kvalloc did not make."""
    fault = "is a link" if folder.is_symlink() else "" if folder.is_dir() else "is no folder"
    if not fault:
        before = _begun(folder)  # read twice: another process may be making or deleting it
        foreign = [
            one.name
            for one in folder.glob("*")
            if one.is_symlink() or not (one.name == _LOCK or one.match(f".*{ENDING}"))
        ]
        if foreign and _KIND not in (before.get("kind"), _begun(folder).get("kind")):
            fault = f"holds {one_line(min(foreign), 60)}, but no manifest of kvalloc"
    if fault:
        raise InputError(
            f"{folder} {fault}, expected a folder that kvalloc made for finished work; move it "
            "away, or write to another file"
        )


def _begun(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / _MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def _holds_pieces(folder: Path) -> bool:
    return any(folder.glob(f"*{_PIECE}"))


_WAIT = 1.0
"""Seconds to wait for the lock."""


def _locked(folder: Path) -> BaseFileLock:
    """Return the folder's lock, released when this process ends."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / _LOCK)
    try:
        lock.acquire(timeout=_WAIT)
    except Timeout:
        process = "another process"
        with suppress(OSError, ValueError):  # it has written its id there if it could
            process += f" ({int((folder / _LOCK).read_text('ascii'))})"
        raise InputError(
            f"{process} is at work in {folder}; wait for it, or write to another file"
        ) from None
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InputError(f"cannot lock the folder {folder}: {error.strerror or error}") from error
    return lock
