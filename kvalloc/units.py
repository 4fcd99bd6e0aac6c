"""Options, shares and sizes as people write them."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, wraps
from itertools import pairwise
from math import inf
from textwrap import indent
from typing import Any, TypeVar, cast

from kvalloc.errors import InputError, in_our_words, nearest, option

F = TypeVar("F", bound=Callable[..., Any])

_BYTE_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _BYTE_UNITS[f"{_letter}ib"] = 1024**_power
    _BYTE_UNITS[f"{_letter}b"] = 1000**_power


@dataclass(frozen=True)
class Option:
    """Appearance of a field as a flag; its help is the docstring below it.

    Other fields in its backticks become flags.
    """

    metavar: str = ""
    """Placeholder of its value; by default the choices of a ``Literal``. Empty for a switch, or its
    two flags if it can be switched off too."""

    group: str = ""
    """Heading in the help."""

    minimum: int | None = None
    """Smallest number that the command line takes."""


@cache
def _classes(module: str) -> Mapping[str, ast.ClassDef]:
    with suppress(OSError, TypeError):
        statements = ast.parse(inspect.getsource(sys.modules[module])).body
        return {one.name: one for one in statements if isinstance(one, ast.ClassDef)}
    return {}


def field_texts(kind: type) -> dict[str, str]:
    """Return the docstring below each field of a class and of its bases."""
    texts = {}
    for base in reversed(kind.__mro__):
        defined = _classes(base.__module__).get(base.__name__)
        for pair in pairwise(defined.body if defined else ()):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text))):
                    texts[name] = inspect.cleandoc(text)
    return texts


def keywords_of(*options: type, without: Collection[str] = ()) -> Callable[[F], F]:
    """Add the keywords that a function takes by ``**`` to its docstring, and refuse all others.

    Parameters
    ----------
    *options : type
        The ``TypedDict`` of the keywords, after its bases.
    without : collection of str
        Keywords that the function refuses itself.
    """
    texts = {name: text for one in options for name, text in field_texts(one).items()}

    def decorate(function: F) -> F:
        *named, _ = inspect.signature(function).parameters
        known = {*named, *(name for one in options for name in one.__annotations__)}

        @wraps(function)
        def checked(*args: Any, **keywords: Any) -> Any:
            for name in keywords.keys() - known:
                near = in_our_words(name, known, keywords[name]) or nearest(name, known)
                raise InputError(
                    f"there is no option {name!r}; {near}see help({function.__name__})"
                )
            return function(*args, **keywords)

        lines = [inspect.getdoc(function) or "", "", "Other Parameters", "----------------"]
        for name in (one for one in texts if one not in without):
            lines += [name, indent(texts[name], "    ")]
        checked.__doc__ = "\n".join(lines)
        return cast(F, checked)

    return decorate


def parse_share(value: str | float) -> float:
    """Read a budget, above 0 and up to 1, from ``"20%"``, ``"0.2"`` or a number.

    Raises
    ------
    InputError
    """
    text = str(value).strip()
    try:
        share = parse_fraction(text)
    except InputError:
        raise InputError(f"{text!r} is not a share of a cache; write 20% or 0.2") from None
    if not 0 < share <= 1:
        raise InputError(f"a budget of {text} is not a share of a cache; write 20% or 0.2")
    return share


def parse_fraction(value: str | float) -> float:
    """Read a number of any range from ``0.9`` or ``"90%"``."""
    text = str(value).strip()
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise InputError(f"{text!r} is not a share; write 0.9 or 90%") from None


def check_temperature(temperature: float | None) -> None:
    """Refuse an impossible temperature; None is accepted."""
    if temperature is not None and not 0 < temperature < inf:
        raise InputError(
            f"{option('temperature')} is {temperature:g}, expected a number above 0, such as 0.7; "
            "leave it out for the most likely tokens"
        )


def parse_bytes(value: str | int) -> int:
    """Read a positive number of bytes from ``"512MiB"``, ``"1.5GB"`` or a whole number.

    Raises
    ------
    InputError

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


def parse_tokens(value: str | int) -> int:
    """Read a number of tokens from ``4096`` or ``"32k"``; a k is 1,024.

    Raises
    ------
    InputError
    """
    match = re.fullmatch(r"\s*([0-9]{1,15})(k?)\s*", str(value), re.IGNORECASE)
    if match is None:
        raise InputError(f"{value!r} is no number of tokens; write 4096 or 32k")
    return int(match[1]) * (1024 if match[2] else 1)


def bytes_text(size: int) -> str:
    """Return a size that `parse_bytes` reads back exactly."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size and size % unit == 0:
            return f"{size // unit}{name}"
    return str(size)


def size(count_bytes: float) -> str:
    """Return bytes for people."""
    if count_bytes < 1024:
        return f"{count_bytes:.0f} bytes"
    power = next((p for p in (1, 2) if count_bytes < 1024 ** (p + 1)), 3)
    value = count_bytes / 1024**power
    digits = 0 if value >= 100 else 2
    return f"{value:.{digits}f} {('KiB', 'MiB', 'GiB')[power - 1]}"


def duration(seconds: float) -> str:
    """Return a time for people.

    Examples
    --------
    >>> duration(0.0123), duration(12.34), duration(7322)
    ('0.012 s', '12.3 s', '2 h 2 min')
    """
    if seconds < 10:
        return f"{seconds:.3f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def share_text(stored_bytes: int, full_bytes: int, target: str = "") -> str:
    """Return the stored share of a 16-bit cache, after the target."""
    goal, share = f"asked for {target}, " if target else "", stored_bytes / max(full_bytes, 1)
    stored = f"{size(stored_bytes)} of {size(full_bytes)}"
    return f"{goal}{share:.1%} of a cache at 16 bits, {stored}"


def gap_text(gap: float | None) -> str:
    """Return a relative gap for people; unknown is not zero."""
    if gap is None:
        return "unknown"
    if gap == 0:
        return "0%"
    return "<0.001%" if gap < 1e-5 else f"{100 * gap:.3g}%"


def parse_numbers(value: str | Sequence[int], name: str = "bits") -> tuple[int, ...]:
    """Read whole numbers of any range from ``"16,8,4"`` or a sequence.

    Raises
    ------
    InputError
    """
    try:
        return tuple(int(one) for one in (value.split(",") if isinstance(value, str) else value))
    except (TypeError, ValueError):
        raise InputError(f"{option(name)} is {value!r}, expected numbers such as 16,8,4") from None


def parse_indices(text: str) -> tuple[int, ...]:
    """Read indices, none twice, from ``"0-3,8"``, both ends included.

    Raises
    ------
    InputError
    """
    indices: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,6})\s*(?:-\s*([0-9]{1,6})\s*)?", part)
        if match is None:
            raise InputError(f"{text.strip()!r} is no list of layers; write 0-15 or 0-3,8")
        first = int(match.group(1))
        last = first if match.group(2) is None else int(match.group(2))
        if last < first:
            raise InputError(f"{part.strip()!r} ends before it begins; write {last}-{first}")
        indices.extend(range(first, last + 1))
    if len(indices) != len(set(indices)):
        raise InputError(f"{text.strip()!r} names a layer twice; name it once")
    return tuple(indices)
