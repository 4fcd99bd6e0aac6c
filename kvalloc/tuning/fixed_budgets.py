"""Budgets and policies of single heads, decided on the loss of the whole reduced cache.

Loss curves add up what each unit does alone. Harm is not additive at small budgets, so here all
units are reduced together (`kvalloc.tuning.descent`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvalloc.accounting import FloatArray
from kvalloc.errors import InputError, UnsupportedRequestError
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.policy import Policy
from kvalloc.measure.loss_policies import named_policies
from kvalloc.measure.sampling import SampleSet, choose_samples
from kvalloc.models.loading import require_run_packages, shape_of
from kvalloc.runtime.policies import policy_of
from kvalloc.runtime.policies.score import Score
from kvalloc.scorers import Scorer, get_scorer
from kvalloc.tuning.descent import Descent, DescentJob, ReadPrompt, Stage, descend, held_out
from kvalloc.tuning.descent_record import descent_record, descent_states, provenance
from kvalloc.units import parse_share

if TYPE_CHECKING:
    from kvalloc.prompts.texts import Document, Prompt


DEFAULT_POLICIES = (
    *("xkv:window=4:pool=1", "criticalkv:window=8", "tova", "keydiff", "streaming"),
    "expected_attention",
)
"""What a head chooses from, beside the scorer."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What a descent came to.

    Attributes
    ----------
    profile : BudgetProfile
    held_out_losses : ndarray of float64, (n_held_out,)
        Loss of the whole reduced cache on each held-out prompt, nats per token.
    uniform_losses : ndarray of float64, (n_held_out,)
        The same of equal budgets with the first policy.
    stages : tuple of (int, float)
        Mean held-out loss after so many steps.
    """

    profile: BudgetProfile
    held_out_losses: FloatArray
    uniform_losses: FloatArray
    stages: tuple[tuple[int, float], ...]


def tune(
    model: Any,
    tokenizer: Any,
    texts: Iterable[str | Document | Prompt],
    *,
    budget: str | float,
    by_prompt: bool = False,
    state_file: str | Path | None = None,
    resume: bool = False,
    **options: Any,
) -> BudgetProfile:
    """Decide budgets and policies of all heads together, for one size.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model; the same afterwards.
    tokenizer : transformers.PreTrainedTokenizerBase
    texts : iterable of str, Document or Prompt
        Prompts of all the kinds that are to come, such as those of
        `kvalloc.prompts.calibration.calibration_prompts`.
    budget : str or float
        Share of all entries, such as ``"20%"`` or 0.2.
    by_prompt : bool
        Whether each prompt hands out its entries among the heads by score; what is decided is how
        much each scorer's scores count in each head.
    state_file : str or Path, optional
        Where the descent's state is kept after each step, and deleted when it is done.
    resume : bool
        Whether to go on with what a killed call left in `state_file`. The numbers are those of an
        unbroken one.
    **options
        Of `tune_shares`, or with `by_prompt` of `kvalloc.tuning.per_prompt.tune_by_prompt`.

    Returns
    -------
    BudgetProfile
        ``predicted_loss`` is that of the held-out prompts.

    Raises
    ------
    InputError
        As `tune_shares`; if `state_file` holds another descent, or any without `resume`.
    UnsupportedRequestError
        If a policy does not rank entries by one score.

    Examples
    --------
    >>> from kvalloc.models.loading import load_model  # doctest: +SKIP
    >>> demo = load_model("demo")  # doctest: +SKIP
    >>> prompts = calibration_prompts(demo.tokenizer, 16, 1024)  # doctest: +SKIP
    >>> kvalloc.tune(demo.model, demo.tokenizer, prompts, budget="20%")  # doctest: +SKIP
    """
    if resume and state_file is None:
        raise InputError("there is nothing to resume from; name the state_file")
    files = None if state_file is None else [Path(state_file)]
    tune_all: Callable[..., Iterator[Tuned]] = tune_shares
    if by_prompt:
        from kvalloc.tuning.per_prompt import tune_by_prompt  # late: it takes much from here

        tune_all = tune_by_prompt
    (found,) = tune_all(
        model,
        tokenizer,
        texts,
        shares=[parse_share(budget)],
        state_files=files,
        resume=resume,
        **options,
    )
    for file in files or ():
        file.unlink(missing_ok=True)
    return found.profile


def tune_shares(
    model: Any,
    tokenizer: Any,
    texts: Iterable[str | Document | Prompt],
    *,
    shares: Sequence[float],
    scorer: str | Scorer = "xkv",
    policies: Sequence[str] = DEFAULT_POLICIES,
    context: int = 1024,
    samples: int | None = None,
    sinks: int = 4,
    seed: int = 0,
    descent: Descent | None = None,
    model_id: str | None = None,
    state_files: Sequence[Path] | None = None,
    resume: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Tuned]:
    """Decide budgets and policies of all heads together, on what the reduced cache really does.

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
        What ranks the entries where no other policy is better. Its window is never evicted.
    policies : sequence of str
        What else each head chooses from, named as for ``kvalloc profile --loss-policies``; any
        scorer, with its options. ``usual`` stands for those that are the default.
    context, samples, sinks, seed
        As for `kvalloc.profile`; all prompts by default. All of them are held in memory with
        their full caches.
    descent : Descent, optional
        How it goes.
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
        If a share leaves no room beside sinks and window, there are fewer than two prompts, or
        text, prompts or policies cannot be used.
    UnsupportedRequestError
        If a policy does not rank entries by one score.

    Notes
    -----
    Entry t of a head with n evictable entries, budget share s and policy p is kept to the part
    ``sigmoid((s n - rank_p(t) - 1/2) / (tau n))``, the head's mixture of policies is a softmax,
    and the shares are ``sigmoid(theta + lambda)`` with the one lambda that meets the budget. tau
    and the softmax's temperature fall until each head has one policy and a sharp budget. The loss
    is each prompt's KL over that of equal budgets on it, so that no kind of prompt drowns another.
    """
    require_run_packages()
    descent = descent or Descent()
    shape = shape_of(model, model_id=model_id)
    own_scorer = scorer if isinstance(scorer, Scorer) else get_scorer(scorer)
    usual = {"usual": DEFAULT_POLICIES}
    named = [each for one in policies for each in usual.get(one, (one,))]
    chosen = scoring_policies(own_scorer, named, sinks)
    protected = chosen[0].protected_tokens
    check_shares(shares, protected, context)
    found = prompts_to_tune_on(texts, tokenizer, context, protected, samples, seed)
    n_prompts = len(found.token_ids)
    record = descent_record(model, shape, context, chosen, found, descent, seed)
    states = descent_states(state_files, shares, record, resume=resume)
    total, tell = n_prompts + descent.steps * len(shares), progress or (lambda done, total: None)
    read = []
    for index in range(n_prompts):
        read.append(ReadPrompt.read(model, found, index, chosen, shape, descent))
        tell(index + 1, total)
    held = held_out(n_prompts, descent.held_out, seed)
    for number, share in enumerate(shares):
        before = n_prompts + number * descent.steps
        job = DescentJob(
            shape=shape, share=share, context=context, protected=protected, descent=descent
        )
        stage = descend(
            job,
            [one for place, one in enumerate(read) if place not in held],
            [one for place, one in enumerate(read) if place in held],
            len(chosen),
            seed,
            lambda step, before=before: tell(before + step, total),  # type: ignore[misc]
            states[number],
        )
        yield Tuned(
            profile=_to_profile(job, chosen, found, stage, seed),
            held_out_losses=stage.held_out_losses,
            uniform_losses=stage.uniform_losses,
            stages=stage.stages,
        )


def prompts_to_tune_on(
    texts: Iterable[str | Document | Prompt],
    tokenizer: Any,
    context: int,
    protected: int,
    samples: int | None,
    seed: int,
) -> SampleSet:
    """All prompts of a descent, those that are held out among them.

    Raises
    ------
    InputError
        If there are fewer than two, or one is too short or cannot be read.
    """
    found = choose_samples(
        texts,
        tokenizer,
        context_tokens=context,
        least_tokens=protected + 2,
        samples=samples,
        sampling_ratio=1.0,
        seed=seed,
    )
    if len(found.token_ids) < 2:
        raise InputError("a descent needs at least two prompts: one to learn from, one held out")
    return found


def check_shares(shares: Sequence[float], protected: int, context: int) -> None:
    """Refuse budgets that leave nothing to decide.

    Raises
    ------
    InputError
        If there is none, or one has no room beside sinks and window or keeps everything.
    """
    if not shares:
        raise InputError("there is no budget to decide for; ask for at least one share")
    for share in shares:
        if not protected / context < share < 1:
            raise InputError(
                f"{share:.1%} of {context:,} tokens is not more than the {protected} of sinks and "
                "window and less than all; ask for another budget"
            )


def scoring_policies(scorer: Scorer, others: Sequence[str], sinks: int) -> tuple[Policy, ...]:
    """The scorer's best entries, and the others, all with its window.

    Raises
    ------
    InputError
        If a policy is not known, or named twice.
    UnsupportedRequestError
        If one does not rank entries by one score.
    """
    own = Policy(
        scorer=scorer.name,
        scorer_parameters=dict(scorer.parameters()),
        sinks=sinks,
        window=scorer.window,
    )
    chosen = (own, *named_policies(others, scorer, sinks=sinks))
    for policy in chosen:
        if type(policy_of(policy)) is not Score:
            raise UnsupportedRequestError(
                f"the policy {policy.title!r} may keep at a small budget what it does not keep at "
                "a larger one, so its budget cannot be made smooth; name scorers, such as "
                f"{', '.join(DEFAULT_POLICIES)}"
            )
    return chosen


def _to_profile(
    job: DescentJob,
    policies: Sequence[Policy],
    found: SampleSet,
    tuned: Stage,
    seed: int,
) -> BudgetProfile:
    """Budgets at the reference context, and the policies that heads really have."""
    shape, full = job.shape, list(job.shape.full_layers)
    budgets = np.zeros((shape.n_layers, shape.n_kv_heads), dtype=np.int64)
    window = shape.sliding_window or job.context
    budgets[:] = min(window, job.context)
    budgets[full] = job.budgets(tuned.shares, job.context)
    used = [0, *(int(place) for place in np.unique(tuned.places) if place)]
    table = np.zeros_like(budgets)
    table[full] = np.searchsorted(used, tuned.places)
    several = len(used) > 1
    reached, uniform = tuned.held_out_losses.mean(), tuned.uniform_losses.mean()
    return BudgetProfile(
        shape=shape,
        level="head",
        context_tokens=job.context,
        budgets=budgets,
        policy=policies[0],
        other_policies=tuple(policies[place] for place in used[1:]),
        unit_policies=table if several else None,
        **provenance(
            job.share,
            job.descent,
            policies,
            found,
            held_out_losses=tuned.held_out_losses,
            uniform_losses=tuned.uniform_losses,
            seed=seed,
            detail=(
                f"loss of the whole reduced cache on {tuned.held_out_losses.size} prompts that "
                f"were held out of the descent and chose its best stage: {reached:.4f} nats per "
                f"token, {uniform:.4f} with equal budgets"
            ),
        ),
    )
