"""Scorers: importance of each entry of the cache for later tokens."""

from __future__ import annotations

from typing import Any

from kvalloc.problem.registry import SCORERS, build, load, names, read_named
from kvalloc.scorers.base import Scorer

__all__ = ["Scorer", "get_scorer", "scorer_class", "scorer_names"]


def scorer_names() -> list[str]:
    """Return the sorted names of all registered scorers."""
    return names(SCORERS)


def scorer_class(name: str) -> type[Scorer]:
    """Return the class of a registered scorer.

    Raises
    ------
    InputError
        If there is no such scorer.
    SolverError
        If the plug-in cannot be imported or is not a scorer.
    """
    return load(SCORERS, name, Scorer)


def get_scorer(name: str, **parameters: Any) -> Scorer:
    """Return a scorer; ``get_scorer(scorer.name, **scorer.parameters())`` builds it again.

    Parameters
    ----------
    name : str
        Also with parameters: ``"snapkv:window=32"``.
    **parameters

    Raises
    ------
    InputError, SolverError
        As `scorer_class`, or for an unknown or invalid parameter.
    """
    name, named = read_named(name)
    return build(scorer_class(name), named | parameters, what=f"scorer {name}")
