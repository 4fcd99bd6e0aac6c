"""Loss curves: change of the next-token distribution if one layer or KV head is reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.errors import InputError
from kvalloc.measure.curves import check_finite
from kvalloc.measure.job import Job, Measured
from kvalloc.measure.loss_probe import LossProbe

BATCH = 8
"""Variants in one batch."""

_Place = tuple[int, ...]
"""Width and level of a loss, after the KV head if only one head is reduced."""


class _Variant(NamedTuple):
    """Kept entries of a layer, and the places of the losses that they give."""

    places: list[_Place]
    keep: Tensor
    """``(n_kv_heads, n_tokens)``"""
    bits: IntArray
    """``(n_kv_heads,)``"""


def sample_losses(
    model: Any,
    job: Job,
    index: int,
    *,
    layer_done: Callable[[], None],
) -> Measured:
    """Return the loss curves of one sample of a job, by its plan.

    Parameters
    ----------
    layer_done : callable
        Called after each layer.

    Returns
    -------
    Measured
        ``losses``, as `Job.sizes` has them.

    Raises
    ------
    InputError
        If the sample cannot be measured; a `SampleError` if a loss is not finite.
    UnsupportedModelError
        If the model's layers cannot be seen.
    """
    plan = job.losses
    assert plan is not None  # else no losses are measured
    losses_of = measure_losses if plan.method == "measured" else estimate_losses
    try:
        probe = LossProbe(
            model,
            job.samples.samples[index],
            plan.policy(job.scorer),
            sinks=job.sinks,
            shape=job.shape,
            continuation_tokens=plan.continuation_tokens,
        )
        measured = losses_of(probe, job, layer_done=layer_done)
    except InputError as error:
        raise InputError(f"sample {index}: {error}") from error
    what = f"the losses of {job.shape.model_id} in sample {index}"
    check_finite(what, measured["losses"])
    return measured


def measure_losses(
    probe: LossProbe,
    job: Job,
    *,
    layer_done: Callable[[], None] = lambda: None,
) -> Measured:
    """Measure the loss of each unit at each level, reduced alone.

    Parameters
    ----------
    probe : LossProbe
        The prompt.
    job : Job
        The job of these losses. Its `loss_levels` are budgets at the reference context; a prompt of
        another length is reduced to the same shares of its evictable entries.
    layer_done : callable
        Called after each measured layer.

    Returns
    -------
    Measured
        ``losses``: mean over the continuation's predictions of KL(full cache || reduced cache),
        nats per token. They are 0 in sliding layers, and at 16 bits at the last level.
    """

    def of_layer(layer: int) -> Iterator[tuple[list[_Place], FloatArray]]:
        for batch in _batches(_variants(_figures(probe, layer, job), job)):
            losses = probe.losses(layer, **_stacked(batch)).cpu().numpy()
            for variant, values in zip(batch, losses, strict=True):
                yield variant.places, values

    return _of_all_layers(probe, job, of_layer, layer_done)


def estimate_losses(
    probe: LossProbe,
    job: Job,
    *,
    n_draws: int = 16,
    seed: int = 0,
    layer_done: Callable[[], None] = lambda: None,
) -> Measured:
    """Estimate the losses to second order, from one forward.

    Hiding and rounding entries moves the outputs of a unit's heads by a known ``d``. To second
    order ``KL = d' F d / 2`` with F the Fisher information of those outputs. ``d' F d`` is the mean
    of ``(g' d)^2`` over gradients g of next tokens drawn from the model's predictions. It is a
    local estimate: it overstates the loss of a unit that flips an answer.

    Parameters
    ----------
    probe, job, layer_done
        As in `measure_losses`.
    n_draws : int
        Draws of next tokens; the relative standard error falls with their square root.
    seed : int
        Seed of the draws.

    Returns
    -------
    Measured
        Means over the draws.

    References
    ----------
    S. Amari, Natural Gradient Works Efficiently in Learning (1998): the Fisher information as the
    second-order term of the KL divergence. Its use for cache budgets is ours.
    """
    gradients = probe.sensitivities(n_draws, seed=seed)
    heads = job.sizes()["losses"][1]

    def of_layer(layer: int) -> Iterator[tuple[list[_Place], FloatArray]]:
        whole = probe.outputs(layer, None)
        slopes = _by_unit(gradients[layer], heads).transpose(1, 2)
        # Heads do not see each other: all of them are reduced at once, and separated after.
        for batch in _batches(_figures(probe, layer, job)):
            shifts = _by_unit(probe.outputs(layer, **_stacked(batch)) - whole, heads)
            squares = ((shifts @ slopes) ** 2 / (2 * probe.n_measured)).cpu().numpy()
            for head, of_head in enumerate(squares):
                for variant, values in zip(batch, of_head, strict=True):
                    yield [(head, *place) for place in variant.places], values

    return _of_all_layers(probe, job, of_layer, layer_done)


def _of_all_layers(
    probe: LossProbe,
    job: Job,
    of_layer: Callable[[int], Iterator[tuple[list[_Place], FloatArray]]],
    layer_done: Callable[[], None],
) -> Measured:
    """Return the mean of the values that belong to each place."""
    losses = np.zeros(job.sizes()["losses"])
    for layer in sorted(probe.scores):
        for places, values in of_layer(layer):
            for place in places:
                losses[layer, *place] = values.mean()
        layer_done()
    return {"losses": losses}


def _by_unit(outputs: Tensor, heads: int) -> Tensor:
    """Group (n, n_predictions, n_query_heads, head_dim) by KV head or layer, in float64.

    Returns
    -------
    Tensor, (heads, n, n_predictions * n_query_heads / heads * head_dim)
    """
    n, n_predictions, _, head_dim = outputs.shape
    split = outputs.double().view(n, n_predictions, heads, -1, head_dim)
    return split.permute(2, 0, 1, 3, 4).reshape(heads, n, -1)


def _figures(probe: LossProbe, layer: int, job: Job) -> list[_Variant]:
    """Return a layer at each width and level, reduced as a whole; not full at 16 bits."""
    budgets = [probe.budget(level, job.context_tokens) for level in job.loss_levels.tolist()]
    kept = probe.kept(layer, budgets)
    return [
        _Variant([(place, level)], keep, np.full(len(keep), width))
        for place, width in enumerate(job.loss_bits)
        for level, keep in enumerate(kept)
        if width != 16 or level < len(budgets) - 1
    ]


def _variants(figures: Sequence[_Variant], job: Job) -> list[_Variant]:
    """Return the layer, or each head of it, reduced alone; each set of entries once a width."""
    variants: dict[bytes, _Variant] = {}
    for places, keep, bits in figures:
        reduced = [(keep, bits)]
        if job.losses is not None and job.losses.level == "head":
            reduced = []
            for head in range(len(keep)):
                one, width = torch.ones_like(keep), np.full_like(bits, 16)
                one[head], width[head] = keep[head], bits[head]
                reduced.append((one, width))
        for head, (one, width) in enumerate(reduced):
            same = one.cpu().numpy().tobytes() + width.tobytes()
            variant = variants.setdefault(same, _Variant([], one, width))
            variant.places.extend((head, *place) for place in places)
    return list(variants.values())


def _stacked(batch: Sequence[_Variant]) -> dict[str, Any]:
    """Return the kept entries and their bits as the probe takes them."""
    keep, bits = torch.stack([one.keep for one in batch]), np.stack([one.bits for one in batch])
    return {"keep": keep, "bits": bits}


def _batches(variants: Sequence[_Variant]) -> Iterator[Sequence[_Variant]]:
    return (variants[begin : begin + BATCH] for begin in range(0, len(variants), BATCH))
