"""Budgets that are decided when a prompt has come, and from it: what the cache asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
from torch import Tensor, nn

from kvalloc.accounting import IntArray
from kvalloc.errors import UnsupportedRequestError
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.models.attention import AttentionStates
from kvalloc.scorers import Scorer

__all__ = [
    "Decide",
    "DecideHeld",
    "from_held",
    "prompt_rows",
    "row_decisions",
]


class Decide(Protocol):
    """Decides budgets from prompts. Holds no model and nothing of a prompt: caches share it."""

    def __call__(self, decoder: nn.Module, rows: Sequence[IntArray]) -> Sequence[BudgetProfile]:
        """The budgets of each row.

        Parameters
        ----------
        decoder : nn.Module
            The model without its head, which may be run.
        rows : sequence of ndarray of int64, (n_tokens,)
            Token ids without padding; no row is empty.

        Returns
        -------
        sequence of BudgetProfile
            One a row, with the same sinks, window and policy as the cache's own.
        """


class DecideHeld(Decide, Protocol):
    """Decides budgets from a prompt that the cache holds whole, without running it again."""

    @property
    def hold(self) -> bool:
        """Whether it does; otherwise it is a `Decide` like any other."""

    @property
    def scorer(self) -> Scorer:
        """Whose scores it measures."""

    def from_states(
        self,
        decoder: nn.Module,
        rows: Sequence[IntArray],
        states: Sequence[Mapping[int, AttentionStates]],
    ) -> Sequence[BudgetProfile]:
        """The budgets of each row.

        Parameters
        ----------
        decoder, rows
            As for `Decide`.
        states : sequence of mapping of int to AttentionStates, each with one row
            What each full-attention layer saw of it, with the last queries that the scorer looks
            at, and without padding.

        Returns
        -------
        sequence of BudgetProfile
            As from `Decide`.
        """


def from_held(decide: Decide | None) -> DecideHeld | None:
    """The decider, if it wants the cache to hold the prompt."""
    return cast(DecideHeld, decide) if getattr(decide, "hold", False) else None


def prompt_rows(arguments: Mapping[str, Any], visible: Tensor | None) -> list[IntArray]:
    """Token ids of each row of a prompt, without padding.

    Parameters
    ----------
    arguments : mapping
        Arguments of a forward, or of ``generate()``.
    visible : Tensor of bool, (batch, n_tokens), or None
        False marks padding.

    Raises
    ------
    UnsupportedRequestError
        If the prompt is not given as token ids.
    """
    ids = arguments.get("input_ids")
    if arguments.get("inputs_embeds") is not None or not isinstance(ids, Tensor):
        raise UnsupportedRequestError(
            "budgets of a prompt's own are decided from its token ids, but this prompt came as "
            "inputs_embeds; pass input_ids, or use a stored profile without adapt"
        )
    rows = ids.cpu().numpy().astype(np.int64)
    if visible is None:
        return list(rows)
    return [row[shown] for row, shown in zip(rows, visible.numpy(), strict=True)]


def row_decisions(
    decide: Decide,
    decoder: nn.Module,
    rows: Sequence[IntArray],
    otherwise: BudgetProfile,
    states: Callable[[int], Mapping[int, AttentionStates]] | None = None,
) -> list[BudgetProfile]:
    """Ask for the budgets of all rows that are not padding alone.

    Parameters
    ----------
    decide : Decide
    decoder : nn.Module
    rows : sequence of ndarray of int64, (n_tokens,)
    otherwise : BudgetProfile
        For rows that are padding only.
    states : callable, optional
        For a `DecideHeld`: what the layers saw of a row.

    Returns
    -------
    list of BudgetProfile, one a row
    """
    places = [place for place, row in enumerate(rows) if row.size]
    asked, holding = [rows[place] for place in places], from_held(decide)
    answers: Sequence[BudgetProfile] = ()
    if asked and holding is not None and states is not None:
        answers = holding.from_states(decoder, asked, [states(place) for place in places])
    elif asked:
        answers = decide(decoder, asked)
    decided = dict(zip(places, answers, strict=True))
    return [decided.get(place, otherwise) for place in range(len(rows))]
