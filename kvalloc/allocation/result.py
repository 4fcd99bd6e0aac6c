"""What a choice means for every head, and a checked solution as a budget profile."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.allocation.curves import mean_retention, predicted_loss, worst_sample_retention
from kvalloc.allocation.formulation import PosedRequest, cache_costs
from kvalloc.allocation.sensitivity import ShadowPrice
from kvalloc.allocation.verification import CheckedSolution
from kvalloc.files import utc_date, versions
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.problem import AllocationProblem


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a choice means for every head, and what the measured curves say about it.

    Attributes
    ----------
    budgets : ndarray of int64, (n_layers, n_kv_heads)
        Entries that each head keeps, those of sliding layers included.
    bits, policies : ndarray of int64, (n_layers, n_kv_heads), or None
        Bit widths, and places in `ScoreProfile.policies`; None where all are 16, or 0.
    retention : float or None
        Mean over layers; None where units keep other entries than the scorer's best.
    predicted_loss : float or None
        Nats per token; None where it is not known.
    """

    budgets: IntArray
    bits: IntArray | None
    policies: IntArray | None
    retention: float | None
    predicted_loss: float | None

    @classmethod
    def of(
        cls, scores: ScoreProfile, posed: PosedRequest, choice: IntArray, value: float
    ) -> Prediction:
        """The prediction for a choice that has this value in its problem."""
        problem, groups = posed.problem, posed.request.groups
        context, chosen = problem.context_tokens, (np.arange(problem.n_units), choice)
        stored = scores.shape.sliding_entries(context)
        budgets = head_table(scores, problem, problem.tokens[chosen], stored)
        for group in groups:
            budgets[list(group)] = budgets[group[0]]
        bits = policies = None
        if problem.bits is not None:
            bits = head_table(scores, problem, problem.bits[chosen], 16)
        if problem.policies is not None and problem.policies[chosen].any():
            policies = head_table(scores, problem, problem.policies[chosen], 0)
        retention = None
        if policies is None and posed.request.is_plain_mean:
            retention = value
        elif policies is None:
            retention = mean_retention(scores, budgets, context, bits=bits, share_groups=groups)
        loss = None
        if not groups:  # losses are measured with entries that each layer chooses for itself
            loss = predicted_loss(scores, budgets, context, bits=bits, policies=policies)
        return cls(
            budgets=budgets, bits=bits, policies=policies, retention=retention, predicted_loss=loss
        )


def to_budget_profile(
    scores: ScoreProfile,
    posed: PosedRequest,
    checked: CheckedSolution,
    *,
    solver_name: str,
    solver_options: dict[str, Any],
    price: ShadowPrice | None = None,
) -> BudgetProfile:
    """Write a checked solution down as a budget profile.

    Parameters
    ----------
    scores : ScoreProfile
        What was measured.
    posed : PosedRequest
        What was asked, and the problem that was solved.
    checked : CheckedSolution
        What came out.
    solver_name : str
    solver_options : dict
    price : ShadowPrice, optional
        Where it is known.

    Returns
    -------
    BudgetProfile
    """
    request, problem = posed.request, posed.problem
    found = Prediction.of(scores, posed, checked.choice, checked.value)
    other_policies, unit_policies = (), None
    if found.policies is not None:
        used = np.union1d(found.policies, 0)  # the profile's own is always there
        other_policies = tuple(scores.policies[place] for place in used[1:].tolist())
        unit_policies = np.searchsorted(used, found.policies).astype(np.int64)
    ranks = None if checked.ranks is None else head_table(scores, problem, checked.ranks, -1)
    worst = None
    if request.workloads != "mean":
        worst = worst_sample_retention(
            scores, found.budgets, problem.context_tokens, share_groups=request.groups
        )
    requested = {**request.record(), **posed.asked_groups}
    other_cost, costs = request.cost != "bytes", cache_costs(scores, request)
    if other_cost:
        requested["capacity_bytes"] = problem.capacity_bytes
    elif problem.capacity_bytes is not None:
        requested["bytes"] = problem.capacity_bytes + costs.sliding_bytes
    return BudgetProfile(
        shape=scores.shape,
        level=request.level,
        context_tokens=problem.context_tokens,
        budgets=found.budgets,
        bits=found.bits,
        share_groups=request.groups,
        ranks=ranks,
        length_rule="fixed" if request.target.is_fixed else "proportional",
        page_tokens=request.page,
        policy=scores.policy,
        other_policies=other_policies,
        unit_policies=unit_policies,
        solver=solver_name,
        solver_options=solver_options,
        decided_by=checked.decided_by or solver_name,
        detail=checked.detail,
        sense=problem.sense.value,
        objective=checked.objective,
        bound=checked.bound,
        bound_source=checked.bound_source,
        grouping_bound=posed.grouping_bound,
        termination=checked.termination.value,
        requested=requested,
        retention=found.retention,
        worst_sample_retention=worst,
        predicted_loss=found.predicted_loss,
        value_per_mib=None if price is None else price.value_per_byte * 2**20,
        price_source="" if price is None else price.source,
        cost_bytes=checked.cost_bytes if other_cost else None,
        full_cost_bytes=costs.full if other_cost else None,
        batch=request.batch,
        score_digest=scores.digest,
        problem_digest=problem.digest(),
        versions={"python": platform.python_version(), **versions("numpy")},
        created=utc_date(),
    )


def head_table(
    scores: ScoreProfile, problem: AllocationProblem, numbers: IntArray, elsewhere: int
) -> IntArray:
    """Each unit's number in the row and the columns of its heads, ``(n_layers, n_kv_heads)``."""
    table = np.full((scores.shape.n_layers, scores.shape.n_kv_heads), elsewhere, dtype=np.int64)
    if np.any(problem.heads < 0):
        table[problem.layers] = numbers[:, None]
    else:
        table[problem.layers, problem.heads] = numbers
    return table
