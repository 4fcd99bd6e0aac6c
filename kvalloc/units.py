"""Shares and sizes as people write them: ``20%``, ``512MiB``, layers ``0-3,8``."""

from __future__ import annotations

import re

from kvalloc.errors import InputError

_BYTE_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _BYTE_UNITS[f"{_letter}ib"] = 1024**_power
    _BYTE_UNITS[f"{_letter}b"] = 1000**_power


def parse_share(value: str | float) -> float:
    """A share of entries from ``"20%"``, ``"0.2"`` or a number.

    Raises
    ------
    InputError
        If it is not a share above 0 and up to 1 (100%).

    Examples
    --------
    >>> parse_share("20%"), parse_share(0.5)
    (0.2, 0.5)
    """
    text = str(value).strip()
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise InputError(f"{text!r} is not a share of entries; write 20% or 0.2") from None
    if not 0 < share <= 1:
        raise InputError(f"a budget of {text} is not a share of entries; write 20% or 0.2")
    return share


def parse_bytes(value: str | int) -> int:
    """A number of bytes from ``"512MiB"``, ``"1.5GB"`` or a whole number.

    Raises
    ------
    InputError
        If it is not a positive size.

    Examples
    --------
    >>> parse_bytes("512MiB"), parse_bytes("1kB")
    (536870912, 1000)
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", str(value))
    unit = match.group(2).lower() if match else ""
    if match is None or unit not in _BYTE_UNITS:
        raise InputError(f"{value!r} is not a size; write 512MiB, 1.5GB or a number of bytes")
    size = float(match.group(1)) * _BYTE_UNITS[unit]
    if not 1 <= size < 2**63:
        raise InputError(f"a memory of {value} is no size a cache can have; write 512MiB or 1.5GB")
    return int(size)


def parse_indices(text: str) -> tuple[int, ...]:
    """Indices from ``"0-3,8"``, both ends included.

    Raises
    ------
    InputError
        If it is not a list of indices and ranges, or one is named twice.

    Examples
    --------
    >>> parse_indices("0-3,8")
    (0, 1, 2, 3, 8)
    """
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,6})\s*(?:-\s*([0-9]{1,6})\s*)?", part)
        if match is None:
            raise InputError(f"{text.strip()!r} is no list of layers; write 0-15 or 0-3,8")
        first = int(match.group(1))
        last = first if match.group(2) is None else int(match.group(2))
        if last < first:
            raise InputError(f"{part.strip()!r} ends before it begins; write {last}-{first}")
        found.extend(range(first, last + 1))
    if len(found) != len(set(found)):
        raise InputError(f"{text.strip()!r} names a layer twice; name it once")
    return tuple(found)
