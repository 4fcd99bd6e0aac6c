"""Noisy changes drawn towards what all units have in common, as far as held-out prompts want it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvalloc.accounting import FloatArray
from kvalloc.tuning.tasks import folds, prompt_weights

SPREADS = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, float("inf"))
"""How far units may differ from the pooled curve, relative to their expected change; 0 keeps the
pooled curve alone, infinity every measurement as it is."""

FOLDS = 5
"""How often some prompts are left out, at most the number of prompts."""

LARGEST_FACTOR = 10.0
"""The pooled curve is at most so many times what was expected."""


@dataclass(frozen=True, kw_only=True)
class Shrunk:
    """Changes after shrinkage.

    Attributes
    ----------
    changes : ndarray of float64, (n_prompts, n_figures)
        Per prompt; their means over the prompts of a task are the task's estimates.
    spread : float
        The one of `SPREADS` that foretold left-out prompts best.
    """

    changes: FloatArray
    spread: float


def pooled(changes: FloatArray, expected: FloatArray) -> FloatArray:
    """The expected changes, those up and those down each times the factor that all units share.

    Parameters
    ----------
    changes : ndarray of float64, (n_prompts, n_figures)
        Measured.
    expected : ndarray of float64, (n_figures,)
        What the curves so far say.

    Returns
    -------
    ndarray of float64, (n_figures,)

    Examples
    --------
    >>> pooled(np.array([[0.2, 0.6, -0.1]]), np.array([0.1, 0.3, -0.1])).tolist()
    [0.2, 0.6, -0.1]
    """
    found = np.zeros_like(expected)
    for side in (expected > 0, expected < 0):
        whole = float(expected[side].sum())
        if whole != 0:
            factor = float(changes[:, side].mean(axis=0).sum()) / whole
            found[side] = expected[side] * min(max(factor, 0.0), LARGEST_FACTOR)
    return found


def shrink(
    changes: FloatArray, expected: FloatArray, tasks: Sequence[str], spread: float
) -> FloatArray:
    """Draw each figure of each task towards the pooled curve, the more the noisier it is.

    With changes of a unit spread around the pooled curve by ``spread`` times their size (t), and a
    standard error s of the measured mean, the mean is kept for a share ``t^2 / (t^2 + s^2)`` and
    the rest is the pooled curve (the posterior mean of a normal with that prior).

    Parameters
    ----------
    changes : ndarray of float64, (n_prompts, n_figures)
        Measured changes of the loss, nats per token.
    expected : ndarray of float64, (n_figures,)
        What the curves so far say.
    tasks : sequence of str, (n_prompts,)
    spread : float
        From 0 up.

    Returns
    -------
    ndarray of float64, (n_prompts, n_figures)

    References
    ----------
    B. Efron and C. Morris, Stein's Estimation Rule and Its Competitors (1973).
    """
    names = np.asarray(tasks)
    shrunk = np.empty_like(changes)
    size = np.abs(expected) + float(np.abs(expected).mean())
    variance = _variances(changes, names)
    for task in np.unique(names):
        rows = names == task
        own = changes[rows]
        common = pooled(own, expected)
        if np.isinf(spread):
            keep = np.ones_like(size)
        else:
            prior = (spread * size) ** 2
            noise = variance / own.shape[0]
            keep = np.divide(prior, prior + noise, out=np.zeros_like(size), where=prior > 0)
        shrunk[rows] = common + keep * (own - common)
    return shrunk


def shrink_by_folds(changes: FloatArray, expected: FloatArray, tasks: Sequence[str]) -> Shrunk:
    """The same with the spread that foretells left-out prompts best.

    Parameters
    ----------
    changes, expected, tasks
        See `shrink`.

    Returns
    -------
    Shrunk
    """
    names = np.asarray(tasks)
    errors = np.zeros(len(SPREADS))
    parts = list(folds(tasks, min(FOLDS, names.size))) if names.size > 1 else []
    for kept, left_out in parts:
        learnt = [str(task) for task in names[kept]]
        for index, spread in enumerate(SPREADS):
            guesses = shrink(changes[kept], expected, learnt, spread)
            errors[index] += _error(guesses, learnt, changes[left_out], names[left_out])
    # Among equals the middle one: nothing was learnt about the spread.
    best = int(np.argmin(errors)) if parts and np.ptp(errors) > 0 else SPREADS.index(1.0)
    return Shrunk(changes=shrink(changes, expected, tasks, SPREADS[best]), spread=SPREADS[best])


def _variances(changes: FloatArray, names: npt.NDArray[np.str_]) -> FloatArray:
    """Variance of a figure between prompts of one task, pooled over tasks, ``(n_figures,)``."""
    squares, freedom = np.zeros(changes.shape[1]), 0
    for task in np.unique(names):
        own = changes[names == task]
        squares += ((own - own.mean(axis=0)) ** 2).sum(axis=0)
        freedom += own.shape[0] - 1
    variance: FloatArray = squares / freedom if freedom else np.zeros(changes.shape[1])
    return variance


def _error(
    guesses: FloatArray, learnt: Sequence[str], found: FloatArray, tasks: npt.NDArray[np.str_]
) -> float:
    """Squared error of the tasks' estimates on prompts that they have not seen."""
    names = np.asarray(learnt)
    weights = prompt_weights([str(task) for task in tasks])
    total = 0.0
    for row, task, weight in zip(found, tasks, weights, strict=True):
        if np.any(names == task):
            total += weight * float(((row - guesses[names == task].mean(axis=0)) ** 2).sum())
    return total
