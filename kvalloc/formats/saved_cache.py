"""What the file of a saved cache says of itself: a JSON header, read without torch and checked."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from kvalloc.errors import ProfileFileError, by_interface, option
from kvalloc.formats.record import digest_of

__all__ = [
    "HEADER",
    "SCHEMA_VERSION",
    "header_digest",
    "header_fault",
    "opened",
    "read_header",
]

SCHEMA_VERSION = 1
HEADER = "kvalloc_cache"
"""Under which the file's metadata have it."""

_AGAIN = "read the prompt again and save the cache again"
_KINDS = {
    "batch": int,
    "seen_tokens": int,
    "prompt_tokens": int,
    "dtype": str,
    "profile": dict,
    "layers": list,
}


def read_header(path: str | Path) -> dict[str, Any]:
    """The header of a saved cache; none of its tensors is read.

    Parameters
    ----------
    path : str or Path
        Written by `BudgetCache.save`.

    Returns
    -------
    dict
        As it was written: its digest is checked, and that the file has all tensors it names.

    Raises
    ------
    ProfileFileError
        If the file is missing, truncated, no saved cache or of another schema version, or its
        header was edited.
    """
    with opened(path, "numpy") as file:
        metadata, tensors = file.metadata() or {}, set(file.keys())
    try:
        header = json.loads(metadata.get(HEADER, "null"))
    except (ValueError, RecursionError) as error:
        raise header_fault(path, "header", str(error), "JSON") from error
    if not isinstance(header, dict):
        raise header_fault(path, "header", "missing", _expected())
    if header.get("schema_version") != SCHEMA_VERSION:
        found = header.get("schema_version")
        raise header_fault(path, "schema_version", found, str(SCHEMA_VERSION))
    _check_fields(path, header)
    for index, layer in enumerate(header["layers"]):
        _check_layer(path, header, index, layer, tensors)
    try:
        digest = header_digest(header)
    except ValueError as error:
        raise header_fault(path, "header", str(error), "finite numbers") from error
    # last, so that a field that cannot be is named
    if header.get("header_digest") != digest:
        raise header_fault(path, "header_digest", header.get("header_digest"), "that of its header")
    return header


def header_digest(header: dict[str, Any]) -> str:
    """The digest of all else in a header, SHA-256 of its JSON in one order."""
    others = {name: value for name, value in header.items() if name != "header_digest"}
    return digest_of(others)


def header_fault(path: str | Path, field: str, found: object, expected: str) -> ProfileFileError:
    """What is wrong with a field of a saved cache."""
    return ProfileFileError(path, field=field, found=found, expected=expected, way_out=_AGAIN)


@contextmanager
def opened(path: str | Path, framework: Literal["numpy", "pt"]) -> Iterator[Any]:
    """A safetensors file, open for reading.

    Parameters
    ----------
    path : str or Path
    framework : str
        Whose tensors it gives.

    Raises
    ------
    ProfileFileError
        If it is missing, or not readable as safetensors.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise ProfileFileError(
            path,
            field="file",
            found="a folder" if Path(path).is_dir() else "missing",
            expected=_expected(),
            way_out="check the path",
        )
    try:
        with safe_open(path, framework=framework) as file:
            yield file
    except (SafetensorError, OSError) as error:
        found = f"not readable as safetensors ({error})"
        raise header_fault(path, "file", found, _expected()) from error


def _expected() -> str:
    how = by_interface(python="by cache.save()", flags=f"with {option('save_cache')}")
    return f"a cache written {how}"


def _check_fields(path: str | Path, header: dict[str, Any]) -> None:
    for name, kind in _KINDS.items():
        if not isinstance(header.get(name), kind):
            raise header_fault(path, name, header.get(name), f"of type {kind.__name__}")
    rows = header.get("row_profiles")
    if rows is not None and (not isinstance(rows, list) or len(rows) != header["batch"]):
        raise header_fault(path, "row_profiles", rows, f"one for each of {header['batch']} rows")
    if not isinstance(header.get("notes", {}), dict):
        raise header_fault(path, "notes", header["notes"], "of type dict")


def _check_layer(
    path: str | Path, header: dict[str, Any], index: int, layer: Any, tensors: Collection[str]
) -> None:
    field = f"layers[{index}]"
    if not isinstance(layer, dict) or not isinstance(layer.get("tensors"), list):
        raise header_fault(path, field, layer, "a layer with its kind and its tensors")
    missing = [name for name in layer["tensors"] if f"{index}.{name}" not in tensors]
    if missing:
        raise header_fault(path, field, f"without {missing[0]}", "all its tensors")
    if layer.get("kind") != "packed":
        return
    widths = header["profile"].get("bits")
    bits, following = layer.get("bits"), layer.get("packed_following")
    if not isinstance(widths, list) or index >= len(widths) or bits != widths[index]:
        raise header_fault(path, f"{field}.bits", bits, "those of its profile")
    most = header["seen_tokens"] - header["prompt_tokens"]
    if not isinstance(following, int) or not 0 <= following <= most:
        raise header_fault(
            path, f"{field}.packed_following", following, f"a number from 0 to {most}"
        )
