"""A prompt that is whole until all of its layers evict at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from kvalloc.accounting import IntArray
from kvalloc.runtime.arrival import Step, row_tokens
from kvalloc.runtime.plan import Plan
from kvalloc.runtime.refusals import token_ids
from kvalloc.runtime.repetition import (
    HeldPrompt,
    Wanted,
    check_context,
    repeat_prompt,
)
from kvalloc.scorers.base import awaited_tokens, repetitions
from kvalloc.scorers.later_pass import Later

__all__ = ["WholePrompt"]


class WholePrompt:
    """What is known of a prompt that is held, for the tokens that come after it.

    Parameters
    ----------
    plan : Plan

    Attributes
    ----------
    positions : Tensor of int64, (batch, n_tokens)
        On the host.
    ids : Tensor of int64, (batch, n_tokens)
        Its tokens, where the model is to repeat them.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.positions = self.ids = torch.empty(0, 0, dtype=torch.long)

    def add(self, arguments: Mapping[str, Any], step: Step) -> None:
        """Note a forward of the prompt; one that has failed may come again.

        Raises
        ------
        UnsupportedRequestError
            If the model is to repeat the prompt, but it comes as embeddings.
        """
        seen, end = step.seen, step.seen + step.new_tokens
        if repetitions(one for scorers in self.plan.wanted.values() for one in scorers):
            use = "a scorer has the model repeat the prompt's tokens"
            ids = token_ids(arguments, use, "choose another scorer")
            self.ids = torch.cat([self.ids[:, :seen], ids], dim=1) if seen else ids
        positions = arguments.get("position_ids")
        if not isinstance(positions, Tensor):
            positions = torch.arange(seen, end)[None]
        positions = positions.cpu().expand(step.batch, -1)
        before = self.positions[:, :seen]
        self.positions = torch.cat([before, positions], dim=1) if seen else positions

    def select(self, rows: Tensor) -> None:
        """Let row i go on with what is known of row ``rows[i]``."""
        self.positions = self.positions[rows.cpu()]
        if len(self.ids):
            self.ids = self.ids[rows.to(self.ids.device)]

    def next_positions(self, visible: Tensor) -> Tensor:
        """Return the position of what follows each row, (batch,), on the host."""
        return self.positions.masked_fill(~visible, -1).amax(dim=1) + 1

    def check_room(self, visible: Tensor, tokens: IntArray, layers: Collection[int]) -> None:
        """Refuse a prompt that does not fit the model's limit with what scorers want after it.

        Parameters
        ----------
        visible : Tensor of bool, (batch, n_tokens)
        tokens : ndarray of int64, (batch,)
            Of each row of the complete prompt, padding left out.
        layers : collection of int
            Those that will evict.
        """
        scorers = [one for layer in layers for one in self.plan.wanted.get(layer, ())]
        passes = repetitions(scorers)
        if awaited := awaited_tokens(scorers):
            passes.append(Later(kind="following", tokens=awaited))
        if self.plan.limit is None or not passes:
            return
        places = self.next_positions(visible) + torch.from_numpy(tokens - row_tokens(visible))
        for later in passes:
            check_context(later, places.tolist(), tokens.tolist(), self.plan.limit)

    def repeat(self, layers: list[Any], visible: Tensor, looks: Wanted, *, sinks: int) -> None:
        """Let the model repeat the complete prompt; what scorers note of it stands in its layers.

        Parameters
        ----------
        layers : list
            The cache's own.
        visible : Tensor of bool, (batch, n_tokens)
        looks : mapping of int to sequence of Scorer
        sinks : int
        """
        decoder = self.plan.decoder()
        assert decoder is not None, "it has just read the prompt"
        held = HeldPrompt(
            decoder=decoder,
            layers=layers,
            visible=visible,
            next_positions=self.next_positions(visible),
            ids=self.ids,
        )
        for index, noted in repeat_prompt(held, looks, sinks=sinks).items():
            layers[index].unfinished.later |= noted
