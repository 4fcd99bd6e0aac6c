"""Prompts by task: who is held out, what a task weighs, and how sure a mean over tasks is.

A loss over several tasks is the mean over tasks of each task's mean over its prompts, so that a
task does not count more for having more prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.errors import InputError, option
from kvalloc.prompts import intervals

LEAST_PROMPTS = 4
"""Fewer cannot be split into prompts to learn from and prompts to judge by, two of each."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which prompts curves are corrected on, and which ones only judge.

    Attributes
    ----------
    training, held_out : ndarray of int64
        Indices of prompts, rising; none is in both.
    """

    training: IntArray
    held_out: IntArray


def split_prompts(
    tasks: Sequence[str],
    losses: FloatArray | None = None,
    *,
    held_out_share: float = 1 / 3,
    seed: int = 0,
) -> Split:
    """Hold out a share of each task's prompts, drawn at random among those that lose alike.

    Losses have heavy tails: the few prompts whose answer flips make up most of the mean. So the
    prompts of a task are put in the order of what they lose before anything is learnt, cut into as
    many blocks as are held out, and one of each block is drawn: both sides get their share of them.

    Parameters
    ----------
    tasks : sequence of str, (n_prompts,)
        Task of each prompt.
    losses : ndarray of float64, (n_prompts,), optional
        Loss of each prompt with the first solution; all alike by default.
    held_out_share : float
        Above 0 and below 1; of a task with two prompts or more at least one is held out and one
        is not, and a task with a single prompt is learnt from.
    seed : int
        Of the draw.

    Returns
    -------
    Split

    Raises
    ------
    InputError
        If there are fewer than `LEAST_PROMPTS` prompts, or no task has two.

    References
    ----------
    R. A. Fisher, The Design of Experiments (1935), Chap. IV: randomised blocks.
    """
    if not 0 < held_out_share < 1:
        raise InputError(f"a held-out share of {held_out_share:g} is not between 0 and 1")
    names = np.asarray(tasks)
    if names.size < LEAST_PROMPTS:
        raise InputError(
            f"refining needs at least {LEAST_PROMPTS} prompts, some to learn from and some to "
            f"judge by, and there are {names.size}; give more with "
            f"{option('refine_prompts', keyword='prompts')}"
        )
    random = np.random.default_rng(seed)
    held: list[int] = []
    for task in sorted(set(tasks)):
        members = np.flatnonzero(names == task)
        if members.size > 1:
            count = min(members.size - 1, max(1, round(held_out_share * members.size)))
            order = random.permutation(members)
            if losses is not None:
                order = order[np.argsort(losses[order], kind="stable")]
            held += [int(random.choice(block)) for block in np.array_split(order, count)]
    if not held:
        raise InputError(
            "no task has two prompts, so that none can be held out; give more prompts of a task"
        )
    held_out = np.array(sorted(held), dtype=np.int64)
    training = np.setdiff1d(np.arange(names.size, dtype=np.int64), held_out)
    return Split(training=training, held_out=held_out)


def prompt_weights(tasks: Sequence[str], task_weight: dict[str, float] | None = None) -> FloatArray:
    """What each prompt weighs in a mean over tasks, ``(n_prompts,)``.

    Parameters
    ----------
    tasks : sequence of str, (n_prompts,)
    task_weight : dict of str to float, optional
        Factors of the tasks; 1 each by default, and the weights then sum to 1.

    Examples
    --------
    >>> prompt_weights(["a", "b", "b"]).tolist()
    [0.5, 0.25, 0.25]
    """
    names = np.asarray(tasks)
    known, inverse, counts = np.unique(names, return_inverse=True, return_counts=True)
    factors = np.ones(known.size)
    if task_weight is not None:
        factors = np.array([task_weight[str(name)] for name in known])
    weights: FloatArray = (factors / (counts * known.size))[inverse]
    return weights


def comparable_scales(tasks: Sequence[str], losses: FloatArray) -> dict[str, float]:
    """Factors that bring the tasks' losses halfway to one scale, in logarithms.

    A task that loses ten times as much as another would decide alone. Full normalisation would
    let a task that loses next to nothing, and whose loss is mostly noise, weigh as much as one
    that suffers; so each loss is divided by the square root of its own and the mean one. What the
    factors leave alone is the mean over tasks of the given losses.

    Parameters
    ----------
    tasks : sequence of str, (n_prompts,)
    losses : ndarray of float64, (n_prompts,)
        Of one choice, nats per token.

    Returns
    -------
    dict of str to float

    Examples
    --------
    >>> scales = comparable_scales(["a", "b"], np.array([0.9, 0.1]))
    >>> round(scales["a"], 3), round(scales["b"], 3)
    (0.833, 2.5)
    """
    names = np.asarray(tasks)
    means = {str(t): float(losses[names == t].mean()) for t in np.unique(names)}
    whole = sum(means.values()) / len(means)
    if whole <= 0:
        return dict.fromkeys(means, 1.0)
    own = {task: max(mean, 1e-3 * whole) for task, mean in means.items()}
    factors = {task: (whole / mean) ** 0.5 for task, mean in own.items()}
    total = sum(factors[task] * mean for task, mean in means.items()) / len(means)
    return {task: factor * whole / total for task, factor in factors.items()}


def folds(
    tasks: Sequence[str], n_folds: int, *, seed: int = 0
) -> Iterator[tuple[IntArray, IntArray]]:
    """Split prompts into folds, each with its share of every task.

    Parameters
    ----------
    tasks : sequence of str, (n_prompts,)
    n_folds : int
        At most the number of prompts.
    seed : int

    Yields
    ------
    kept, left_out : ndarray of int64
        Indices of prompts; each prompt is left out once.
    """
    names = np.asarray(tasks)
    random = np.random.default_rng(seed)
    order = np.concatenate(
        [random.permutation(np.flatnonzero(names == task)) for task in sorted(set(tasks))]
    )
    of = np.empty(names.size, dtype=np.int64)
    of[order] = np.arange(names.size) % n_folds
    for fold in range(n_folds):
        yield np.flatnonzero(of != fold), np.flatnonzero(of == fold)


def interval(
    tasks: Sequence[str], losses: FloatArray, *, confidence: float = 0.95, seed: int = 0
) -> list[float]:
    """Percentile bootstrap interval of the mean over tasks, prompts drawn within their task.

    A task's only prompt tells nothing of how much its prompts differ. Where there is such a task,
    prompts are drawn across the tasks, each with its weight in the mean.

    Parameters
    ----------
    tasks : sequence of str, (n_prompts,)
    losses : ndarray of float64, (n_prompts,)
    confidence : float
    seed : int

    Returns
    -------
    list of float
        Low and high end.
    """
    names = np.asarray(tasks)
    known, place, counts = np.unique(names, return_inverse=True, return_counts=True)
    if counts.min() > 1:
        ends = intervals.interval(
            [losses[names == task] for task in known], confidence=confidence, seed=seed
        )
    else:
        weights = 1 / counts[place]
        ends = intervals.interval(
            [np.column_stack([weights * losses, weights])],
            lambda means: means[:, 0] / means[:, 1],
            confidence=confidence,
            seed=seed,
        )
    return [float(losses.mean())] * 2 if ends is None else ends
