"""Groups of adjacent layers that keep the same entries: which there can be, and their text.

MPCache (Sec. 4.4) shares the kept indices between adjacent layers, whose attention ranks entries
alike, and never of the first two layers, whose does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.errors import InputError

Groups = tuple[tuple[int, ...], ...]

FIRST_SHARED_LAYER = 2
"""The layers before it never share (MPCache, Fig. 8)."""

LONGEST_RUN = 4
"""Largest number of layers of a group that can be measured."""


def runs_of(full_layers: Sequence[int], longest: int) -> IntArray:
    """Return every run of adjacent full-attention layers that may share.

    Parameters
    ----------
    full_layers : sequence of int
        Rising.
    longest : int
        Largest number of layers in a run.

    Returns
    -------
    ndarray of int64, (n_runs, 2)
        First layer and number of layers, by last layer, shortest first.

    Examples
    --------
    >>> runs_of([0, 1, 2, 3, 4, 6], 3).tolist()
    [[2, 2], [3, 2], [2, 3]]
    """
    full = set(full_layers)
    runs = [
        (last - length + 1, length)
        for last in full_layers
        for length in range(2, longest + 1)
        if last - length + 1 >= FIRST_SHARED_LAYER
        and all(layer in full for layer in range(last - length + 1, last))
    ]
    return np.array(runs, dtype=np.int64).reshape(-1, 2)


def parse_groups(given: object) -> int | Groups:
    """Return a number of groups, or the groups themselves.

    Parameters
    ----------
    given : int, str or sequence of sequences of int
        Such as ``14``, ``"14"``, ``"2-3,4-6"`` or ``[(2, 3), (4, 5, 6)]``.

    Returns
    -------
    int or tuple of tuple of int

    Raises
    ------
    InputError
        If it is neither.

    Examples
    --------
    >>> parse_groups("2-3,4-6"), parse_groups("14")
    (((2, 3), (4, 5, 6)), 14)
    """
    way_out = "give a number of groups such as 14, or groups of layers such as 2-3,4-6"
    if isinstance(given, str):
        if re.fullmatch(r"\s*\d+\s*", given):
            return _at_least_one(int(given))
        pairs = [re.fullmatch(r"\s*(\d+)\s*-\s*(\d+)\s*", part) for part in given.split(",")]
        if not all(pairs):
            raise InputError(f"groups of layers {given!r} cannot be read; {way_out}")
        ends = [(int(pair.group(1)), int(pair.group(2))) for pair in pairs if pair is not None]
        return tuple(tuple(range(first, last + 1)) for first, last in ends)
    if isinstance(given, int) and not isinstance(given, bool):
        return _at_least_one(given)
    if isinstance(given, Iterable):
        try:
            groups = tuple(tuple(int(layer) for layer in group) for group in given)
        except (TypeError, ValueError, OverflowError):
            groups = ((),)
        if all(groups):
            return groups
    raise InputError(f"groups of layers {given!r} cannot be read; {way_out}")


def _at_least_one(number: int) -> int:
    if number < 1:
        raise InputError(f"{number} groups of layers are not possible; ask for at least 1")
    return number


def groups_text(groups: Groups) -> str:
    """Return groups as ``parse_groups`` reads them.

    Examples
    --------
    >>> groups_text(((2, 3), (4, 5, 6)))
    '2-3,4-6'
    """
    return ",".join(f"{group[0]}-{group[-1]}" for group in groups)


def shared_text(groups: Groups) -> str:
    """Return what groups do, in a few words.

    Examples
    --------
    >>> shared_text(((2, 3), (4, 5, 6)))
    'layers 2-3,4-6 keep the same entries'
    """
    return f"layers {groups_text(groups)} keep the same entries"


def groups_fault(groups: Groups, full_layers: Sequence[int]) -> str | None:
    """Return what is wrong with groups of layers, as half a sentence, or None.

    Parameters
    ----------
    groups : tuple of tuple of int
    full_layers : sequence of int
        Layers of full attention; only those can share.
    """
    full, used = set(full_layers), -1
    for group in groups:
        if len(group) < 2 or tuple(range(group[0], group[0] + len(group))) != group:
            return f"the group {list(group)} is not a run of at least two adjacent layers"
        if group[0] < FIRST_SHARED_LAYER:
            return f"the group {list(group)} has one of the first two layers, which never share"
        if not full.issuperset(group):
            layer = next(layer for layer in group if layer not in full)
            return f"layer {layer} of the group {list(group)} has no full attention to share"
        if group[0] <= used:
            return f"the group {list(group)} is not after the one before it"
        used = group[-1]
    return None


def segments_of(full_layers: Sequence[int], groups: Groups) -> Groups:
    """Return all layers in order, each alone or in its group."""
    inside = {layer for group in groups for layer in group}
    alone = [(layer,) for layer in full_layers if layer not in inside]
    return tuple(sorted([*groups, *alone]))
