"""Loss curves: what reducing one layer, or one KV head, does to the next-token distribution."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import BoolArray, FloatArray
from kvalloc.errors import InputError
from kvalloc.measure.job import Job, Measured
from kvalloc.measure.loss_probe import LossProbe
from kvalloc.runtime.policies import policy_of

_Place = tuple[int, int, int]
"""KV head, policy and level that a loss belongs to."""

_Variant = tuple[list[_Place], Tensor]
"""Where a loss belongs, and what is kept for it, ``(n_kv_heads, n_tokens)``."""


def sample_losses(
    job: Job, index: int, *, layer_done: Callable[[], None], only: BoolArray | None = None
) -> Measured:
    """Loss curves of one sample of a job, as its plan says.

    Parameters
    ----------
    job : Job
    index : int
        Of the sample.
    layer_done : callable
        Called after each layer.
    only : ndarray of bool, optional
        Which figures to measure; see `measure_losses`. Where the plan has `probes` and it is not
        given, all are estimated.

    Returns
    -------
    Measured
        ``losses`` and ``loss_stderr``.

    Raises
    ------
    InputError
        If the sample cannot be measured, or a loss is not finite.
    UnsupportedModelError
        If the model's layers cannot be seen.
    """
    plan, name = job.loss_plan, job.shape.model_id
    try:
        probe = LossProbe.of_sample(
            job.model,
            job.samples.samples[index],
            job.scorer,
            sinks=job.sinks,
            shape=job.shape,
            continuation_tokens=plan.continuation_tokens,
            policies=[policy_of(policy) for policy in job.policies[1:]],
        )
        if only is not None or (plan.method == "measured" and plan.probes is None):
            found = measure_losses(probe, job, only=only, layer_done=layer_done)
        else:
            found = estimate_losses(probe, job, layer_done=layer_done)
    except InputError as error:
        raise InputError(f"sample {index}: {error}") from error
    if not np.isfinite(found["losses"]).all():
        raise InputError(
            f"the losses of {name} in sample {index} are not finite; load the model in float32 or "
            "bfloat16, or check its weights"
        )
    return found


def measure_losses(
    probe: LossProbe,
    job: Job,
    *,
    only: BoolArray | None = None,
    layer_done: Callable[[], None] = lambda: None,
) -> Measured:
    """Reduce every unit alone to every level, and measure.

    Parameters
    ----------
    probe : LossProbe
        The prompt.
    job : Job
        What the figures are for. Its `loss_levels` are budgets at the reference context; a prompt
        of another length is reduced to the same shares of its evictable entries.
    only : ndarray of bool, (n_layers, n_kv_heads or 1, 1 + n_policies, n_levels), optional
        Which figures to measure; the others are 0. All by default.
    layer_done : callable
        Called after each measured layer.

    Returns
    -------
    Measured
        ``losses``: mean over the continuation's predictions of KL(full cache || reduced cache),
        nats per token; 0 in sliding layers and at the last level, where nothing is hidden.
        ``loss_stderr``: standard error of that mean.
    """
    losses, stderr = np.zeros((2, *job.sizes()["losses"]))
    batch = job.loss_plan.batch
    for layer in sorted(probe.scores):
        variants = _variants(_kept_by_policy(probe, layer, job), job)
        if only is not None:
            here = only[layer]
            variants = [one for one in variants if any(here[place] for place in one[0])]
        for begin in range(0, len(variants), batch):
            some = variants[begin : begin + batch]
            found = probe.losses(layer, torch.stack([keep for _, keep in some])).cpu().numpy()
            for (places, _), values in zip(some, found, strict=True):
                for place in places:
                    losses[layer, *place] = values.mean()
                    stderr[layer, *place] = _stderr(values)
        layer_done()
    return {"losses": losses, "loss_stderr": stderr}


def estimate_losses(
    probe: LossProbe,
    job: Job,
    *,
    n_draws: int = 16,
    seed: int = 0,
    layer_done: Callable[[], None] = lambda: None,
) -> Measured:
    """The same to second order, from one backward pass instead of a forward for each figure.

    Hiding entries moves the outputs of a unit's heads by a known ``d``. To second order
    ``KL = d' F d / 2`` with F the Fisher information of those outputs, and ``d' F d`` is the mean
    of ``(g' d)^2`` over gradients g of next tokens drawn from the model's own predictions. It is
    a local estimate: it overstates the loss of what flips an answer.

    Parameters
    ----------
    probe, job, layer_done
        As in `measure_losses`.
    n_draws : int
        Draws of next tokens; the relative standard error falls with their square root.
    seed : int
        Of the draws.

    Returns
    -------
    Measured
        The standard errors are those of the draws.

    References
    ----------
    S. Amari, Natural Gradient Works Efficiently in Learning (1998): the Fisher information as
    the second-order term of the KL divergence. Its use for cache budgets is ours.
    """
    losses, stderr = np.zeros((2, *job.sizes()["losses"]))
    gradients = probe.sensitivities(n_draws, seed=seed)
    batch = job.loss_plan.batch
    for layer in sorted(probe.scores):
        whole = probe.outputs(layer, None)
        heads = losses.shape[1]
        slopes = _by_unit(gradients[layer], heads)
        # Heads do not see each other: all of them are reduced at once, and told apart after.
        kept = [keep for each in _kept_by_policy(probe, layer, job) for keep in each]
        for begin in range(0, len(kept), batch):
            shifts = probe.outputs(layer, torch.stack(kept[begin : begin + batch])) - whole
            squares = (_by_unit(shifts, heads) @ slopes.transpose(1, 2)) ** 2 / (
                2 * probe.n_measured
            )
            for place, values in enumerate(squares.transpose(0, 1).cpu().numpy(), start=begin):
                policy, level = divmod(place, job.loss_levels.size - 1)
                losses[layer, :, policy, level] = values.mean(axis=-1)
                stderr[layer, :, policy, level] = [_stderr(each) for each in values]
        layer_done()
    return {"losses": losses, "loss_stderr": stderr}


def _by_unit(numbers: Tensor, heads: int) -> Tensor:
    """Rows of (n, n_predictions, n_query_heads, head_dim) by KV head or layer, float64.

    Returns
    -------
    Tensor, (heads, n, n_predictions * n_query_heads / heads * head_dim)
    """
    n, n_predictions, _, head_dim = numbers.shape
    split = numbers.double().view(n, n_predictions, heads, -1, head_dim)
    return split.permute(2, 0, 1, 3, 4).reshape(heads, n, -1)


def _kept_by_policy(probe: LossProbe, layer: int, job: Job) -> list[list[Tensor]]:
    """What each policy keeps of a layer at each level but the last."""
    context, levels = job.context_tokens, job.loss_levels[:-1].tolist()
    budgets = [probe.budget(level, context) for level in levels]
    return [probe.kept(layer, place, budgets) for place in range(1 + len(probe.policies))]


def _stderr(values: FloatArray) -> float:
    return float(values.std(ddof=1)) / values.size**0.5 if values.size > 1 else 0.0


def _variants(kept: list[list[Tensor]], job: Job) -> list[_Variant]:
    """What is run: each set of entries once, whichever policies and levels keep it."""
    places: dict[bytes, list[_Place]] = {}
    masks: dict[bytes, Tensor] = {}
    for policy, by_level in enumerate(kept):
        for level, keep in enumerate(by_level):
            for head, alone in _alone(keep, job):
                same = alone.cpu().numpy().tobytes()
                places.setdefault(same, []).append((head, policy, level))
                masks.setdefault(same, alone)
    return [(places[same], masks[same]) for same in masks]


def _alone(keep: Tensor, job: Job) -> Iterator[tuple[int, Tensor]]:
    """Each unit reduced alone: the layer, or one head after the other."""
    if job.loss_plan.level == "layer":
        yield 0, keep
        return
    for head in range(keep.shape[0]):
        alone = torch.ones_like(keep)
        alone[head] = keep[head]
        yield head, alone
