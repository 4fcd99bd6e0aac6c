"""What follows a prompt, turns and answers: which of it competes with what, for how many places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import BoolArray, IntArray
from kvalloc.runtime.kept import KeptEntries
from kvalloc.runtime.layer import BudgetLayer
from kvalloc.runtime.packed import NO_COLUMN
from kvalloc.runtime.unfinished import Unfinished

__all__ = ["COMPETE_AGAIN", "Followed", "Settling", "Tail"]

COMPETE_AGAIN = 1.5
"""Everything that is kept competes again when so many times the tokens have been seen as when it
did before; until then what is new competes for the places that it brought. Entries at fewer bits
lose a little whenever they are rounded again (SmolLM2-135M: a quarter less than if all
compete every 64 tokens)."""

UNSEEN = -1e30
"""Added to the logits of a place of no entry."""


@dataclass(frozen=True, kw_only=True)
class Followed:
    """What a layer holds when it is brought back within its budgets.

    Attributes
    ----------
    budgets : ndarray of int64, (batch, n_kv_heads)
        Of all tokens seen; at least sinks and window.
    kept : ndarray of int64, (batch, n_kv_heads)
        Entries that earlier evictions kept.
    new : ndarray of int64, (batch,)
        Tokens since then, padding left out.
    idle : ndarray of bool, (batch,)
        Rows of which nothing has come since.
    tokens : ndarray of int64, (batch,)
        All tokens seen, padding left out.
    """

    budgets: IntArray
    kept: IntArray
    new: IntArray
    idle: BoolArray
    tokens: IntArray

    @property
    def there(self) -> IntArray:
        """Entries before, (batch, n_kv_heads)."""
        return self.kept + self.new[:, None]

    @property
    def whole(self) -> BoolArray:
        """Rows of which nothing has gone, (batch,)."""
        return np.asarray((self.there == self.tokens[:, None]).all(axis=1))


@dataclass(frozen=True, kw_only=True)
class Settling:
    """How many entries each layer keeps, and among what they are chosen.

    Each row is settled as it would be alone.

    Attributes
    ----------
    new_alone : ndarray of bool, (batch,)
        Rows in which what was kept stays, and only what followed competes.
    targets : dict of int to ndarray of int64, (batch, n_kv_heads)
        For each layer, how many stay of what competes. Where heads share them, each row's sum
        over heads and layers counts.
    """

    new_alone: BoolArray
    targets: dict[int, IntArray]

    @classmethod
    def of(
        cls,
        layers: Mapping[int, Followed],
        *,
        shared: bool,
        all_compete: BoolArray,
        window: int,
        protected: int,
    ) -> Settling:
        """Decide it.

        Parameters
        ----------
        layers : mapping of int to Followed
        shared : bool
            Whether the heads of all layers share their budgets.
        all_compete : ndarray of bool, (batch,)
            Rows in which all entries compete, whatever room there is.
        window, protected : int
            Latest tokens that always stay; these and the sinks.
        """
        room = {i: own.budgets - own.kept for i, own in layers.items()}
        free = {i: room[i] - np.minimum(own.new, window)[:, None] for i, own in layers.items()}
        whole = np.stack([own.whole for own in layers.values()])
        if shared:
            fits = np.stack([own.sum(axis=1) for own in free.values()]).sum(axis=0) >= 0
            fits &= ~whole.all(axis=0)
        else:
            fits = np.stack([(own >= 0).all(axis=1) for own in free.values()]).all(axis=0)
            goes = np.stack([(own.budgets < own.there).any(axis=1) for own in layers.values()])
            fits &= ~(whole & goes).any(axis=0)
        fits |= np.stack([own.new == 0 for own in layers.values()]).all(axis=0)
        new_alone: BoolArray = fits & ~all_compete
        targets = {}
        for i, own in layers.items():
            new = own.new[:, None] + np.zeros_like(own.kept)
            there = np.where(new_alone[:, None], new, own.there)
            wanted = np.where(new_alone[:, None], room[i], own.budgets)
            least = np.where(new_alone, window, protected)[:, None]
            few = own.idle[:, None] | (there <= least).all(axis=1, keepdims=True)
            targets[i] = np.where(few, there, wanted if shared else np.minimum(wanted, there))
        return cls(new_alone=new_alone, targets=targets)


@dataclass(frozen=True)
class _Front:
    """Kept entries in front of what competes, as if all heads had as many."""

    lengths: IntArray
    columns: tuple[Tensor, Tensor | None]


@dataclass
class Tail:
    """A reduced layer of which only what followed competes; what is kept stands in front of it.

    Heads that keep fewer than another have places of no token between the two, which no query sees.

    Attributes
    ----------
    layer : BudgetLayer
    front : int
        Places in front.
    """

    layer: BudgetLayer
    unfinished: Unfinished = field(default_factory=Unfinished)

    reduced = even = True

    def __post_init__(self) -> None:
        assert self.layer.entries is not None
        keys, values, positions, bias = self.layer.entries.padded()
        self._kept = keys, values
        self.front, lengths = int(keys.shape[2]), self.layer.entries.lengths
        if (lengths != self.front).any():
            bias = torch.zeros_like(positions, dtype=torch.float32) if bias is None else bias
            bias.masked_fill_(positions == NO_COLUMN, UNSEEN)
        self.entries = _Front(np.full_like(lengths, self.front), (positions, bias))
        self.seen_tokens, self.batch = self.layer.seen_tokens, self.layer.batch
        self.unfinished.latest = self.layer.unfinished.latest

    def all_but(self, latest: int) -> tuple[Tensor, Tensor]:
        """Keys and values, those that are kept in front."""
        end = self.layer.dense_tokens - latest
        pairs = zip(self._kept, (self.layer.keys, self.layer.values), strict=True)
        keys, values = (torch.cat([kept, own[:, :, :end]], dim=2) for kept, own in pairs)
        return keys, values

    def keep_numbers(self, more: KeptEntries, bits: IntArray | None, following: int) -> None:
        """Add entries behind those that are kept, and free the rest."""
        self.layer.add(more)
