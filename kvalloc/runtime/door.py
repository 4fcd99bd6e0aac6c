"""Padding: rows of real tokens go on; only this module knows of padding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import IntArray
from kvalloc.errors import UnsupportedRequestError
from kvalloc.runtime.kept import index_of, on_device

Columns: TypeAlias = "slice | Tensor"
"""Columns of a row's tokens: a slice, or int64, (n_tokens,), on the host."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """New tokens of a forward, in columns `seen` to ``seen + new``.

    `lengths`, (rows,), are each row's new tokens.

    Attributes
    ----------
    order : Tensor of int64, (rows, new), or None
        Columns that put each row's tokens last, on the host; None if they are.
    hides : bool
        Whether layers that store every column need a padding mask.
    """

    seen: int
    new: int
    lengths: IntArray
    order: Tensor | None
    follows: bool
    completes: bool
    hides: bool
    _starts: dict[Any, Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    def aligned(self, states: Tensor) -> Tensor:
        """Return states, (rows, heads, new, dim), with each row's tokens last."""
        if self.order is None:
            return states
        index = self.order.to(states.device)[:, None, :, None]
        return states.gather(2, index.expand(-1, states.shape[1], -1, states.shape[3]))

    def seen_by(self, shown: Tensor) -> Tensor:
        """Return which `aligned` new tokens see which, (rows, new, new), from this by columns.

        All see padding, which may stand for earlier tokens.
        """
        if self.order is not None:
            order = self.order.to(shown.device)
            shown = shown.gather(1, order[:, :, None].expand_as(shown))
            shown = shown.gather(2, order[:, None].expand_as(shown))
        first = torch.from_numpy(self.new - self.lengths)
        padding = torch.arange(self.new, device="cpu") < first[:, None]
        return shown | padding.to(shown.device)[:, None]

    def in_columns(self, output: Tensor) -> Tensor:
        """Undo `aligned` for an output, (rows, new, heads, dim)."""
        if self.order is None:
            return output
        index = self.order.argsort(dim=1).to(output.device)[:, :, None, None]
        return output.gather(1, index.expand(-1, -1, *output.shape[2:]))

    def starts(self, starts: IntArray | None, device: torch.device) -> Tensor | None:
        """Return host numbers on a device, equal ones once."""
        if starts is None:
            return None
        key = starts.tobytes(), str(device)
        if key not in self._starts:
            self._starts[key] = on_device(starts, device)
        return self._starts[key]


class Door:
    """Columns of one cache, real and padding.

    The prompt is the first forward, or ``announced`` columns; `prompt_columns` are read so far.
    """

    def __init__(self, announced: int | None, lengths: tuple[int, ...] | None = None) -> None:
        self.announced, self._known = announced, lengths
        self.forget()

    def forget(self) -> None:
        """Get ready for a new prompt."""
        self.prompt_columns: int | None = None
        self.complete = False
        self._before: Tensor | None = None  # bool, (rows, seen); None where nothing is padding
        self._visible: Tensor | None = None  # the same with the forward that runs
        self._columns: dict[int, Columns] = {}

    # One forward

    def enter(
        self, shape: tuple[int, int], seen: int, mask: object, *, may_change: bool = False
    ) -> Batch:
        """Return the next forward's batch; an error changes nothing.

        With ``may_change`` the mask may show other past tokens: none was evicted.

        Raises
        ------
        UnsupportedRequestError
            For more tokens than announced, or a mask that cannot be followed.
        """
        (rows, new), in_prompt = shape, not self.complete or not seen
        end = seen + new
        expected = self.announced if in_prompt and self.announced is not None else end
        if end > expected:
            raise UnsupportedRequestError(
                f"the cache was made for a prompt of {expected} tokens, but {seen} seen and {new} "
                "new ones are more; send the prompt and what follows it separately"
            )
        visible = self._after(seen, rows, new, mask, may_change=may_change)
        lengths, order = np.full(rows, new), None
        if visible is not None and not (shown := visible[:, seen:]).all():
            lengths = shown.sum(dim=1).numpy()
            order = shown.byte().argsort(dim=1, stable=True)
            if (order == torch.arange(new, device="cpu")).all():
                order = None
        self._visible, self._columns = visible, {}
        return Batch(
            seen=seen,
            new=new,
            lengths=lengths,
            order=order,
            follows=not in_prompt,
            completes=in_prompt and end == expected,
            hides=mask is None and visible is not None,
        )

    def _after(
        self, seen: int, rows: int, new: int, mask: object, *, may_change: bool
    ) -> Tensor | None:
        old = self._before if seen else None
        if mask is None:
            return None if old is None else torch.nn.functional.pad(old, (0, new), value=True)
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            raise UnsupportedRequestError(
                f"an attention_mask of the kind {type(mask).__name__} is unknown here; pass a 2-D "
                'one or none, or load the model with attn_implementation="sdpa"'
            )
        if tuple(mask.shape) != (rows, seen + new):
            raise UnsupportedRequestError(
                f"attention_mask covers {mask.shape[1]} tokens in {mask.shape[0]} rows, expected "
                f"{seen + new} in {rows}: all {seen} seen ones and the {new} new ones"
            )
        shown = mask.to("cpu", torch.bool, copy=True)
        past = shown[:, :seen]
        same = bool(past.all()) if old is None else torch.equal(past, old)
        if not (may_change or same):
            raise UnsupportedRequestError(
                "attention_mask shows or hides other tokens of the past than when they arrived, "
                "but padding is gone and other tokens are kept; pass the same values for them"
            )
        return None if bool(shown.all()) else shown

    def commit(self, batch: Batch) -> None:
        """Note that a forward went through."""
        self._before = self._visible
        if not batch.follows:
            self.prompt_columns, self.complete = batch.seen + batch.new, batch.completes

    def resume(self, visible: Tensor | None, prompt_columns: int) -> None:
        """Go on behind a complete prompt."""
        self._visible = self._before = visible
        self.prompt_columns, self.complete = prompt_columns, True

    def abandon(self) -> None:
        """Note that a forward failed."""
        self._visible, self._columns = self._before, {}

    @property
    def visible(self) -> Tensor | None:
        """Mask of real tokens, (rows, columns)."""
        return self._visible

    def mask(self, device: torch.device) -> Tensor:
        """Return `visible` as int64."""
        assert self._visible is not None
        return self._visible.to(device, torch.long)

    # Rows

    def tokens(self, batch: Batch) -> IntArray:
        """Return each row's tokens after a forward."""
        if self._visible is None:
            return batch.seen + batch.lengths
        counts: IntArray = self._visible.sum(dim=1).numpy()
        return counts

    def prompt_tokens(self, batch: Batch) -> IntArray:
        """Return each row's tokens of the whole prompt.

        If unknown: the tokens so far and all columns still announced.
        """
        if self._known and not batch.rows % len(self._known):
            return np.repeat(np.array(self._known), batch.rows // len(self._known))
        end = batch.seen + batch.new
        return self.tokens(batch) + ((self.announced or end) - end)

    def columns(self, row: int) -> Columns:
        """Return the columns of a row's tokens."""
        if self._visible is None:
            return slice(None)
        if row not in self._columns:
            shown = self._visible[row].numpy().nonzero()[0]
            places = index_of(shown, self._visible.device)
            self._columns[row] = places if len(shown) else slice(0, 0)
        return self._columns[row]

    def place(self, row: int) -> object:
        """Return a key, equal for rows with equal `columns`."""
        columns = self.columns(row)
        if isinstance(columns, slice):
            return columns.start, columns.stop
        return columns.numpy().tobytes()

    def in_columns(self, row: int, tokens: Tensor) -> Tensor:
        """Return the columns of a row's tokens, counted without padding."""
        columns = self.columns(row)
        if isinstance(columns, slice):
            return tokens + (columns.start or 0)
        return columns.to(tokens)[tokens.long()] if len(tokens) else tokens

    def count(self, row: int, end: int) -> int:
        """Return a row's number of tokens before a column."""
        return end if self._visible is None else int(self._visible[row, :end].sum())

    def select(self, rows: Tensor) -> None:
        """Let row i go on with row ``rows[i]``."""
        if self._visible is not None:
            self._keep(self._visible[rows.cpu()])

    def crop(self, columns: int) -> None:
        """Forget all but the first columns."""
        if self._visible is not None:
            self._keep(self._visible[:, :columns])
        if self.prompt_columns is not None:
            self.prompt_columns = min(self.prompt_columns, columns)

    def _keep(self, visible: Tensor) -> None:
        self._visible = self._before = None if bool(visible.all()) else visible
        self._columns = {}
