"""Groups of layers as units of a problem: what they keep together, and what that costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.allocation.prediction import evictable_rank
from kvalloc.errors import InputError
from kvalloc.formats.score_profile import ScoreProfile, interpolate_curves
from kvalloc.formats.sharing_groups import Groups, groups_fault, segments_of
from kvalloc.problem import AllocationProblem


def group_values(
    scores: ScoreProfile,
    group: tuple[int, ...],
    tokens: IntArray,
    context_tokens: int,
    *,
    by_head: bool,
    sample: int | None = None,
) -> FloatArray:
    """What the layers of a group retain together at budgets, when all keep the same entries.

    Parameters
    ----------
    scores : ScoreProfile
        With the group's joint curves.
    group : tuple of int
        Adjacent layers.
    tokens : ndarray of int64, (n_options,)
        Budgets of each layer's KV heads, sinks and window included.
    context_tokens : int
        Prompt length that they are for.
    by_head : bool
        One row for each KV head, or one for all of them.
    sample : int, optional
        One sample; the mean over all by default.

    Returns
    -------
    ndarray of float64, (n_kv_heads or 1, n_options)
        Summed over the layers: keeping everything in all heads is worth ``len(group)``.
    """
    curves = scores.shared_contributions(group, sample)
    if not by_head:
        curves = curves.sum(axis=0, keepdims=True)
    at = evictable_rank(scores, tokens, context_tokens)
    return interpolate_curves(curves, scores.ranks, at)


def grouped(
    problem: AllocationProblem,
    scores: ScoreProfile,
    groups: Groups,
    *,
    sample: int | None = None,
) -> AllocationProblem:
    """The problem in which the layers of each group keep the same entries.

    A group is one unit (at head level, one for each KV head): its value is what its layers retain
    together, its cost what they cost together, and it stands where its first layer stood.

    Parameters
    ----------
    problem : AllocationProblem
        Of single layers, without side constraints, with the same options for every unit.
    scores : ScoreProfile
        With the groups' joint curves.
    groups : tuple of tuple of int
    sample : int, optional
        The sample that the problem was posed on.

    Returns
    -------
    AllocationProblem

    Raises
    ------
    InputError
        If the groups cannot be, were not measured, or the problem is not of that kind.

    References
    ----------
    MPCache, Sec. 4.4.
    """
    fault = groups_fault(groups, scores.shape.full_layers)
    if fault is not None:
        raise InputError(f"layers cannot share entries like that: {fault}; name other layers")
    if problem.constraints or np.any(problem.costs != problem.costs[:1]):
        raise InputError(
            "layers that share entries cannot be combined with caps, ranks, equal heads, few "
            "distinct budgets or options that differ from unit to unit; leave out one of them"
        )
    segments = segments_of(scores.shape.full_layers, groups)
    own = [np.flatnonzero(problem.layers == segment[0]) for segment in segments]
    kept = np.concatenate(own)
    lengths = np.concatenate(
        [np.full(rows.size, len(segment)) for rows, segment in zip(own, segments, strict=True)]
    )
    tokens, by_head = problem.tokens[0], bool(problem.heads[0] >= 0)
    n_layers = len(scores.shape.full_layers)

    def replaced(rows: FloatArray, one: int | None, scale: float) -> FloatArray:
        values = rows[kept]
        for group in groups:
            mine = problem.layers[kept] == group[0]
            joint = group_values(
                scores, group, tokens, problem.context_tokens, by_head=by_head, sample=one
            )
            values[mine] = scale * joint
        return values

    values, scenarios, weights = problem.values, problem.scenarios, problem.weights[kept]
    if scenarios is None:
        values = replaced(values, sample, 1.0)
        # Joint curves are shares of the layers' mass; a head's weight is its own share of one.
        joined = [layer for group in groups for layer in group]
        weights[np.isin(problem.layers[kept], joined)] = 1.0 / n_layers
    else:  # their values hold the weights of the units
        scenarios = np.stack(
            [replaced(rows, one, 1.0 / n_layers) for one, rows in enumerate(scenarios)]
        )
        values = scenarios.mean(axis=0)
    return replace(
        problem,
        tokens=np.broadcast_to(tokens, values.shape),
        values=values,
        scenarios=scenarios,
        costs=lengths[:, None] * problem.costs[0],
        option_counts=problem.option_counts[kept],
        weights=weights,
        layers=problem.layers[kept],
        heads=problem.heads[kept],
    )


def members_alike(table: IntArray, groups: Groups) -> IntArray:
    """The table with every layer of a group as its first one, ``(n_layers, n_kv_heads)``."""
    for group in groups:
        table[list(group)] = table[group[0]]
    return table
