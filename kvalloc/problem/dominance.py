"""Options that nobody would take: the same cost or more for no more value."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvalloc.accounting import FloatArray, IntArray


@dataclass(frozen=True, kw_only=True)
class Undominated:
    """What is left of each unit's options, padded with its last one.

    Attributes
    ----------
    tokens, bits, costs : ndarray of int64, (n_units, n_options)
    values : ndarray of float64, (n_units, n_options)
    counts : ndarray of int64, (n_units,)
        Options that each unit really has.
    """

    tokens: IntArray
    bits: IntArray
    values: FloatArray
    costs: IntArray
    counts: IntArray


def undominated(
    tokens: IntArray, bits: IntArray, values: FloatArray, costs: IntArray
) -> Undominated:
    """Return each unit's options by rising cost, each worth more than all cheaper ones.

    An option that costs as much as another or more and is worth no more is dropped: a choice with
    it can be changed to the other at no loss, so neither the most value within a capacity (a cap)
    nor the least cost for a target changes. Constraints that compare what units take, not what it
    costs, would: they are refused where this is used.

    Parameters
    ----------
    tokens, bits, costs : ndarray of int64, (n_options,)
        Options that all units share, in any order.
    values : ndarray of float64, (n_units, n_options)
        What each is worth to each unit.

    Returns
    -------
    Undominated

    Examples
    --------
    >>> left = undominated(np.array([1, 2, 2]), np.array([16, 8, 16]),
    ...                    np.array([[0.5, 0.4, 1.0]]), np.array([4, 5, 8]))
    >>> left.tokens.tolist(), left.bits.tolist()
    ([[1, 2]], [[16, 16]])
    """
    rows = []
    for worth in values:
        order = np.lexsort((-worth, costs))  # of one cost, the best first
        reached = np.maximum.accumulate(worth[order])
        better = np.ones(order.size, dtype=np.bool_)
        better[1:] = worth[order][1:] > reached[:-1]
        rows.append(order[better])
    counts = np.array([row.size for row in rows], dtype=np.int64)
    kept = np.array([np.pad(row, (0, int(counts.max()) - row.size), mode="edge") for row in rows])
    return Undominated(
        tokens=tokens[kept],
        bits=bits[kept],
        values=np.take_along_axis(values, kept, axis=1),
        costs=costs[kept],
        counts=counts,
    )
