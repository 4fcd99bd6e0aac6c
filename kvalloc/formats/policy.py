"""Which entries are kept within a budget: the record of it that both kinds of profile hold."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from kvalloc.errors import InputError, command
from kvalloc.formats.record import Record, require

BY_SCORE = ("score", "attention_matching")
"""Policies that keep the best by score, whatever they do with the rest."""


class Policy(Record):
    """How the runtime picks which entries to keep within a budget."""

    NAME: ClassVar[str] = "policy"

    scorer: str
    """Name of the scorer."""

    scorer_parameters: dict[str, Any]
    """What rebuilds the scorer."""

    sinks: int = Field(ge=0)
    """First tokens of the prompt, never evicted and part of every budget."""

    window: int = Field(ge=0)
    """Last tokens of the prompt, likewise."""

    name: str = "score"
    """Name of the policy; ``score`` keeps the scorer's best entries."""

    parameters: dict[str, Any] = Field(default_factory=dict)
    """What rebuilds the policy, apart from the scorer."""

    label: str = ""
    """Its name in the request, such as ``snapkv:window=4``, where it is one of several."""

    @cached_property
    def protected_tokens(self) -> int:
        """Sinks plus window."""
        return self.sinks + self.window

    @cached_property
    def biased(self) -> bool:
        """Whether it gives entries logit biases."""
        return self.name == "attention_matching" and bool(self.parameters.get("biases", True))

    @property
    def title(self) -> str:
        """Its name in tables: its label, else its name, else that of its scorer."""
        return self.label or (self.scorer if self.name == "score" else self.name)


def counted(titles: npt.NDArray[np.str_]) -> str:
    """Return how many KV heads have which policy, the most common first.

    Examples
    --------
    >>> counted(np.array(["xkv", "tova", "xkv"]))
    'xkv in 2, tova in 1'
    """
    names, heads = np.unique(titles, return_counts=True)
    by_count = sorted(zip(heads.tolist(), names.tolist(), strict=True), reverse=True)
    return ", ".join(f"{name} in {count}" for count, name in by_count)


def require_policies(field: str, main: Policy, others: Sequence[Policy]) -> None:
    """Refuse policies that cannot stand beside a profile's own, as `require` does.

    Budgets include sinks and window, so all must protect the same. Each needs a different name, by
    which a request can choose it.

    Parameters
    ----------
    field : str
        Where the others stand.
    main, others
        The policies.
    """
    for other in others:
        require(
            (other.sinks, other.window) == (main.sinks, main.window),
            field,
            f"{other.title} with {other.sinks} sinks and a window of {other.window}",
            f"the profile's {main.sinks} sinks and window of {main.window} in every policy",
        )
    titles = [policy.title for policy in (main, *others)]
    twice = next((title for title in titles if titles.count(title) > 1), "")
    single = len({*titles}) == len(titles) and all(titles)
    require(single, field, f"{twice!r} twice", "a name of its own for each policy")


def places_of(main: Policy, others: Sequence[Policy], names: Sequence[str]) -> tuple[int, ...]:
    """Return the places of named policies in ``(main, *others)``, rising.

    Parameters
    ----------
    main, others
        The policies.
    names : sequence of str
        Titles.

    Returns
    -------
    tuple of int

    Raises
    ------
    InputError
        If there is none of that name, or no name at all; lists those there are.
    """
    titles = [policy.title for policy in (main, *others)]
    unknown = next((name for name in names if name not in titles), None)
    if unknown is not None or not names:
        fault = "no policy is named" if unknown is None else f"no losses of {unknown!r} are held"
        raise InputError(
            f"{fault}; this score profile has those of {', '.join(titles)}: choose from them, or "
            f"measure more with {command('profile', loss_policies=None)}"
        )
    return tuple(sorted({titles.index(name) for name in names}))
