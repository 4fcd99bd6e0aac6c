"""Data that ships with kvalloc."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any


def words(name: str) -> Any:
    """Return a word list of ``words.json``, or several by name."""
    return _word_lists()[name]


@cache
def _word_lists() -> dict[str, Any]:
    lists: dict[str, Any] = json.loads(
        (resources.files(__name__) / "words.json").read_text("utf-8")
    )
    return lists
