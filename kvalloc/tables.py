"""What units chose, as tables of layers and KV heads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvalloc.problem import AllocationProblem
from kvalloc.score_profile import ScoreProfile

IntArray = npt.NDArray[np.int64]


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


def in_their_places(table: IntArray, problem: AllocationProblem, numbers: IntArray) -> IntArray:
    """The table with each unit's number in the row and the columns of its heads."""
    if np.any(problem.heads < 0):
        table[problem.layers] = numbers[:, None]
    else:
        table[problem.layers, problem.heads] = numbers
    return table
