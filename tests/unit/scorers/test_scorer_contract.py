"""The contract of scorers: all of kvalloc's meet it, and so does the one of docs/plugins.md."""

import re
from pathlib import Path

import pytest

from kvalloc.scorers import get_scorer, scorer_names
from kvalloc.testing import ScorerContract

PAGE = Path(__file__).parents[3] / "docs" / "plugins.md"
NEEDING_MORE = ("surrogate", "kvpress", "reconstruction")
"""A file of one model, another package, a second read."""


def of_the_page():
    """The class of the page's first block of Python, and the lines that it takes."""
    block = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    names = {"__name__": "plugin"}
    exec(block, names)
    return names["ShortKeys"]()


class TestScorers(ScorerContract):
    """Each scorer by its name."""

    @pytest.fixture(params=sorted({*scorer_names()} - {*NEEDING_MORE}))
    def scorer(self, request):
        return get_scorer(request.param)


class TestOfThePage(ScorerContract):
    """Ten lines, written as the page says."""

    @pytest.fixture
    def scorer(self):
        return of_the_page()
