"""What measured curves say: the value of every option of a unit, and what budgets retain and lose.

Values and predictions are looked up in the same curves, so that what a problem promises is what a
budget profile states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.allocation.request import WEIGHT_SHAPES, Request
from kvalloc.errors import InputError, command, option
from kvalloc.formats.policy import places_of
from kvalloc.formats.score_profile import ScoreProfile, interpolate_curves
from kvalloc.formats.sharing_groups import Groups
from kvalloc.prompts.intervals import interval
from kvalloc.shape import ModelShape

# Values of options


@dataclass(frozen=True, kw_only=True)
class UnitCurves:
    """The measured curves of a request's units, read off at budgets.

    Attributes
    ----------
    scores : ScoreProfile
        Measured curves.
    request : Request
        Its objective, level, weights and policies.
    context : int
        Prompt length, tokens.
    tokens : ndarray of int64, (n_options,)
        Budgets.
    sample : int or None
        One sample, or the mean of all.
    """

    scores: ScoreProfile
    request: Request
    context: int
    tokens: IntArray
    sample: int | None = None

    def values(self, bits: int) -> tuple[FloatArray, FloatArray]:
        """What the budgets are worth to each unit at a bit width, and what units weigh.

        Returns
        -------
        values : ndarray of float64, (n_units, n_options)
            Retention that the unit adds to its layer, or its own for the worst unit, or less its
            loss at that width.
        weights : ndarray of float64, (n_units,)

        Raises
        ------
        InputError
            If losses or bits are asked for and were not measured for such units.
        """
        scores, request = self.scores, self.request
        if request.objective == "loss":
            values = -self.losses(bits).min(axis=0)
            return values, np.ones(values.shape[0])
        ranks = evictable_rank(scores, self.tokens, self.context)
        if request.weights is not None:
            curves, weights = self._weighted(bits)
            return interpolate_curves(curves, scores.ranks, ranks), weights
        n_layers = len(scores.shape.full_layers)
        only = 0 if scores.n_samples == 1 else self.sample
        if request.level == "head" and only is not None and request.bits is None:
            # The measured curves, weighed by the heads' shares of their layers. What a head adds to
            # its layer is the product, with a long context a second copy of gigabytes.
            layers = list(scores.shape.full_layers)
            curves, shares = scores.curves[only], scores.head_shares[only, layers].ravel()
            curves = _of_full_layers(scores, curves).reshape(-1, scores.ranks.size)
            weights = np.ones_like(shares) if request.objective == "worst" else shares / n_layers
            return interpolate_curves(curves, scores.ranks, ranks), weights
        curves = self._added(bits)
        values = interpolate_curves(curves, scores.ranks, ranks)
        if request.objective == "worst":  # a unit's own retention, not what it adds to its layer's
            whole = curves if bits == 16 else self._added(16)
            return values / whole[:, -1:], np.ones(values.shape[0])
        return values, np.full(values.shape[0], 1.0 / n_layers)

    def _added(self, bits: int) -> FloatArray:
        """What each unit adds to its layer's retention at every rank, ``(n_units, n_points)``."""
        added = _of_full_layers(self.scores, self.scores.contributions(self.sample, bits=bits))
        if self.request.level == "layer":
            curves: FloatArray = added.sum(axis=1)
            return curves
        return added.reshape(-1, self.scores.ranks.size)

    def _weighted(self, bits: int) -> tuple[FloatArray, FloatArray]:
        """Curves and weights of units, such that keeping everything is worth 1."""
        scores, sample = self.scores, self.sample
        weights = head_weights(scores.shape, self.request.weights or ())
        curves = _of_full_layers(scores, scores.contributions(sample, bits=bits))
        worth = weights * _of_full_layers(scores, scores.contributions(sample))[..., -1]
        if self.request.level == "head":
            return curves.reshape(-1, curves.shape[2]), weights.ravel() / worth.sum()
        # A layer's curve, its heads as they weigh; of one that weighs nothing, all the same.
        total = worth.sum(axis=1, keepdims=True)
        shares = np.where(total > 0, weights, 1.0)
        summed = (shares[..., None] * curves).sum(axis=1) / np.where(total > 0, total, 1.0)
        return summed, total[:, 0] / total.sum()

    def offered_policies(self) -> tuple[int, ...]:
        """Places in `ScoreProfile.policies` of those that units can choose from.

        Raises
        ------
        InputError
            If the request names one whose losses were not measured.
        """
        scores, asked = self.scores, self.request.loss_policies
        if asked is None:
            return tuple(range(len(scores.policies)))
        return places_of(scores.policy, scores.loss_policies, asked)

    def losses(self, bits: int) -> FloatArray:
        """Loss of each unit at each budget and a bit width with each policy on offer.

        Returns
        -------
        ndarray of float64, (n_policies, n_units, n_options)
            Nats per token.

        Raises
        ------
        InputError
            If they were not measured for such units, policies or bits.
        """
        scores, layers = self.scores, list(self.scores.shape.full_layers)
        curves = loss_curves(scores, self.sample, bits=bits)
        curves = curves[list(self.offered_policies())][:, layers]
        if self.request.weights is not None:
            weights = head_weights(scores.shape, self.request.weights)
            if curves.shape[2] == 1 and np.any(weights != weights[:, :1]):
                raise InputError(
                    "the loss curves of this score profile were measured on whole layers, so heads "
                    "of a layer cannot weigh differently; give one weight a layer"
                )
            curves = curves * weights[:, : curves.shape[2], None]
        if self.request.level == "layer":
            curves = curves.sum(axis=2)
        elif curves.shape[2] == scores.shape.n_kv_heads:
            curves = curves.reshape(curves.shape[0], -1, curves.shape[-1])
        else:
            raise InputError(
                "the loss curves of this score profile were measured on whole layers, so they "
                f"cannot tell KV heads apart; ask for {option('level', 'layer')}, or measure every "
                "head"
            )
        return loss_at(scores, curves, self.tokens, self.context)

    def best_policies(self, tokens: IntArray, bits: IntArray) -> IntArray | None:
        """The policy that loses least in each unit at its own options, of equal ones the first.

        At equal bytes nothing but the loss counts, so that the problem of choosing budgets and
        policies together is the one over each unit's least losses, exactly.

        Parameters
        ----------
        tokens, bits : ndarray of int64, (n_units, n_options)
            Some of the budgets for each unit, and the width of each.

        Returns
        -------
        ndarray of int64, (n_units, n_options), or None
            Places in `ScoreProfile.policies`; None where only the scorer's own is on offer.
        """
        if (places := self.offered_policies()) == (0,):
            return None
        at, best = np.searchsorted(self.tokens, tokens), np.empty_like(tokens)
        for width in np.unique(bits).tolist():
            least = np.asarray(places, dtype=np.int64)[self.losses(width).argmin(axis=0)]
            best = np.where(bits == width, np.take_along_axis(least, at, axis=1), best)
        return best


def _of_full_layers(scores: ScoreProfile, curves: FloatArray) -> FloatArray:
    """Curves of the layers with full attention; a view if those are all."""
    layers = scores.shape.full_layers
    return curves if len(layers) == scores.shape.n_layers else curves[list(layers)]


def head_weights(shape: ModelShape, weights: tuple[object, ...]) -> FloatArray:
    """Weights of every KV head of the full-attention layers, with a mean of 1.

    Parameters
    ----------
    shape : ModelShape
    weights : tuple of float, or of tuples of float
        Those of a request.

    Returns
    -------
    ndarray of float64, (n_full_layers, n_kv_heads)

    Raises
    ------
    InputError
        If they do not fit the model, or none counts that has a budget.
    """
    array = np.asarray(weights, dtype=np.float64)
    expected = (shape.n_layers, shape.n_kv_heads)
    if array.shape not in (expected[:1], expected):
        raise InputError(
            f"weights are shaped {array.shape}, and {shape.model_id} has {shape.n_layers} layers "
            f"of {shape.n_kv_heads} KV heads; give {WEIGHT_SHAPES}"
        )
    if array.ndim == 1:
        array = np.repeat(array[:, None], shape.n_kv_heads, axis=1)
    decided: FloatArray = array[list(shape.full_layers)]
    mean = float(decided.mean())
    if mean <= 0:
        raise InputError(
            "all weights of full-attention layers are 0, and only those get budgets; give at "
            "least one above 0"
        )
    return decided / mean


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
    return interpolate_curves(curves, scores.ranks, evictable_rank(scores, tokens, context_tokens))


# What budgets retain and lose


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
    full = scores.shape.full_layers
    widths = np.full_like(budgets, 16) if bits is None else bits
    curves = {
        width: scores.contributions(sample, bits=width)
        for width in np.unique(widths[list(full)]).tolist()
    }
    shared = {layer for group in share_groups for layer in group}
    joint = {group[0]: scores.shared_contributions(group, sample) for group in share_groups}
    at = evictable_rank(scores, budgets, context_tokens)
    kept = [
        interpolate_curves(
            joint[layer][head] if layer in joint else curves[widths[layer, head]][layer, head],
            scores.ranks,
            at[layer, [head]],
        )
        for layer in full
        if layer in joint or layer not in shared
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
    """Mean retention over layers, 0..1, of the sample that loses most; see `mean_retention`."""
    return min(
        mean_retention(scores, budgets, context_tokens, sample=one, share_groups=share_groups)
        for one in range(scores.n_samples)
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


def check_losses(scores: ScoreProfile, bits: tuple[int, ...] = (16,)) -> None:
    """Refuse what was not measured.

    Raises
    ------
    InputError
        If there are no loss curves, or none at one of the widths; names what to measure.
    """
    missing = [width for width in bits if width not in scores.loss_widths]
    if not missing:
        return
    every = tuple(sorted({16, *scores.loss_widths, *bits}, reverse=True))
    widths = {} if every == (16,) else {"bits": every}
    again = command("profile", loss=scores.loss_method or "measured", **widths)
    if scores.losses is None:
        raise InputError(
            "this score profile holds no loss curves, so no loss can be predicted; measure them "
            f"with {again}, or ask for retention"
        )
    listed, known = (" and ".join(map(str, some)) for some in (missing, scores.loss_widths))
    raise InputError(
        f"what {listed} bits lose was not measured in this score profile (of {known} bits it was); "
        f"measure it with {again}, or leave it out of {option('bits')}"
    )


def loss_curves(scores: ScoreProfile, sample: int | None = None, *, bits: int = 16) -> FloatArray:
    """Mean loss curves of every measured policy over samples, or those of one sample.

    Parameters
    ----------
    scores : ScoreProfile
    sample : int, optional
        One sample; the mean over all by default.
    bits : int
        Width at which the kept entries are stored.

    Returns
    -------
    ndarray of float64, (n_policies, n_layers, n_kv_heads or 1, n_levels)
        Nats per token.

    Raises
    ------
    InputError
        As `check_losses`.
    """
    check_losses(scores, (bits,))
    assert scores.losses is not None  # which was checked

    def one(losses: FloatArray) -> FloatArray:
        mean: FloatArray = losses.mean(axis=0) if sample is None else losses[sample]
        return mean

    first = len(scores.policies) * scores.loss_widths.index(bits)
    found = one(scores.losses)[None]
    if scores.other_losses is not None:
        found = np.concatenate([found, np.moveaxis(one(scores.other_losses), 2, 0)])
    return found[first : first + len(scores.policies)]


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
    assert scores.loss_tokens is not None  # only called with loss curves
    lowest = int(scores.loss_tokens[0]) - scores.protected_tokens
    stretch = (context_tokens - scores.protected_tokens) / scores.evictable_tokens
    return scores.protected_tokens + math.ceil(lowest * stretch - 1e-9)


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
    scores, budgets, context_tokens, bits, sample
        As in `mean_retention`.
    policies : ndarray of int64, (n_layers, n_kv_heads), optional
        Place of each head's policy in `ScoreProfile.policies`; the scorer's own by default.

    Returns
    -------
    float or None
        None where it is not known: no loss curves, a budget below the lowest measured level, bits
        that were not measured, or heads of a layer that differ when only whole layers were.
    """
    full, widths = scores.shape.full_layers, np.full_like(budgets, 16) if bits is None else bits
    used = np.unique(widths[list(full)]).tolist()
    if not {*used} <= {*scores.loss_widths}:
        return None
    if int(budgets[list(full)].min()) < least_loss_tokens(scores, context_tokens):
        return None
    curves = {width: loss_curves(scores, sample, bits=width) for width in used}
    places = np.zeros_like(budgets) if policies is None else policies
    columns = curves[used[0]].shape[2]
    chosen = np.stack([budgets, places, widths])[:, list(full)]
    if columns == 1 and np.any(chosen != chosen[..., :1]):
        return None
    lost = [
        loss_at(
            scores,
            curves[int(widths[layer, head])][places[layer, head], layer, head],
            budgets[layer, [head]],
            context_tokens,
        )
        for layer in full
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
) -> tuple[float, float] | None:
    """Percentile bootstrap interval, 95%, of the predicted loss over the measured samples.

    It says how sure the sum of single-unit losses is on such text, not how far single losses are
    from those of all units together.

    Parameters
    ----------
    scores, budgets, context_tokens, bits, policies
        As in `predicted_loss`.

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
    ends = interval([losses], seed=0)
    return None if ends is None else (ends[0], ends[1])
