"""Putting the parts of a measurement together, one block of samples after the other."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvalloc.accounting import IntArray
from kvalloc.errors import InputError, one_line, option
from kvalloc.files import atomic_write, check_writable
from kvalloc.formats.score_profile import ScoreHeader, ScoreProfile, shards_text
from kvalloc.formats.tensors import NAMES, Blocks, Digest, tensor_places, write_tensors

_BLOCK_BYTES = 1 << 24
_MAY_DIFFER = ("created", "interpolation_error")
"""Fields of the header whose largest value the merged file has."""

_ASIDE = "set_aside"
"""Field of the header whose entries of all parts the merged file has."""

_OF_PARTS = ("shards", "sample_places")
"""Arrays that only a part has, not a whole measurement."""


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The result of a merge.

    Attributes
    ----------
    output : Path
    samples : int
    missing : str
        The shards that are not in it; empty for a whole measurement.
    digest : str
        Of the file's content.
    """

    output: Path
    samples: int
    missing: str
    digest: str


class _Part:
    """The file of a part, of which only the header and what all parts share are in memory."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with ScoreHeader.opened(path) as file:
            self._stated = ScoreHeader.stated(path, file)
            self._check(file)
            self.tensors = tensor_places(path)
        self.header = ScoreHeader.parsed(path, self._stated)
        self.content = self.header.header()
        self.names = [name for name in ScoreProfile.model_fields if name in self.tensors]
        self.shared = {
            name: self.rows(name, 0, self.tensors[name][1][0])
            for name in self.names
            if name not in ScoreProfile.PER_SAMPLE or name == "sample_places"
        }
        self.places: IntArray = self.shared["sample_places"]
        for name in {*ScoreProfile.PER_SAMPLE} & {*self.names}:
            if (n_rows := self.tensors[name][1][0]) != self.places.size:
                expected = f"{self.places.size}, as there are sample_places"
                raise ScoreHeader.file_error(path, name, f"of {n_rows} samples", expected)
        self._require(np.isin(self.shared["shards"], (0, 1)).all(), "shards", "0 or 1 each")
        self._require((np.diff(self.places) > 0).all(), "sample_places", "rising")
        self._check_digest()

    def _check(self, file: Any) -> None:
        """Refuse what is no part, or has an array that no score profile has."""
        names, fields = {*file.keys()}, ScoreProfile.array_fields()
        for name in sorted(names):
            one, field = file.get_slice(name), fields.get(name)
            dtype, shape, expected = one.get_dtype(), one.get_shape(), "an array of score profiles"
            if field is not None:
                expected = f"{field.dtype} with {field.ndim} axes"
            if field is None or (dtype, len(shape)) != (NAMES[str(field.dtype)], field.ndim):
                raise ScoreHeader.file_error(self.path, name, f"{dtype} shaped {shape}", expected)
        if not names.issuperset(_OF_PARTS):
            raise InputError(
                f"{self.path} is a whole measurement and no part of one, so there is nothing to "
                f"merge; parts are made with {option('shard', '1/8')}"
            )

    def _require(self, holds: np.bool_, name: str, expected: str) -> None:
        if not holds:
            found = one_line(self.shared[name].tolist(), 60)
            raise ScoreHeader.file_error(self.path, name, found, expected)

    def _check_digest(self) -> None:
        """Compare the digest of the file with the one that it states."""
        digest = Digest(json.dumps(self.content, sort_keys=True))
        for name in self.names:
            dtype, shape, _ = self.tensors[name]
            digest.begin(name, Blocks(dtype=dtype, shape=shape, blocks=()))
            for first, end in _blocks_of(shape, dtype):
                digest.update(self.rows(name, first, end).data)
        ScoreHeader.check_digest(self.path, self._stated, lambda _: digest.hexdigest())

    def rows(self, name: str, first: int, end: int) -> npt.NDArray[Any]:
        """Read some samples of an array; not mapped, so that memory stays small."""
        dtype, shape, begin = self.tensors[name]
        row_items = math.prod(shape[1:])
        with open(self.path, "rb") as file:
            file.seek(begin + first * row_items * dtype.itemsize)
            data = np.fromfile(file, dtype, (end - first) * row_items)
        return data.reshape(end - first, *shape[1:])


def merge(
    parts: Sequence[str | Path],
    output: str | Path,
    *,
    accept_missing: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Merged:
    """Merge the parts of a measurement that ``kvalloc profile --shard`` made.

    The file is the one that an unbroken measurement writes, byte for byte, in whatever order the
    parts are given. Some megabytes of it are in memory at a time.

    Parameters
    ----------
    parts : sequence of str or Path
        Files of score profiles; some may have been merged of parts themselves.
    output : str or Path
        The file to write, atomically.
    accept_missing : bool
        Merge what there is; the result is a part, too, to which the missing shards can be added.
    progress : callable, optional
        Called with (bytes copied, bytes in all).

    Returns
    -------
    Merged

    Raises
    ------
    InputError
        If parts are missing, overlap or do not belong together.
    ProfileFileError
        If a file is no sound part.
    """
    check_given(parts, output)
    files = [_Part(path) for path in parts]
    for other in files[1:]:
        _check_together(files[0], other)
    shards = [part.shared["shards"] for part in files]
    held = held_shards(parts, shards, accept_missing=accept_missing)
    whole = bool(held.all())
    missing = "" if whole else shards_text(held, held=0)
    places, order = _all_places(files, whole=whole)
    last = {name: max(part.content[name] for part in files) for name in _MAY_DIFFER}
    if aside := _set_aside(files):
        last[_ASIDE] = {str(place): reason for place, reason in sorted(aside.items())}
    of_part = {} if whole else {"shards": held, "sample_places": places}
    names = [name for name in files[0].names if not whole or name not in _OF_PARTS]
    arrays = {name: _joined(files, name, order, of_part.get(name)) for name in names}
    total = sum(array.size_bytes for array in arrays.values())
    with atomic_write(output) as temporary:
        digest = write_tensors(
            temporary,
            files[0].content | last,
            arrays,
            entry=ScoreHeader.METADATA,
            progress=None if progress is None else lambda done: progress(done, total),
        )
    return Merged(output=Path(output), samples=places.size, missing=missing, digest=digest)


def _check_together(one: _Part, other: _Part) -> None:
    """Refuse two parts of different measurements; names the first field that differs."""
    check_fields((one.path, other.path), one.content, other.content)
    for name in [*one.names, *other.names]:
        sizes = [part.tensors[name][1] if name in part.tensors else () for part in (one, other)]
        per_sample = name in ScoreProfile.PER_SAMPLE
        if name == "shards":
            continue
        if sizes[0][per_sample:] != sizes[1][per_sample:]:
            raise apart((one.path, other.path), f"the shape of {name}", *sizes)
        if per_sample:
            continue
        before, now = (part.shared[name] for part in (one, other))
        if not np.array_equal(before, now):
            raise apart((one.path, other.path), name, before.tolist(), now.tolist())


def check_given(parts: Sequence[str | Path], output: str | Path) -> None:
    """Refuse an empty list of parts, a part given twice, and an output that cannot be written."""
    check_writable(output)
    given = [os.path.realpath(path) for path in parts]
    if not given:
        raise InputError("there is nothing to merge; name the files of the parts")
    if twice := [path for path in given if given.count(path) > 1]:
        raise InputError(f"{twice[0]} is given twice; give each part once")


def check_fields(
    paths: tuple[str | Path, str | Path], one: Mapping[str, Any], other: Mapping[str, Any]
) -> None:
    """Refuse two parts whose headers differ; names the first field and both values."""
    for name in [*one, *other]:
        before, now = one.get(name), other.get(name)
        if name in (*_MAY_DIFFER, _ASIDE) or before == now:
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            key = next(key for key in [*before, *now] if before.get(key) != now.get(key))
            name, before, now = f"{name}.{key}", before.get(key), now.get(key)
        raise apart(paths, name, before, now)


def apart(
    paths: tuple[str | Path, str | Path], name: str, before: object, now: object
) -> InputError:
    """Return the error for two parts of different measurements."""
    return InputError(
        f"{paths[0]} and {paths[1]} are no parts of one measurement: {one_line(name, 60)} is "
        f"{one_line(before, 60)} in the first and {one_line(now, 60)} in the second"
    )


def held_shards(
    paths: Sequence[str | Path], shards: Sequence[IntArray], *, accept_missing: bool
) -> IntArray:
    """Return the mask of present shards, ``(n_shards,)``; refuse one twice, or missing."""
    held = np.zeros_like(shards[0])
    for place, mask in enumerate(shards):
        if mask.shape != held.shape:
            raise apart((paths[0], paths[place]), "the number of shards", held.size, mask.size)
        both = held & mask
        if both.any():
            other = next(
                path for path, one in zip(paths, shards, strict=True) if (one & both).any()
            )
            raise InputError(
                f"{other} and {paths[place]} overlap: {shards_text(both)} is in both of them; "
                "give each shard once"
            )
        held = held | mask
    if not held.all() and not accept_missing:
        are = "are" if held.size - held.sum() > 1 else "is"
        raise InputError(
            f"{shards_text(held, held=0)} {are} missing; measure what is missing, or merge what "
            f"there is with {option('accept_missing', True)}"
        )
    return held


def _all_places(parts: Sequence[_Part], *, whole: bool) -> tuple[IntArray, IntArray]:
    """Return the rising places of all samples, and each one's part and row there, ``(n, 2)``."""
    places = np.concatenate([part.places for part in parts])
    rows = np.concatenate(
        [
            np.stack([np.full(part.places.size, number), np.arange(part.places.size)], axis=1)
            for number, part in enumerate(parts)
        ]
    )
    order = np.argsort(places, kind="stable")
    places = places[order]
    doubled = places[1:][np.diff(places) == 0].tolist()
    known = {*places.tolist(), *_set_aside(parts)}
    missing = [*({*range(len(known))} - known)] if whole else []
    if doubled or missing:
        wrong = f"sample {doubled[0]} is in two" if doubled else f"sample {missing[0]} is in none"
        raise InputError(
            f"the parts are no shards of one measurement: {wrong} of them; measure all of them "
            "with the same samples in batches of the same size"
        )
    return places, rows[order].astype(np.int64)


def _set_aside(parts: Sequence[_Part]) -> dict[int, str]:
    """Return the samples that could not be measured: name and reason, by place."""
    return {place: why for part in parts for place, why in part.header.set_aside.items()}


def _joined(
    parts: Sequence[_Part], name: str, order: IntArray, shared: npt.NDArray[Any] | None
) -> Blocks:
    """Return an array of all parts, sample by sample, or the one they share; read lazily."""
    dtype, shape, _ = parts[0].tensors[name]
    if shared is None and name in parts[0].shared:
        shared = parts[0].shared[name]
    if shared is None:
        shape = (order.shape[0], *shape[1:])
    size = shape if shared is None else shared.shape

    def blocks() -> Iterator[npt.NDArray[Any]]:
        if shared is not None:
            yield shared
            return
        for first, end in _blocks_of(size, dtype):
            chosen = order[first:end]
            block = np.empty((chosen.shape[0], *size[1:]), dtype)
            for number in np.unique(chosen[:, 0]).tolist():
                here = chosen[:, 0] == number
                rows = chosen[here, 1]
                block[here] = parts[number].rows(name, int(rows[0]), int(rows[-1]) + 1)
            yield block

    return Blocks(dtype=dtype, shape=size, blocks=blocks())


def _blocks_of(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Iterator[tuple[int, int]]:
    """Yield first and end of the rows of blocks of at most `_BLOCK_BYTES`, one row at least."""
    step = max(1, _BLOCK_BYTES // max(1, math.prod(shape[1:]) * dtype.itemsize))
    for first in range(0, shape[0], step):
        yield first, min(first + step, shape[0])
