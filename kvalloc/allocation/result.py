"""A checked solution, written down as a budget profile."""

from __future__ import annotations

import platform
from typing import Any

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.allocation.formulation import cache_costs
from kvalloc.allocation.head_arrays import bit_table, budget_table, policies_in_use, policy_table
from kvalloc.allocation.prediction import mean_retention, predicted_loss, worst_sample_retention
from kvalloc.allocation.request import Request
from kvalloc.allocation.sharing import members_alike
from kvalloc.allocation.verification import CheckedSolution
from kvalloc.files import utc_date, versions
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.problem import AllocationProblem


def to_budget_profile(
    scores: ScoreProfile,
    request: Request,
    problem: AllocationProblem,
    checked: CheckedSolution,
    solver_name: str,
    solver_options: dict[str, Any],
) -> BudgetProfile:
    """Write a checked solution down as a budget profile.

    Parameters
    ----------
    scores : ScoreProfile
        What was measured.
    request : Request
        What was asked.
    problem : AllocationProblem
        What was solved.
    checked : CheckedSolution
        What came out.
    solver_name : str
    solver_options : dict

    Returns
    -------
    BudgetProfile
    """
    shape = scores.shape
    groups = request.share_groups if isinstance(request.share_groups, tuple) else ()
    budgets = members_alike(budget_table(scores, problem, checked.choice), groups)
    bits = bit_table(scores, problem, checked.choice)
    policies = policy_table(scores, problem, checked.choice)
    other_policies, unit_policies = policies_in_use(scores, policies)
    other_cost = request.cost != "bytes"
    return BudgetProfile(
        shape=shape,
        level=request.level,
        context_tokens=problem.context_tokens,
        budgets=budgets,
        bits=bits,
        share_groups=groups,
        ranks=_rank_table(scores, problem, checked),
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
        termination=checked.termination.value,
        requested=_requested(scores, request, problem),
        # Retention is about the scorer's best entries, and some units keep others.
        retention=None
        if policies is not None
        else checked.value
        if request.workloads == "mean"
        and request.objective in (None, "mean")
        and request.weights is None
        else mean_retention(
            scores, budgets, problem.context_tokens, bits=bits, share_groups=groups
        ),
        worst_sample_retention=None
        if request.workloads == "mean"
        else worst_sample_retention(scores, budgets, problem.context_tokens, share_groups=groups),
        # Losses are measured with entries that each layer chooses for itself.
        predicted_loss=None
        if groups
        else predicted_loss(scores, budgets, problem.context_tokens, bits=bits, policies=policies),
        cost_bytes=checked.cost_bytes if other_cost else None,
        full_cost_bytes=cache_costs(scores, request).full if other_cost else None,
        batch=request.batch,
        score_digest=scores.digest(),
        problem_digest=problem.digest(),
        versions={"python": platform.python_version(), **versions("numpy")},
        created=utc_date(),
    )


def _requested(
    scores: ScoreProfile, request: Request, problem: AllocationProblem
) -> dict[str, Any]:
    """What was asked for, as plain values."""
    requested = request.record()
    if request.cost != "bytes":
        requested["capacity_bytes"] = problem.capacity_bytes
    elif problem.capacity_bytes is not None:
        sliding = cache_costs(scores, request).sliding_bytes
        requested["bytes"] = problem.capacity_bytes + sliding
    return requested


def _rank_table(
    scores: ScoreProfile, problem: AllocationProblem, checked: CheckedSolution
) -> IntArray | None:
    """Rank of each head, -1 where none was decided (sliding layers), `(n_layers, n_kv_heads)`."""
    if checked.ranks is None:
        return None
    table = np.full((scores.shape.n_layers, scores.shape.n_kv_heads), -1, dtype=np.int64)
    table[problem.layers, problem.heads] = checked.ranks
    return table
