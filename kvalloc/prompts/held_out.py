"""Texts that are kept for the final evaluation: nothing may be measured on them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import cache

from kvalloc.errors import InputError
from kvalloc.prompts.texts import Document, Prompt, shipped_texts

HELD_OUT_PREFIX = "heldout_"
"""How the names of these texts begin, in ``kvalloc/data/texts``."""

RUN_WORDS = 10
"""A run of so many words is found again in no other text but by quotation."""
MOST_RUNS = 10
"""So many runs in common may be a quotation; more are a piece of the text."""

_WORD = re.compile(r"[a-z0-9]+")


def refuse_held_out(texts: Iterable[Document | Prompt]) -> None:
    """Refuse texts with a piece of the held-out evaluation texts in them.

    Parameters
    ----------
    texts : iterable of Document or Prompt
        What is to be measured.

    Raises
    ------
    InputError
        Names the text and the held-out one that it holds a piece of.
    """
    for text in texts:
        held_out = _held_out_runs()
        found = Counter(held_out[run] for run in _runs(_whole(text)) if run in held_out)
        for source, count in found.items():
            if count > MOST_RUNS:
                where = text.where if isinstance(text, Prompt) else text.name or "a text"
                raise InputError(
                    f"{where} holds a piece of {source}, which is kept for the final evaluation "
                    "(kvalloc eval --split held-out); measure on another text"
                )


def _whole(text: Document | Prompt) -> str:
    if isinstance(text, Document):
        return text.text
    said = (str(message.get("content", "")) for message in text.messages)
    return " ".join([text.text, *said, text.question])


@cache
def _held_out_runs() -> dict[int, str]:
    """Which held-out text each run of words is of, by the run's hash."""
    return {
        run: name for name, text in shipped_texts(HELD_OUT_PREFIX).items() for run in _runs(text)
    }


def _runs(text: str) -> Iterable[int]:
    words = _WORD.findall(text.lower())
    return (hash(tuple(words[at : at + RUN_WORDS])) for at in range(len(words) - RUN_WORDS + 1))
