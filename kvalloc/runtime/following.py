"""What follows a prompt, turns and answers: which of it competes with what, for how many places."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvalloc.accounting import BoolArray, IntArray

COMPETE_AGAIN = 1.5
"""Everything that is kept competes again when so many times the tokens have been seen as when it
did before; until then what is new competes for the places that it brought. Entries at fewer bits
lose a little whenever they are rounded again (SmolLM2-135M: a quarter less than if all
compete every 64 tokens)."""


@dataclass(frozen=True, kw_only=True)
class Followed:
    """What layers hold when they are brought back within their budgets.

    Attributes
    ----------
    budgets : ndarray of int64, (batch, n_layers, n_kv_heads)
        Of all tokens seen; at least sinks and window.
    kept : ndarray of int64, (batch, n_layers, n_kv_heads)
        Entries that earlier evictions kept.
    new : ndarray of int64, (batch, n_layers)
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
        """Entries before, (batch, n_layers, n_kv_heads)."""
        return self.kept + self.new[:, :, None]


@dataclass(frozen=True, kw_only=True)
class Settling:
    """How many entries each layer keeps, and among what they are chosen.

    Each row is settled as it would be alone.

    Attributes
    ----------
    new_alone : ndarray of bool, (batch,)
        Rows in which what was kept stays, and only what followed competes.
    targets : ndarray of int64, (batch, n_layers, n_kv_heads)
        How many stay of what competes. Where heads share them, each row's sum over heads and
        layers counts.
    """

    new_alone: BoolArray
    targets: IntArray

    @classmethod
    def of(
        cls,
        followed: Followed,
        *,
        shared: bool,
        all_compete: BoolArray,
        window: int,
        protected: int,
    ) -> Settling:
        """Decide it.

        Parameters
        ----------
        followed : Followed
        shared : bool
            Whether the heads of all layers share their budgets.
        all_compete : ndarray of bool, (batch,)
            Rows in which all entries compete, whatever room there is.
        window, protected : int
            Latest tokens that always stay; these and the sinks.
        """
        budgets, there = followed.budgets, followed.there
        room, new = budgets - followed.kept, followed.new[:, :, None]
        free = room - np.minimum(new, window)
        whole = (there == followed.tokens[:, None, None]).all(axis=2)  # nothing has gone
        if shared:
            fits = (free.sum(axis=(1, 2)) >= 0) & ~whole.all(axis=1)
        else:
            goes = (budgets < there).any(axis=2)
            fits = (free >= 0).all(axis=(1, 2)) & ~(whole & goes).any(axis=1)
        new_alone: BoolArray = (fits | (followed.new == 0).all(axis=1)) & ~all_compete
        alone = new_alone[:, None, None]
        there, wanted = np.where(alone, new, there), np.where(alone, room, budgets)
        few = (there <= np.where(alone, window, protected)).all(axis=2, keepdims=True)
        few |= followed.idle[:, None, None]
        wanted = wanted if shared else np.minimum(wanted, there)
        return cls(new_alone=new_alone, targets=np.where(few, there, wanted))
