"""The prompts of a refinement, by task: what each is for, what a task weighs, how sure a mean is.

A loss over several tasks is the mean over tasks of each task's mean over its prompts, so that a
task does not count more for having more prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.errors import InputError, option
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.measure.sampling import SampleSet, choose_samples
from kvalloc.prompts import intervals
from kvalloc.prompts.texts import Document, Prompt, default_texts, read_prompts

LEAST_PROMPTS = 4
"""Fewer cannot be split into prompts to learn from, to choose by and to report on."""
HELD_OUT_SHARE = 0.25
"""Share of each task's prompts that only choose, and of those that are only reported on."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """Prompts that are used for one purpose.

    Attributes
    ----------
    prompts : ndarray of int64
        Indices, rising.
    tasks : tuple of str
        Task of each.
    """

    prompts: IntArray
    tasks: tuple[str, ...]

    def weights(self, task_weight: dict[str, float] | None = None) -> FloatArray:
        """What each prompt weighs in a mean over tasks; see `prompt_weights`."""
        return prompt_weights(self.tasks, task_weight)

    def mean(self, losses: FloatArray, task_weight: dict[str, float] | None = None) -> float:
        """Mean over tasks of the means over their prompts, of the losses of all prompts."""
        return float(self.weights(task_weight) @ losses[self.prompts])


@dataclass(frozen=True, kw_only=True)
class Split:
    """What each prompt is for; none is in two sides.

    Attributes
    ----------
    learn : Side
        Curves are corrected on them.
    choose : Side
        They choose the round, and whether a target loss is met.
    report : Side
        Nothing is learnt from them or chosen by them: their loss is what is stated.
    """

    learn: Side
    choose: Side
    report: Side


def split_prompts(
    tasks: Sequence[str],
    losses: FloatArray | None = None,
    *,
    held_out_share: float = HELD_OUT_SHARE,
    seed: int = 0,
) -> Split:
    """Hold out twice a share of each task's prompts, drawn at random among those that lose alike.

    Losses have heavy tails: the few prompts whose answer flips make up most of the mean. So the
    prompts of a task are put in the order of what they lose before anything is learnt and cut into
    blocks; of each block one prompt is drawn to choose by and one to report on: all sides get their
    share of those that lose most.

    Parameters
    ----------
    tasks : sequence of str, (n_prompts,)
        Task of each prompt.
    losses : ndarray of float64, (n_prompts,), optional
        Loss of each prompt with the first solution; all alike by default.
    held_out_share : float
        Of each side, above 0 and below 1/2. Of a task with three prompts or more at least one is on
        each side. Of tasks with two prompts one is learnt from, and the other is on the one side
        and the other in turn. A task with a single prompt is learnt from.
    seed : int
        Of the draw.

    Returns
    -------
    Split

    Raises
    ------
    InputError
        If there are fewer than `LEAST_PROMPTS` prompts, or a side would be empty.

    References
    ----------
    R. A. Fisher, The Design of Experiments (1935), Chap. IV: randomised blocks.
    """
    if not 0 < held_out_share < 0.5:
        raise InputError(f"a held-out share of {held_out_share:g} is not between 0 and 1/2")
    names = np.asarray(tasks)
    if names.size < LEAST_PROMPTS:
        raise InputError(
            f"refining needs at least {LEAST_PROMPTS} prompts, some to learn from, some to choose "
            f"by and some to report on, and there are {names.size}; give more with "
            f"{option('refine_prompts', keyword='prompts')}"
        )
    random = np.random.default_rng(seed)
    sides: tuple[list[int], list[int]] = ([], [])
    pairs = 0
    for task in sorted(set(tasks)):
        order = random.permutation(np.flatnonzero(names == task))
        if losses is not None:
            order = order[np.argsort(losses[order], kind="stable")]
        if order.size == 2:
            sides[pairs % 2].append(int(random.choice(order)))
            pairs += 1
        count = min((order.size - 1) // 2, max(1, round(held_out_share * order.size)))
        for block in np.array_split(order, count) if count > 0 else ():
            for side, prompt in zip(sides, random.choice(block, 2, replace=False), strict=True):
                side.append(int(prompt))
    if not all(sides):
        raise InputError(
            "no task has three prompts, nor have two tasks two, so that none can be held out to "
            "choose by and to report on; give more prompts of a task"
        )
    learn = sorted(set(range(names.size)) - {*sides[0], *sides[1]})
    three = (
        Side(
            prompts=np.array(sorted(side), dtype=np.int64),
            tasks=tuple(tasks[place] for place in sorted(side)),
        )
        for side in (learn, *sides)
    )
    return Split(**dict(zip(("learn", "choose", "report"), three, strict=True)))


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


def folds(tasks: Sequence[str], n_folds: int) -> Iterator[tuple[IntArray, IntArray]]:
    """Split prompts into folds, each with its share of every task.

    Parameters
    ----------
    tasks : sequence of str, (n_prompts,)
    n_folds : int
        At most the number of prompts.

    Yields
    ------
    kept, left_out : ndarray of int64
        Indices of prompts; each prompt is left out once.
    """
    names = np.asarray(tasks)
    random = np.random.default_rng(0)
    order = np.concatenate(
        [random.permutation(np.flatnonzero(names == task)) for task in sorted(set(tasks))]
    )
    of = np.empty(names.size, dtype=np.int64)
    of[order] = np.arange(names.size) % n_folds
    for fold in range(n_folds):
        yield np.flatnonzero(of != fold), np.flatnonzero(of == fold)


def interval(tasks: Sequence[str], losses: FloatArray) -> list[float]:
    """95% percentile bootstrap interval of the mean over tasks, prompts drawn within their task.

    A task's only prompt tells nothing of how much its prompts differ. Where there is such a task,
    prompts are drawn across the tasks, each with its weight in the mean.

    Parameters
    ----------
    tasks : sequence of str, (n_prompts,)
    losses : ndarray of float64, (n_prompts,)

    Returns
    -------
    list of float
        Low and high end.
    """
    names = np.asarray(tasks)
    known, place, counts = np.unique(names, return_inverse=True, return_counts=True)
    if counts.min() > 1:
        ends = intervals.interval([losses[names == task] for task in known])
    else:
        weights = 1 / counts[place]
        ends = intervals.interval(
            [np.column_stack([weights * losses, weights])],
            lambda means: means[:, 0] / means[:, 1],
        )
    return [float(losses.mean())] * 2 if ends is None else ends


DEFAULT_PROMPTS = 16
"""Four of each kind: two to learn from, one to choose by, one to report on."""
SEED = 1_000
"""Other prompts than those that losses are measured on by default."""
DEFAULT_PIECES = 16
"""Pieces of the shipped texts that are measured on where no prompts are given."""

TEXT_TASK, ANSWER_TASK = "text", "answers"


def refinement_prompts(
    files: Sequence[str | Path] = (), *, tokenizer: Any = None, context_tokens: int | None = None
) -> tuple[list[Document | Prompt], str]:
    """The prompts in some JSONL files; where none is named, prompts of every kind, or texts.

    Budgets that are refined on prose alone let go of what finds needles, so the default is what
    ``kvalloc profile --loss`` measures on, with other seeds.

    Parameters
    ----------
    files : sequence of str or Path
    tokenizer : PreTrainedTokenizerBase, optional
        Makes `DEFAULT_PROMPTS` prompts of every kind; without it the shipped texts are taken.
    context_tokens : int, optional
        Of the score profile. Where prompts of some kind do not fit into it, the shipped texts are
        taken, too.

    Returns
    -------
    prompts : list of Document or Prompt
    said : str
        Why it is the shipped texts, where prompts of every kind were wanted; else empty.

    Raises
    ------
    InputError
        If a file cannot be read or holds no prompts.
    """
    if files:
        return [prompt for file in files for prompt in read_prompts(file)], ""
    said = ""
    if tokenizer is not None and context_tokens is not None:
        from kvalloc.prompts.calibration import calibration_prompts

        try:
            made = calibration_prompts(tokenizer, DEFAULT_PROMPTS, context_tokens, seed=SEED)
            return [*made], ""
        except InputError as error:
            said = (
                f"measured on prose alone, because prompts of every kind cannot be made ({error}); "
                "budgets refined on prose may lose what answers questions need: name prompts of "
                f"your own with {option('refine_prompts', keyword='prompts')}"
            )
    return [*default_texts()], said


def chosen_prompts(
    texts: Iterable[str | Document | Prompt], tokenizer: Any, scores: ScoreProfile
) -> tuple[SampleSet, list[str]]:
    """All prompts as samples, running text as `DEFAULT_PIECES` pieces, and the task of each.

    Parameters
    ----------
    texts : iterable of str, Document or Prompt
    tokenizer : transformers.PreTrainedTokenizerBase
    scores : ScoreProfile
        Reference context, sinks and window.

    Returns
    -------
    samples : SampleSet
    tasks : list of str
        A prompt's own, else ``"answers"`` where it comes with an answer, and ``"text"`` where the
        model's own continuation is measured.

    Raises
    ------
    InputError
        If a prompt is too short, or there is none.
    """
    given = [texts] if isinstance(texts, str) else list(texts)
    prompts = [text for text in given if isinstance(text, Prompt)]
    if prompts and len(prompts) < len(given):
        raise InputError(
            "prompts and running text are mixed; refine on one of them, or write the text as "
            "prompts, one JSON object a line"
        )
    samples = choose_samples(
        given,
        tokenizer,
        context_tokens=scores.context_tokens,
        least_tokens=scores.protected_tokens + 1,
        samples=None if prompts else DEFAULT_PIECES,
        sampling_ratio=1.0,
    )
    if not prompts:
        return samples, [TEXT_TASK] * len(samples.samples)
    return samples, [
        prompt.task or (ANSWER_TASK if prompt.answer else TEXT_TASK) for prompt in prompts
    ]
