"""Putting the parts of a measurement together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.errors import InputError, one_line, option
from kvalloc.files import check_writable
from kvalloc.formats.score_profile import ScoreProfile

_MAY_DIFFER = ("created", "interpolation_error")
"""Fields of the header that are merged by their maximum."""

_ASIDE = "set_aside"
"""Field of the header that is merged as a union."""


def merge(parts: Sequence[str | Path], output: str | Path) -> ScoreProfile:
    """Merge the parts of a measurement that ``kvalloc profile --shard`` made.

    The file equals an unbroken measurement's, byte for byte, in any order of the parts.

    Parameters
    ----------
    parts : sequence of str or Path
        Files of every shard.
    output : str or Path

    Raises
    ------
    InputError
        If parts are missing, overlap or belong to different measurements.
    ProfileFileError
        If a file is no valid part.
    """
    check_writable(output)
    if not parts:
        raise InputError("there is nothing to merge; name the files of the parts")
    loaded = [ScoreProfile.load(path) for path in parts]
    for path, part in zip(parts, loaded, strict=True):
        if part.shard is None:
            raise InputError(
                f"{path} is a whole measurement and no part of one, so there is nothing to "
                f"merge; parts are made with {option('shard', '1/8')}"
            )
        _check_fields((parts[0], path), _shared(loaded[0]), _shared(part))
    _check_shards(parts, [part.shard for part in loaded if part.shard is not None])
    order = _in_order(loaded)
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in loaded])[order]
        for name in ScoreProfile.PER_SAMPLE
        if getattr(loaded[0], name) is not None
    }
    last = {name: max(getattr(part, name) for part in loaded) for name in _MAY_DIFFER}
    last[_ASIDE] = dict(sorted(_set_aside(loaded).items()))
    result = loaded[0].replace(**arrays, **last, shard=None)
    result.save(output)
    return result


def _shared(part: ScoreProfile) -> dict[str, Any]:
    shared = part.header()
    shared["the number of shards"] = shared.pop("shard")[1]
    for name, array in part.arrays().items():
        if name in ScoreProfile.PER_SAMPLE:
            shared[f"the shape of {name}"] = array.shape[1:]
        else:
            shared[name] = array.tolist()
    return shared


def _check_fields(
    paths: tuple[str | Path, str | Path], one: Mapping[str, Any], other: Mapping[str, Any]
) -> None:
    for name in [*one, *other]:
        before, now = one.get(name), other.get(name)
        if name in (*_MAY_DIFFER, _ASIDE) or before == now:
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            key = next(key for key in [*before, *now] if before.get(key) != now.get(key))
            name, before, now = f"{name}.{key}", before.get(key), now.get(key)
        raise InputError(
            f"{paths[0]} and {paths[1]} are no parts of one measurement: {one_line(name, 60)} is "
            f"{one_line(before, 60)} in the first and {one_line(now, 60)} in the second"
        )


def _check_shards(paths: Sequence[str | Path], shards: Sequence[tuple[int, int]]) -> None:
    (_, of), known = shards[0], dict[int, str | Path]()
    for path, (number, _) in zip(paths, shards, strict=True):
        if number in known:
            raise InputError(
                f"{known[number]} and {path} overlap: both are shard {number} of {of}; give each "
                "shard once"
            )
        known[number] = path
    if missing := [str(number) for number in range(1, of + 1) if number not in known]:
        raise InputError(f"of {of} shards are missing: {', '.join(missing)}; measure these, too")


def _in_order(parts: Sequence[ScoreProfile]) -> IntArray:
    places = [place for part in parts for place in part.places]
    known = sorted([*places, *_set_aside(parts)])
    gap = next((place for place, one in enumerate(known) if place != one), None)
    if gap is not None:
        raise InputError(
            f"the parts are no shards of one measurement: sample {gap} is in none of them; measure "
            "all of them with the same samples"
        )
    return np.argsort(places)


def _set_aside(parts: Sequence[ScoreProfile]) -> dict[int, str]:
    return {place: why for part in parts for place, why in part.set_aside.items()}
