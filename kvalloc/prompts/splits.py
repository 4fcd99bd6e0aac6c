"""What is kept apart: texts, words and random numbers of profiles, development and evaluation."""

from __future__ import annotations

import random
import zlib
from importlib import resources
from typing import Literal, get_args

from kvalloc.errors import InputError
from kvalloc.prompts.held_out import HELD_OUT_PREFIX

Split = Literal["profiling", "development", "held-out"]
SPLITS: tuple[Split, ...] = get_args(Split)

TEXTS = "kvalloc.data.texts"
PREFIXES: dict[Split, str] = {
    "profiling": "profile_",
    "development": "haystack_",
    "held-out": HELD_OUT_PREFIX,
}
"""How the names of a split's shipped texts begin."""

KEYS: dict[Split, tuple[str, ...]] = {
    "profiling": (
        "telescope", "cactus", "sleigh", "trumpet", "kettle", "canoe", "sparrow", "almond",
        "fountain", "zipper", "marble", "thimble", "hammock", "radish", "puppet", "volcano",
        "mitten", "oyster", "banjo", "tulip", "scarecrow", "waffle", "raft", "pebble",
    ),
    "development": (
        "lighthouse", "orchard", "glacier", "violin", "teapot", "meadow", "compass", "pelican",
        "chimney", "walnut", "anchor", "lantern", "saddle", "beehive", "windmill", "acorn",
        "harpsichord", "pumpkin", "igloo", "sandbox", "bakery", "ladder", "parrot", "cinnamon",
    ),
    "held-out": (
        "carousel", "dolphin", "umbrella", "candle", "waterfall", "penguin", "mushroom", "cello",
        "blanket", "cherry", "snowman", "tractor", "feather", "pillow", "squirrel", "jigsaw",
        "cupboard", "hedgehog", "drum", "lemon", "castle", "bicycle", "spoon", "dragon",
    ),
}  # fmt: skip
"""Things that seldom stand in prose, none of them in two splits."""


def check_split(name: str) -> Split:
    """The split of a name.

    Raises
    ------
    InputError
        If there is none; lists them.
    """
    for split in SPLITS:
        if split == name:
            return split
    raise InputError(f"there is no split {name!r}; choose from: {', '.join(SPLITS)}")


def split_texts(split: Split) -> dict[str, str]:
    """The shipped public-domain texts of a split, by name.

    Returns
    -------
    dict of str
        No text, and no speaker, is in two splits.
    """
    prefix = PREFIXES[split]
    return {
        entry.name.removeprefix(prefix).removesuffix(".txt"): entry.read_text("utf-8")
        for entry in sorted(resources.files(TEXTS).iterdir(), key=lambda item: item.name)
        if entry.name.startswith(prefix) and entry.name.endswith(".txt")
    }


def belongs(name: str, split: Split) -> bool:
    """Whether a thing that does not ship with kvalloc, such as a word or a module, is a split's.

    Each name is in exactly one split, by its checksum.
    """
    return zlib.crc32(name.encode()) % len(SPLITS) == SPLITS.index(split)


def stream(split: Split, task: str, seed: int) -> random.Random:
    """Random numbers that no other split, task or seed draws."""
    return random.Random(f"kvalloc/{split}/{task}/{seed}")
