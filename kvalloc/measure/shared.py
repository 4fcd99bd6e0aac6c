"""Curves of adjacent layers that keep the same entries, measured while the layers go by."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.errors import InputError
from kvalloc.formats.sharing_groups import FIRST_SHARED_LAYER, LONGEST_RUN, runs_of
from kvalloc.measure.curves import retention_curves


def check_share_length(share_length: int, full_layers: Sequence[int]) -> None:
    """Refuse a length of runs that cannot be measured.

    Raises
    ------
    InputError
        If it is out of range, or the model has no adjacent layers that could share.
    """
    if not 1 <= share_length <= LONGEST_RUN:
        raise InputError(
            f"the share length is {share_length}, expected 1 (nothing is shared) to {LONGEST_RUN} "
            "layers"
        )
    if share_length > 1 and not len(runs_of(full_layers, share_length)):
        raise InputError(
            "no layers of this model can share entries: there are no two adjacent ones of full "
            f"attention from layer {FIRST_SHARED_LAYER} on; leave out the share length"
        )


class SharedRuns:
    """Joint curves of each run of layers, as soon as its last layer has been seen.

    Entries are ranked by the sum over the run's layers of a head's scores, each layer's divided by
    its score mass over all heads, so that layers count alike; the curve is the sum over the
    layers of the kept share. Equal to the sum of the layers' own contributions where they rank
    entries alike, and below it elsewhere (MPCache, Sec. 4.4).

    Parameters
    ----------
    full_layers : sequence of int
        Layers that will be added, rising.
    longest : int
        Most layers in a run; 1 measures nothing and keeps nothing.
    """

    def __init__(self, full_layers: Sequence[int], longest: int) -> None:
        self.runs: IntArray = runs_of(full_layers, longest)
        self._index = {(first, length): n for n, (first, length) in enumerate(self.runs.tolist())}
        # Scores of the layers before: the only ones that are held.
        self._recent: deque[tuple[int, npt.NDArray[Any], FloatArray]] = deque(maxlen=longest - 1)

    def add(
        self, layer: int, scores: npt.NDArray[Any], masses: FloatArray
    ) -> Iterator[tuple[int, FloatArray]]:
        """Take a layer's scores; the runs that end with it, and their curves.

        Parameters
        ----------
        layer : int
        scores : ndarray, (batch, n_kv_heads, n_evictable)
            Of the entries that can be evicted.
        masses : ndarray of float64, (batch, n_kv_heads)
            Their sums.

        Yields
        ------
        run : int
            Index into ``runs``.
        curves : ndarray of float64, (batch, n_kv_heads, n_evictable + 1)
            What the run's layers keep together, as a function of the entries.
        """
        wanted = [length for first, length in self._index if first + length - 1 == layer]
        if wanted:
            joint, empty = _shares(scores, masses)
            for before, other, mass in reversed(self._recent):
                length = layer - before + 1
                if length > max(wanted):
                    break
                more, none = _shares(other, mass)
                joint, empty = joint + more, empty + none
                if length in wanted:
                    curves, kept = retention_curves(joint)
                    curves *= kept[..., None]
                    yield self._index[before, length], curves + empty[:, None, None]
        if self._recent.maxlen:
            self._recent.append((layer, scores, masses))


def _shares(scores: npt.NDArray[Any], masses: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Scores as shares of their layer's mass; and where it has none, what a head keeps anyway."""
    whole = masses.sum(axis=1)
    with_mass = np.where(whole > 0, whole, 1.0)
    shares: FloatArray = scores / with_mass[:, None, None]
    return shares, np.where(whole > 0, 0.0, 1.0 / masses.shape[1])
