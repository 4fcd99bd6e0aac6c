"""Scorers: how much each entry of the cache matters for the tokens to come.

One file a scorer. All of them, ours and others', are found through the entry-point group
``kvalloc.scorers``. Nothing here imports torch until a score is computed.
"""

from __future__ import annotations

from typing import Any

from kvalloc.problem.registry import SCORERS, build, load, names, read_named
from kvalloc.scorers.base import Scorer

__all__ = ["Scorer", "get_scorer", "scorer_class", "scorer_names"]


def scorer_names() -> list[str]:
    """Return the names of all registered scorers, sorted, without importing them."""
    return names(SCORERS)


def scorer_class(name: str) -> type[Scorer]:
    """Return the class of a registered scorer, for its summary and reference.

    Parameters
    ----------
    name : str
        A registered name.

    Raises
    ------
    InputError
        If there is no such scorer; lists those there are.
    SolverError
        If the plug-in cannot be imported or is not a scorer.
    """
    return load(SCORERS, name, Scorer)


def get_scorer(name: str, **parameters: Any) -> Scorer:
    """Return a scorer by name.

    Parameters
    ----------
    name : str
        A registered name, also with parameters: ``"snapkv:window=32"``.
    **parameters
        The scorer's own parameters, such as ``window`` and ``pool``.

    Returns
    -------
    Scorer
        ``get_scorer(scorer.name, **scorer.parameters())`` builds it again.

    Raises
    ------
    InputError
        If there is no such scorer or parameter, or a value is out of range; lists the choices.
    SolverError
        If the plug-in is broken.
    """
    name, named = read_named(name)
    return build(scorer_class(name), named | parameters, what=f"scorer {name}")
