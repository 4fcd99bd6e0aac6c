"""Budgets for each prompt: decided from the prompt itself, or a stored decision moved by it.

XKV's per-task mode (Section IV): a mini-prefill of the prompt measures its retention curves, the
same solvers as everywhere decide, then the prompt is prefilled with eviction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, Unpack

import numpy as np
from torch import nn

from kvalloc.accounting import IntArray
from kvalloc.allocation.decision import decide
from kvalloc.allocation.formulation import pose
from kvalloc.allocation.request import Request, RequestOptions
from kvalloc.errors import InfeasibleError, InputError, option
from kvalloc.formats.budget_profile import BudgetProfile, Policy
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.measure.prompt_scores import check_measured_tokens, prompt_scores
from kvalloc.models.attention import AttentionStates
from kvalloc.models.loading import shape_of
from kvalloc.online.adaptation import adapt_budgets, check_adapt, may_move
from kvalloc.problem.registry import get_solver
from kvalloc.runtime.cache import BudgetCache
from kvalloc.runtime.making import make_cache, with_policy
from kvalloc.scorers import Scorer, get_scorer
from kvalloc.shape import ModelShape

__all__ = ["PromptOptions", "PromptTarget", "make_adapting_cache", "make_prompt_cache"]

NOT_OF_A_PROMPT = RequestOptions.__annotations__.keys() - {
    *("target_retention", "budget", "budget_tokens", "memory"),
    *("level", "min_tokens", "max_tokens", "page"),
}
"""What of a request cannot be asked of each prompt: one has no loss curves, for example."""


class PromptOptions(RequestOptions, total=False):
    """What is to be reached for each prompt, and how it is measured and decided.

    Of the options of a request: one of the targets that are no loss, `level`, `min_tokens`,
    `max_tokens` and `page`.

    Parameters
    ----------
    budget : str or float
        A share such as 20% or 0.2: alone, of the bytes of a cache at 16 bits; decided by a solver
        or a scorer that is named, of the entries.
    memory : str or int
        Such as 512MiB: beside a budget, what the cache may take while a prompt is read. Alone,
        what is kept of all rows of a batch together, each getting what it would if all were as
        long.
    level : {"layer", "head"}
        What gets a budget of its own, where budgets are decided from each prompt; a layer by
        default.
    page : int
        Budgets are whole pages of N tokens.
    solver : str
        Who decides; ``"auto"`` by default.
    solver_options : mapping
        Its options.
    scorer : str
        Whose scores are measured, and rank the entries unless another policy is named; ``"xkv"``
        by default.
    scorer_options : mapping
        Its parameters, such as ``window``.
    sinks : int
        First tokens, never evicted; 4 by default.
    """

    solver: str | None
    solver_options: Mapping[str, Any] | None
    scorer: str | None
    scorer_options: Mapping[str, Any] | None
    sinks: int | None


@dataclass(frozen=True, kw_only=True)
class _Measurement:
    """How a prompt is measured.

    Attributes
    ----------
    scorer : Scorer
        Whose scores are measured.
    sinks : int
        First tokens, never evicted.
    measured_tokens : int or None
        Longest mini-prefill, tokens; see `kvalloc.measure.prompt_scores.prompt_scores`.
    hold : bool
        Run no mini-prefill: hold the prompt's full cache, decide from it, then evict.

    Raises
    ------
    InputError
        If a value is out of range, or they do not go together.
    """

    scorer: Scorer
    sinks: int = 4
    measured_tokens: int | None = None
    hold: bool = False

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise InputError(f"sinks is {self.sinks!r}, expected a number of tokens >= 0")
        if not self.hold:
            self.scorer.check_prompt_only()
        elif self.measured_tokens is not None:
            raise InputError(
                "a held prompt is measured whole and without another prefill, so "
                f"{option('measured_tokens')} spares nothing; leave out one of them"
            )
        check_measured_tokens(self.measured_tokens, self.sinks + self.scorer.window)


@dataclass(frozen=True, kw_only=True)
class PromptTarget(_Measurement):
    """What `PromptOptions` mean, checked, beside how a prompt is measured.

    Attributes
    ----------
    request : Request
        What is to be reached.
    solver : str
        Who decides.
    solver_options : mapping
        Its options.

    Raises
    ------
    InputError
        If a value is out of range, there is no such solver or scorer, or not exactly one target.
    """

    request: Request
    solver: str = "auto"
    solver_options: Mapping[str, Any]

    def __post_init__(self) -> None:
        get_solver(self.solver, **self.solver_options)
        super().__post_init__()

    @classmethod
    def parse(
        cls,
        *,
        measured_tokens: int | None = None,
        hold: bool = False,
        **asked: Unpack[PromptOptions],
    ) -> Self:
        """The target that keywords make; see `PromptOptions`."""
        given: dict[str, Any] = {name: each for name, each in asked.items() if each is not None}
        scorer = get_scorer(given.pop("scorer", "xkv"), **given.pop("scorer_options", {}))
        options = given.pop("solver_options", {})
        own = {name: given.pop(name) for name in ("solver", "sinks") if name in given}
        for name in given:
            if name in NOT_OF_A_PROMPT:
                raise InputError(
                    f"{option(name)} cannot be asked of each prompt; leave it out, or decide once "
                    "with 'kvalloc solve' and apply the profile"
                )
        return cls(
            request=Request.parse(**given),
            scorer=scorer,
            solver_options=options,
            measured_tokens=measured_tokens,
            hold=hold,
            **own,
        )

    def undecided(self, shape: ModelShape) -> BudgetProfile:
        """What holds until a prompt has come: its sinks and window, and everything is kept."""
        context = self.sinks + self.scorer.window
        return BudgetProfile(
            shape=shape,
            level=self.request.level,
            context_tokens=context,
            budgets=np.full((shape.n_layers, shape.n_kv_heads), context, dtype=np.int64),
            policy=Policy(
                scorer=self.scorer.name,
                scorer_parameters=self.scorer.parameters(),
                sinks=self.sinks,
                window=self.scorer.window,
            ),
            detail="everything, until a prompt has come",
        )


States = Mapping[int, AttentionStates]


@dataclass(frozen=True, kw_only=True)
class _PromptDecider(_Measurement):
    """Measures each row of a prompt, and decides; see `kvalloc.runtime.deciding.DecideHeld`.

    Attributes
    ----------
    otherwise : BudgetProfile
        What a row gets where there is nothing to decide.
    is_open : callable
        Whether there is something to decide for a row of so many tokens.
    decided : callable
        The budgets of a row, from its scores and the number of rows.
    """

    otherwise: BudgetProfile
    is_open: Callable[[int], bool]
    decided: Callable[[ScoreProfile, int], BudgetProfile]

    def __call__(self, decoder: nn.Module, rows: Sequence[IntArray]) -> list[BudgetProfile]:
        return self.from_states(decoder, rows, [None] * len(rows))

    def from_states(
        self, decoder: nn.Module, rows: Sequence[IntArray], states: Sequence[States | None]
    ) -> list[BudgetProfile]:
        found: dict[bytes, BudgetProfile] = {}
        keys = [row.tobytes() for row in rows]
        for key, row, seen in zip(keys, rows, states, strict=True):
            if key in found:  # as in a beam search
                continue
            if not self.is_open(int(row.size)):
                found[key] = self.otherwise
                continue
            scores = prompt_scores(
                decoder,
                row,
                scorer=self.scorer,
                sinks=self.sinks,
                shape=self.otherwise.shape,
                measured_tokens=self.measured_tokens,
                states=seen,
            )
            found[key] = self.decided(scores, len(rows))
        return [found[key] for key in keys]


def make_prompt_cache(
    model: Any,
    target: PromptTarget,
    *,
    policy: str | Policy | None = None,
    policy_options: Mapping[str, Any] | None = None,
    **options: Any,
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
    policy, policy_options, **options
        As for `kvalloc.make_cache`.

    Returns
    -------
    BudgetCache
        Its ``profile`` is the decision once the prompt has come, its ``row_profiles`` those of
        the rows, its ``decision_seconds`` what deciding took.

    Raises
    ------
    KVAllocError
        As `kvalloc.make_cache`.

    References
    ----------
    XKV, Section IV-A.
    """
    undecided = with_policy(target.undecided(shape_of(model)), policy, policy_options)
    whole = undecided.replace(detail="keeps the prompt whole, which is too short to leave any out")

    def decided(scores: ScoreProfile, rows: int) -> BudgetProfile:
        try:
            problem = pose(scores, replace(target.request, batch=rows))
        except InfeasibleError:
            if target.request.target.is_fixed:
                raise
            return whole  # of a longer prompt the same share would hold sinks and window
        found = decide(
            problem,
            get_solver(target.solver, **target.solver_options),
            solver_options=target.solver_options,
            priced=False,
        )
        return found.with_policy(undecided.policy)

    decider = _PromptDecider(
        otherwise=whole,
        is_open=lambda tokens: tokens > target.sinks + target.scorer.window,
        decided=decided,
        **{one.name: getattr(target, one.name) for one in fields(_Measurement)},
    )
    return make_cache(model, undecided, **options, decide=decider)


def make_adapting_cache(
    model: Any,
    profile: BudgetProfile,
    *,
    adapt: float | None = None,
    measured_tokens: int | None = None,
    hold: bool = False,
    policy: str | Policy | None = None,
    policy_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> BudgetCache:
    """A cache whose stored budgets follow its prompt, within a limit.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    profile : BudgetProfile
        The stored decision.
    adapt : float, optional
        Share of its own budget that a unit may gain or lose, 0..1, at the same total; see
        `kvalloc.online.adaptation.adapt_budgets`. By default, and at 0, nothing is measured, and
        the budgets stay.
    measured_tokens : int, optional
        Longest mini-prefill, tokens; the whole prompt by default.
    hold : bool
        Run no mini-prefill: hold the prompt's full cache, decide from it, then evict.
    policy, policy_options, **options
        As for `kvalloc.make_cache`. The scores are those that the stored budgets were
        decided from, also where another policy picks the entries.

    Returns
    -------
    BudgetCache

    Raises
    ------
    KVAllocError
        As `kvalloc.make_cache` and `kvalloc.online.adaptation.check_adapt`.
    """
    if adapt is None:
        if measured_tokens is not None or hold:
            name = "hold" if hold else "measured_tokens"
            raise InputError(
                f"with a stored profile nothing is measured; leave out {option(name)}, or give "
                f"{option('adapt')}"
            )
        options |= {"policy": policy, "policy_options": policy_options}
        return make_cache(model, profile, **options)
    check_adapt(profile, adapt)
    limit, own = adapt, profile.policy
    scorer = get_scorer(own.scorer, **own.scorer_parameters)
    changed = with_policy(profile, policy, policy_options)

    def decided(scores: ScoreProfile, rows: int) -> BudgetProfile:
        moved = adapt_budgets(profile, scores, limit)
        return moved if policy is None else moved.with_policy(changed.policy)

    decider = _PromptDecider(
        otherwise=changed,
        is_open=lambda tokens: may_move(profile, limit, tokens),
        decided=decided,
        scorer=scorer,
        sinks=own.sinks,
        measured_tokens=measured_tokens,
        hold=hold,
    )
    return make_cache(model, changed, **options, decide=decider if adapt else None)
