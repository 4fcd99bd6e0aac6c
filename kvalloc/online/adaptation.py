"""Budgets moved towards one prompt: the stored shares, within limits, at the same total."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.accounting.rounding import apportion
from kvalloc.allocation.curves import RequestCurves
from kvalloc.allocation.formulation import problem_of
from kvalloc.allocation.request import Request
from kvalloc.allocation.verification import solve_problem
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
    request = Request.stated(profile)
    distinct = None if request is None else request.max_distinct
    leave_out = f"leave out {option('adapt')}"
    refusals = {
        f"each prompt hands out the budgets of this profile among all heads anyway; {leave_out}": (
            profile.by_prompt
        ),
        f"this profile keeps as many entries in every head; {leave_out}": (
            profile.share_of_16_bits is not None
        ),
        "layers of this profile keep the same entries, so their budgets cannot follow a prompt one "
        f"by one; {leave_out}, or solve without {option('share_groups')}": profile.share_groups,
        "budgets follow a prompt by what the scorer's best entries retain of it, and heads of this "
        f"profile keep others; {leave_out}, or solve with one of {option('loss_policies')}": (
            profile.unit_policies is not None
        ),
        f"this profile has at most {distinct} different budgets, which would not stay so; "
        f"{leave_out}, or solve without {option('max_distinct')}": distinct is not None,
    }
    for refusal, holds in refusals.items():
        if holds:
            raise UnsupportedRequestError(refusal)


def may_move(profile: BudgetProfile, limit: float, context_tokens: int) -> bool:
    """Whether any budget of a prompt of that length can move within the limit at all."""
    if limit == 0 or context_tokens <= profile.policy.protected_tokens:
        return False
    room = _Room.of(profile, limit, context_tokens)
    return bool(room.down.any()) and bool(room.up.any())


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
    room = _Room.of(profile, limit, context)
    request = Request.parse(budget=1.0, level=_unit_level(profile))
    curves = RequestCurves(scores=scores, request=request)
    problem = room.problem(problem_of(curves), profile)
    checked = solve_problem(problem, get_solver("auto"))
    steps = checked.choice.copy()
    for _, units in _classes(profile):  # a solver leaves over what adds nothing
        total, most = int(room.down[units].sum()), (room.down + room.up)[units]
        steps[units] = apportion(checked.choice[units], total, maximum=most)
    budgets = profile.budgets_for(context).copy()
    full = list(profile.shape.full_layers)
    moved = room.base + (steps - room.down) * profile.page_tokens
    budgets[full] = moved.reshape(len(full), -1)
    unknown = ("predicted_loss", "worst_sample_retention", "cost_bytes", "full_cost_bytes")
    changes: dict[str, Any] = {
        **dict.fromkeys((*unknown, "value_per_mib")),
        **checked.stated(),
        "price_source": "",
        "context_tokens": context,
        "budgets": budgets,
        "detail": f"moved by at most {limit:.0%} towards one prompt: {checked.detail}",
        "sense": problem.sense.value,
        "objective": problem.objective(steps),
        "requested": {**profile.requested, "adapt": float(limit)},
        "retention": curves.retention(budgets),
        "score_digest": scores.digest,
        "problem_digest": problem.digest(),
    }
    return profile.replace(**changes)


def _unit_level(profile: BudgetProfile) -> Level:
    """Whose budgets move: layers also where all heads of a layer were asked to be equal."""
    request = Request.stated(profile)
    return "layer" if request is not None and request.equal_heads else profile.level


@dataclass(frozen=True, kw_only=True)
class _Room:
    """How far each unit of the full-attention layers may move, all ``(n_units,)``.

    Attributes
    ----------
    base : ndarray of int64
        Budgets as they are stored, tokens.
    down, up : ndarray of int64
        Pages that a unit may lose and gain.
    """

    base: IntArray
    down: IntArray
    up: IntArray

    @classmethod
    def of(cls, profile: BudgetProfile, limit: float, context_tokens: int) -> _Room:
        rows = profile.budgets_for(context_tokens)[list(profile.shape.full_layers)]
        base = rows[:, 0] if _unit_level(profile) == "layer" else rows.ravel()
        page, request = profile.page_tokens, Request.stated(profile)
        most_moved = np.floor(limit * base + 1e-9).astype(np.int64)
        least, most = profile.policy.protected_tokens, context_tokens
        if request is not None:
            least = max(least, request.min_tokens or 0)
            most = min(most, request.max_tokens or most)
        whole = base % page == 0  # another unit could not take a last page that is not full
        down = whole * (np.minimum(most_moved, np.maximum(base - least, 0)) // page)
        up = whole * (np.minimum(most_moved, np.maximum(most - base, 0)) // page)
        return cls(base=base, down=down, up=up)

    def problem(self, whole: AllocationProblem, profile: BudgetProfile) -> AllocationProblem:
        """The problem of all budgets, with those in the room left and the total as capacity."""
        last = self.down + self.up
        places = np.arange(int(last.max()) + 1)
        steps = np.minimum(places, last[:, None]) - self.down[:, None]
        tokens = self.base[:, None] + steps * profile.page_tokens
        # padding must stay increasing; it is never selected
        padding = np.maximum(places - last[:, None], 0)
        own = np.arange(whole.n_units)[:, None], tokens - int(whole.tokens[0, 0])
        page_bytes = int(whole.costs[0, 1] - whole.costs[0, 0]) * profile.page_tokens
        costs = whole.costs[own] + padding * page_bytes
        at_base = costs[np.arange(self.base.size), self.down]
        return whole.replace(
            tokens=tokens + padding * profile.page_tokens,
            values=whole.values[own],
            costs=costs,
            option_counts=last + 1,
            capacity_bytes=int(at_base.sum()),
            constraints=tuple(
                GroupCap(
                    name=f"units that share {name}",
                    units=tuple(units.tolist()),
                    capacity_bytes=int(at_base[units].sum()),
                )
                for name, units in _classes(profile)
                if units.size < self.base.size
            ),
        )


def _classes(profile: BudgetProfile) -> list[tuple[str, IntArray]]:
    """Units between which entries may move: of one bit width and the same caps."""
    full = list(profile.shape.full_layers)
    capped = np.zeros(profile.budgets.shape, dtype=np.int64)
    request = Request.stated(profile)
    for place, cap in enumerate(() if request is None else request.cap):
        layers = [layer for layer in cap.layers if layer in full]
        capped[layers] += 2**place
    tables = [capped] if profile.bits is None else [capped, profile.bits]
    marks = np.stack([table[full] for table in tables], axis=-1)
    # of a layer all heads have to be alike
    n_units = len(full) if _unit_level(profile) == "layer" else marks[..., 0].size
    different, which = np.unique(marks.reshape(n_units, -1), axis=0, return_inverse=True)
    return [
        ("caps, bit width and rank " + "/".join(map(str, mark)), np.flatnonzero(which == i))
        for i, mark in enumerate(different.tolist())
    ]
