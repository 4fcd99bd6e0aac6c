"""Budget profiles whose entries each prompt hands out by weighted scores, tuned on the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.accounting.rounding import apportion
from kvalloc.errors import InputError
from kvalloc.formats.budget_checks import BY_SCORE
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.measure.loss_policies import read_named, read_scorer
from kvalloc.models.loading import require_run_packages, shape_of
from kvalloc.runtime.policies import changed_policy, policy_of
from kvalloc.scorers import Scorer
from kvalloc.tuning.cache_loss import cache_loss
from kvalloc.tuning.descent import held_out
from kvalloc.tuning.descent_record import descent_record, descent_states, provenance
from kvalloc.tuning.fixed_budgets import (
    Tuned,
    check_shares,
    prompts_to_tune_on,
    scoring_policies,
)
from kvalloc.tuning.score_mixing import (
    WeighedPrompt,
    Weighing,
    WeighingJob,
    WeighingStage,
    weigh_scores,
)

if TYPE_CHECKING:
    from kvalloc.formats.policy import Policy
    from kvalloc.measure.sampling import SampleSet
    from kvalloc.prompts.texts import Document, Prompt

__all__ = ["DEFAULT_COMBINE", "DEFAULT_OTHERS", "DEFAULT_SCORER", "tune_by_prompt"]


_DRAFT = "lookahead:tokens=16:row_reduce=max:group_reduce=max:votes=0"
DEFAULT_SCORER = f"{_DRAFT}:pool=1"
"""What a draft of the answer looks at."""
DEFAULT_OTHERS = (
    f"{_DRAFT}:pool=5",
    "lookahead:tokens=0:votes=32:row_reduce=max:group_reduce=max:pool=1",
    "snapkv:pool=5",
    *("tova", "keydiff", "streaming"),
)
"""The draft again, for passages; the prompt's last queries, for single entries and passages; its
very last one; how far a key is from the others; and how late an entry stands."""
DEFAULT_COMBINE = "attention_matching"
"""What is done with what is evicted."""


def tune_by_prompt(
    model: Any,
    tokenizer: Any,
    texts: Iterable[str | Document | Prompt],
    *,
    shares: Sequence[float],
    scorer: str | Scorer = DEFAULT_SCORER,
    policies: Sequence[str] = DEFAULT_OTHERS,
    context: int = 1024,
    samples: int | None = None,
    sinks: int = 4,
    seed: int = 0,
    combine: str | None = DEFAULT_COMBINE,
    weighing: Weighing | None = None,
    model_id: str | None = None,
    state_files: Sequence[Path] | None = None,
    resume: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Tuned]:
    """Decide what each head's scores count, where prompts hand out their entries by score.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model; the same afterwards.
    tokenizer : transformers.PreTrainedTokenizerBase
    texts : iterable of str, Document or Prompt
        As for `kvalloc.profile`; prompts of all the kinds that are to come.
    shares : sequence of float
        Of all entries at the reference context, sinks and window included, 0..1. Each is decided
        for itself; the prompts are read once.
    scorer : str or Scorer
        Where the descent begins. Its window is never evicted. Written as for ``--loss-policies``.
    policies : sequence of str
        What else each head mixes; scorers only. ``usual`` stands for those that are the default.
    context, samples, sinks, seed
        As for `kvalloc.profile`; all prompts by default. All of them are held in memory with
        their full caches and scores.
    combine : str, optional
        Policy that puts something of what is evicted into what is kept, written like a scorer:
        ``attention_matching``, with options. None, or ``none``, drops it. The descent does not
        see it; the losses that the profile tells are those of caches that do it.
    weighing : Weighing, optional
        How the descent goes.
    model_id : str, optional
        Instead of what the model's config says.
    state_files : sequence of Path, optional
        For each share, where its descent's state is kept; the caller deletes them.
    resume : bool
        Whether to go on with what they hold.
    progress : callable, optional
        Called with (steps done, steps in all); reading a prompt counts as one.

    Yields
    ------
    Tuned
        In the order of the shares, each as soon as it is decided.

    Raises
    ------
    InputError
        If a share leaves no room beside sinks and window, there are fewer than two prompts,
        text, prompts or scorers cannot be used, or a state file holds another descent, or any
        without `resume`.

    Notes
    -----
    The score of an entry in head h is ``sum_k w_hk s_k``; the best entries of all heads together
    stay. The descent is on ``log w`` (`kvalloc.tuning.score_mixing`), the loss each prompt's KL
    over
    that of the beginning, so that no kind of prompt drowns another. A fifth of the prompts is held
    out and chooses among the stages, the beginning among them.
    """
    require_run_packages()
    weighing = weighing or Weighing()
    shape = shape_of(model, model_id=model_id)
    first = scorer if isinstance(scorer, Scorer) else read_scorer(scorer)
    named = [each for one in policies for each in (DEFAULT_OTHERS if one == "usual" else (one,))]
    chosen = scoring_policies(first, named, sinks)
    built = [policy_of(policy).scorer for policy in chosen]
    own = _combining(chosen[0], combine)
    check_shares(shares, sinks + first.window, context)
    jobs = [
        WeighingJob(
            shape=shape,
            share=share,
            context=context,
            sinks=sinks,
            window=first.window,
            weighing=weighing,
        )
        for share in shares
    ]
    found = prompts_to_tune_on(texts, tokenizer, context, sinks + first.window, samples, seed)
    record = descent_record(model, shape, context, chosen, found, weighing, seed)
    states = descent_states(state_files, shares, record, resume=resume)
    n_prompts = len(found.token_ids)
    total, tell = n_prompts + weighing.steps * len(shares), progress or (lambda done, total: None)
    train: list[WeighedPrompt] = []
    asked: list[WeighedPrompt] = []
    held = held_out(n_prompts, weighing.held_out, seed)
    for index in range(n_prompts):
        one = WeighedPrompt.read(model, found, index, built, jobs[0])
        (asked if index in held else train).append(one)
        tell(index + 1, total)
    for number, job in enumerate(jobs):
        before = n_prompts + number * weighing.steps
        stage = weigh_scores(
            job,
            train,
            asked,
            seed,
            lambda step, before=before: tell(before + step, total),  # type: ignore[misc]
            states[number],
        )
        profile = _to_profile(job, (own, *chosen[1:]), stage, _mean_budgets(job, train, stage))
        losses = stage.held_out_losses
        if own is not chosen[0]:
            losses = _losses_of(model, profile, asked)
        yield Tuned(
            profile=replace(profile, **_told(job, chosen, found, stage, losses, seed)),
            held_out_losses=losses,
            uniform_losses=stage.uniform_losses,
            stages=stage.stages,
        )


def _mean_budgets(
    job: WeighingJob, prompts: Sequence[WeighedPrompt], stage: WeighingStage
) -> IntArray:
    """What heads kept of the prompts in the mean, at the reference context."""
    parts = []
    for one in prompts:
        room = one.probe.n_tokens - job.protected
        parts.append((one.budgets(job, stage.weights) - job.protected) / room)
    room = job.context - job.protected
    wanted = np.mean(parts, axis=0) * room
    total = job.total(job.context) - job.protected * wanted.size
    kept = apportion(wanted.ravel(), total, maximum=np.full(wanted.size, room))
    return kept.reshape(wanted.shape) + job.protected


def _to_profile(
    job: WeighingJob,
    policies: Sequence[Policy],
    stage: WeighingStage,
    kept: IntArray,
) -> BudgetProfile:
    """The decision alone, without what is told of it."""
    shape, full = job.shape, list(job.shape.full_layers)
    budgets = np.zeros((shape.n_layers, shape.n_kv_heads), dtype=np.int64)
    budgets[:] = shape.sliding_entries(job.context)
    budgets[full] = kept
    weights = np.zeros((*budgets.shape, len(policies)))
    # six digits say it all, and keep the file small
    weights[full] = np.vectorize(lambda one: float(f"{one:.6g}"))(stage.weights.cpu().numpy())
    return BudgetProfile(
        shape=shape,
        level="head",
        context_tokens=job.context,
        budgets=budgets,
        policy=policies[0],
        other_policies=tuple(policies[1:]),
        unit_weights=weights,
        by_prompt=True,
    )


def _told(
    job: WeighingJob,
    policies: Sequence[Policy],
    found: SampleSet,
    stage: WeighingStage,
    losses: FloatArray,
    seed: int,
) -> dict[str, Any]:
    """What the profile tells of how it was decided, and of what its caches lost."""
    reached, uniform = losses.mean(), stage.uniform_losses.mean()
    return provenance(
        job.share,
        job.weighing,
        policies,
        found,
        held_out_losses=losses,
        uniform_losses=stage.uniform_losses,
        seed=seed,
        detail=(
            "each prompt hands out its entries by weighted scores; loss of the whole reduced "
            f"cache on {losses.size} held-out prompts {reached:.4f} nats per token, "
            f"{uniform:.4f} with equal budgets and the first scorer"
        ),
    )


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
    own = replace(changed_policy(policy, name, options), label=policy.label)
    if own.name == policy.name or own.name not in BY_SCORE:
        raise InputError(
            f"combine is {combine!r}, expected attention_matching, with options, or none"
        )
    return replace(own, parameters=dict(policy_of(own).parameters()))


def _losses_of(model: Any, profile: BudgetProfile, prompts: Sequence[WeighedPrompt]) -> FloatArray:
    """What caches of the profile lose on prompts, nats per token."""
    return np.array(
        [
            cache_loss(
                model, profile.cache(model, allow_other_model=True), one.token_ids, one.probe
            )
            for one in prompts
        ]
    )
