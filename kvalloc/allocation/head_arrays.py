"""What units chose, as tables of layers and KV heads."""

from __future__ import annotations

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.formats.policy import Policy
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.problem import AllocationProblem


def budget_table(scores: ScoreProfile, problem: AllocationProblem, choice: IntArray) -> IntArray:
    """The budgets that a choice means, sliding layers included, ``(n_layers, n_kv_heads)``."""
    shape = scores.shape
    stored = shape.sliding_entries(problem.context_tokens)
    budgets = np.full((shape.n_layers, shape.n_kv_heads), stored, dtype=np.int64)
    return in_their_places(budgets, problem, problem.chosen_tokens(choice))


def bit_table(
    scores: ScoreProfile, problem: AllocationProblem, choice: IntArray
) -> IntArray | None:
    """The bit widths that a choice means, 16 in sliding layers; None where all are 16."""
    widths = problem.chosen_bits(choice)
    if widths is None:
        return None
    bits = np.full((scores.shape.n_layers, scores.shape.n_kv_heads), 16, dtype=np.int64)
    return in_their_places(bits, problem, widths)


def policy_table(
    scores: ScoreProfile, problem: AllocationProblem, choice: IntArray
) -> IntArray | None:
    """Places in `ScoreProfile.policies` that a choice means, 0 in sliding layers; None if all 0."""
    places = problem.chosen_policies(choice)
    if places is None or not places.any():
        return None
    table = np.zeros((scores.shape.n_layers, scores.shape.n_kv_heads), dtype=np.int64)
    return in_their_places(table, problem, places)


def policies_in_use(
    scores: ScoreProfile, table: IntArray | None
) -> tuple[tuple[Policy, ...], IntArray | None]:
    """The policies beside the scorer's own that a table names, and the table of places in those.

    Parameters
    ----------
    scores : ScoreProfile
    table : ndarray of int64, (n_layers, n_kv_heads), or None
        From `policy_table`.

    Returns
    -------
    others : tuple of Policy
        `BudgetProfile.other_policies`.
    units : ndarray of int64, (n_layers, n_kv_heads), or None
        `BudgetProfile.unit_policies`.
    """
    if table is None:
        return (), None
    used = np.union1d(table, 0)  # the profile's own is always there
    others = tuple(scores.policies[place] for place in used[1:].tolist())
    return others, np.searchsorted(used, table).astype(np.int64)


def in_their_places(table: IntArray, problem: AllocationProblem, numbers: IntArray) -> IntArray:
    """The table with each unit's number in the row and the columns of its heads."""
    if np.any(problem.heads < 0):
        table[problem.layers] = numbers[:, None]
    else:
        table[problem.layers, problem.heads] = numbers
    return table
