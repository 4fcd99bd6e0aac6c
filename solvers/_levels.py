"""Few different budgets: bounds over all sets of levels, and the sets that could be best.

At given prices every unit takes the option of a level in the set that loses it least, so a set
costs the sum of those losses. Losses fall up to a unit's best level and rise after it, or have a
lower bound that does. So a unit uses the level below or above its best one, the sum splits over
neighbouring levels, and the best set is a path: a dynamic program over levels, as for medians on a
line (Hassin and Tamir, 1991). The program bounds every beginning of a set, so that all sets that
could beat a known choice are listed without a detour.

One program over all budgets (HiGHS, 4 budgets of 64 to 197 on SmolLM2's curves) takes 2 to 70 times
the processor time of this, CP-SAT more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.problem.bounds import NOISE
from kvalloc.solvers._prices import Prices

MOST_SETS = 50_000
"""With more beginnings of sets, these are not listed one by one."""


@dataclass(frozen=True, kw_only=True)
class LevelSets:
    """Losses of sets of the largest allowed number of levels, at given prices.

    Smaller sets are parts of these, and lose no less.

    Attributes
    ----------
    prices : Prices
    levels : ndarray of int64, (n_levels,)
        Budgets in tokens, rising.
    loss : ndarray of float64, (n_units, n_levels)
        Loss of each unit at each level; inf where it has no such option.
    first : ndarray of float64, (n_levels,)
        Loss of the units below the first level of a set.
    between : ndarray of float64, (n_levels, n_levels)
        Loss of the units from one level of a set to the next.
    rest : ndarray of float64, (n_members, n_levels)
        Least loss of the units above a level when 0, 1, ... further levels follow it in the set;
        inf if there are fewer levels.
    """

    prices: Prices
    levels: IntArray
    loss: FloatArray
    first: FloatArray
    between: FloatArray
    rest: FloatArray

    @classmethod
    def of(cls, prices: Prices, max_distinct: int) -> LevelSets:
        """Return the losses of sets of ``max_distinct`` levels, or of all where there are fewer."""
        problem = prices.problem
        levels = np.unique(problem.tokens[problem.exists])
        loss = np.full((problem.n_units, levels.size), np.inf)
        units, columns = np.nonzero(problem.exists)
        at = np.searchsorted(levels, problem.tokens[units, columns])
        loss[units, at] = prices.loss[units, columns]
        below = _valley(loss)
        best = np.argmin(loss, axis=1)
        index = np.arange(levels.size)
        under = best[:, None] < index[None, :]
        first = np.where(under, below, 0.0).sum(axis=0)
        last = np.where(under, 0.0, below).sum(axis=0)
        between = np.full((levels.size, levels.size), np.inf)
        for level in range(levels.size - 1):
            after = slice(level + 1, None)
            pair = np.minimum(below[:, level, None], below[:, after])
            inside = under[:, after] & (best >= level)[:, None]
            between[level, after] = np.where(inside, pair, 0.0).sum(axis=0)
        rest = [last]
        for _ in range(1, min(max_distinct, levels.size)):
            rest.append((between + rest[-1][None, :]).min(axis=1))
        return cls(
            prices=prices,
            levels=levels,
            loss=loss,
            first=first,
            between=between,
            rest=np.stack(rest),
        )

    def best(self) -> tuple[int, ...]:
        """Return the places of the levels of a best set."""
        chosen = [int(np.argmin(self.first + self.rest[-1]))]
        for rest in self.rest[-2::-1]:
            chosen.append(int(np.argmin(self.between[chosen[-1]] + rest)))
        return tuple(chosen)

    def within(self, room: float) -> list[tuple[float, tuple[int, ...]]] | None:
        """List all sets that may lose no more than the room, least first.

        Returns
        -------
        list of (float, tuple of int), or None
            Loss and places of the levels; None when there are too many.
        """
        room += NOISE
        sets: list[tuple[float, tuple[int, ...]]] = []
        begun = np.flatnonzero(self.first + self.rest[-1] <= room).tolist()
        stack: list[tuple[float, tuple[int, ...]]]
        stack = [(float(self.first[level]), (level,)) for level in begun]
        for _ in range(MOST_SETS):
            if not stack:
                return sorted(sets)
            lost, chosen = stack.pop()
            if len(chosen) < len(self.rest):
                following = lost + self.between[chosen[-1]]
                able = following + self.rest[-1 - len(chosen)] <= room
                for level in np.flatnonzero(able).tolist():
                    stack.append((float(following[level]), (*chosen, level)))
            elif (lost := float(self.loss[:, chosen].min(axis=1).sum())) <= room:
                sets.append((lost, chosen))  # by the losses themselves, not by lower bounds
        return None


def _valley(loss: FloatArray) -> FloatArray:
    """Return the largest losses below these that fall up to each unit's best, then rise."""
    best = np.argmin(loss, axis=1)
    falling = np.minimum.accumulate(loss, axis=1)
    rising = np.minimum.accumulate(loss[:, ::-1], axis=1)[:, ::-1]
    before = np.arange(loss.shape[1])[None, :] <= best[:, None]
    return np.where(before, falling, rising)
