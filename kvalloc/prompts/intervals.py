"""How sure a mean over prompts is: percentile bootstrap intervals.

NumPy draws the resamples. `scipy.stats.bootstrap` gives the same numbers, as a test checks, but
importing `scipy.stats` takes a second, as long as all the rest of ``kvalloc solve``.

References
----------
B. Efron and R. Tibshirani, An Introduction to the Bootstrap (1993), Chap. 8.5 and 13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvalloc.accounting import FloatArray

RESAMPLES = 2000
CONFIDENCE = 0.95


def resampled_means(tasks: Sequence[FloatArray], *, seed: int = 0) -> list[FloatArray]:
    """Return means over prompts that are drawn with replacement, for each task.

    Parameters
    ----------
    tasks : sequence of ndarray, each (n_prompts, ...)
        Values of each prompt, such as those of two methods: both get the same draws.
    seed : int

    Returns
    -------
    list of ndarray, each (RESAMPLES, ...)
    """
    random = np.random.default_rng(seed)
    return [
        task[random.integers(len(task), size=(RESAMPLES, len(task)))].mean(axis=1) for task in tasks
    ]


def interval(
    tasks: Sequence[FloatArray],
    of: Callable[[FloatArray], FloatArray] = lambda means: means,
    *,
    seed: int = 0,
) -> list[float] | None:
    """Return the 95% percentile bootstrap interval of a mean over tasks, resampled in each task.

    Parameters
    ----------
    tasks : sequence of ndarray, each (n_prompts,) or (n_prompts, n_values)
        Tasks have equal weight, whatever their number of prompts.
    of : callable
        What is wanted of the means, ``(RESAMPLES,)`` or ``(RESAMPLES, n_values)``, such as the
        ratio of two columns; gives ``(RESAMPLES,)``.
    seed : int

    Returns
    -------
    list of float or None
        Low and high end; None without tasks, where a task has one prompt only, which says nothing
        of how much its prompts differ, and where the result is not finite.
    """
    if not tasks or min(map(len, tasks)) < 2:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = of(np.mean(resampled_means(tasks, seed=seed), axis=0))
    tail = 50 * (1 - CONFIDENCE)
    ends = np.percentile(drawn, (tail, 100 - tail))
    return [float(end) for end in ends] if np.isfinite(drawn).all() else None
