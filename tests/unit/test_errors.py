"""What every error has in common."""

from __future__ import annotations

import copy
import importlib.metadata
import pickle

import pytest
from cli_tools import without

from kvalloc import errors


class OfAPlugin(errors.SolverError):
    """With arguments of its own, as a plug-in's may have."""

    def __init__(self, *, solver: str) -> None:
        super().__init__(f"{solver} has failed")
        self.solver = solver


KINDS = [
    one
    for one in vars(errors).values()
    if isinstance(one, type) and issubclass(one, errors.KVAllocError)
]


@pytest.mark.parametrize("kind", [*KINDS, OfAPlugin], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("again", [lambda one: pickle.loads(pickle.dumps(one)), copy.copy])
def test_an_error_comes_back_from_another_process(kind, again):
    """What a worker raises is sent as a pickle; one that cannot be read ends the whole pool."""
    if kind is errors.ProfileFileError:
        error = kind("p.json", field="bits", value=[3], expected="8", way_out="make it again")
    elif kind is errors.InfeasibleError:
        error = kind("too little", nearest=0.5)
    else:
        error = OfAPlugin(solver="mine") if kind is OfAPlugin else kind("what was wrong")
    result = again(error)
    assert type(result) is kind
    assert (str(result), result.args, vars(result)) == (str(error), error.args, vars(error))


STATED = (
    "numpy>=1.26",
    'transformers<5.25,>=5.2; extra == "run"',
    'transformers<5.3,>=5.2; extra == "kvpress"',
)


@pytest.mark.parametrize(
    ("installed", "tested"),
    [("5.2.0", True), ("5.24.9+cpu", True), ("5.1.0", False), ("5.25.0.dev0", False)],
)
def test_a_version_that_was_not_tested_is_named_with_the_way_out(monkeypatch, installed, tested):
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: STATED)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed)
    asked = "transformers>=5.2,<5.25"
    line = f"kvalloc asks for {asked}, not {installed}: pip install '{asked}'"
    assert errors.outside_range("transformers") == ("" if tested else line)
    assert errors.outside_range("torch") == ""  # of which nothing is stated here
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: None)
    assert errors.outside_range("transformers") == ""


def test_nothing_is_said_where_there_is_nothing_to_compare(monkeypatch):
    with without("packaging"):
        assert errors.outside_range("transformers") == ""
    assert errors.outside_range("not-installed") == ""
