"""What an option is worth: the retention that it adds, or less the loss that was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.allocation.prediction import evictable_rank, loss_at, policy_loss_curves
from kvalloc.allocation.weights import head_weights
from kvalloc.errors import InputError, option
from kvalloc.formats.policy import places_of
from kvalloc.formats.score_profile import ScoreProfile, interpolate_curves

if TYPE_CHECKING:
    from kvalloc.allocation.request import Request


def unit_values(
    scores: ScoreProfile,
    request: Request,
    context: int,
    tokens: IntArray,
    sample: int | None,
    bits: int,
) -> tuple[FloatArray, FloatArray]:
    """What budgets are worth to each unit at a bit width, and what units weigh.

    Parameters
    ----------
    scores : ScoreProfile
        Measured curves.
    request : Request
        Its objective, level and weights.
    context : int
        Prompt length, tokens.
    tokens : ndarray of int64, (n_options,)
        Budgets.
    sample : int or None
        One sample, or the mean of all.
    bits : int
        Bit width of what is kept.

    Returns
    -------
    values : ndarray of float64, (n_units, n_options)
        Retention that the unit adds to its layer, or its own for the worst unit, or less its loss.
    weights : ndarray of float64, (n_units,)

    Raises
    ------
    InputError
        If losses or bits are asked for and were not measured for such units.
    """
    if request.objective == "loss":
        losses = _unit_losses(scores, request, sample, context, tokens)
        values = -losses.min(axis=0)
        return values, np.ones(values.shape[0])
    if request.weights is not None:
        return _weighted(scores, request, context, tokens, sample, bits)
    n_layers = len(scores.shape.full_layers)
    measured = _measured_heads(scores, request, sample)
    if measured is not None:
        curves, shares = measured
        values = _option_values(scores, curves, context, tokens)
        weights = np.ones_like(shares) if request.objective == "worst" else shares / n_layers
        return values, weights
    curves = _unit_curves(scores, request, sample, bits)
    values = _option_values(scores, curves, context, tokens)
    if request.objective == "worst":  # a unit's own retention, not what it adds to its layer's
        whole = curves if bits == 16 else _unit_curves(scores, request, sample)
        return values / whole[:, -1:], np.ones(values.shape[0])
    return values, np.full(values.shape[0], 1.0 / n_layers)


def workload_values(
    scores: ScoreProfile,
    request: Request,
    context: int,
    tokens: IntArray,
    *,
    shape_as: FloatArray,
) -> FloatArray:
    """What budgets are worth to each unit in each sample, weights included.

    Parameters
    ----------
    scores, request, context, tokens
        See `unit_values`.
    shape_as : ndarray of float64, (n_units, n_options)
        Values of the mean of the samples.

    Returns
    -------
    ndarray of float64, (n_samples, n_units, n_options)

    Raises
    ------
    InputError
        If options are left out because the mean of the samples does not need them: another
        sample might.
    """
    if request.bits is not None or shape_as.shape[1] != tokens.size:
        raise InputError(
            "the worst of several samples is decided for tokens and stored bytes only; leave out "
            "bits and the other cost, or ask for the mean of the workloads"
        )
    each = (
        unit_values(scores, request, context, tokens, sample, 16)
        for sample in range(scores.n_samples)
    )
    return np.stack([weights[:, None] * values for values, weights in each])


def _measured_heads(
    scores: ScoreProfile, request: Request, sample: int | None
) -> tuple[FloatArray, FloatArray] | None:
    """Curves of one sample's heads as they were measured, and the heads' shares of their layers.

    The product is what a head adds to the retention of its layer; with a long context it would be
    a second copy of gigabytes. None where units are layers, the mean of samples, or have several
    bit widths.

    Returns
    -------
    curves : ndarray of float64, (n_units, n_points)
        A view, unless sliding layers have to be left out.
    shares : ndarray of float64, (n_units,)
    """
    only = 0 if scores.n_samples == 1 else sample
    if request.level != "head" or only is None or request.bits is not None:
        return None
    layers = list(scores.shape.full_layers)
    curves, shares = scores.curves[only], scores.head_shares()[only, layers]
    if len(layers) < scores.shape.n_layers:
        curves = curves[layers]
    return curves.reshape(-1, scores.ranks.size), shares.ravel()


def _unit_curves(
    scores: ScoreProfile, request: Request, sample: int | None, bits: int = 16
) -> FloatArray:
    """What each unit adds to the retention of its layer at every rank, `(n_units, n_points)`."""
    layers = list(scores.shape.full_layers)
    contributions = scores.contributions(sample, bits=bits)
    if len(layers) < scores.shape.n_layers:
        contributions = contributions[layers]
    if request.level == "layer":
        curves: FloatArray = contributions.sum(axis=1)
        return curves
    return contributions.reshape(-1, scores.ranks.size)


def _option_values(
    scores: ScoreProfile,
    curves: FloatArray,
    context: int,
    tokens: IntArray,
) -> FloatArray:
    return interpolate_curves(curves, scores.ranks, evictable_rank(scores, tokens, context))


def _unit_losses(
    scores: ScoreProfile,
    request: Request,
    sample: int | None,
    context: int,
    tokens: IntArray,
) -> FloatArray:
    """Loss of each unit at each option with each policy on offer, nats per token.

    Returns
    -------
    ndarray of float64, (n_policies, n_units, n_options)
    """
    layers = list(scores.shape.full_layers)
    places = offered_policies(scores, request)
    curves = policy_loss_curves(scores, sample=sample, places=places)[:, layers]
    if request.weights is not None:
        weights = head_weights(scores.shape, request.weights)
        if curves.shape[2] == 1 and np.any(weights != weights[:, :1]):
            raise InputError(
                "the loss curves of this score profile were measured on whole layers, so heads of "
                "a layer cannot weigh differently; give one weight a layer"
            )
        curves = curves * weights[:, : curves.shape[2], None]
    if request.level == "layer":
        curves = curves.sum(axis=2)
    elif curves.shape[2] == scores.shape.n_kv_heads:
        curves = curves.reshape(len(places), -1, curves.shape[-1])
    else:
        raise InputError(
            "the loss curves of this score profile were measured on whole layers, so they cannot "
            f"tell KV heads apart; ask for {option('level', 'layer')}, or measure every head"
        )
    return loss_at(scores, curves, tokens, context)


def offered_policies(scores: ScoreProfile, request: Request) -> tuple[int, ...]:
    """Places in `ScoreProfile.policies` of those that units can choose from.

    Raises
    ------
    InputError
        If the request names one whose losses were not measured.
    """
    if request.loss_policies is None:
        return tuple(range(len(scores.policies)))
    return places_of(scores.policy, scores.loss_policies, request.loss_policies)


def least_loss_policies(
    scores: ScoreProfile, request: Request, context: int, tokens: IntArray, sample: int | None
) -> IntArray | None:
    """The policy that loses least in each unit at each option.

    At equal bytes nothing but the loss counts, so that the problem of choosing budgets and
    policies together is the one over each unit's least losses, exactly.

    Parameters
    ----------
    scores, request, context, tokens, sample
        See `unit_values`.

    Returns
    -------
    ndarray of int64, (n_units, n_options), or None
        Places in `ScoreProfile.policies`, of equal ones the first; None where only the scorer's
        own is on offer, or something else than loss is asked for.
    """
    if request.objective != "loss" or (places := offered_policies(scores, request)) == (0,):
        return None
    losses = _unit_losses(scores, request, sample, context, tokens)
    best: IntArray = np.asarray(places, dtype=np.int64)[losses.argmin(axis=0)]
    return best


def _weighted(
    scores: ScoreProfile,
    request: Request,
    context: int,
    tokens: IntArray,
    sample: int | None,
    bits: int,
) -> tuple[FloatArray, FloatArray]:
    """Values and weights of units, such that keeping everything is worth 1."""
    assert request.weights is not None  # only called then
    weights = head_weights(scores.shape, request.weights)
    layers = list(scores.shape.full_layers)
    curves = scores.contributions(sample, bits=bits)[layers]
    worth = weights * scores.contributions(sample)[layers][..., -1]
    at = evictable_rank(scores, tokens, context)
    if request.level == "head":
        values = interpolate_curves(curves.reshape(-1, curves.shape[2]), scores.ranks, at)
        return values, weights.ravel() / worth.sum()
    # A layer's curve, its heads as they weigh; of one that weighs nothing, all the same.
    total = worth.sum(axis=1, keepdims=True)
    shares = np.where(total > 0, weights, 1.0)
    summed = (shares[..., None] * curves).sum(axis=1) / np.where(total > 0, total, 1.0)
    return interpolate_curves(summed, scores.ranks, at), total[:, 0] / total.sum()
