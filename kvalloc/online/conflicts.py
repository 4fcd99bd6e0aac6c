"""Which options exclude each other: one table for `kvalloc.apply` and the commands."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from kvalloc.allocation.request import TARGETS
from kvalloc.errors import InputError, OptionNames, option

TARGET = tuple(kind.keyword for kind in TARGETS)
DECIDING = (
    *("level", "min_tokens", "max_tokens", "page"),
    *("solver", "scorer", "sinks"),
)
"""How a target is decided for each prompt."""
KEEPING = ("policy", "decode_every")
"""How a cache keeps its budgets."""


class Conflict(NamedTuple):
    """Options that do not go with others, or say nothing without them.

    Attributes
    ----------
    options : tuple of str
        Options; each is refused.
    message : str
        With ``{0}`` for the one that is given, and ``{1}`` for the other.
    excluded : tuple of str
        Other options; it is refused beside each of them.
    without : tuple of str
        Other options; it is refused unless one of them is set.
    """

    options: tuple[str, ...]
    message: str
    excluded: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


_FITTED = (
    "{0} goes with {option[budget]}, {option[memory]} or {option[target_loss]} and nothing else; "
    "leave it out, or name the scorer 'surrogate' with its file"
)

CONFLICTS = (
    Conflict(
        (*TARGET, *DECIDING, "profile", *KEEPING, "fitted"),
        "{0} says how a document is reduced, and the one in {1} was reduced when it was saved; "
        "leave it out",
        excluded=("cache", "document"),
    ),
    Conflict(
        ("lossless",),
        "{0} needs the full cache beside the reduced one, which is all that {1} holds; leave out "
        "either",
        excluded=("cache", "document", "save_cache"),
    ),
    Conflict(
        ("prompt", "prompt_file"),
        "{1} holds the document already; ask about it with {option[question]} instead of giving "
        "{0}",
        excluded=("cache", "document"),
    ),
    Conflict(
        ("save_cache",),
        "{1} is a saved cache already; leave out {0}",
        excluded=("cache", "document"),
    ),
    Conflict(
        ("document",),
        "{1} is one saved document and {0} puts several together; name each with {0}",
        excluded=("cache",),
    ),
    Conflict(
        ("recompute",),
        "{0} is for documents that were read one by one; name them with {1}",
        without=("document",),
    ),
    Conflict(
        ("prompt",),
        "{0} and {1} are two prompts at once; give one of them",
        excluded=("prompt_file",),
    ),
    Conflict(
        ("seed",),
        "{0} draws an answer, and without {1} none is drawn; add it",
        without=("temperature",),
    ),
    Conflict(
        ("metric",), "{0} is for {1}; every task has a metric of its own", without=("prompts",)
    ),
    Conflict(("fitted",), _FITTED, excluded=(*DECIDING, "profile", "policy")),
    Conflict(("fitted",), _FITTED, without=("budget", "target_loss", "memory")),
    Conflict(
        ("across",),
        "{0} shares a budget among the rows of a batch by what was fitted to the model; it goes "
        "with {option[budget=20%]} and nothing else that decides",
        excluded=(*sorted({*TARGET} - {"budget"}), *DECIDING, "profile", "policy"),
        without=("budget",),
    ),
    Conflict(
        ("target_loss",),
        "{0} is solved from what 'kvalloc fit' measured; leave out {1}, or decide once with "
        "'kvalloc solve' and apply the profile",
        excluded=(*DECIDING, "policy"),
    ),
    Conflict(
        (*TARGET, *DECIDING),
        "{0} decides for each prompt and {1} was decided before; give one of them",
        excluded=("profile",),
    ),
    Conflict(
        ("allow_other_model",),
        "{0} accepts what was stored for another model, and nothing stored is named; leave it out, "
        "or give {1}",
        without=("profile", "fitted", "cache", "document"),
    ),
    Conflict(
        DECIDING,
        "{0} says how a target is decided for each prompt; give one, such as {option[budget=20%]}",
        without=TARGET,
    ),
)
"""In the order in which they are looked for."""


def given_names(options: Mapping[str, object]) -> set[str]:
    """Return the names of the options that are given: neither None nor False."""
    return {name for name, value in options.items() if value is not None and value is not False}


def check_conflicts(set_options: Collection[str]) -> None:
    """Refuse options that exclude each other.

    Parameters
    ----------
    set_options : collection of str
        Names of the options that were given, as keywords or as they stand in flags.

    Raises
    ------
    InputError
        For the first conflict of the table.
    """
    for conflict in CONFLICTS:
        first = next((name for name in conflict.options if name in set_options), None)
        other = next((name for name in conflict.excluded if name in set_options), None)
        if conflict.without and not any(name in set_options for name in conflict.without):
            other = conflict.without[0]
        if first is not None and other is not None:
            names = option(first), option(other)
            raise InputError(conflict.message.format(*names, option=OptionNames()))
