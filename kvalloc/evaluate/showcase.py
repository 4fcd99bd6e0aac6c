"""The demo's experiment: every solver at one target, then all of them at the same bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvalloc.allocation.decision import solve
from kvalloc.errors import KVAllocError, SolverError
from kvalloc.evaluate.caches import CacheRow, Reference, evaluate_cache
from kvalloc.formats.budget_profile import BudgetProfile, Level
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.problem.registry import solver_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SHARES = (0.125, 0.2, 0.3, 0.4, 0.6, 0.8)
"""Shares of all entries at which the needles are looked for."""

ORDER = ("uniform", "greedy", "ilp", "pyramid", "adaptive_head", "max_min", "proportional")
"""What is shown first, and asked first where time is short; then all others by name."""

NO_TIME = "the time limit was near"

Target = dict[str, float | int]
Rule = Callable[[float], BudgetProfile]
"""Gives the budgets at a share of all entries, 0..1."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What one solver made of one target.

    Attributes
    ----------
    solver : str
        Registered name.
    profile : BudgetProfile or None
        None where the solver refused or failed.
    reason : str
        Why there is no profile; empty otherwise.
    seconds : float
        Wall time of `kvalloc.solve`, the solver's own imports included.
    """

    solver: str
    profile: BudgetProfile | None
    reason: str
    seconds: float

    @property
    def enforceable(self) -> bool:
        """Whether the runtime can apply it."""
        return self.profile is not None


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
    rows : tuple of CacheRow
        One a question, in the order of the questions.
    same_as : str or None
        Another solver whose budgets are the same to the entry: its rows, measured once.
    """

    solver: str
    share: float
    profile: BudgetProfile
    rows: tuple[CacheRow, ...]
    same_as: str | None

    @property
    def n_found(self) -> int:
        """Needles found."""
        return sum(row.found for row in self.rows)

    @property
    def kl(self) -> float | None:
        """Mean KL to the full cache over the questions, nats per token; None if unknown."""
        values = [row.kl for row in self.rows if row.kl is not None]
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
    skipped : tuple of (str, float)
        What there was no time for.
    """

    shares: tuple[float, ...]
    asked: Mapping[tuple[str, float], Asked]
    skipped: tuple[tuple[str, float], ...]

    def first_share(self, solver: str) -> float | None:
        """The smallest share asked at which all needles were found, or None."""
        found = [
            share
            for (name, share), cell in self.asked.items()
            if name == solver and cell.n_found == len(cell.rows)
        ]
        return min(found, default=None)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that was asked.

    Attributes
    ----------
    references : tuple of Reference
        The full cache's answers.
    capacity_bytes : int
        What every solver was granted.
    decisions : tuple of Decision
        What every solver made of that.
    asked : tuple of Asked
        The answers of those that can be applied.
    by_loss : tuple of Asked
        At the same bytes: budgets of least loss, and equal ones over the same ranking.
    ladder : Ladder
        The answers at other shares of the entries.
    """

    references: tuple[Reference, ...]
    capacity_bytes: int
    decisions: tuple[Decision, ...]
    asked: tuple[Asked, ...]
    by_loss: tuple[Asked, ...]
    ladder: Ladder


class Questions:
    """Asks the same questions for any number of budget profiles, each different one once.

    Parameters
    ----------
    model : PreTrainedModel
    tokenizer : PreTrainedTokenizerBase
    references : sequence of Reference
        The questions, already answered with the full cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        references: Sequence[Reference],
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self.references = tuple(references)
        self._known: list[Asked] = []
        self.last_seconds = sum(r.prefill_seconds + r.decode_seconds for r in references)

    def is_known(self, profile: BudgetProfile) -> bool:
        """Whether these budgets have been asked already."""
        return self._twin(profile) is not None

    def ask(self, solver: str, share: float, profile: BudgetProfile) -> Asked:
        """Answer all questions with a profile's reduced cache.

        Parameters
        ----------
        solver : str
            Who decided.
        share : float
            Share of the entries that was granted.
        profile : BudgetProfile
            At layer level.

        Returns
        -------
        Asked
        """
        twin = self._twin(profile)
        if twin is not None:
            same_as = None if twin.solver == solver else twin.same_as or twin.solver
            return Asked(
                solver=solver, share=share, profile=profile, rows=twin.rows, same_as=same_as
            )
        start = time.perf_counter()
        rows = tuple(
            evaluate_cache(
                self._model,
                self._tokenizer,
                self.references,
                lambda: profile.cache(self._model),
            )
        )
        self.last_seconds = time.perf_counter() - start
        asked = Asked(solver=solver, share=share, profile=profile, rows=rows, same_as=None)
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


def decide(
    scores: ScoreProfile, target: Target, *, time_limit: float | None = 30.0
) -> list[Decision]:
    """Let every registered solver decide, at layer level where it can, else at head level.

    Parameters
    ----------
    scores : ScoreProfile
        What was measured.
    target : dict
        One target of `kvalloc.solve`, such as ``{"target_retention": 0.9}``.
    time_limit : float, optional
        Seconds a solver may take.

    Returns
    -------
    list of Decision
        One a solver, in `ORDER`.

    Raises
    ------
    SolverError
        If no solver is registered.
    """
    known = {name: rank for rank, name in enumerate(ORDER)}
    names = sorted(solver_names(), key=lambda name: (known.get(name, len(ORDER)), name))
    if not names:
        raise SolverError("no solver is registered: kvalloc is on the path but not installed")
    return [_decide_one(scores, name, target, time_limit) for name in names]


def ask_each(
    decisions: Sequence[Decision],
    share: float,
    questions: Questions,
    *,
    deadline: float,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[Asked], dict[str, str]]:
    """Ask the questions with the budgets of every solver that can be applied.

    Parameters
    ----------
    decisions : sequence of Decision
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
        if progress is not None:
            progress(done, len(decisions))
        if decision.profile is None or not decision.enforceable:
            missing[decision.solver] = decision.reason
            continue
        late = len(asked) >= 2 and time.monotonic() + questions.last_seconds > deadline
        if late and not questions.is_known(decision.profile):
            missing[decision.solver] = NO_TIME
            continue
        asked.append(questions.ask(decision.solver, share, decision.profile))
    return asked, missing


def rules_of(scores: ScoreProfile, solvers: Sequence[str]) -> dict[str, Rule]:
    """What these solvers decide at any share, at layer level where they can, else at head level.

    Parameters
    ----------
    scores : ScoreProfile
        What was measured.
    solvers : sequence of str
        Registered names.

    Returns
    -------
    dict of callable
        By solver.
    """
    return {name: partial(_budgets, scores, name) for name in solvers}


def climb(
    rules: Mapping[str, Rule],
    questions: Questions,
    *,
    shares: Sequence[float] = SHARES,
    deadline: float,
    progress: Callable[[int, int], None] | None = None,
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

    Returns
    -------
    Ladder
    """
    climber = _Climber(rules, questions, deadline, progress)
    ranges = dict.fromkeys(rules, (0, len(shares)))
    while any(low < high for low, high in ranges.values()):
        for name, (low, high) in ranges.items():
            if low < high:
                middle = (low + high) // 2
                found = climber.finds_all(name, shares[middle])
                ranges[name] = (
                    (low, low) if found is None else (low, middle) if found else (middle + 1, high)
                )
    for share in shares:
        for name in rules:
            if (name, share) not in climber.asked and (name, share) not in climber.skipped:
                climber.finds_all(name, share)
    climber.report_end()
    return Ladder(shares=tuple(shares), asked=climber.asked, skipped=tuple(climber.skipped))


class _Climber:
    """Asks one cell after the other as long as there is time."""

    def __init__(
        self,
        rules: Mapping[str, Rule],
        questions: Questions,
        deadline: float,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._rules, self._questions = rules, questions
        self._begun, self._deadline = time.monotonic(), deadline
        self._progress = progress
        self._granted_seconds = max(1, round(deadline - self._begun))
        self.asked: dict[tuple[str, float], Asked] = {}
        self.skipped: list[tuple[str, float]] = []

    def finds_all(self, solver: str, share: float) -> bool | None:
        """Ask one cell: whether all needles were found, None where there is no time."""
        now = time.monotonic()
        if self._progress is not None:
            gone = min(self._granted_seconds, round(now - self._begun))
            self._progress(gone, self._granted_seconds)
        profile = self._rules[solver](share)
        late = now + self._questions.last_seconds > self._deadline
        if late and not self._questions.is_known(profile):
            self.skipped.append((solver, share))
            return None
        cell = self.asked[solver, share] = self._questions.ask(solver, share, profile)
        return cell.n_found == len(cell.rows)

    def report_end(self) -> None:
        if self._progress is not None:
            self._progress(self._granted_seconds, self._granted_seconds)


def _budgets(scores: ScoreProfile, solver: str, share: float) -> BudgetProfile:
    try:
        return solve(scores, solver=solver, budget=share)
    except SolverError:  # some rules work on single heads only
        return solve(scores, solver=solver, budget=share, level="head")


def _decide_one(
    scores: ScoreProfile, name: str, target: Target, time_limit: float | None
) -> Decision:
    reason, start = "", time.perf_counter()
    levels: tuple[Level, Level] = ("layer", "head")
    for level in levels:
        start = time.perf_counter()
        try:
            profile = solve(scores, solver=name, level=level, time_limit=time_limit, **target)  # type: ignore[arg-type]
        except KVAllocError as error:
            # The first reason counts: the second try only finds out whether heads would do.
            reason = reason or str(error)
            continue
        seconds = time.perf_counter() - start
        return Decision(solver=name, profile=profile, reason="", seconds=seconds)
    seconds = time.perf_counter() - start
    return Decision(solver=name, profile=None, reason=reason, seconds=seconds)
