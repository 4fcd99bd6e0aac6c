"""Kept entries made to stand for all: logit biases and values that match the full attention.

For reference queries r with attention weights a over all entries of a head, and kept entries S:

1. mass: w minimises ``sum_r c_r (sum_S a_rj w_j - sum_all a_rj)^2 + lambda sum_S (w_j - 1)^2``, and
   is cut to between `LEAST_WEIGHT` and `MOST_WEIGHT`; the logit bias of entry j is ``log w_j``;
2. output: V' minimises ``sum_r c_r |sum_S b_rj v'_j - sum_all a_rj v_j|^2 + lambda |V' - V|^2``,
   with b the softmax over S with these biases.

Both are ridge regressions toward what the entries are by themselves, with c_r the weight of a query
and lambda the ridge times the mean of the diagonal of the normal matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["LEAST_WEIGHT", "MOST_WEIGHT", "Matched", "match_attention"]

LEAST_WEIGHT, MOST_WEIGHT = 0.05, 50.0
"""How many entries one may count for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Matched:
    """What the kept entries of a head become.

    Attributes
    ----------
    values : Tensor, (n_kept, head_dim)
    logit_bias : Tensor of float32, (n_kept,), or None
        None where none was asked for.
    """

    values: Tensor
    logit_bias: Tensor | None


def match_attention(
    weights: Tensor,
    values: Tensor,
    kept: Tensor,
    *,
    query_weights: Tensor,
    value_ridge: float,
    bias_ridge: float | None,
    others: bool = False,
) -> Matched:
    """Values and logit biases of kept entries that reproduce the attention over all of them.

    Parameters
    ----------
    weights : Tensor of float32, (n_queries, n_tokens)
        Attention weights of the reference queries.
    values : Tensor, (n_tokens, head_dim)
    kept : Tensor of int64, (n_kept,)
    query_weights : Tensor of float32, (n_queries,)
        How much each query counts, at least 0.
    value_ridge : float
        Above 0; large values leave the values as they are.
    bias_ridge : float or None
        Above 0; None for no biases.
    others : bool
        Whether something without an entry takes part in the softmax, so that a row sums to less
        than 1.

    Returns
    -------
    Matched

    References
    ----------
    Fast KV Compaction via Attention Matching (Zweiger et al., 2026, arXiv 2602.16284): biases by
    non-negative least squares, then values by least squares. There without a ridge, on thousands
    of queries; here toward the entries' own values, so that a few queries are enough, and the
    mass in closed form, cut to its bounds.
    """
    mass = weights.sum(dim=1)
    own = weights[:, kept]
    roots = query_weights.sqrt()[:, None]
    counts = None
    if bias_ridge is not None:
        lacking = (mass - own.sum(dim=1))[:, None]
        more = ridge_step(roots * own, roots * lacking, bias_ridge)[:, 0]
        counts = (1 + more).clamp(LEAST_WEIGHT, MOST_WEIGHT)
        own = own * counts
    total = own.sum(dim=1)
    if others:
        total = total + (1 - mass).clamp(min=0)  # they stay
    shares = own / total.clamp(min=torch.finfo(own.dtype).tiny)[:, None]
    first = values[kept].float()
    lacking = weights @ values.float() - shares @ first
    change = ridge_step(roots * shares, roots * lacking, value_ridge)
    return Matched(
        values=(first + change).to(values.dtype),
        logit_bias=None if counts is None else counts.log(),
    )


def ridge_step(design: Tensor, target: Tensor, ridge: float) -> Tensor:
    """``argmin |design x - target|^2 + lambda |x|^2``, lambda relative to the design.

    Parameters
    ----------
    design : Tensor, (n_rows, n_columns)
    target : Tensor, (n_rows, n_targets)
    ridge : float
        lambda over the mean of the diagonal of ``design^T design``.

    Returns
    -------
    Tensor of float32, (n_columns, n_targets)
        In the form of rows or of columns, whichever system is smaller; solved in float64.
    """
    wide, aim = design.double(), target.double()
    n_rows, n_columns = wide.shape
    scale = wide.square().sum() / n_columns * ridge
    scale = scale.clamp(min=torch.finfo(torch.float32).tiny)  # nothing is attended: no change
    if n_rows < n_columns:
        system = wide @ wide.T
        system.diagonal().add_(scale)
        found: Tensor = wide.T @ torch.linalg.solve(system, aim)
        return found.float()
    system = wide.T @ wide
    system.diagonal().add_(scale)
    solved: Tensor = torch.linalg.solve(system, wide.T @ aim)
    return solved.float()
