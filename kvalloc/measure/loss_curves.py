"""Loss curves: change of predictions if one layer or KV head is reduced."""

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
    """Return ``losses`` of one sample by the job's plan, as in `Job.sizes`.

    Raises
    ------
    InputError, UnsupportedModelError
        As `LossProbe`; a `SampleError` if a loss is not finite.
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
    """Return ``losses`` of each unit at each level, reduced alone, nats per token.

    They are mean KL(full cache || reduced cache); 0 in sliding layers, and at 16 bits at the last
    level. A prompt that is not of the reference context is reduced to the same shares of its
    evictable entries.
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
    """Estimate `measure_losses` to second order, from one forward.

    Reducing a unit moves its heads' outputs by ``d``, and ``KL = d' F d / 2`` with their Fisher
    information F. ``d' F d`` is the mean of ``(g' d)^2`` over gradients g of `n_draws` tokens from
    the model's predictions; its standard error falls with their root. It overstates losses of units
    that flip an answer.

    References
    ----------
    S. Amari, Natural Gradient Works Efficiently in Learning (1998); its use here is ours.
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
    losses = np.zeros(job.sizes()["losses"])
    for layer in sorted(probe.scores):
        for places, values in of_layer(layer):
            for place in places:
                losses[layer, *place] = values.mean()
        layer_done()
    return {"losses": losses}


def _by_unit(outputs: Tensor, heads: int) -> Tensor:
    """Group (n, n_predictions, n_query_heads, head_dim) by unit, in float64, (heads, n, -1)."""
    n, n_predictions, _, head_dim = outputs.shape
    split = outputs.double().view(n, n_predictions, heads, -1, head_dim)
    return split.permute(2, 0, 1, 3, 4).reshape(heads, n, -1)


def _figures(probe: LossProbe, layer: int, job: Job) -> list[_Variant]:
    budgets = [probe.budget(level, job.context_tokens) for level in job.loss_levels.tolist()]
    kept = probe.kept(layer, budgets)
    return [
        _Variant([(place, level)], keep, np.full(len(keep), width))
        for place, width in enumerate(job.loss_bits)
        for level, keep in enumerate(kept)
        if width != 16 or level < len(budgets) - 1
    ]


def _variants(figures: Sequence[_Variant], job: Job) -> list[_Variant]:
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
    keep, bits = torch.stack([one.keep for one in batch]), np.stack([one.bits for one in batch])
    return {"keep": keep, "bits": bits}


def _batches(variants: Sequence[_Variant]) -> Iterator[Sequence[_Variant]]:
    return (variants[begin : begin + BATCH] for begin in range(0, len(variants), BATCH))
