"""Budgets that are decided when a prompt has come, and from it: what the cache asks for."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from torch import Tensor, nn

from kvalloc.accounting import IntArray
from kvalloc.errors import UnsupportedRequestError
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.runtime.arrival import Arrival
from kvalloc.runtime.refusals import new_tokens_shape

if TYPE_CHECKING:
    from kvalloc.models.attention import AttentionStates
    from kvalloc.scorers import Scorer

__all__ = [
    "Decide",
    "DecideHeld",
    "DecidesByPrompt",
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
    shown = ids.new_ones(ids.shape).bool() if visible is None else visible.to(ids.device)
    rows = zip(ids, shown, strict=True)
    return [row[kept].cpu().numpy().astype(np.int64) for row, kept in rows]


def row_decisions(
    decide: Decide,
    decoder: nn.Module,
    rows: Sequence[IntArray],
    otherwise: BudgetProfile,
    states: Callable[[int], Mapping[int, AttentionStates]] | None = None,
) -> list[BudgetProfile]:
    """Ask once for rows that are equal, as those of a beam search are.

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
    keys = [row.tobytes() for row in rows]
    places = {key: place for place, key in enumerate(keys) if rows[place].size}
    asked = [rows[place] for place in places.values()]
    holding = from_held(decide)
    answers: Sequence[BudgetProfile] = ()
    if asked and holding is not None and states is not None:
        answers = holding.from_states(decoder, asked, [states(row) for row in places.values()])
    elif asked:
        answers = decide(decoder, asked)
    decided = dict(zip(places, answers, strict=True))
    return [decided.get(key, otherwise) for key in keys]


class DecidesByPrompt:
    """The part of a cache that decides its budgets when the prompt has come, if it does.

    Attributes
    ----------
    profile : BudgetProfile
        Whose budgets hold: decided ones, where all rows have the same.
    decision_seconds : float or None
        What deciding took; None where nothing was decided.
    """

    profile: BudgetProfile
    arrival: Arrival
    decoder: Callable[[], nn.Module | None]
    decision_seconds: float | None = None
    _decided_ahead: bool = False
    _decide: Decide | None
    _stored_profile: BudgetProfile
    get_seq_length: Callable[[], int]

    @property
    @abstractmethod
    def batch(self) -> int:
        """Rows that are stored; 0 before the first forward."""

    @property
    def row_profiles(self) -> tuple[BudgetProfile, ...]:
        """Whose budgets each row keeps, ``(batch,)``: its own, where they are decided by prompt."""
        found = self.arrival.row_profiles
        return (self.profile,) * self.batch if found is None else found

    def decide(self, inputs: Mapping[str, Any]) -> None:
        """Decide the budgets of a prompt now, before it arrives; without a decider do nothing.

        By itself the cache decides in the first forward, which has to be the whole prompt. Where
        a prompt of announced length comes in chunks, this is how it is shown as a whole.

        Parameters
        ----------
        inputs : mapping
            ``input_ids`` (batch, n_tokens) and, where there is padding, ``attention_mask``.

        Raises
        ------
        UnsupportedRequestError
            If a prompt has been seen already, or it is not given as token ids.
        KVAllocError
            As the decider does.
        """
        if self.get_seq_length():
            raise UnsupportedRequestError(
                "the budgets of a prompt are decided before it arrives, but this cache holds one "
                "already; call cache.reset(), or make a new cache"
            )
        self._decide_for(inputs)
        self._decided_ahead = self._decide is not None

    def _decide_for(self, inputs: Mapping[str, Any]) -> None:
        if self._decide is None or from_held(self._decide) is not None:
            return
        batch, tokens = new_tokens_shape(inputs)
        visible = self.arrival.padding(batch, tokens, inputs.get("attention_mask"))
        self._decide_rows(prompt_rows(inputs, visible))

    def _decide_rows(
        self,
        rows: Sequence[IntArray],
        states: Callable[[int], Mapping[int, AttentionStates]] | None = None,
    ) -> None:
        """Decide for rows without padding, from what the layers saw of them where that is known."""
        decoder = self.decoder()
        if self._decide is None or decoder is None:
            return
        begun = time.perf_counter()
        decided = row_decisions(self._decide, decoder, rows, self._stored_profile, states)
        self.arrival.decide(decided)
        if all(one is decided[0] for one in decided):
            self.profile = decided[0]
        self.decision_seconds = time.perf_counter() - begun

    def _decide_on_arrival(self, batch: int, arguments: Mapping[str, Any], mask: object) -> None:
        """Decide in the first forward, unless that was done before."""
        if self._decide is None or self.get_seq_length() or self._decided_ahead:
            return
        if from_held(self._decide) is not None:  # when the prompt is complete
            return
        _, tokens = new_tokens_shape(arguments)
        if self.arrival.open or self.arrival.announced not in (None, tokens):
            raise UnsupportedRequestError(
                "budgets of a prompt's own are decided from the whole prompt, but only a chunk of "
                "it has come; send it in one piece, show all of it first with cache.decide(), or "
                "use a stored profile without adapt"
            )
        self.arrival.row_profiles = None  # of an attempt that failed
        self.arrival.step(0, batch, tokens, mask)  # refuses before anything runs
        self._decide_for({**arguments, "attention_mask": mask})
