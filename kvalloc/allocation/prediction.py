"""What measured curves say about budgets: retention, and loss where loss curves were measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.errors import InputError, command
from kvalloc.formats.score_profile import ScoreProfile, interpolate_curves
from kvalloc.formats.sharing_groups import Groups
from kvalloc.prompts.intervals import interval

EVEN_OPTIONS = 256
"""Most budgets on offer to a unit whose values are not concave (a loss, or several bit widths),
because exact solvers pay for every option there. Where there are more pages than that, every
second, third, ... one is offered."""


def mean_retention(
    scores: ScoreProfile,
    budgets: IntArray,
    context_tokens: int,
    *,
    bits: IntArray | None = None,
    sample: int | None = None,
    share_groups: Groups = (),
) -> float:
    """Mean over full-attention layers of the kept share of score mass, times its fidelity.

    Parameters
    ----------
    scores : ScoreProfile
        Measured curves.
    budgets : ndarray of int64, (n_layers, n_kv_heads)
        Entries that each head keeps, sinks and window included.
    context_tokens : int
        Prompt length that the budgets are for.
    bits : ndarray of int64, (n_layers, n_kv_heads), optional
        Bit width of each head; 16 everywhere by default.
    sample : int, optional
        One sample; the mean over all by default.
    share_groups : tuple of tuple of int
        Layers that keep the same entries, at one budget.

    Returns
    -------
    float
        0..1.
    """
    full = list(scores.shape.full_layers)
    widths = np.full_like(budgets, 16) if bits is None else bits
    curves = {
        int(width): scores.contributions(sample, bits=int(width))
        for width in np.unique(widths[full])
    }
    at = evictable_rank(scores, budgets, context_tokens)
    kept = [
        interpolate_curves(
            curves[int(widths[layer, head])][layer, head], scores.ranks, at[layer, [head]]
        )
        for layer in full
        if not any(layer in group for group in share_groups)
        for head in range(scores.shape.n_kv_heads)
    ]
    for group in share_groups:
        joint = scores.shared_contributions(group, sample)
        kept += [
            interpolate_curves(joint[head], scores.ranks, at[group[0], [head]])
            for head in range(scores.shape.n_kv_heads)
        ]
    return math.fsum(np.concatenate(kept)) / len(full)


def worst_sample_retention(
    scores: ScoreProfile,
    budgets: IntArray,
    context_tokens: int,
    *,
    share_groups: Groups = (),
) -> float:
    """Mean retention over layers of the sample that loses most.

    Parameters
    ----------
    scores, budgets, context_tokens, share_groups
        See `mean_retention`.

    Returns
    -------
    float
        0..1.
    """
    samples = range(scores.n_samples)
    return min(
        mean_retention(scores, budgets, context_tokens, sample=one, share_groups=share_groups)
        for one in samples
    )


def evictable_rank(scores: ScoreProfile, tokens: IntArray, context_tokens: int) -> FloatArray:
    """Kept evictable entries at the reference context that budgets at another one stand for.

    Parameters
    ----------
    scores : ScoreProfile
    tokens : ndarray of int64
        Budgets, sinks and window included.
    context_tokens : int
        Prompt length that they are for; the same share of its evictable entries is looked up.

    Returns
    -------
    ndarray of float64, as ``tokens``
    """
    stretch = scores.evictable_tokens / (context_tokens - scores.protected_tokens)
    ranks = (tokens - scores.protected_tokens) * stretch
    within: FloatArray = np.clip(ranks, 0.0, float(scores.evictable_tokens)).astype(np.float64)
    return within


def loss_curves(scores: ScoreProfile, *, sample: int | None = None) -> FloatArray:
    """Mean loss curves over samples, or those of one.

    Returns
    -------
    ndarray of float64, (n_layers, n_kv_heads or 1, n_levels)
        Nats per token.

    Raises
    ------
    InputError
        If none were measured.
    """
    if scores.losses is None:
        raise InputError(
            "this score profile holds no loss curves, so no loss can be predicted; measure them "
            f"with {command('profile', loss='measured')}, or ask for retention"
        )
    mean: FloatArray = scores.losses.mean(axis=0) if sample is None else scores.losses[sample]
    return mean


def policy_loss_curves(
    scores: ScoreProfile, *, sample: int | None = None, places: Sequence[int] | None = None
) -> FloatArray:
    """Mean loss curves of several policies over samples, or those of one sample.

    Parameters
    ----------
    scores : ScoreProfile
    sample : int, optional
        One sample; the mean over all by default.
    places : sequence of int, optional
        Of the policies wanted in `ScoreProfile.policies`; all by default.

    Returns
    -------
    ndarray of float64, (n_policies, n_layers, n_kv_heads or 1, n_levels)
        Nats per token.

    Raises
    ------
    InputError
        If no losses were measured.
    """
    own = loss_curves(scores, sample=sample)[None]
    every = own
    if scores.other_losses is not None:
        others = scores.other_losses
        mean = others.mean(axis=0) if sample is None else others[sample]
        every = np.concatenate([own, np.moveaxis(mean, 2, 0)])
    chosen: FloatArray = every if places is None else every[list(places)]
    return chosen


def loss_at(
    scores: ScoreProfile, curves: FloatArray, tokens: IntArray, context_tokens: int
) -> FloatArray:
    """Loss curves at budgets, linear between the measured levels.

    Parameters
    ----------
    scores : ScoreProfile
    curves : ndarray of float64, (..., n_levels)
        From `loss_curves`.
    tokens : ndarray of int64, (n_at,)
        Budgets at ``context_tokens``, none below `least_loss_tokens`.
    context_tokens : int

    Returns
    -------
    ndarray of float64, (..., n_at)
        Nats per token.
    """
    assert scores.loss_tokens is not None  # loss_curves has given the curves
    levels = scores.loss_tokens - scores.protected_tokens
    return interpolate_curves(curves, levels, evictable_rank(scores, tokens, context_tokens))


def least_loss_tokens(scores: ScoreProfile, context_tokens: int) -> int:
    """The smallest budget at a context whose loss is known: the lowest measured level.

    Below it there is no measurement, and none is made up.
    """
    assert scores.loss_tokens is not None  # asked for with loss curves only
    lowest = int(scores.loss_tokens[0]) - scores.protected_tokens
    stretch = (context_tokens - scores.protected_tokens) / scores.evictable_tokens
    return scores.protected_tokens + math.ceil(lowest * stretch - 1e-9)


def even_options(least: int, most: int, context_tokens: int, page_tokens: int) -> IntArray:
    """Budgets that are offered where values are not concave: equal steps down from the largest.

    Equal steps keep the grain of the costs coarse, which is what exact solvers pay for.

    Parameters
    ----------
    least, most : int
        Smallest and largest budget allowed, tokens; ``most`` at most the context.
    context_tokens : int
        The last page may be a partial one: it holds the rest of the context.
    page_tokens : int
        Budgets are whole pages of so many tokens.

    Returns
    -------
    ndarray of int64, (n_options,)
        Rising, at most `EVEN_OPTIONS`.

    Raises
    ------
    InputError
        If there is no page in between.

    Examples
    --------
    >>> even_options(5, 40, 40, 8).tolist(), even_options(20, 1000, 1000, 1).size
    ([8, 16, 24, 32, 40], 246)
    """
    first = -(-least // page_tokens)
    last = -(-context_tokens // page_tokens) if most >= context_tokens else most // page_tokens
    if last < first:
        raise InputError(
            f"no budget of whole pages of {page_tokens} tokens is between the least of {least} "
            f"that can be offered and the largest of {most}; allow larger ones, or smaller pages"
        )
    stride = -(-(last - first + 1) // EVEN_OPTIONS)
    pages = np.arange(last, first - 1, -stride, dtype=np.int64)[::-1]
    return np.minimum(pages * page_tokens, context_tokens)


def predicted_loss(
    scores: ScoreProfile,
    budgets: IntArray,
    context_tokens: int,
    *,
    bits: IntArray | None = None,
    sample: int | None = None,
    policies: IntArray | None = None,
) -> float | None:
    """Sum of the units' measured losses at their budgets, nats per token.

    Parameters
    ----------
    scores : ScoreProfile
        Measured curves.
    budgets : ndarray of int64, (n_layers, n_kv_heads)
        Entries that each head keeps, sinks and window included.
    context_tokens : int
        Prompt length that the budgets are for.
    bits : ndarray of int64, (n_layers, n_kv_heads), optional
        Bit width of each head; 16 everywhere by default.
    sample : int, optional
        One sample; the mean over all by default.
    policies : ndarray of int64, (n_layers, n_kv_heads), optional
        Place of each head's policy in `ScoreProfile.policies`; the scorer's own by default.

    Returns
    -------
    float or None
        None where it is not known: no loss curves, a budget below the lowest measured level, fewer
        bits than 16, or heads of a layer that differ when only whole layers were measured.
    """
    if scores.losses is None or (bits is not None and bool(np.any(bits != 16))):
        return None
    decided = budgets[list(scores.shape.full_layers)]
    if int(decided.min()) < least_loss_tokens(scores, context_tokens):
        return None
    curves = policy_loss_curves(scores, sample=sample)
    table = np.zeros_like(budgets) if policies is None else policies
    columns, chosen = curves.shape[2], table[list(scores.shape.full_layers)]
    if columns == 1 and (np.any(decided != decided[:, :1]) or np.any(chosen != chosen[:, :1])):
        return None
    lost = [
        loss_at(
            scores,
            curves[table[layer, head], layer, head],
            budgets[layer, [head]],
            context_tokens,
        )
        for layer in scores.shape.full_layers
        for head in range(columns)
    ]
    return math.fsum(np.concatenate(lost))


def predicted_loss_interval(
    scores: ScoreProfile,
    budgets: IntArray,
    context_tokens: int,
    *,
    bits: IntArray | None = None,
    policies: IntArray | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> tuple[float, float] | None:
    """Percentile bootstrap interval of the predicted loss over the measured samples.

    It says how sure the sum of single-unit losses is on such text, not how far single losses are
    from those of all units together.

    Parameters
    ----------
    scores, budgets, context_tokens, bits, policies
        As in `predicted_loss`.
    confidence : float
    seed : int

    Returns
    -------
    low, high : float
        Nats per token; None where no loss is known, or of one sample only.
    """
    each = [
        predicted_loss(scores, budgets, context_tokens, bits=bits, sample=s, policies=policies)
        for s in range(scores.n_samples)
    ]
    losses = np.array([loss for loss in each if loss is not None])
    ends = interval([losses], confidence=confidence, seed=seed)
    return None if ends is None else (ends[0], ends[1])
