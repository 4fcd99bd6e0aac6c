"""Budgets for each prompt: decided from the prompt itself, or a stored decision moved by it.

XKV's per-task mode (Section IV): a mini-prefill of the prompt measures its retention curves, the
same solvers as everywhere decide, then the prompt is prefilled with eviction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from kvalloc.accounting import IntArray
from kvalloc.allocation.decision import decide
from kvalloc.allocation.request import Request
from kvalloc.errors import InputError, option
from kvalloc.formats.budget_profile import BudgetProfile, Level, Policy
from kvalloc.formats.shipped_profiles import load_profile
from kvalloc.measure.prompt_scores import check_measured_tokens, prompt_scores
from kvalloc.models.attention import AttentionStates
from kvalloc.models.loading import shape_of
from kvalloc.online.adaptation import adapt_budgets, check_adapt, may_move
from kvalloc.online.applying import Applied
from kvalloc.problem.registry import get_solver
from kvalloc.runtime.cache import BudgetCache
from kvalloc.runtime.making import make_cache, with_policy
from kvalloc.scorers import Scorer, get_scorer
from kvalloc.shape import ModelShape

__all__ = ["PromptTarget", "apply", "make_adapting_cache", "make_prompt_cache"]


@dataclass(frozen=True, kw_only=True)
class PromptTarget:
    """What is to be reached for each prompt, and how it is measured and decided.

    Attributes
    ----------
    target_retention, budget, budget_tokens, memory, min_tokens, max_tokens, page, level
        As for `kvalloc.solve`; exactly one of the first four. ``memory`` is for all rows of a
        batch together, each getting what it would if all were as long.
    solver : str
        Who decides.
    solver_options : mapping or None
        Its options.
    scorer : str
        Whose scores are measured, and rank the entries unless another policy is named.
    scorer_options : mapping or None
        Its parameters, such as ``window``.
    sinks : int
        First tokens, never evicted.
    measured_tokens : int or None
        Longest mini-prefill, tokens; see `kvalloc.measure.prompt_scores.prompt_scores`.
    hold : bool
        Run no mini-prefill: hold the prompt's full cache, decide from it, then evict.

    Raises
    ------
    InputError
        If a value is out of range, there is no such solver or scorer, or not exactly one target.
    """

    target_retention: float | None = None
    budget: str | float | None = None
    budget_tokens: int | None = None
    memory: str | int | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    page: int = 1
    level: Level = "layer"
    solver: str = "auto"
    solver_options: Mapping[str, Any] | None = None
    scorer: str = "xkv"
    scorer_options: Mapping[str, Any] | None = None
    sinks: int = 4
    measured_tokens: int | None = None
    hold: bool = False

    def __post_init__(self) -> None:
        self.request(1)
        get_solver(self.solver, **(self.solver_options or {}))
        if self.sinks < 0:
            raise InputError(f"sinks is {self.sinks!r}, expected a number of tokens >= 0")
        scorer = self.make_scorer()
        _check_hold(self.hold, scorer, self.measured_tokens)
        check_measured_tokens(self.measured_tokens, self.sinks + scorer.window)

    def request(self, rows: int) -> Request:
        """The target for a prompt that is one of several rows."""
        return Request.parse(
            target_retention=self.target_retention,
            budget=self.budget,
            budget_tokens=self.budget_tokens,
            memory=self.memory,
            min_tokens=self.min_tokens,
            max_tokens=self.max_tokens,
            page=self.page,
            level=self.level,
            batch=rows,
        )

    def make_scorer(self) -> Scorer:
        """The scorer that is measured with."""
        return get_scorer(self.scorer, **(self.scorer_options or {}))

    def undecided(self, shape: ModelShape) -> BudgetProfile:
        """What holds until a prompt has come: its sinks and window, and everything is kept."""
        scorer = self.make_scorer()
        context = self.sinks + scorer.window
        return BudgetProfile(
            shape=shape,
            level=self.level,
            context_tokens=context,
            budgets=np.full((shape.n_layers, shape.n_kv_heads), context, dtype=np.int64),
            policy=Policy(
                scorer=scorer.name,
                scorer_parameters=dict(scorer.parameters()),
                sinks=self.sinks,
                window=scorer.window,
            ),
            detail="everything, until a prompt has come",
        )


def _check_hold(hold: bool, scorer: Scorer, measured_tokens: int | None) -> None:
    if not hold:
        scorer.check_prompt_only()
    elif measured_tokens is not None:
        raise InputError(
            "a held prompt is measured whole and without another prefill, so "
            f"{option('measured_tokens')} spares nothing; leave out one of them"
        )


States = Mapping[int, AttentionStates]


@dataclass(frozen=True, kw_only=True)
class _SolveForPrompt:
    """Decides each row for itself; see `kvalloc.runtime.deciding.DecideHeld`."""

    target: PromptTarget
    undecided: BudgetProfile

    @property
    def hold(self) -> bool:
        return self.target.hold

    @property
    def scorer(self) -> Scorer:
        return self.target.make_scorer()

    def __call__(self, decoder: nn.Module, rows: Sequence[IntArray]) -> list[BudgetProfile]:
        return [self._row(decoder, row, len(rows)) for row in rows]

    def from_states(
        self, decoder: nn.Module, rows: Sequence[IntArray], states: Sequence[States]
    ) -> list[BudgetProfile]:
        pairs = zip(rows, states, strict=True)
        return [self._row(decoder, row, len(rows), seen) for row, seen in pairs]

    def _row(
        self, decoder: nn.Module, row: IntArray, rows: int, states: States | None = None
    ) -> BudgetProfile:
        target, policy, scorer = self.target, self.undecided.policy, self.scorer
        if row.size <= target.sinks + scorer.window:
            return self.undecided
        scores = prompt_scores(
            decoder,
            row,
            scorer=scorer,
            sinks=target.sinks,
            shape=self.undecided.shape,
            measured_tokens=target.measured_tokens,
            states=states,
        )
        options = dict(target.solver_options or {})
        request = target.request(rows)
        decided = decide(
            scores, request, solver=target.solver, solver_options=options, priced=False
        )
        return decided.with_policy(policy)


@dataclass(frozen=True, kw_only=True)
class _MoveForPrompt:
    """Moves a stored decision for each row; see `kvalloc.runtime.deciding.DecideHeld`.

    The scores are those that the stored budgets were decided from, also where the entries are
    picked by another policy.
    """

    stored: BudgetProfile
    policy: Policy | None
    limit: float
    measured_tokens: int | None
    hold: bool = False

    @property
    def scorer(self) -> Scorer:
        policy = self.stored.policy
        return get_scorer(policy.scorer, **policy.scorer_parameters)

    def __call__(self, decoder: nn.Module, rows: Sequence[IntArray]) -> list[BudgetProfile]:
        return self._picked([self._row(decoder, row) for row in rows])

    def from_states(
        self, decoder: nn.Module, rows: Sequence[IntArray], states: Sequence[States]
    ) -> list[BudgetProfile]:
        pairs = zip(rows, states, strict=True)
        return self._picked([self._row(decoder, row, seen) for row, seen in pairs])

    def _picked(self, moved: list[BudgetProfile]) -> list[BudgetProfile]:
        return moved if self.policy is None else [one.with_policy(self.policy) for one in moved]

    def _row(
        self, decoder: nn.Module, row: IntArray, states: States | None = None
    ) -> BudgetProfile:
        stored = self.stored
        if not may_move(stored, self.limit, int(row.size)):
            return stored
        scores = prompt_scores(
            decoder,
            row,
            scorer=self.scorer,
            sinks=stored.policy.sinks,
            shape=stored.shape,
            measured_tokens=self.measured_tokens,
            states=states,
        )
        return adapt_budgets(stored, scores, self.limit)


def make_prompt_cache(
    model: Any,
    target: PromptTarget,
    *,
    policy: str | Policy | None = None,
    policy_options: Mapping[str, Any] | None = None,
    decode_every: int | None = None,
    prompt_tokens: int | None = None,
) -> BudgetCache:
    """A cache whose budgets are decided from its prompt.

    In the prompt's forward, a mini-prefill over the prompt comes first, then the solver, then the
    prefill with eviction. That takes about as long as another prefill, less with
    ``measured_tokens``; no cache exists meanwhile, so peak memory stays that of a reduced prefill.
    With ``hold`` there is no mini-prefill: the prompt's own forward is measured, and peak memory is
    that of its full cache.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    target : PromptTarget
        What is to be reached.
    policy, policy_options, decode_every, prompt_tokens
        As for `kvalloc.runtime.make_cache`.

    Returns
    -------
    BudgetCache
        Its ``profile`` is the decision once the prompt has come, its ``row_profiles`` those of
        the rows, its ``decision_seconds`` what deciding took.

    Raises
    ------
    KVAllocError
        As `kvalloc.runtime.make_cache`.

    References
    ----------
    XKV, Section IV-A.
    """
    undecided = with_policy(target.undecided(shape_of(model)), policy, policy_options)
    return make_cache(
        undecided,
        model,
        decode_every=decode_every,
        prompt_tokens=prompt_tokens,
        decide=_SolveForPrompt(target=target, undecided=undecided),
    )


def make_adapting_cache(
    profile: BudgetProfile,
    model: Any,
    *,
    adapt: float,
    measured_tokens: int | None = None,
    hold: bool = False,
    policy: str | Policy | None = None,
    policy_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> BudgetCache:
    """A cache whose stored budgets follow its prompt, within a limit.

    Parameters
    ----------
    profile : BudgetProfile
        The stored decision.
    model : transformers.PreTrainedModel
    adapt : float
        Share of its own budget that a unit may gain or lose, 0..1, at the same total; see
        `kvalloc.online.adaptation.adapt_budgets`. At 0 nothing is measured.
    measured_tokens : int, optional
        Longest mini-prefill, tokens; the whole prompt by default.
    hold : bool
        Run no mini-prefill: hold the prompt's full cache, decide from it, then evict.
    policy, policy_options, **options
        As for `kvalloc.runtime.make_cache`.

    Returns
    -------
    BudgetCache

    Raises
    ------
    KVAllocError
        As `kvalloc.runtime.make_cache` and `kvalloc.online.adaptation.check_adapt`.
    """
    check_adapt(profile, adapt)
    check_measured_tokens(measured_tokens, profile.policy.protected_tokens)
    scorer = get_scorer(profile.policy.scorer, **profile.policy.scorer_parameters)
    _check_hold(hold, scorer, measured_tokens)
    changed = with_policy(profile, policy, policy_options)
    move = _MoveForPrompt(
        stored=profile,
        policy=None if policy is None else changed.policy,
        limit=adapt,
        measured_tokens=measured_tokens,
        hold=hold,
    )
    return make_cache(changed, model, **options, decide=move if adapt else None)


def apply(
    model: Any,
    profile: BudgetProfile | str | Path | None = None,
    *,
    target_retention: float | None = None,
    budget: str | float | None = None,
    budget_tokens: int | None = None,
    memory: str | int | None = None,
    adapt: float | None = None,
    measured_tokens: int | None = None,
    hold: bool = False,
    level: Level | None = None,
    solver: str | None = None,
    solver_options: Mapping[str, Any] | None = None,
    min_tokens: int | None = None,
    max_tokens: int | None = None,
    page: int | None = None,
    scorer: str | None = None,
    scorer_options: Mapping[str, Any] | None = None,
    sinks: int | None = None,
    allow_other_model: bool = False,
    policy: str | Policy | None = None,
    policy_options: Mapping[str, Any] | None = None,
    decode_every: int | None = None,
) -> Applied:
    """From now on, each ``model.generate()`` reduces its prompt.

    To the budgets of a stored profile, or to budgets decided from each prompt itself::

        with kvalloc.apply(model, profile):              # a stored decision
        with kvalloc.apply(model, profile, adapt=0.25):  # the same, moved by each prompt
        with kvalloc.apply(model, target_retention=0.9): # decided for each prompt (XKV)
            model.generate(**inputs)

    It ends with the ``with``; without one, with ``remove()`` of what is returned. Every call gets
    a fresh cache, one that brings its own ``past_key_values`` keeps it.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A model that can generate.
    profile : BudgetProfile, str or Path, optional
        Budgets made for this model, their file, or the name of shipped ones. Without any, exactly
        one target is given.
    target_retention, budget, budget_tokens, memory : optional
        What each prompt is to reach, as for `kvalloc.solve`.
    adapt : float, optional
        Let each prompt move the profile's budgets by at most this share; see
        `make_adapting_cache`.
    measured_tokens : int, optional
        Longest mini-prefill, tokens; the whole prompt by default.
    hold : bool
        With a target or adapt: run no mini-prefill, but hold each prompt's full cache, decide from
        it, and then evict. Nearly as fast as a stored profile, at the peak memory of a full cache.
    level, solver, solver_options, min_tokens, max_tokens, page, scorer, scorer_options, sinks
        How a target is measured and decided; see `PromptTarget`. They do not go with a profile.
    allow_other_model : bool
        Accept the profile of a model of another name with the same sizes.
    policy, policy_options, decode_every : optional
        As for `kvalloc.runtime.make_cache`.

    Returns
    -------
    Applied
        Its ``last_cache`` tells what the latest call stored.

    Raises
    ------
    KVAllocError
        As `kvalloc.runtime.make_cache`, and for a profile and a target at once, or neither.
    """
    picked: dict[str, Any] = {
        "policy": policy,
        "policy_options": policy_options,
        "decode_every": decode_every,
    }
    targets = {
        "target_retention": target_retention,
        "budget": budget,
        "budget_tokens": budget_tokens,
        "memory": memory,
    }
    deciding = {
        "level": level,
        "solver": solver,
        "solver_options": solver_options,
        "min_tokens": min_tokens,
        "max_tokens": max_tokens,
        "page": page,
        "scorer": scorer,
        "scorer_options": scorer_options,
        "sinks": sinks,
    }
    asked: dict[str, Any] = {
        name: value for name, value in (targets | deciding).items() if value is not None
    }
    if profile is None:
        if adapt is not None:
            moves = f"{option('adapt')} moves the budgets of a stored profile"
            raise InputError(f"{moves}; give one, too")
        target = PromptTarget(measured_tokens=measured_tokens, hold=hold, **asked)
        return Applied(model, _for_target(model, target, picked))
    if asked:
        raise InputError(
            f"a profile and {option(next(iter(asked)))} are two decisions at once; give the "
            f"profile, with {option('adapt')} if each prompt is to move it, or a target alone"
        )
    picked["allow_other_model"] = allow_other_model
    if adapt is not None:
        picked |= {"adapt": adapt, "measured_tokens": measured_tokens, "hold": hold}
    elif measured_tokens is not None or hold:
        name = "hold" if hold else "measured_tokens"
        raise InputError(
            f"with a stored profile nothing is measured; leave out {option(name)}, or give "
            f"{option('adapt')}"
        )
    return Applied(model, _for_profile(model, _stored(profile), picked))


def _stored(profile: object) -> BudgetProfile:
    """A profile as it was given, or from its file, or a shipped one by its name."""
    if isinstance(profile, str | Path):
        return load_profile(profile)
    if not isinstance(profile, BudgetProfile):
        raise InputError(
            f"the profile is a {type(profile).__name__}, expected a BudgetProfile, its file, or "
            "the name of a shipped one"
        )
    return profile


def _for_target(
    model: Any, target: PromptTarget, options: dict[str, Any]
) -> Callable[[int | None], BudgetCache]:
    return lambda tokens: make_prompt_cache(model, target, prompt_tokens=tokens, **options)


def _for_profile(
    model: Any, profile: BudgetProfile, options: dict[str, Any]
) -> Callable[[int | None], BudgetCache]:
    make: Callable[..., BudgetCache] = make_adapting_cache if "adapt" in options else make_cache
    return lambda tokens: make(profile, model, prompt_tokens=tokens, **options)
