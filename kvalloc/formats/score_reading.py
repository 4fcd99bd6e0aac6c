"""What a score profile's file holds, before any of it is believed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvalloc.errors import ProfileFileError


def read_scores(
    path: Path, wanted: Sequence[str], optional: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Header and arrays of a score profile's file.

    Parameters
    ----------
    path : Path
    wanted, optional : sequence of str
        Names of the arrays that must be there, and of those that may; others are not read.

    Returns
    -------
    header, arrays : dict

    Raises
    ------
    ProfileFileError
        If the file is missing or no safetensors, or header or arrays are missing.
    """
    from safetensors import SafetensorError, safe_open

    expected = "a score profile written by 'kvalloc profile'"
    way_out = "check the path"
    if not path.is_file():
        found = "a folder" if path.is_dir() else "missing"
        raise ProfileFileError(path, field="file", found=found, expected=expected, way_out=way_out)
    try:
        with safe_open(str(path), framework="numpy") as handle:
            metadata = handle.metadata() or {}
            names = set(handle.keys())
            known = (*wanted, *optional)
            arrays = {name: handle.get_tensor(name) for name in known if name in names}
    except (SafetensorError, OSError, TypeError, ValueError) as error:
        raise ProfileFileError(
            path,
            field="file",
            found=f"not readable as safetensors ({error})",
            expected=expected,
            way_out="make it again with 'kvalloc profile'; a truncated file cannot be repaired",
        ) from error
    missing = [name for name in wanted if name not in arrays]
    if "kvalloc" not in metadata or missing:
        found = "missing" if "kvalloc" not in metadata else f"without {', '.join(missing)}"
        raise ProfileFileError(
            path, field="kvalloc header", found=found, expected=expected, way_out=way_out
        )
    try:
        header = json.loads(metadata["kvalloc"])
    except (ValueError, RecursionError) as error:
        raise ProfileFileError(
            path, field="kvalloc header", found=str(error), expected="JSON", way_out=way_out
        ) from error
    if not isinstance(header, dict):
        raise ProfileFileError(
            path, field="kvalloc header", found=header, expected="an object", way_out=way_out
        )
    return header, arrays
