"""Two methods on the same prompts: their difference and its uncertainty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvalloc.accounting import FloatArray
from kvalloc.errors import InputError
from kvalloc.evaluate.scoring import FULL, Outcome, Score, known, mean_of_tasks, row, values
from kvalloc.prompts.intervals import TAILS, interval, tails

Pair = tuple[Outcome, Outcome]


def compare(scores: Sequence[Score], other: Sequence[Score]) -> dict[str, Any]:
    """Compare two methods prompt by prompt, tasks with equal weight.

    The bootstrap draws the same prompts for both. KL is over tokens that both predicted after their
    eviction.

    Parameters
    ----------
    scores, other : sequence of Score, (n_tasks,)
        Of the same tasks in the same order.

    Returns
    -------
    dict
        Differences of means, and ratios of means and percentiles, over ``n_tokens`` compared
        tokens. Names with ``_ci95`` are intervals; see `kvalloc.prompts.intervals.interval`. None
        without comparisons, for too few tokens, or a divisor of 0.

    Raises
    ------
    InputError
        If the tasks or their numbers of prompts differ.
    """
    shapes = [[(score.task, len(score.outcomes)) for score in one] for one in (scores, other)]
    if shapes[0] != shapes[1] or not scores:
        raise InputError("methods can be compared on the same prompts only; evaluate them together")
    tasks = zip(scores, other, strict=True)
    pairs = [[*zip(one.outcomes, two.outcomes, strict=True)] for one, two in tasks]
    kls, points = values(pairs, partial(_means, "kls")), values(pairs, _both_scores)
    kl, score = mean_of_tasks(kls), mean_of_tasks(points)
    top1 = mean_of_tasks(values(pairs, partial(_means, "agrees")))
    tokens = [
        both for task in pairs for pair in task for turn in _shared("kls", pair) for both in turn
    ]
    of_scores, of_other = map(tails, np.array(tokens, dtype=np.float64).reshape(-1, 2).T)
    ratio = kl[0] / kl[1] if kl is not None and kl[1] > 0 else None
    by = None if ratio is None else interval(kls, lambda m: m[:, 0] / m[:, 1])
    return {
        "against": other[0].name,
        "kl_difference": None if kl is None else kl[0] - kl[1],
        "kl_difference_ci95": interval(kls, _difference),
        "kl_ratio": ratio,
        "kl_ratio_ci95": by,
        **{f"{n}_ratio": of_scores[n] / of_other[n] if of_other[n] else None for n in TAILS},
        "n_tokens": of_scores["n_tokens"],
        "top1_difference": None if top1 is None else top1[0] - top1[1],
        "score_difference": None if score is None else score[0] - score[1],
        "score_difference_ci95": interval(points, _difference),
    }


def rows(scores: Sequence[Score]) -> list[dict[str, Any]]:
    """Return every score as plain values, compared with the full cache and the first reduced one.

    Parameters
    ----------
    scores : sequence of Score
        See `kvalloc.evaluate.scoring.evaluate`.

    Returns
    -------
    list of dict
        See `row`; comparisons are under ``paired``. Rows over several tasks come last.
    """
    by_name: dict[str, list[Score]] = {}
    for score in scores:
        by_name.setdefault(score.name, []).append(score)
    n_tasks = len(by_name.get(FULL, ()))
    spans = [slice(task, task + 1) for task in range(n_tasks)]
    if n_tasks > 1:
        spans.append(slice(None))
    return [
        {**row(one[span]), "paired": _paired({n: s[span] for n, s in by_name.items()}, name)}
        for span in spans
        for name, one in by_name.items()
    ]


def _paired(by_name: Mapping[str, list[Score]], name: str) -> list[dict[str, Any]]:
    reduced = [method for method in by_name if method != FULL]
    against = [] if name == FULL else [FULL, *(first for first in reduced[:1] if first != name)]
    return [compare(by_name[name], by_name[other]) for other in against]


def _shared(name: str, pair: Pair) -> list[list[tuple[float, float]]]:
    """Return both values of each turn's tokens that both predicted after their eviction."""
    turns = zip(*(getattr(outcome, name) for outcome in pair), strict=True)
    return [[both for both in zip(*turn, strict=True) if None not in both] for turn in turns]


def _means(name: str, pair: Pair) -> FloatArray | None:
    turns = (turn for turn in _shared(name, pair) if turn)
    means = [np.array(turn, dtype=np.float64).mean(axis=0) for turn in turns]
    return np.mean(means, axis=0) if means else None


def _both_scores(pair: Pair) -> list[float] | None:
    scores = known(outcome.score for outcome in pair)
    return scores if len(scores) == len(pair) else None


def _difference(means: FloatArray) -> FloatArray:
    return means[:, 0] - means[:, 1]
