"""How the tokens of a cache arrive: what belongs to the prompt, what is padding, what is kept."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import IntArray
from kvalloc.errors import UnsupportedRequestError
from kvalloc.formats.budget_profile import BudgetProfile


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one forward is.

    Attributes
    ----------
    seen : int
        Columns seen before it.
    visible : Tensor of bool, (batch, seen + new_tokens)
        False marks padding. On the host.
    follows : bool
        Whether its tokens follow the prompt.
    prompt_tokens : int
        Columns of the prompt as far as it is known.
    completes : bool
        Whether the prompt is known to be complete after it.
    """

    seen: int
    visible: Tensor
    follows: bool
    prompt_tokens: int
    completes: bool

    @property
    def batch(self) -> int:
        """Rows of its input."""
        return int(self.visible.shape[0])

    @property
    def new_tokens(self) -> int:
        """Columns of its input."""
        return int(self.visible.shape[1]) - self.seen

    @property
    def new_visible(self) -> Tensor:
        """What is no padding of its input, bool, (batch, new_tokens)."""
        return self.visible[:, self.seen :]

    @cached_property
    def padded(self) -> bool:
        """Whether its input has padding."""
        return not bool(self.new_visible.all())

    def following_visible(self, tokens: int, device: torch.device) -> Tensor | None:
        """The last columns of `visible`, (batch, tokens); None where they hide nothing."""
        key = tokens, str(device)
        if key not in self._following:
            last = self.visible[:, self.visible.shape[1] - tokens :]
            self._following[key] = None if bool(last.all()) else last.to(device)
        return self._following[key]

    @cached_property
    def columns(self) -> Tensor:
        """Where its tokens stand, int64, (batch, new_tokens), on the host; -1 for padding."""
        columns = torch.arange(self.seen, self.seen + self.new_tokens, device="cpu").expand(
            self.batch, -1
        )
        return columns.masked_fill(~self.new_visible, -1)

    @cached_property
    def _following(self) -> dict[tuple[int, str], Tensor | None]:
        return {}


class Arrival:
    """Follows the tokens of one cache.

    The prompt is the first forward, unless its length was announced (`prompt_tokens`). Everything
    after it follows.

    Parameters
    ----------
    profile : BudgetProfile
        Whose budgets hold.
    announced : int or None
        Columns of the prompt, if they were announced.

    Attributes
    ----------
    prompt_tokens : int or None
        Columns of the prompt that have come; None before the first.
    complete : bool
        Whether the whole prompt has come.
    settled : int
        Columns up to the latest eviction, which are within the budget.
    competed : ndarray of int64, (batch,)
        Tokens of each row when all of it last competed.
    visible : Tensor of bool, (batch, n_seen)
        False marks padding. On the host.
    shown_rows : ndarray of int64, (batch,), or None
        Tokens of each row of a prompt that was shown before it comes.
    row_profiles : tuple of BudgetProfile or None
        Whose budgets each row keeps, where they were decided from the prompt.
    """

    def __init__(self, profile: BudgetProfile, announced: int | None) -> None:
        self.profile, self.announced = profile, announced
        self.forget()

    def forget(self) -> None:
        """Get ready for a new prompt."""
        self.prompt_tokens: int | None = None
        self.complete = False
        self.settled = 0
        self.competed = np.zeros(0, np.int64)
        self.visible = torch.ones(0, 0, dtype=torch.bool, device="cpu")
        self.shown_rows: IntArray | None = None
        self.row_profiles: tuple[BudgetProfile, ...] | None = None

    def _profiles_of(self, batch: int) -> tuple[BudgetProfile, ...] | None:
        """One profile a row; each stands for several where rows were repeated since."""
        if self.row_profiles is None:
            return None
        times, rest = divmod(batch, len(self.row_profiles))
        if rest or not times:
            raise UnsupportedRequestError(
                f"the budgets were decided for {len(self.row_profiles)} rows, but this input has "
                f"{batch}; call cache.reset() and decide for these rows"
            )
        return tuple(one for one in self.row_profiles for _ in range(times))

    def step(
        self, seen: int, batch: int, new_tokens: int, mask: object, *, whole: bool = False
    ) -> Step:
        """What the next forward is; raises where it cannot be served, and changes nothing.

        Parameters
        ----------
        seen : int
            Columns seen so far.
        batch, new_tokens : int
            Size of the forward's input.
        mask : object
            Its ``attention_mask``.
        whole : bool
            Whether nothing has gone, so that it may show and hide other tokens of the past.

        Raises
        ------
        UnsupportedRequestError
            If there are more tokens than announced, or the mask cannot be followed.
        """
        in_prompt = not self.complete or seen == 0
        end = seen + new_tokens
        expected = self.announced if in_prompt and self.announced is not None else end
        if end > expected:
            raise UnsupportedRequestError(
                f"the cache was made for a prompt of {expected} tokens, but {seen} seen and "
                f"{new_tokens} new ones are more; send the prompt and what follows it "
                "separately"
            )
        visible = self.visible_after(seen, batch, new_tokens, mask, whole=whole)
        return Step(
            seen=seen,
            visible=visible,
            follows=not in_prompt,
            prompt_tokens=expected if in_prompt else (self.prompt_tokens or seen),
            completes=in_prompt and end == expected,
        )

    def row_tokens(self, visible: Tensor, expected: int) -> IntArray:
        """Tokens of each row of the complete prompt, (batch,), padding left out.

        Where they have not been shown, those so far and all columns that are still announced.
        """
        if self.shown_rows is not None and len(self.shown_rows) == len(visible):
            return self.shown_rows
        return row_tokens(visible) + (expected - visible.shape[1])

    def commit(self, step: Step) -> None:
        """The forward went through."""
        self.visible = step.visible
        self.row_profiles = self._profiles_of(step.batch)
        if not step.follows:
            self.prompt_tokens = step.seen + step.new_tokens
            self.complete = step.completes

    def resume(
        self,
        visible: Tensor,
        prompt_tokens: int,
        competed: IntArray,
        row_profiles: tuple[BudgetProfile, ...] | None = None,
    ) -> None:
        """Go on behind a complete prompt, and what followed it, all of which is settled."""
        self.visible, self.complete, self.settled = visible, True, int(visible.shape[1])
        self.prompt_tokens, self.competed = prompt_tokens, competed
        self.row_profiles = row_profiles

    def select(self, rows: Tensor) -> None:
        """Let row i go on with what row ``rows[i]`` has seen."""
        self.visible = self.visible[rows.cpu()]
        if len(self.competed):
            self.competed = self.competed[rows.cpu().numpy()]
        if self.row_profiles is not None:
            self.row_profiles = tuple(self.row_profiles[row] for row in rows.tolist())

    def crop(self, columns: int) -> None:
        """Forget all but the first columns."""
        self.settled = min(self.settled, columns)
        self.visible = self.visible[:, :columns]

    def budgets(self, tokens: IntArray) -> IntArray:
        """What may stay of rows of so many tokens, (batch,), padding left out.

        Returns
        -------
        ndarray of int64, (batch, n_layers, n_kv_heads)
        """
        profiles = self._profiles_of(len(tokens)) or (self.profile,) * len(tokens)
        rows = zip(profiles, tokens.tolist(), strict=True)
        return np.stack(
            [own.budgets_for(n) if n else np.zeros_like(own.budgets) for own, n in rows]
        )

    def visible_after(
        self, seen: int, batch: int, new_tokens: int, mask: object, *, whole: bool = False
    ) -> Tensor:
        """What is no padding, old and new, bool, ``(batch, seen + new_tokens)``, on the host.

        A mask is read here, once, and no later forward reads it again unless it brings one.

        Raises
        ------
        UnsupportedRequestError
            If the mask cannot be followed.
        """
        old = self.visible if seen else torch.ones(batch, 0, dtype=torch.bool, device="cpu")
        if mask is None:
            return torch.nn.functional.pad(old, (0, new_tokens), value=True)
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            raise UnsupportedRequestError(
                f"an attention_mask of the kind {type(mask).__name__} is unknown here; pass a 2-D "
                'one or none, or load the model with attn_implementation="sdpa"'
            )
        if tuple(mask.shape) != (batch, seen + new_tokens):
            raise UnsupportedRequestError(
                f"attention_mask covers {mask.shape[1]} tokens in {mask.shape[0]} rows, expected "
                f"{seen + new_tokens} in {batch}: all {seen} seen ones and the {new_tokens} new "
                "ones"
            )
        shown = mask.to("cpu", torch.bool, copy=True)
        if not (whole or torch.equal(shown[:, :seen], old)):
            raise UnsupportedRequestError(
                "attention_mask shows or hides other tokens of the past than it did when they "
                "arrived, but what was padding is gone and what was not is kept; pass the same "
                "values for them again"
            )
        return shown


def row_tokens(visible: Tensor) -> IntArray:
    """Tokens of each row, padding left out, (batch,)."""
    return visible.sum(dim=1).numpy()
