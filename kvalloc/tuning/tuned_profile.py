"""``kvalloc.tune``: from prompts and a size to a budget profile, by descent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np
import torch

from kvalloc.engine.contract import MEASURED_WITH, ModelFacts, engine_of
from kvalloc.errors import InputError, UnsupportedRequestError, option
from kvalloc.files import provenance
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.policy import BY_SCORE, Policy
from kvalloc.measure.checkpoint import kept_work
from kvalloc.measure.job import Steps
from kvalloc.measure.loss_plan import named_policies, own_policy, read_named, read_scorer
from kvalloc.measure.sampling import SampleSet, choose_samples
from kvalloc.models.loading import require_run_packages
from kvalloc.prompts.intervals import interval
from kvalloc.runtime.policies import changed_policy, policy_of
from kvalloc.runtime.policies.score import Score
from kvalloc.scorers import Scorer
from kvalloc.shape import ModelShape
from kvalloc.tuning.descent import (
    Course,
    Descent,
    DescentJob,
    Moves,
    Prompts,
    PromptWork,
    Question,
    descend,
    held_out,
)
from kvalloc.tuning.fixed_budgets import FixedBudgets
from kvalloc.tuning.score_mixing import MixedScores
from kvalloc.units import parse_share

if TYPE_CHECKING:
    from kvalloc.prompts.texts import Document, Prompt

DEFAULT_COMBINE = "attention_matching"
"""What caches that hand out entries by prompt do with what is evicted."""


class TuneOptions(TypedDict, total=False):
    """What decides the numbers of a descent, beside model, prompts and size.

    Attributes
    ----------
    scorer : str or Scorer
        What ranks the entries where nothing else is better, or, by prompt, where the descent
        begins. Written as for ``--loss-policies``. Its window is never evicted.
    policies : sequence of str
        What else each head chooses from or mixes, named as for ``--loss-policies``; any scorer,
        with its options. ``usual`` stands for those that are the default.
    combine : str or None
        By prompt only: the policy that puts something of what is evicted into what is kept,
        written like a scorer: ``attention_matching``, with options. None, or ``none``, drops it.
        The descent does not see it; the losses that the profile states are those of caches that
        do it.
    context, samples, sinks, seed : int
        As for `kvalloc.profile`; all prompts by default. All of them are held in memory with
        their full caches.
    descent : Descent
        How it goes; `FixedBudgets.settings`, or by prompt `MixedScores.settings`, by default.
    model_id : str
        Instead of what the model's config says.
    """

    scorer: str | Scorer
    policies: Sequence[str]
    combine: str | None
    context: int
    samples: int | None
    sinks: int
    seed: int
    descent: Descent
    model_id: str


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What a descent came to.

    Attributes
    ----------
    profile : BudgetProfile
    course : Course
        The descent. With a policy that combines its `held_out_losses` are those of real caches.
    """

    profile: BudgetProfile
    course: Course


def tune(
    model: Any,
    tokenizer: Any,
    texts: Iterable[str | Document | Prompt],
    *,
    budget: str | float,
    by_prompt: bool = False,
    output: str | Path | None = None,
    resume: bool = False,
    progress: Callable[[int, int], None] | None = None,
    **options: Unpack[TuneOptions],
) -> BudgetProfile:
    """Decide budgets and policies of all heads together, for one size.

    Parameters
    ----------
    model : transformers.PreTrainedModel or Engine
        A causal language model, the same afterwards; or workers, to which the prompts are spread,
        see `kvalloc.engine.ray.RayEngine`.
    tokenizer : transformers.PreTrainedTokenizerBase
    texts : iterable of str, Document or Prompt
        Prompts of all the kinds that are to come, such as those of
        `kvalloc.prompts.calibration.calibration_prompts`.
    budget : str or float
        Share of all entries, such as ``"20%"`` or 0.2.
    by_prompt : bool
        Whether each prompt hands out its entries among the heads by score; what is decided is how
        much each scorer's scores count in each head.
    output : str or Path, optional
        The budget profile to write. Each finished step is kept in ``OUTPUT.partial`` until then.
    resume : bool
        Whether to go on with what a killed call left there. The numbers are those of an unbroken
        one.
    progress : callable, optional
        Called with (steps done, steps in all); reading a prompt counts as one.
    **options
        See `TuneOptions`.

    Returns
    -------
    BudgetProfile
        ``predicted_loss`` is that of the held-out prompts.

    Raises
    ------
    InputError
        As `tune_each`.
    UnsupportedRequestError
        If a policy does not rank entries by one score.

    Examples
    --------
    >>> from kvalloc.models.loading import load_model  # doctest: +SKIP
    >>> demo = load_model("demo")  # doctest: +SKIP
    >>> prompts = calibration_prompts(demo.tokenizer, 16, 1024)  # doctest: +SKIP
    >>> kvalloc.tune(demo.model, demo.tokenizer, prompts, budget="20%")  # doctest: +SKIP
    """
    (found,) = tune_each(
        model,
        tokenizer,
        texts,
        shares=[parse_share(budget)],
        by_prompt=by_prompt,
        outputs=None if output is None else [output],
        resume=resume,
        progress=progress,
        **options,
    )
    return found.profile


def tune_each(
    model: Any,
    tokenizer: Any,
    texts: Iterable[str | Document | Prompt],
    *,
    shares: Sequence[float],
    by_prompt: bool = False,
    outputs: Sequence[str | Path] | None = None,
    resume: bool = False,
    progress: Callable[[int, int], None] | None = None,
    **options: Unpack[TuneOptions],
) -> Iterator[Tuned]:
    """Decide one budget profile for each of several sizes; the prompts are read once.

    Parameters
    ----------
    model, tokenizer, texts, by_prompt, resume, progress, **options
        As for `tune`.
    shares : sequence of float
        Of all entries at the reference context, sinks and window included, 0..1.
    outputs : sequence of str or Path, optional
        For each share the budget profile to write. What was finished stays beside each until all
        are decided.

    Yields
    ------
    Tuned
        In the order of the shares, each as soon as it is decided.

    Raises
    ------
    InputError
        If a share leaves no room beside sinks and window, there are fewer than two prompts, text,
        prompts or policies cannot be used, or an output cannot be written or has unfinished work
        beside it that is not this job's.
    UnsupportedRequestError
        If a policy does not rank entries by one score.
    """
    if unknown := sorted(options.keys() - TuneOptions.__annotations__.keys()):
        raise TypeError(f"tune() got an unexpected keyword argument {unknown[0]!r}")
    require_run_packages()
    if not shares:
        raise InputError("there is no budget to decide for; ask for at least one share")
    engine = engine_of(model)
    facts = engine.facts(options.get("model_id"))
    jobs = [_job(facts.shape, share, options, by_prompt=by_prompt) for share in shares]
    found = _prompts(texts, tokenizer, jobs[0], options.get("samples"))
    records = [partial(_record, facts, job, found) for job in jobs]
    files: Sequence[str | Path | None] = outputs or [None] * len(jobs)
    with ExitStack() as stack:
        kept = [
            stack.enter_context(kept_work(file, record, resume=resume))
            for file, record in zip(files, records, strict=True)
        ]
        n_prompts, descent = len(found.samples), jobs[0].descent
        steps = Steps(n_prompts + descent.steps * len(jobs), progress)
        held = held_out(n_prompts, descent.held_out, jobs[0].seed)
        rest = [index for index in range(n_prompts) if index not in held]
        order = np.random.default_rng(jobs[0].seed).permutation(len(rest))
        prompts = Prompts(
            engine=engine,
            work=PromptWork(jobs, found.samples),
            train=tuple(rest[place] for place in order.tolist()),
            held_out=tuple(sorted(held)),
        )
        every = (*prompts.train, *prompts.held_out)
        prompts.ask([Question(what="nothing", prompt=index) for index in every], steps.advance)
        for place, (job, checkpoint) in enumerate(zip(jobs, kept, strict=True)):
            course = descend(job, place, prompts, steps=steps, kept=checkpoint)
            tuned = _tuned(job, place, course, prompts, found)
            if checkpoint is not None:
                tuned.profile.save(checkpoint.output)
            yield tuned
        for checkpoint in filter(None, kept):
            checkpoint.finish()


def _job(shape: ModelShape, share: float, options: TuneOptions, *, by_prompt: bool) -> DescentJob:
    """What is asked, for one share.

    Raises
    ------
    InputError
        If a share or an option cannot be used.
    UnsupportedRequestError
        If a policy does not rank entries by one score.
    """
    moves: type[Moves] = MixedScores if by_prompt else FixedBudgets
    if options.get("combine") is not None and not by_prompt:
        raise InputError(
            f"{option('combine')} goes with {option('by_prompt', True)}: other profiles have one "
            "policy a head"
        )
    policies = _policies(moves, options)
    combine = options.get("combine", DEFAULT_COMBINE if by_prompt else None)
    return DescentJob(
        shape=shape,
        share=share,
        context=options.get("context", 1024),
        policies=policies,
        own=_combining(policies[0], combine),
        descent=options.get("descent") or moves.settings,
        moves=moves,
        seed=options.get("seed", 0),
    )


def _policies(moves: type[Moves], options: TuneOptions) -> tuple[Policy, ...]:
    """The scorer's best entries, and the others, all with its window.

    Raises
    ------
    InputError
        If a policy is not known, or named twice.
    UnsupportedRequestError
        If one does not rank entries by one score.
    """
    scorer, sinks = options.get("scorer", moves.own_scorer), options.get("sinks", 4)
    first = scorer if isinstance(scorer, Scorer) else read_scorer(scorer)
    usual = moves.other_scorers
    named = named_policies(options.get("policies", usual), first, sinks=sinks, usual=usual)
    chosen = (own_policy(first, sinks), *named)
    for policy in chosen:
        if type(policy_of(policy)) is not Score:
            raise UnsupportedRequestError(
                f"the policy {policy.title!r} may keep at a small budget what it does not keep at "
                "a larger one, so its budget cannot be made smooth; name scorers, such as "
                f"{', '.join(usual)}"
            )
    return chosen


def _combining(policy: Policy, combine: str | None) -> Policy:
    """The first policy, with what it is to do with what is evicted.

    Raises
    ------
    InputError
        If that is not a policy that keeps the best by score and combines.
    """
    if combine is None or combine.strip() == "none":
        return policy
    name, options = read_named(combine)
    own = changed_policy(policy, name, options).replace(label=policy.label)
    if own.name == policy.name or own.name not in BY_SCORE:
        raise InputError(
            f"combine is {combine!r}, expected attention_matching, with options, or none"
        )
    return own.replace(parameters=dict(policy_of(own).parameters()))


def _prompts(
    texts: Iterable[str | Document | Prompt],
    tokenizer: Any,
    job: DescentJob,
    samples: int | None,
) -> SampleSet:
    """All prompts of a descent, those that are held out among them."""
    found = choose_samples(
        texts,
        tokenizer,
        context_tokens=job.context,
        least_tokens=job.protected + 2,
        samples=samples,
        sampling_ratio=1.0,
        seed=job.seed,
    )
    if len(found.samples) < 2:
        raise InputError("a descent needs at least two prompts: one to learn from, one held out")
    return found


def _record(facts: ModelFacts, job: DescentJob, found: SampleSet) -> dict[str, Any]:
    """Everything that decides the numbers of a descent."""
    return {
        **facts.record(),
        "budget": job.share,
        "context_tokens": job.context,
        "policies": [policy.record() for policy in job.policies],
        "descent": asdict(job.descent),
        "seed": job.seed,
        "text_digest": found.digest(),
        "answers": found.answers_digest(),
    }


def _tuned(
    job: DescentJob, place: int, course: Course, prompts: Prompts, found: SampleSet
) -> Tuned:
    """The decision as a profile, with what its caches lose on the held-out prompts."""
    shape, moves = job.shape, job.moves(job, torch.device("cpu"))
    asked = Question(what="part", prompt=0, job=place, decision=course.decision)
    parts = prompts.ask([replace(asked, prompt=index) for index in sorted(prompts.train)])
    budgets = np.full((shape.n_layers, shape.n_kv_heads), shape.sliding_entries(job.context))
    budgets[list(shape.full_layers)] = moves.budgets(course.decision, parts)
    profile = BudgetProfile(
        shape=shape,
        level="head",
        context_tokens=job.context,
        budgets=budgets,
        policy=job.own,
        **moves.profile_fields(course.decision),
    )
    if job.own != job.policies[0]:
        asked = Question(what="cache_loss", prompt=0, job=place, profile=profile)
        losses = prompts.ask([replace(asked, prompt=index) for index in prompts.held_out])
        course = replace(course, held_out_losses=np.array(losses))
    return Tuned(profile=profile.replace(**_provenance(job, moves, course, found)), course=course)


def _provenance(job: DescentJob, moves: Moves, course: Course, found: SampleSet) -> dict[str, Any]:
    """What the profile tells of how it was decided, and of what its caches lost."""
    descent, losses = job.descent, course.held_out_losses
    reached = float(losses.mean())
    settings = ("steps", "batch", "continuation_tokens", "learning_rate")
    return {
        "solver": "descent",
        "solver_options": {
            **{name: getattr(descent, name) for name in settings},
            "seed": job.seed,
            "policies": [policy.title for policy in job.policies],
        },
        "decided_by": "descent",
        "detail": moves.detail(losses, course.uniform_losses),
        "objective": -reached,
        "predicted_loss": reached,
        "termination": "heuristic",
        "requested": {
            "target": "budget",
            "value": job.share,
            "budget": job.share,
            "objective": "loss",
            "text": found.description,
            "text_digest": found.digest(),
            "predicted_on_prompts": int(losses.size),
            "predicted_interval": interval([losses], seed=job.seed),
            "predicted_with_equal_budgets": float(course.uniform_losses.mean()),
        },
        **provenance(*MEASURED_WITH),
    }
