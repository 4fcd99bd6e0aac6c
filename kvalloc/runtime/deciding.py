"""Budgets decided from a prompt before anything of it is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from kvalloc.accounting import IntArray
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.runtime.refusals import new_tokens, refuse


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


def prompt_rows(arguments: Mapping[str, Any], visible: Tensor) -> list[IntArray]:
    """Token ids of each row of a prompt, without padding.

    Parameters
    ----------
    arguments : mapping
        Arguments of a forward, or of ``generate()``.
    visible : Tensor of bool, (batch, n_tokens)
        False marks padding.

    Raises
    ------
    UnsupportedRequestError
        If the prompt is not given as token ids.
    """
    ids = new_tokens(arguments)
    refuse(decides_from_embeddings=ids.ndim > 2)
    rows = ids.cpu().numpy().astype(np.int64)
    return [row[shown] for row, shown in zip(rows, visible.numpy(), strict=True)]


def row_decisions(
    decide: Decide, decoder: nn.Module, rows: Sequence[IntArray], otherwise: BudgetProfile
) -> list[BudgetProfile]:
    """Decide the budgets of all rows that are not padding alone.

    Parameters
    ----------
    decide : Decide
    decoder : nn.Module
    rows : sequence of ndarray of int64, (n_tokens,)
    otherwise : BudgetProfile
        For rows that are padding only.

    Returns
    -------
    list of BudgetProfile, one a row
    """
    places = [place for place, row in enumerate(rows) if row.size]
    profiles = decide(decoder, [rows[place] for place in places]) if places else ()
    decided = dict(zip(places, profiles, strict=True))
    return [decided.get(place, otherwise) for place in range(len(rows))]
