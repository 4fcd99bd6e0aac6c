"""Budgets moved towards one prompt: the stored shares, within limits, at the same total."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.accounting.rounding import apportion
from kvalloc.allocation.formulation import formulate
from kvalloc.allocation.prediction import mean_retention
from kvalloc.allocation.request import LayerCap, Request
from kvalloc.allocation.verification import CheckedSolution, solve_problem
from kvalloc.errors import InputError, UnsupportedRequestError, option
from kvalloc.formats.budget_profile import BudgetProfile, Level
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.problem import AllocationProblem, GroupCap
from kvalloc.problem.registry import get_solver

__all__ = ["adapt_budgets", "check_adapt", "may_move"]


def check_adapt(profile: BudgetProfile, limit: object) -> None:
    """Refuse a limit that is none, and profiles whose budgets cannot move one by one.

    Raises
    ------
    InputError
        If the limit is not a share from 0 to 1.
    UnsupportedRequestError
        If each prompt hands out the budgets anyway, layers share their entries, heads have
        different policies, or there may be only few different budgets.
    """
    number = isinstance(limit, int | float) and not isinstance(limit, bool)
    if not number or not 0 <= float(limit) <= 1:  # type: ignore[arg-type]
        raise InputError(
            f"{option('adapt')} is {limit!r}, expected the share by which a budget may move, from "
            "0 to 1, such as 0.25"
        )
    if profile.by_prompt:
        raise UnsupportedRequestError(
            "each prompt hands out the budgets of this profile among all heads anyway; leave out "
            f"{option('adapt')}"
        )
    if profile.share_groups:
        raise UnsupportedRequestError(
            "layers of this profile keep the same entries, so their budgets cannot follow a "
            f"prompt one by one; leave out {option('adapt')}, or solve without "
            f"{option('share_groups')}"
        )
    if profile.unit_policies is not None:
        raise UnsupportedRequestError(
            "budgets follow a prompt by what the scorer's best entries retain of it, and heads of "
            f"this profile keep others; leave out {option('adapt')}, or solve with one of "
            f"{option('loss_policies')}"
        )
    if profile.requested.get("max_distinct") is not None:
        raise UnsupportedRequestError(
            f"this profile has at most {profile.requested['max_distinct']} different budgets, "
            f"which would not stay so; leave out {option('adapt')}, or solve without "
            f"{option('max_distinct')}"
        )


def may_move(profile: BudgetProfile, limit: float, context_tokens: int) -> bool:
    """Whether any budget of a prompt of that length can move within the limit at all."""
    if limit == 0 or context_tokens <= profile.policy.protected_tokens:
        return False
    base = _units(profile, profile.budgets_for(context_tokens))
    steps_down, steps_up = _room(profile, base, limit, context_tokens)
    return bool(steps_down.any()) and bool(steps_up.any())


def adapt_budgets(profile: BudgetProfile, scores: ScoreProfile, limit: float) -> BudgetProfile:
    """Move a profile's budgets towards what one prompt needs.

    The best retention of the prompt's own curves among all budgets ``n`` with
    ``|n - b| <= limit * b`` for each unit and ``sum n = sum b``, where ``b`` is what the profile
    gives a prompt of that length. Sinks and window, the whole context, and the least and largest
    budget that the profile was asked for are limits, too. Entries move in whole pages, and only
    between units of the same bit width, tensor-parallel rank and memory caps, so that all of
    these hold as before, to the byte.

    Parameters
    ----------
    profile : BudgetProfile
        The stored decision.
    scores : ScoreProfile
        Measured on the prompt; its context is the prompt's length.
    limit : float
        Share of its own budget that a unit may gain or lose, 0..1.

    Returns
    -------
    BudgetProfile
        For exactly this length; `profile` itself where nothing can move.

    Raises
    ------
    InputError, UnsupportedRequestError
        As `check_adapt`.
    """
    check_adapt(profile, limit)
    context = scores.context_tokens
    if not may_move(profile, limit, context):
        return profile
    base = _units(profile, profile.budgets_for(context))
    down, up = _room(profile, base, limit, context)
    whole = formulate(scores, Request.parse(budget=1.0, level=_unit_level(profile)))
    problem = _around(whole, profile, base, down, up)
    checked = solve_problem(problem, get_solver("auto"))
    steps = _whole_total(profile, problem, checked.choice, down, up)
    budgets = profile.budgets_for(context).copy()
    full = list(profile.shape.full_layers)
    moved = base + (steps - down) * profile.page_tokens
    columns = 1 if _unit_level(profile) == "layer" else profile.shape.n_kv_heads
    budgets[full] = moved.reshape(len(full), columns)
    return _recorded(profile, scores, limit, budgets, problem, checked, steps)


def _unit_level(profile: BudgetProfile) -> Level:
    """Whose budgets move: layers also where all heads of a layer were asked to be equal."""
    return "layer" if profile.requested.get("equal_heads") else profile.level


def _units(profile: BudgetProfile, table: IntArray) -> IntArray:
    """A table of heads as one number a unit, full-attention layers only, ``(n_units,)``."""
    rows = table[list(profile.shape.full_layers)]
    return rows[:, 0].copy() if _unit_level(profile) == "layer" else rows.ravel().copy()


def _room(
    profile: BudgetProfile, base: IntArray, limit: float, context_tokens: int
) -> tuple[IntArray, IntArray]:
    """Pages that each unit may lose and gain, each ``(n_units,)``."""
    page, asked = profile.page_tokens, profile.requested
    most_moved = np.floor(limit * base + 1e-9).astype(np.int64)
    least = max(profile.policy.protected_tokens, asked.get("min_tokens") or 0)
    most = min(context_tokens, asked.get("max_tokens") or context_tokens)
    down = np.minimum(most_moved, np.maximum(base - least, 0)) // page
    up = np.minimum(most_moved, np.maximum(most - base, 0)) // page
    # A last page that is not full is no page that another unit could take.
    partial = base % page != 0
    down[partial] = up[partial] = 0
    return down, up


def _around(
    whole: AllocationProblem,
    profile: BudgetProfile,
    base: IntArray,
    down: IntArray,
    up: IntArray,
) -> AllocationProblem:
    """The problem of all budgets, with those within the limits left and the total as capacity."""
    counts = down + up + 1
    steps = np.minimum(np.arange(int(counts.max())), (counts - 1)[:, None]) - down[:, None]
    tokens = base[:, None] + steps * profile.page_tokens
    # What is beyond a unit's own options still has to rise, though nobody looks at it.
    beyond = np.maximum(np.arange(tokens.shape[1]) - (counts - 1)[:, None], 0)
    places = tokens - int(whole.tokens[0, 0])
    rows = np.arange(whole.n_units)[:, None]
    step = int(whole.costs[0, 1] - whole.costs[0, 0]) * profile.page_tokens
    costs = whole.costs[rows, places] + beyond * step
    at_base = costs[np.arange(base.size), down]
    return AllocationProblem(
        tokens=tokens + beyond * profile.page_tokens,
        values=whole.values[rows, places],
        costs=costs,
        option_counts=counts,
        weights=whole.weights,
        layers=whole.layers,
        heads=whole.heads,
        sense=whole.sense,
        capacity_bytes=int(at_base.sum()),
        context_tokens=whole.context_tokens,
        protected_tokens=whole.protected_tokens,
        constraints=tuple(
            GroupCap(
                name=f"units that share {name}",
                units=tuple(units.tolist()),
                capacity_bytes=int(at_base[units].sum()),
            )
            for name, units in _classes(profile)
            if units.size < base.size
        ),
    )


def _classes(profile: BudgetProfile) -> list[tuple[str, IntArray]]:
    """Units between which entries may move: of one bit width, one rank and the same caps."""
    full = list(profile.shape.full_layers)
    caps = [LayerCap.parse(text).layers for text in profile.requested.get("cap", ())]
    capped = np.zeros(profile.budgets.shape, dtype=np.int64)
    for place, layers in enumerate(caps):
        capped[[layer for layer in layers if layer in full]] += 2**place
    tables = [capped, *(table for table in (profile.bits, profile.ranks) if table is not None)]
    by_layer = _unit_level(profile) == "layer"  # then all its heads have to be alike
    marks = (
        np.hstack([table[full].reshape(len(full), -1) for table in tables])
        if by_layer
        else (np.stack([table[full].ravel() for table in tables], axis=1))
    )
    different, which = np.unique(marks, axis=0, return_inverse=True)
    return [
        (
            "caps, bit width and rank " + "/".join(map(str, mark.tolist())),
            np.flatnonzero(which == i),
        )
        for i, mark in enumerate(different)
    ]


def _whole_total(
    profile: BudgetProfile,
    problem: AllocationProblem,
    choice: IntArray,
    down: IntArray,
    up: IntArray,
) -> IntArray:
    """The choice with what a solver left over because it adds nothing handed out, too."""
    steps = choice.copy()
    for _, units in _classes(profile):
        steps[units] = apportion(choice[units], int(down[units].sum()), maximum=(down + up)[units])
    return steps


def _recorded(
    profile: BudgetProfile,
    scores: ScoreProfile,
    limit: float,
    budgets: IntArray,
    problem: AllocationProblem,
    checked: CheckedSolution,
    steps: IntArray,
) -> BudgetProfile:
    """The profile of this prompt, with who decided it and what it is worth here."""
    stale: dict[str, Any] = {
        "predicted_loss": None,
        "worst_sample_retention": None,
        "cost_bytes": None,
        "full_cost_bytes": None,
        "value_per_mib": None,
        "price_source": "",
    }
    return replace(
        profile,
        **stale,
        context_tokens=scores.context_tokens,
        budgets=budgets,
        detail=f"moved by at most {limit:.0%} towards one prompt: {checked.detail}",
        decided_by=checked.decided_by or "auto",
        sense=problem.sense.value,
        objective=problem.objective(steps),
        bound=checked.bound,
        bound_source=checked.bound_source,
        termination=checked.termination.value,
        requested={**profile.requested, "adapt": float(limit)},
        retention=mean_retention(scores, budgets, scores.context_tokens),
        score_digest=scores.digest(),
        problem_digest=problem.digest(),
    )
