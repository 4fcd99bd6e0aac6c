"""Conflicts of options."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping
from importlib import resources
from typing import NamedTuple

from kvalloc.allocation.request import TARGETS
from kvalloc.errors import InputError, OptionNames, option


class Conflict(NamedTuple):
    """Options that exclude others, or need one.

    Each of `options` is refused beside one of `excluded`, or unless one of `without` is set. In
    `message`, ``{0}`` is the set option and ``{1}`` the other.
    """

    options: tuple[str, ...]
    message: str
    excluded: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


def _conflicts() -> Iterator[Conflict]:
    """Read ``conflicts.toml``."""
    table = tomllib.loads((resources.files(__package__) / "conflicts.toml").read_text("utf-8"))
    groups = {f"@{name}": names for name, names in table["groups"].items()} | {"@target": TARGETS}

    def names(row: Mapping[str, list[str]], field: str) -> tuple[str, ...]:
        return tuple(name for one in row.get(field, ()) for name in groups.get(one, [one]))

    for row in table["conflict"]:
        fields = {field: names(row, field) for field in ("options", "excluded", "without")}
        yield Conflict(message=row["message"], **fields)


CONFLICTS = tuple(_conflicts())
"""Conflicts, in the order of their checks."""


def given_names(options: Mapping[str, object]) -> set[str]:
    """Return the names of options that are neither None nor False."""
    return {name for name, value in options.items() if value is not None and value is not False}


def check_conflicts(set_options: Collection[str]) -> None:
    """Refuse the first conflict of set options.

    Raises
    ------
    InputError
    """
    for conflict in CONFLICTS:
        first = next((name for name in conflict.options if name in set_options), None)
        other = next((name for name in conflict.excluded if name in set_options), None)
        if conflict.without and not any(name in set_options for name in conflict.without):
            other = conflict.without[0]
        if first is not None and other is not None:
            names = option(first), option(other)
            raise InputError(conflict.message.format(*names, option=OptionNames()))
