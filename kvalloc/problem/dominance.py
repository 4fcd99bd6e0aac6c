"""Options that nobody would take: the same cost or more for no more value."""

from __future__ import annotations

import numpy as np

from kvalloc.accounting import FloatArray, IntArray


def undominated(values: FloatArray, costs: IntArray) -> tuple[IntArray, IntArray]:
    """Return each unit's options by rising cost, each worth more than all cheaper ones.

    An option that costs as much as another or more and is worth no more is dropped. A choice with
    it can be changed to the other at no loss. So neither the most value within a capacity (a cap)
    nor the least cost for a target changes. A limit on the number of different budgets would change
    them, so it does not go with bits.

    Parameters
    ----------
    values : ndarray of float64, (n_units, n_options)
        What each option is worth to each unit.
    costs : ndarray of int64, (n_options,)
        Of the options, which all units share, in any order.

    Returns
    -------
    options : ndarray of int64, (n_units, n_kept)
        Which are left, padded with the last one.
    counts : ndarray of int64, (n_units,)
        How many each unit has.

    Examples
    --------
    >>> options, counts = undominated(np.array([[0.5, 0.4, 1.0]]), np.array([4, 5, 8]))
    >>> options.tolist(), counts.tolist()
    ([[0, 2]], [2])
    """
    rows = []
    for worth in values:
        order = np.lexsort((-worth, costs))  # of one cost, the best first
        reached = np.maximum.accumulate(worth[order])
        better = np.ones(order.size, dtype=np.bool_)
        better[1:] = worth[order][1:] > reached[:-1]
        rows.append(order[better])
    counts = np.array([row.size for row in rows], dtype=np.int64)
    kept = [np.pad(row, (0, int(counts.max()) - row.size), mode="edge") for row in rows]
    return np.array(kept), counts
