"""Groups of adjacent layers that keep the same entries: which there can be, and their curves.

MPCache (Sec. 4.4) shares the kept indices between adjacent layers, whose attention ranks entries
alike, and never of the first two layers, whose does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.errors import InputError, command

if TYPE_CHECKING:
    from kvalloc.formats.score_profile import ScoreProfile

Groups = tuple[tuple[int, ...], ...]

FIRST_SHARED_LAYER = 2
"""The layers before it never share (MPCache, Fig. 8)."""

LONGEST_RUN = 4
"""Most layers of a group that can be measured."""


def runs_of(full_layers: Sequence[int], longest: int) -> IntArray:
    """Every run of adjacent full-attention layers that may share.

    Parameters
    ----------
    full_layers : sequence of int
        Rising.
    longest : int
        Most layers in a run.

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
    """A number of groups, or the groups themselves.

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
            return tuple(tuple(int(layer) for layer in group) for group in given)
        except (TypeError, ValueError):
            pass
    raise InputError(f"groups of layers {given!r} cannot be read; {way_out}")


def _at_least_one(number: int) -> int:
    if number < 1:
        raise InputError(f"{number} groups of layers are not possible; ask for at least 1")
    return number


def groups_text(groups: Groups) -> str:
    """Groups as ``parse_groups`` reads them.

    Examples
    --------
    >>> groups_text(((2, 3), (4, 5, 6)))
    '2-3,4-6'
    """
    return ",".join(f"{group[0]}-{group[-1]}" for group in groups)


def shared_text(groups: Groups) -> str:
    """What groups do, in a few words.

    Examples
    --------
    >>> shared_text(((2, 3), (4, 5, 6)))
    'layers 2-3,4-6 keep the same entries'
    """
    return f"layers {groups_text(groups)} keep the same entries"


def groups_record(asked: Groups | int | str) -> int | list[list[int]]:
    """Groups, or their number, as plain values for a budget profile."""
    groups = parse_groups(asked)
    return groups if isinstance(groups, int) else [list(group) for group in groups]


def groups_fault(groups: Groups, full_layers: Sequence[int]) -> str | None:
    """What is wrong with groups of layers, as half a sentence, or None.

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
    """All layers in order, each alone or in its group."""
    inside = {layer for group in groups for layer in group}
    alone = [(layer,) for layer in full_layers if layer not in inside]
    return tuple(sorted([*groups, *alone]))


def run_index(scores: ScoreProfile, group: Sequence[int]) -> int:
    """Which of the measured runs a group is.

    Raises
    ------
    InputError
        If it was not measured.
    """
    again = f"measure again with {command('profile', share_length=len(group))}"
    if scores.shared_runs is None:
        raise InputError(f"the score profile has no curves of layers that share entries; {again}")
    found = np.flatnonzero((scores.shared_runs == (group[0], len(group))).all(axis=1))
    if found.size == 0:
        longest = int(scores.shared_runs[:, 1].max(initial=0))
        if len(group) <= min(longest, LONGEST_RUN):
            raise InputError(f"layers {group[0]}-{group[-1]} cannot share: not all are measured")
        way = again if len(group) <= LONGEST_RUN else f"groups have at most {LONGEST_RUN} layers"
        raise InputError(
            f"the score profile has no curves of {len(group)} layers that share entries; {way}"
        )
    return int(found[0])


def similarity(scores: ScoreProfile, group: Sequence[int]) -> FloatArray:
    """What layers that share entries keep of what each would keep on its own.

    Parameters
    ----------
    scores : ScoreProfile
        With shared curves.
    group : sequence of int
        A measured run of layers.

    Returns
    -------
    ndarray of float64, (n_points,)
        At each rank the kept score mass over that without sharing, 0..1; 1 where nothing is kept.
    """
    together = scores.shared_contributions(group).sum(axis=0)
    apart = scores.contributions()[list(group)].sum(axis=(0, 1))
    kept: FloatArray = np.divide(together, apart, out=np.ones_like(apart), where=apart > 0)
    return kept


def shared_fault(profile: ScoreProfile, tolerance: float) -> tuple[str, object, str] | None:
    """The first thing that cannot be about the shared curves, as (field, found, expected)."""
    runs, curves = profile.shared_runs, profile.shared_curves
    if runs is None and curves is None:
        return None
    if runs is None or curves is None:
        return "shared_runs, shared_curves", "only one of them", "both or none"
    possible = {tuple(run) for run in runs_of(profile.shape.full_layers, LONGEST_RUN).tolist()}
    if runs.dtype != np.int64 or runs.ndim != 2 or runs.shape[1] != 2:
        return "shared_runs", f"{runs.dtype} shaped {runs.shape}", "int64 shaped (n_runs, 2)"
    given = [tuple(run) for run in runs.tolist()]
    if len(set(given)) != len(given) or not possible.issuperset(given):
        wrong = next((run for run in given if run not in possible), "the same run twice")
        return "shared_runs", wrong, f"runs of 2 to {LONGEST_RUN} adjacent layers from layer 2 on"
    expected = (profile.n_samples, len(given), profile.shape.n_kv_heads, profile.ranks.size)
    if curves.dtype != np.float64 or curves.shape != expected:
        return "shared_curves", f"{curves.dtype} shaped {curves.shape}", f"float64 {expected}"
    if not np.all(np.isfinite(curves)):
        return "shared_curves", "not finite", "finite values"
    return _values_fault(profile, given, curves, tolerance)


def _values_fault(
    profile: ScoreProfile, runs: list[tuple[int, ...]], curves: FloatArray, tolerance: float
) -> tuple[str, object, str] | None:
    steps = np.diff(profile.ranks)
    for sample in range(profile.n_samples):
        apart = profile.contributions(sample)
        for run, (first, length) in enumerate(runs):
            together, separate = curves[sample, run], apart[first : first + length].sum(axis=0)
            where = f"in sample {sample}, layers {first}-{first + length - 1}"
            if np.any(together > separate + tolerance) or together.min() < -tolerance:
                found = f"{together.max():.6g} {where}"
                return "shared_curves", found, "no more than the layers keep apart"
            if np.any(np.abs(together[:, -1] - separate[:, -1]) > tolerance):
                return "shared_curves", f"not whole {where}", "everything when everything is kept"
            gains = np.diff(together, axis=-1) / steps
            if np.any(gains < -tolerance) or np.any(np.diff(gains, axis=-1) > tolerance):
                return "shared_curves", f"not rising and concave {where}", "best entries first"
    return None
