"""Two methods on the same prompts: how much one differs from the other, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvalloc.accounting import FloatArray
from kvalloc.errors import InputError
from kvalloc.evaluate.scoring import FULL, Outcome, Score, known, mean_of_tasks, row, values
from kvalloc.prompts.intervals import interval

Pair = tuple[Outcome, Outcome]


def compare(scores: Sequence[Score], other: Sequence[Score]) -> dict[str, Any]:
    """Compare two methods prompt by prompt, tasks with equal weight.

    Prompts are drawn with replacement, the same ones for both methods, within each task. What is
    compared is the mean over tasks of the mean over prompts, KL over the tokens that both methods
    predicted after their eviction.

    Parameters
    ----------
    scores, other : sequence of Score, (n_tasks,)
        Of the same tasks in the same order.

    Returns
    -------
    dict
        ``against``, the other method; ``kl_difference`` and ``score_difference``, the mean less
        that of the other, None where nothing was compared; ``kl_ratio``, the mean KL by
        that of the other, None where that is 0; each with its bootstrap interval over the prompts
        under its name and ``_ci95``, None for fewer than two prompts in a task.

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
    kls, points = values(pairs, _shared_kls), values(pairs, _both_scores)
    kl, score = mean_of_tasks(kls), mean_of_tasks(points)
    ratio = kl[0] / kl[1] if kl is not None and kl[1] > 0 else None
    by = None if ratio is None else interval(kls, lambda m: m[:, 0] / m[:, 1])
    return {
        "against": other[0].name,
        "kl_difference": None if kl is None else kl[0] - kl[1],
        "kl_difference_ci95": interval(kls, _difference),
        "kl_ratio": ratio,
        "kl_ratio_ci95": by,
        "score_difference": None if score is None else score[0] - score[1],
        "score_difference_ci95": interval(points, _difference),
    }


def rows(scores: Sequence[Score]) -> list[dict[str, Any]]:
    """Return every score as plain values, each method beside the full cache and the first one.

    Parameters
    ----------
    scores : sequence of Score
        As `kvalloc.evaluate.scoring.evaluate` gives them: for each task the full cache first.

    Returns
    -------
    list of dict
        As `row` gives them, with a list of comparisons under ``paired``. With several tasks, rows
        over all of them follow.
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
    """Compare a method with the full cache, and with the first of the others."""
    others = [other for other in by_name if other != FULL]
    against = [] if name == FULL else [FULL, *(other for other in others[:1] if other != name)]
    return [compare(by_name[name], by_name[other]) for other in against]


def _shared_kls(pair: Pair) -> FloatArray | None:
    """Return the KL of both, over the tokens that both predicted after their eviction."""
    one, two = pair
    both = (zip(*turns, strict=True) for turns in zip(one.kls, two.kls, strict=True))
    shared = [[kls for kls in turn if None not in kls] for turn in both]
    means = [np.array(turn, dtype=np.float64).mean(axis=0) for turn in shared if turn]
    return np.mean(means, axis=0) if means else None


def _both_scores(pair: Pair) -> list[float] | None:
    scores = known(outcome.score for outcome in pair)
    return scores if len(scores) == len(pair) else None


def _difference(means: FloatArray) -> FloatArray:
    return means[:, 0] - means[:, 1]
