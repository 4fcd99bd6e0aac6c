"""What follows a prompt, turns and answers: which of it competes with what, for how many places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvalloc.accounting import BoolArray, IntArray

__all__ = ["COMPETE_AGAIN", "Followed", "Settling"]

COMPETE_AGAIN = 1.5
"""Everything that is kept competes again when so many times the tokens have been seen as when it
did before; until then what is new competes for the places that it brought. Entries at fewer bits
lose a little whenever they are rounded again (SmolLM2-135M: a quarter less than if all
compete every 64 tokens)."""


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
