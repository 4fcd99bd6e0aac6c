"""Separate texts, words and random numbers for profiles, development and evaluation."""

from __future__ import annotations

import random
import re
import zlib
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Literal, get_args

from kvalloc.data import words
from kvalloc.errors import InputError
from kvalloc.prompts.texts import Document, Prompt, shipped_texts

Split = Literal["profiling", "development", "held-out"]
SPLITS: tuple[Split, ...] = get_args(Split)

PREFIXES: dict[Split, str] = {
    "profiling": "profile_",
    "development": "haystack_",
    "held-out": "heldout_",
}
"""How the names of a split's shipped texts begin."""

KEYS: dict[Split, list[str]] = words("keys")
"""Things that seldom stand in prose, none of them in two splits."""

RUN_WORDS = 10
"""A run of this many words stands in no other text but by quotation."""
MOST_RUNS = 10
"""This many runs in common may be a quotation; more are a piece of the text."""

_WORD = re.compile(r"[a-z0-9]+")


def split_texts(split: Split) -> dict[str, str]:
    """Return the shipped public-domain texts of a split, by name.

    No text, and no speaker, is in two splits.
    """
    prefix = PREFIXES[split]
    return {
        name.removeprefix(prefix).removesuffix(".txt"): text
        for name, text in shipped_texts(prefix).items()
    }


def belongs(name: str, split: Split) -> bool:
    """Return whether a name, such as a module's, is in a split; each has one."""
    return zlib.crc32(name.encode()) % len(SPLITS) == SPLITS.index(split)


def coded_words(
    draw: random.Random, split: Split, count: int, *, letters: str, length: int
) -> list[str]:
    """Return different words of random letters, in no other split.

    Parameters
    ----------
    draw : random.Random
    split : str
    count, length : int
        Numbers of words, and of letters.
    letters : str
    """
    coded: dict[str, None] = {}
    while len(coded) < count:
        word = "".join(draw.choices(letters, k=length))
        if belongs(word, split):
            coded[word] = None
    return list(coded)


def stream(split: Split, task: str, seed: int) -> random.Random:
    """Return random numbers that no other split, task or seed draws."""
    return random.Random(f"kvalloc/{split}/{task}/{seed}")


def refuse_held_out(texts: Iterable[Document | Prompt]) -> None:
    """Refuse texts with pieces of the held-out evaluation texts.

    Raises
    ------
    InputError
        Names both texts.
    """
    for text in texts:
        held_out = _held_out_runs()
        counts = Counter(held_out[run] for run in _runs(_whole(text)) if run in held_out)
        for source, count in counts.items():
            if count > MOST_RUNS:
                where = text.where if isinstance(text, Prompt) else text.name or "a text"
                raise InputError(
                    f"{where} holds a piece of {source}, which is kept for the final evaluation "
                    "(kvalloc eval --split held-out); measure on another text"
                )


def _whole(text: Document | Prompt) -> str:
    if isinstance(text, Document):
        return text.text
    messages = (str(message.get("content", "")) for message in text.messages)
    return " ".join([text.text, *messages, text.question])


@cache
def _held_out_runs() -> dict[int, str]:
    """Return the held-out text of each run of words, by hash."""
    return {
        run: name
        for name, text in shipped_texts(PREFIXES["held-out"]).items()
        for run in _runs(text)
    }


def _runs(text: str) -> Iterable[int]:
    words = _WORD.findall(text.lower())
    return (hash(tuple(words[at : at + RUN_WORDS])) for at in range(len(words) - RUN_WORDS + 1))
