"""Bootstrap intervals of means over prompts, and the tail of the KL over tokens.

References
----------
B. Efron and R. Tibshirani, An Introduction to the Bootstrap (1993), Chap. 8.5 and 13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from kvalloc.accounting import FloatArray

RESAMPLES = 2000
CONFIDENCE = 0.95
TAILS = {"p99": (0.99, 300), "p999": (0.999, 3_000)}
"""Percentiles of the KL by name: the share of tokens, and the fewest tokens that show one, of which
three are above it."""


def resampled_means(tasks: Sequence[FloatArray], *, seed: int = 0) -> list[FloatArray]:
    """Return each task's means over prompts drawn with replacement.

    Parameters
    ----------
    tasks : sequence of ndarray, each (n_prompts, ...)
        All values of a prompt get the same draws.
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
    """Return a 95% percentile bootstrap interval of a mean over tasks, each resampled.

    Parameters
    ----------
    tasks : sequence of ndarray, each (n_prompts,) or (n_prompts, n_values)
        Tasks have equal weight.
    of : callable
        From means, ``(RESAMPLES,)`` or ``(RESAMPLES, n_values)``, to ``(RESAMPLES,)``.
    seed : int

    Returns
    -------
    list of float or None
        Both ends; None without tasks, for a task of one prompt, or a result not finite.
    """
    if not tasks or min(map(len, tasks)) < 2:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = of(np.mean(resampled_means(tasks, seed=seed), axis=0))
    tail = 50 * (1 - CONFIDENCE)
    ends = np.percentile(drawn, (tail, 100 - tail))
    return [float(end) for end in ends] if np.isfinite(drawn).all() else None


def tails(kls: Iterable[float | None]) -> dict[str, Any]:
    """Return percentiles of the KL over tokens.

    They are measured values (``inverted_cdf``): at most 1% of tokens exceed ``p99``.

    Parameters
    ----------
    kls : iterable of (float or None)
        KL of each token, nats; None is not compared.

    Returns
    -------
    dict
        ``p99`` and ``p999``, nats, None for too few tokens (`TAILS`); ``n_tokens``, compared.

    Examples
    --------
    >>> tails([0.0] * 297 + [0.5, 1.0, 2.0, None])
    {'p99': 0.0, 'p999': None, 'n_tokens': 300}
    """
    known = np.array([kl for kl in kls if kl is not None], dtype=np.float64)
    percentiles = {
        name: float(np.quantile(known, share, method="inverted_cdf")) if len(known) >= few else None
        for name, (share, few) in TAILS.items()
    }
    return {**percentiles, "n_tokens": len(known)}
