"""``kvalloc.solve_measured``: decide, measure, and decide again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from kvalloc.allocation.decision import solve
from kvalloc.allocation.request import Request, RequestOptions
from kvalloc.engine.contract import ModelFacts
from kvalloc.errors import InfeasibleError, InputError, option
from kvalloc.formats.budget_profile import BudgetProfile, MeasuredLoss, MeasuredTry
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.formats.shipped_profiles import load_scores
from kvalloc.measure.cache_loss import CacheLosses
from kvalloc.measure.checkpoint import kept_work
from kvalloc.measure.job import Steps
from kvalloc.measure.sampling import SampleSet, choose_samples
from kvalloc.prompts.calibration import calibration_prompts
from kvalloc.prompts.intervals import interval
from kvalloc.prompts.texts import Document, Prompt
from kvalloc.units import keywords_of

PROMPTS, SEED = 16, 1_000
"""Number of default prompts, four of each kind, and a seed that no measurement of loss curves has
by default."""
TRIES, LEAST_STEP, MOST_STEP = 7, 0.1, 0.7
"""Largest number of decisions, and the smallest and largest factor on a missed target."""
NEAR = 0.5
"""Share of the target above which a loss is near enough."""


@keywords_of(RequestOptions)
def solve_measured(
    scores: ScoreProfile | str | Path,
    model: Any,
    tokenizer: Any,
    prompts: Iterable[str | Document | Prompt] | None = None,
    *,
    output: str | Path | None = None,
    resume: bool = False,
    progress: Callable[[int, int], None] | None = None,
    model_id: str | None = None,
    how: Mapping[str, Any] | None = None,
    **keywords: Unpack[RequestOptions],
) -> BudgetProfile:
    """Decide budgets, and measure the whole reduced cache's loss on other prompts.

    Single units' losses do not add up at small budgets. So smaller losses are solved for until the
    measured one meets the target. The prompts choose among tries; `kvalloc eval` judges on others.

    Parameters
    ----------
    scores : ScoreProfile, str or Path
    model : transformers.PreTrainedModel
        The measured model.
    tokenizer : transformers.PreTrainedTokenizerBase
    prompts : iterable of str, Document or Prompt, optional
        All prompts, and 16 pieces of running text; by default 16 other prompts of ``kvalloc profile
        --loss``'s kinds.
    output : str or Path, optional
        Budget profile to write; ``OUTPUT.partial`` has finished measurements meanwhile.
    resume, model_id : optional
        As for `kvalloc.profile`.
    progress : callable, optional
        Called with (prompts measured, prompts to measure so far).
    how : mapping, optional
        Of `kvalloc.solve`: solver, time_limit, average, notify; and a parsed request.
    **keywords
        See `kvalloc.allocation.request.RequestOptions`.

    Returns
    -------
    BudgetProfile
        With `measured_loss`; `requested` has the last solved target.

    Raises
    ------
    InputError
        If prompts cannot be used, or were used for the curves.
    ModelMismatchError
        If the scores are another model's.
    InfeasibleError
        If no try met the target; states the smallest loss.
    SolverError
        As `kvalloc.solve`.

    Examples
    --------
    >>> solve_measured("s.safetensors", model, tokenizer, target_loss=0.02)  # doctest: +SKIP
    """
    scores, facts = load_scores(scores), ModelFacts.of(model, model_id)
    how = dict(how or {})
    request = how.pop("request", None) or Request.parse(**keywords)
    scores.shape.require_same_model(facts.shape)
    samples = _samples(prompts, tokenizer, scores)
    job = {**facts.record(), "text_digest": samples.digest(), "scores": scores.digest}
    with kept_work(output, lambda: job, resume=resume) as kept:
        measured, steps = CacheLosses(model, samples.samples, kept=kept), Steps(0, progress)

        def measure(decided: BudgetProfile) -> dict[str, Any]:
            losses, steps.total = dict[int, float](), steps.total + len(samples.samples)
            for index in range(len(samples.samples)):
                losses[index] = measured.loss(index, decided)
                steps.advance()
            read = {"text": samples.description, "text_digest": samples.digest()}
            return loss_summary(samples, losses) | read

        decided = _meet(request, lambda target: solve(scores, request=target, **how), measure)
        if kept is not None:
            kept.finish(decided)
    return decided


def _meet(
    request: Request,
    decide: Callable[[Request], BudgetProfile],
    measure: Callable[[BudgetProfile], dict[str, Any]],
) -> BudgetProfile:
    """Return the smallest decision within the target loss; the first one without such a target."""
    target, tries, missed = request.target.max_loss, list[MeasuredTry](), 0.0
    best: tuple[BudgetProfile, dict[str, Any]] | None = None
    for _ in range(TRIES):
        try:
            decided = decide(request)
        except InfeasibleError:
            if not tries:
                raise
            break
        summary, aim = measure(decided), request.target.max_loss
        one = MeasuredTry(
            target=aim,
            predicted=decided.predicted_loss,
            loss=summary["loss"],
            retained_bytes=decided.retained_bytes,
        )
        tries.append(one)
        met = target is None or aim is None or summary["loss"] <= target
        best = (decided, summary) if met else best
        if target is None or not aim or (met and (not missed or summary["loss"] > NEAR * target)):
            break
        if met:
            reached = aim
        else:
            missed = aim
        step = min(max(target / max(summary["loss"], 1e-12), LEAST_STEP), MOST_STEP)
        aim = aim * step if best is None else math.sqrt(reached * missed)
        request = replace(request, target=replace(request.target, value=aim))
    if best is not None:
        decided, summary = best
        stated = MeasuredLoss(target=target, tries=tuple(tries), **summary)
        return decided.replace(measured_loss=stated)
    min_loss = min(one.loss for one in tries)
    raise InfeasibleError(
        f"a measured loss of {target:g} nats per token was not reached in {len(tries)} tries; the "
        f"best lost {min_loss:.15g}: ask for that, or allow more tokens",
        nearest=min_loss,
    )


def _samples(
    prompts: Iterable[str | Document | Prompt] | None, tokenizer: Any, scores: ScoreProfile
) -> SampleSet:
    way_out = f"give others with {option('measure_prompts', keyword='prompts')}"
    if prompts is None:
        try:
            prompts = calibration_prompts(tokenizer, PROMPTS, scores.context_tokens, seed=SEED)
        except InputError as error:
            raise InputError(f"{error}; {way_out}") from error
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    samples = choose_samples(
        texts,
        tokenizer,
        context_tokens=scores.context_tokens,
        least_tokens=scores.protected_tokens + 1,
        samples=None if all(isinstance(one, Prompt) for one in texts) else PROMPTS,
        sampling_ratio=1.0,
    )
    if samples.digest() == scores.text_digest:
        raise InputError(f"the prompts are those of the score profile's curves; {way_out}")
    return samples


def loss_summary(samples: SampleSet, losses: Mapping[int, float]) -> dict[str, Any]:
    """Return the mean over tasks of means over prompts, from losses by sample number."""
    by_task: dict[str, list[float]] = {}
    for index, loss in losses.items():
        by_task.setdefault(samples.samples[index].task, []).append(loss)
    tasks = {task: np.array(by_task[task]) for task in sorted(by_task)}
    means = {task: float(values.mean()) for task, values in tasks.items()}
    return {
        "loss": sum(means.values()) / len(means),
        "interval": interval([*tasks.values()]),
        "by_task": means,
        "prompts": len(losses),
    }
