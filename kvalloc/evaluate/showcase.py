"""The demo's experiment: every solver at one target, then all of them at the same bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvalloc.allocation.decision import Attempt, compare, solve
from kvalloc.errors import KVAllocError
from kvalloc.evaluate.methods import CacheMethod, full_cache
from kvalloc.evaluate.scoring import Outcome, known, measure
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.prompts.needle import NeedleCase

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvalloc.models.loading import LoadedModel

ORDER = ("uniform", "greedy", "ilp", "pyramid", "adaptive_head", "max_min", "proportional")
"""What is shown first, and asked first where time is short; then all others by name."""

TIME_LIMIT_SECONDS = 30.0
"""Longest time for one solver."""

NO_TIME = "the time limit was near"

LOSS_SCORER = "tova"
"""All heads of a layer then keep much the same tokens, so that no needle is lost between them."""

LOSS = "least loss"
UNIFORM = "uniform, tova"
"""The same ranking with the same budget everywhere: separates the budgets' share in the result."""

Progress = Callable[[int, int], None]
Rule = Callable[[float], BudgetProfile]
"""Gives the budgets at a share of all entries, 0..1."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The answers that one budget profile led to.

    Attributes
    ----------
    solver : str
        Who decided.
    share : float
        Share of all entries that was granted, 0..1.
    profile : BudgetProfile
        The budgets.
    outcomes : tuple of Outcome
        One a question, in the order of the questions.
    same_as : str or None
        Another solver whose budgets are the same to the entry: its answers, measured once.
    """

    solver: str
    share: float
    profile: BudgetProfile
    outcomes: tuple[Outcome, ...]
    same_as: str | None = None

    @property
    def n_found(self) -> int:
        """Needles found."""
        return sum(bool(outcome.found) for outcome in self.outcomes)

    @property
    def all_found(self) -> bool:
        """Whether every needle was found."""
        return self.n_found == len(self.outcomes)

    @property
    def kl(self) -> float | None:
        """Mean KL to the full cache over the questions, nats per token; None if unknown."""
        values = known(outcome.kl for outcome in self.outcomes)
        return float(np.mean(values)) if values else None


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Which needles each solver finds at which share of the entries.

    Attributes
    ----------
    shares : tuple of float
        The rungs, rising, 0..1.
    asked : dict of (str, float) to Asked
        What was measured, by solver and share.
    skipped : list of (str, float)
        What there was no time for.
    """

    shares: tuple[float, ...]
    asked: dict[tuple[str, float], Asked] = field(default_factory=dict)
    skipped: list[tuple[str, float]] = field(default_factory=list)

    def first_share(self, solver: str) -> float | None:
        """The smallest share asked at which all needles were found, or None."""
        found = (at for (name, at), one in self.asked.items() if name == solver and one.all_found)
        return min(found, default=None)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that was asked.

    Attributes
    ----------
    cases : tuple of NeedleCase
        The questions.
    full : tuple of Outcome
        The full cache's answers.
    capacity_bytes : int
        What every solver was granted.
    decisions : tuple of Attempt
        What every solver made of that.
    asked : tuple of Asked
        The answers of those that can be applied.
    by_loss : tuple of Asked
        At the same bytes: budgets of least loss, and equal ones over the same ranking.
    ladder : Ladder
        The answers at other shares of the entries.
    """

    cases: tuple[NeedleCase, ...]
    full: tuple[Outcome, ...]
    capacity_bytes: int
    decisions: tuple[Attempt, ...]
    asked: tuple[Asked, ...]
    by_loss: tuple[Asked, ...]
    ladder: Ladder

    def record(self, decisions: Sequence[Attempt]) -> dict[str, Any]:
        """Everything as one document of plain values; unknown is None.

        Parameters
        ----------
        decisions : sequence of Attempt
            At the target retention.
        """
        skipped = [{"solver": name, "share": share} for name, share in self.ladder.skipped]
        return {
            "decisions": [_decision(one) for one in decisions],
            "capacity_bytes": self.capacity_bytes,
            "at_capacity": [_decision(one) for one in self.decisions],
            "full_cache": self._answers(self.full),
            "asked": [self._row(asked) for asked in self.asked],
            "by_loss": [self._row(asked) for asked in self.by_loss],
            "ladder": [self._row(asked) for asked in self.ladder.asked.values()],
            "ladder_skipped": skipped,
        }

    def _row(self, asked: Asked) -> dict[str, Any]:
        return {
            "solver": asked.solver,
            "share": asked.share,
            "retention": asked.profile.retention,
            "same_as": asked.same_as,
            "found": asked.n_found,
            "kl": asked.kl,
            "rows": self._answers(asked.outcomes),
        }

    def _answers(self, outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
        measured = "kl top1_agreement retained_bytes full_bytes prefill_seconds decode_seconds"
        return [
            {
                **{name: getattr(case, name) for name in ("source", "key", "number", "depth")},
                "prompt_tokens": case.n_tokens,
                "answer": outcome.answers[0],
                "found": bool(outcome.found),
                **{name: getattr(outcome, name) for name in measured.split()},
            }
            for case, outcome in zip(self.cases, outcomes, strict=True)
        ]


def _decision(attempt: Attempt) -> dict[str, Any]:
    decided = (
        "level retention retained_tokens retained_bytes full_bytes objective bound gap termination"
    )
    return {
        "solver": attempt.solver,
        "reason": attempt.reason or None,
        "seconds": attempt.seconds,
        **{name: getattr(attempt.profile, name, None) for name in decided.split()},
    }


class Questions:
    """Asks the same questions for any number of budget profiles, each different one once.

    Parameters
    ----------
    model : PreTrainedModel
    tokenizer : PreTrainedTokenizerBase
    cases : sequence of NeedleCase
        The full cache is asked at once.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        cases: Sequence[NeedleCase],
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self.cases = tuple(cases)
        start, full = time.perf_counter(), full_cache(model)
        self._full = [measure(model, tokenizer, full, case) for case in cases]
        self.full = tuple(one.outcome for one in self._full)
        self.last_seconds = time.perf_counter() - start
        self._known: list[Asked] = []

    def in_time(self, profile: BudgetProfile, deadline: float) -> bool:
        """Whether these budgets are known already or can be asked before the deadline.

        Parameters
        ----------
        profile : BudgetProfile
        deadline : float
            Reading of ``time.monotonic()``.
        """
        soon_enough = time.monotonic() + self.last_seconds <= deadline
        return soon_enough or self._twin(profile) is not None

    def ask(self, solver: str, share: float, profile: BudgetProfile) -> Asked:
        """Answer all questions with a profile's reduced cache.

        Parameters
        ----------
        solver : str
            Who decided.
        share : float
            Share of the entries that was granted.
        profile : BudgetProfile
        """
        twin = self._twin(profile)
        if twin is not None:
            same_as = None if twin.solver == solver else twin.same_as or twin.solver
            return replace(twin, solver=solver, share=share, profile=profile, same_as=same_as)
        start = time.perf_counter()
        from kvalloc.runtime import make_cache

        method = CacheMethod(make_cache=lambda: make_cache(self._model, profile))
        outcomes = tuple(
            measure(self._model, self._tokenizer, method, case, full).outcome
            for case, full in zip(self.cases, self._full, strict=True)
        )
        self.last_seconds = time.perf_counter() - start
        asked = Asked(solver=solver, share=share, profile=profile, outcomes=outcomes)
        self._known.append(asked)
        return asked

    def _twin(self, profile: BudgetProfile) -> Asked | None:
        for asked in self._known:
            other = asked.profile
            if (
                other.policy == profile.policy
                and other.length_rule == profile.length_rule
                and other.context_tokens == profile.context_tokens
                and np.array_equal(other.budgets, profile.budgets)
            ):
                return asked
        return None


def decide(scores: ScoreProfile, **target: Any) -> list[Attempt]:
    """Let every registered solver decide, at layer level where it can, else at head level.

    Parameters
    ----------
    scores : ScoreProfile
        What was measured.
    **target
        One target of `kvalloc.solve`, such as ``target_retention=0.9``.

    Returns
    -------
    list of Attempt
        One a solver, in `ORDER`. The reason of one that can do neither is that at layer level.

    Raises
    ------
    SolverError
        If no solver is registered, or none can decide.
    """
    target["time_limit"] = TIME_LIMIT_SECONDS
    found = {one.solver: one for one in compare(scores, **target)}
    refused = [name for name, one in found.items() if one.profile is None]
    with suppress(KVAllocError):  # there is none, or heads do not help
        heads = compare(scores, solvers=refused, level="head", **target)
        found |= {one.solver: one for one in heads if one.profile is not None}
    ranks = {name: rank for rank, name in enumerate(ORDER)}
    return sorted(found.values(), key=lambda one: (ranks.get(one.solver, len(ORDER)), one.solver))


def ask_each(
    decisions: Sequence[Attempt],
    share: float,
    questions: Questions,
    *,
    deadline: float,
    progress: Progress = lambda done, total: None,
) -> tuple[list[Asked], dict[str, str]]:
    """Ask the questions with the budgets of every solver that decided any.

    Parameters
    ----------
    decisions : sequence of Attempt
        All for the same target. The first two that can be applied are always asked.
    share : float
        Share of the entries that was granted.
    questions : Questions
        What is asked.
    deadline : float
        Reading of ``time.monotonic()`` after which nothing is begun that may end later.
    progress : callable, optional
        Called with (solvers done, solvers in all).

    Returns
    -------
    tuple of list of Asked and dict of str
        The answers, and for the solvers without answers the reason.
    """
    asked: list[Asked] = []
    missing: dict[str, str] = {}
    for done, decision in enumerate(decisions):
        progress(done, len(decisions))
        if decision.profile is None:
            missing[decision.solver] = decision.reason
        elif len(asked) < 2 or questions.in_time(decision.profile, deadline):
            asked.append(questions.ask(decision.solver, share, decision.profile))
        else:
            missing[decision.solver] = NO_TIME
    return asked, missing


def rules_of(scores: ScoreProfile, levels: Mapping[str, Any]) -> dict[str, Rule]:
    """What solvers decide at any share.

    Parameters
    ----------
    scores : ScoreProfile
        What was measured.
    levels : mapping of str to str
        At which level each of them decides.
    """

    def rule(name: str) -> Rule:
        return lambda share: solve(scores, solver=name, budget=share, level=levels[name])

    return {name: rule(name) for name in levels}


class _TooSlow(Exception):
    """A measurement that would end after its deadline."""


def profile_losses(
    loaded: LoadedModel,
    n_prompts: int,
    context_tokens: int,
    *,
    deadline: float,
    progress: Progress = lambda done, total: None,
    **plan: Any,
) -> ScoreProfile | None:
    """Measure what reducing each layer alone does, on prompts that no question shares a word with.

    Once the pace shows that the deadline would be missed, half as many prompts are tried.

    Parameters
    ----------
    loaded : LoadedModel
    n_prompts : int
        Half of them needles, half running text.
    context_tokens : int
        Reference context; no prompt is longer.
    deadline : float
        Reading of ``time.monotonic()`` before which it has to end.
    progress : callable, optional
        As in `kvalloc.profile`.
    **plan
        Of the `kvalloc.measure.loss_plan.LossPlan`, where it is not the default one.

    Returns
    -------
    ScoreProfile or None
        With loss curves of layers; None where there is no time for one prompt of each kind.
    """
    while n_prompts >= 2:
        watched = _within(deadline, progress)
        try:
            return _profile_losses(loaded, n_prompts, context_tokens, watched, plan)
        except _TooSlow:
            n_prompts //= 2
    return None


def _within(deadline: float, progress: Progress) -> Progress:
    """A progress report that ends what would go on beyond the deadline at its pace so far."""
    first: list[tuple[int, float]] = []

    def report(done: int, total: int) -> None:
        now = time.monotonic()
        first.append((done, now))
        steps, seconds = done - first[0][0], now - first[0][1]
        left = seconds * (total - done) / steps if 20 * steps >= total else 0.0
        if now + left > deadline:
            raise _TooSlow
        progress(done, total)

    return report


def _profile_losses(
    loaded: LoadedModel,
    n_prompts: int,
    context_tokens: int,
    progress: Progress,
    plan: Mapping[str, Any],
) -> ScoreProfile:
    from kvalloc.measure import profile
    from kvalloc.measure.loss_plan import LossPlan
    from kvalloc.prompts.calibration import calibration_prompts

    kinds = ("needle", "kl")
    prompts = calibration_prompts(loaded.tokenizer, n_prompts, context_tokens, kinds=kinds)
    return profile(
        loaded.model,
        loaded.tokenizer,
        prompts,
        samples=len(prompts),
        context=context_tokens,
        scorer=LOSS_SCORER,
        loss=LossPlan(level="layer", **plan),
        progress=progress,
        model_id=loaded.model_id,
    )


def loss_rules(losses: ScoreProfile, context_tokens: int) -> dict[str, Rule]:
    """Budgets of least loss, and equal budgets over the same ranking.

    Parameters
    ----------
    losses : ScoreProfile
        With loss curves.
    context_tokens : int
        Prompt length that the budgets are for.
    """
    return {
        LOSS: lambda share: solve(losses, budget=share, context=context_tokens, objective="loss"),
        UNIFORM: lambda share: solve(
            losses, budget=share, context=context_tokens, objective="mean", solver="uniform"
        ),
    }


def climb(
    rules: Mapping[str, Rule],
    questions: Questions,
    *,
    shares: Sequence[float],
    deadline: float,
    progress: Progress = lambda done, total: None,
) -> Ladder:
    """Look at which share of the entries each rule's cache finds the needles.

    Each rule's rungs are bisected first, all rules side by side, so that little time still
    brackets where all needles are found. With the time left the other rungs are asked too: that
    more entries never lose a needle is not taken for granted.

    Parameters
    ----------
    rules : mapping of str to callable
        Who decides, by the name to show; those asked first where time is short stand first.
    questions : Questions
        What is asked.
    shares : sequence of float
        The rungs, rising, 0..1.
    deadline : float
        Reading of ``time.monotonic()`` after which nothing is begun that may end later.
    progress : callable, optional
        Called with (seconds gone by, seconds there are): how many cells will be asked is not
        known before.
    """
    ladder, begun = Ladder(shares=tuple(shares)), time.monotonic()
    granted_seconds = max(1, round(deadline - begun))

    def finds_all(name: str, share: float) -> bool | None:
        """Ask one cell: whether all needles were found, None where there is no time."""
        progress(min(granted_seconds, round(time.monotonic() - begun)), granted_seconds)
        profile = rules[name](share)
        if not questions.in_time(profile, deadline):
            ladder.skipped.append((name, share))
            return None
        cell = ladder.asked[name, share] = questions.ask(name, share, profile)
        return cell.all_found

    ranges = dict.fromkeys(rules, (0, len(shares)))
    while any(low < high for low, high in ranges.values()):
        for name, (low, high) in ranges.items():
            if low < high:
                middle = (low + high) // 2
                found = finds_all(name, shares[middle])
                ranges[name] = (
                    (low, low) if found is None else (low, middle) if found else (middle + 1, high)
                )
    for share in shares:
        for name in rules:
            if (name, share) not in ladder.asked and (name, share) not in ladder.skipped:
                finds_all(name, share)
    progress(granted_seconds, granted_seconds)
    return ladder
