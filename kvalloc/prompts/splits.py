"""What is kept apart: texts, words and random numbers of profiles, development and evaluation."""

from __future__ import annotations

import random
import zlib
from typing import Literal, get_args

from kvalloc.data import words
from kvalloc.errors import InputError
from kvalloc.prompts.held_out import HELD_OUT_PREFIX
from kvalloc.prompts.texts import shipped_texts

Split = Literal["profiling", "development", "held-out"]
SPLITS: tuple[Split, ...] = get_args(Split)

PREFIXES: dict[Split, str] = {
    "profiling": "profile_",
    "development": "haystack_",
    "held-out": HELD_OUT_PREFIX,
}
"""How the names of a split's shipped texts begin."""

KEYS: dict[Split, list[str]] = words("keys")
"""Things that seldom stand in prose, none of them in two splits."""


def check_split(name: str) -> Split:
    """The split of a name.

    Raises
    ------
    InputError
        If there is none; lists them.
    """
    if name not in SPLITS:
        raise InputError(f"there is no split {name!r}; choose from: {', '.join(SPLITS)}")
    return name


def split_texts(split: Split) -> dict[str, str]:
    """The shipped public-domain texts of a split, by name.

    Returns
    -------
    dict of str
        No text, and no speaker, is in two splits.
    """
    prefix = PREFIXES[split]
    return {
        name.removeprefix(prefix).removesuffix(".txt"): text
        for name, text in shipped_texts(prefix).items()
    }


def belongs(name: str, split: Split) -> bool:
    """Whether a thing that does not ship with kvalloc, such as a word or a module, is a split's.

    Each name is in exactly one split, by its checksum.
    """
    return zlib.crc32(name.encode()) % len(SPLITS) == SPLITS.index(split)


def stream(split: Split, task: str, seed: int) -> random.Random:
    """Random numbers that no other split, task or seed draws."""
    return random.Random(f"kvalloc/{split}/{task}/{seed}")
