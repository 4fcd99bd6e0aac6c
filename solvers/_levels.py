"""Few different budgets: bounds over all sets of levels, and the sets that could be best.

At given prices every row takes the option of a level in the set that loses it least, so a set
costs the sum of those losses. Losses fall up to a row's best level and rise after it (where they
do not, what is below them does), so a row uses one of the two levels around its best one, the
sum splits over neighbouring levels, and the best set is a path: a dynamic program over levels, as
for medians on a line (Hassin and Tamir, 1991). The same program from both ends bounds every
beginning of a set, so that all sets that could beat a known pick are listed without a detour.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvalloc.accounting import BoolArray, FloatArray, IntArray
from kvalloc.solvers._choices import Choices
from kvalloc.solvers._prices import NOISE, Prices, prices_at, too_much

MOST_LEVELS = 512
"""Above, the table of neighbouring levels is too large."""

MOST_SETS = 50_000
"""Above, sets are not listed one by one."""

PRICE_ROUNDS = 30
"""Halvings of the interval of the price of a byte."""


@dataclass(frozen=True, kw_only=True)
class LevelSets:
    """Losses of sets of levels at given prices.

    Attributes
    ----------
    prices : Prices
    levels : ndarray of int64, (n_levels,)
        Budgets in tokens, rising.
    loss : ndarray of float64, (n_rows, n_levels)
        Loss of each row at each level; inf where it has no such option.
    first, last : ndarray of float64, (n_levels,)
        Loss of the rows below the first level of a set, above its last one.
    between : ndarray of float64, (n_levels, n_levels)
        Loss of the rows from one level of a set to the next.
    rest : ndarray of float64, (most, n_levels)
        Least loss of the rows above a level when so many more levels may follow.
    """

    prices: Prices
    levels: IntArray
    loss: FloatArray
    first: FloatArray
    last: FloatArray
    between: FloatArray
    rest: FloatArray

    @classmethod
    def of(cls, choices: Choices, prices: Prices, most: int) -> LevelSets:
        """Tables for at most so many levels."""
        levels = np.unique(choices.tokens[choices.exists])
        loss = np.full((choices.n_rows, levels.size), np.inf)
        rows, columns = np.nonzero(choices.exists)
        at = np.searchsorted(levels, choices.tokens[rows, columns])
        loss[rows, at] = prices.loss[rows, columns]
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
        rest = np.empty((most, levels.size))
        rest[0] = last
        for more in range(1, most):
            onward = (between + rest[more - 1][None, :]).min(axis=1)
            rest[more] = np.minimum(last, onward)
        return cls(
            prices=prices,
            levels=levels,
            loss=loss,
            first=first,
            last=last,
            between=between,
            rest=rest,
        )

    @property
    def least(self) -> float:
        """No set loses less."""
        return float((self.first + self.rest[-1]).min())

    def best(self) -> list[int]:
        """Places of the levels of a best set."""
        chosen = [int(np.argmin(self.first + self.rest[-1]))]
        for more in range(self.rest.shape[0] - 1, 0, -1):
            here = chosen[-1]
            onward = self.between[here] + self.rest[more - 1]
            if float(onward.min()) > float(self.last[here]):
                break
            chosen.append(int(np.argmin(onward)))
        return chosen

    def within(self, room: float) -> list[tuple[float, tuple[int, ...]]] | None:
        """All sets that may lose no more than the room, least first.

        Returns
        -------
        list of (float, tuple of int), or None
            Loss and places of the levels; None when there are too many.
        """
        room += NOISE
        found: list[tuple[float, tuple[int, ...]]] = []
        stack: list[tuple[float, tuple[int, ...]]] = []
        for level in np.flatnonzero(self.first + self.rest[-1] <= room).tolist():
            stack.append((float(self.first[level]), (level,)))
        most = min(self.rest.shape[0], self.levels.size)
        while stack:
            lost, chosen = stack.pop()
            if len(chosen) == most:
                self._add(found, chosen, room)
            else:
                here, more = chosen[-1], most - len(chosen)
                onward = lost + self.between[here] + self.rest[more - 1]
                following = np.flatnonzero(onward <= room).tolist()
                for level in following:
                    stack.append((lost + float(self.between[here, level]), (*chosen, level)))
                # A smaller set can only matter where it cannot be made larger.
                if not following and lost + float(self.last[here]) <= room:
                    self._add(found, chosen, room)
            if len(found) + len(stack) > MOST_SETS:
                return None
        return sorted(found)

    def _add(
        self, found: list[tuple[float, tuple[int, ...]]], chosen: tuple[int, ...], room: float
    ) -> None:
        # The losses themselves, not what is below them.
        lost = float(self.loss[:, chosen].min(axis=1).sum())
        if lost <= room:
            found.append((lost, chosen))

    def usable(self, room: float) -> BoolArray:
        """Levels that are in some set that may lose no more than the room, ``(n_levels,)``."""
        most = self.rest.shape[0]
        reach = np.full((most, self.levels.size), np.inf)
        reach[0] = self.first
        for more in range(1, most):
            reach[more] = np.minimum(
                self.first, (reach[more - 1][:, None] + self.between).min(axis=0)
            )
        through = np.min([reach[j] + self.rest[most - 1 - j] for j in range(most)], axis=0)
        usable: BoolArray = through <= room + NOISE
        return usable


def _valley(loss: FloatArray) -> FloatArray:
    """The largest losses below the given ones that fall up to each row's best, then rise."""
    best = np.argmin(loss, axis=1)
    falling = np.minimum.accumulate(loss, axis=1)
    rising = np.minimum.accumulate(loss[:, ::-1], axis=1)[:, ::-1]
    before = np.arange(loss.shape[1])[None, :] <= best[:, None]
    return np.where(before, falling, rising)


def level_sets(choices: Choices, prices: Prices, most: int) -> LevelSets | None:
    """Sets of levels at the price of a byte that bounds them best.

    Parameters
    ----------
    choices : Choices
    prices : Prices
        The best ones without a limit on levels.
    most : int
        Most levels.

    Returns
    -------
    LevelSets or None
        None where there are too many levels for its tables.
    """
    if np.unique(choices.tokens[choices.exists]).size > MOST_LEVELS:
        return None
    best = LevelSets.of(choices, prices, most)
    if prices.per_byte <= 0.0 or prices.only_cost:
        return best
    cheap, dear = 0.0, 0.0
    price = prices.per_byte
    per_cap = np.asarray(prices.per_cap)
    sets = best
    for _ in range(PRICE_ROUNDS):
        if _spends(choices, sets):
            cheap = price
        else:
            dear = price
        if not dear:
            price *= 2.0
        else:
            price = 0.5 * (cheap + dear)
        if price <= 1e-9 * prices.per_byte or dear - cheap == 0.0:
            break
        sets = LevelSets.of(choices, prices_at(choices, price, per_cap, prices.start), most)
        if choices.better(_bound(choices, best), _bound(choices, sets)):
            best = sets
        if dear and cheap and dear - cheap < 1e-7 * dear:
            break
    return best


def _bound(choices: Choices, sets: LevelSets) -> float:
    """What no pick with few levels can beat, without rounding."""
    if choices.minimise:
        return sets.prices.relaxed_bytes + sets.least / sets.prices.per_byte
    return sets.prices.bound - sets.least


def _spends(choices: Choices, sets: LevelSets) -> bool:
    """Whether the rows spend too much (gain more than the target) with the best set."""
    chosen = sets.levels[sets.best()]
    loss = np.where(np.isin(choices.tokens, chosen), sets.prices.loss, np.inf)
    picked = np.argmin(loss, axis=1).astype(np.int64)
    return too_much(choices, picked)
