"""Two methods on the same prompts: how much one differs from the other, and how sure that is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvalloc.accounting import FloatArray
from kvalloc.errors import InputError
from kvalloc.evaluate.scoring import FULL, RESAMPLES, Outcome, Score

ALL_TASKS = "all tasks"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One method beside another on the same prompts.

    Attributes
    ----------
    against : str
        The other method.
    kl_difference : float or None
        Mean KL less that of the other, nats per token; None where nothing was compared.
    kl_difference_ci95 : list of float or None
        Its bootstrap interval over the prompts; None for fewer than two prompts in a task.
    kl_ratio : float or None
        Mean KL by that of the other; None where that is 0.
    kl_ratio_ci95 : list of float or None
    score_difference : float or None
        Mean score less that of the other; None where nothing is asked.
    score_difference_ci95 : list of float or None
    """

    against: str
    kl_difference: float | None
    kl_difference_ci95: list[float] | None
    kl_ratio: float | None
    kl_ratio_ci95: list[float] | None
    score_difference: float | None
    score_difference_ci95: list[float] | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def compare(mine: Sequence[Score], other: Sequence[Score], *, seed: int = 0) -> Comparison:
    """Compare two methods prompt by prompt, tasks with equal weight.

    Prompts are drawn with replacement, the same ones for both methods, within each task. What is
    compared is the mean over tasks of the mean over prompts.

    Parameters
    ----------
    mine, other : sequence of Score, (n_tasks,)
        Of the same tasks in the same order.
    seed : int
        Of the bootstrap.

    Returns
    -------
    Comparison

    Raises
    ------
    InputError
        If the tasks or their numbers of prompts differ.

    References
    ----------
    B. Efron and R. Tibshirani, An Introduction to the Bootstrap (1993), Chap. 8.5 and 13.
    """
    shapes = [[(score.task, len(score.outcomes)) for score in scores] for scores in (mine, other)]
    if shapes[0] != shapes[1] or not mine:
        raise InputError("methods can be compared on the same prompts only; evaluate them together")
    kls = _pairs(mine, other, lambda outcome: outcome.kl)
    scores = _pairs(mine, other, lambda outcome: outcome.score)
    kl, kl_draws = _means(kls, seed)
    score, score_draws = _means(scores, seed)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = kl_draws[:, 0] / kl_draws[:, 1]
    ratio = float(kl[0] / kl[1]) if kls and kl[1] > 0 else None
    return Comparison(
        against=other[0].name,
        kl_difference=float(kl[0] - kl[1]) if kls else None,
        kl_difference_ci95=_interval(kl_draws[:, 0] - kl_draws[:, 1]),
        kl_ratio=ratio,
        kl_ratio_ci95=None if ratio is None else _interval(ratios),
        score_difference=float(score[0] - score[1]) if scores else None,
        score_difference_ci95=_interval(score_draws[:, 0] - score_draws[:, 1]),
    )


def rows(scores: Sequence[Score]) -> list[dict[str, Any]]:
    """Every score as plain values, each method beside the full cache and the first method.

    Parameters
    ----------
    scores : sequence of Score
        As `kvalloc.evaluate.scoring.evaluate` gives them: for each task the full cache first.

    Returns
    -------
    list of dict
        `Score.row` with a list of comparisons under ``paired``. With several tasks, rows of
        `ALL_TASKS` follow, in which tasks have equal weight.
    """
    by_name: dict[str, list[Score]] = {}
    for score in scores:
        by_name.setdefault(score.name, []).append(score)
    n_tasks = len(by_name.get(FULL, ()))
    found = [
        {**one[task].row(), "paired": _paired({n: [s[task]] for n, s in by_name.items()}, name)}
        for task in range(n_tasks)
        for name, one in by_name.items()
    ]
    if n_tasks > 1:
        found += [
            {**_over_tasks(one), "paired": _paired(by_name, name)} for name, one in by_name.items()
        ]
    return found


def _paired(by_name: Mapping[str, list[Score]], name: str) -> list[dict[str, Any]]:
    """A method beside the full cache, and beside the first of the others."""
    others = [other for other in by_name if other != FULL]
    against = [] if name == FULL else [FULL, *(other for other in others[:1] if other != name)]
    return [compare(by_name[name], by_name[other]).to_dict() for other in against]


def _over_tasks(scores: Sequence[Score]) -> dict[str, Any]:
    """A row of `ALL_TASKS`: means over tasks, and intervals by resampling within each task."""
    each = [score.row() for score in scores]
    names = ("retained_bytes", "full_bytes", "kept_bytes", "kl", "top1_agreement", "exact_match")
    means = {
        name: _mean_or_none([row[name] for row in each])
        for name in (*names, "score", "prefill_seconds", "decode_tokens_per_second")
    }
    kl_draws, score_draws = (
        _means(_pairs(scores, scores, value), 0)[1][:, 0]
        for value in (lambda outcome: outcome.kl, lambda outcome: outcome.score)
    )
    return {
        **each[0],
        **means,
        **{name: round(means[name] or 0) for name in names[:3]},
        "task": ALL_TASKS,
        "ci95": _interval(kl_draws),
        "score_ci95": _interval(score_draws),
        "perplexity": None,
        "n": sum(row["n"] for row in each),
    }


def _pairs(
    mine: Sequence[Score], other: Sequence[Score], value: Callable[[Outcome], float | None]
) -> list[FloatArray]:
    """Known values of each task that has some, ``(n_prompts, 2)``."""
    tasks = []
    for one, two in zip(mine, other, strict=True):
        both = [(value(a), value(b)) for a, b in zip(one.outcomes, two.outcomes, strict=True)]
        known = [pair for pair in both if None not in pair]
        if known:
            tasks.append(np.array(known, dtype=np.float64))
    return tasks


def _means(tasks: Sequence[FloatArray], seed: int) -> tuple[FloatArray, FloatArray]:
    """Means over tasks ``(2,)``, and those of resampled prompts ``(RESAMPLES or 0, 2)``."""
    if not tasks:
        return np.zeros(2), np.empty((0, 2))
    means = np.mean([task.mean(axis=0) for task in tasks], axis=0)
    if min(map(len, tasks)) < 2:
        return means, np.empty((0, 2))
    draw = np.random.default_rng(seed)
    drawn = [
        task[draw.integers(len(task), size=(RESAMPLES, len(task)))].mean(axis=1) for task in tasks
    ]
    return means, np.mean(drawn, axis=0)


def _interval(draws: FloatArray) -> list[float] | None:
    """The middle 95%; None where there is none, or where a ratio was of nothing."""
    if not len(draws) or not np.isfinite(draws).all():
        return None
    low, high = np.percentile(draws, (2.5, 97.5))
    return [float(low), float(high)]


def _mean_or_none(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
