"""Loss curves: what reducing one layer, or one KV head, does to the next-token distribution."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvalloc.runtime.selection import select_entries

if TYPE_CHECKING:
    from kvalloc.measure.loss_probe import LossProbe

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
LossLevel = Literal["layer", "head"]


_Variant = tuple[tuple[int, int], Tensor]
"""Where a loss belongs (KV head, level), and what is kept for it, ``(n_kv_heads, n_tokens)``."""


@dataclass(frozen=True, kw_only=True)
class LossJob:
    """What loss curves are measured for.

    Attributes
    ----------
    n_layers : int
        Of the model, sliding ones included.
    context_tokens : int
        Reference context.
    sinks, window : int
        First and last tokens that every budget includes.
    level : {"layer", "head"}
        What is reduced alone: a layer, all its KV heads alike, or one KV head.
    """

    n_layers: int
    context_tokens: int
    sinks: int
    window: int
    level: LossLevel = "layer"

    @property
    def protected_tokens(self) -> int:
        """Sinks and window."""
        return self.sinks + self.window


@dataclass(frozen=True, kw_only=True)
class MeasuredLosses:
    """Loss curves of one prompt.

    Attributes
    ----------
    losses : ndarray of float64, (n_layers, n_kv_heads or 1, n_levels)
        Mean over the continuation's predictions of KL(full cache || reduced cache), nats per
        token; 0 in sliding layers and at the last level, where nothing is hidden.
    stderr : ndarray of float64, (n_layers, n_kv_heads or 1, n_levels)
        Standard error of that mean.
    """

    losses: FloatArray
    stderr: FloatArray


def measure_losses(
    probe: LossProbe,
    levels: IntArray,
    job: LossJob,
    *,
    batch: int = 8,
    layer_done: Callable[[], None] = lambda: None,
) -> MeasuredLosses:
    """Reduce every unit alone to every level, and measure.

    Parameters
    ----------
    probe : LossProbe
        The prompt.
    levels : ndarray of int64, (n_levels,)
        Budgets at the reference context; a prompt of another length is reduced to the same
        shares of its evictable entries.
    job : LossJob
        What the figures are for.
    batch : int
        Variants that run together.
    layer_done : callable
        Called after each measured layer.

    Returns
    -------
    MeasuredLosses
    """
    measured = _nothing_lost(probe, levels, job)
    for layer, variants in _variants_by_layer(probe, levels, job):
        for begin in range(0, len(variants), batch):
            some = variants[begin : begin + batch]
            found = probe.losses(layer, torch.stack([keep for _, keep in some])).cpu().numpy()
            for (where, _), values in zip(some, found, strict=True):
                measured.losses[layer, *where] = values.mean()
                measured.stderr[layer, *where] = _stderr(values)
        layer_done()
    return measured


def estimate_losses(
    probe: LossProbe,
    levels: IntArray,
    job: LossJob,
    *,
    n_draws: int = 16,
    batch: int = 8,
    seed: int = 0,
    layer_done: Callable[[], None] = lambda: None,
) -> MeasuredLosses:
    """The same to second order, from one backward pass instead of a forward for each figure.

    Hiding entries moves the outputs of a unit's heads by a known ``d``. To second order
    ``KL = d' F d / 2`` with F the Fisher information of those outputs, and ``d' F d`` is the mean
    of ``(g' d)^2`` over gradients g of next tokens drawn from the model's own predictions. It is
    a local estimate: it overstates the loss of what flips an answer.

    Parameters
    ----------
    probe, levels, job, layer_done
        As in `measure_losses`.
    n_draws : int
        Draws of next tokens; the relative standard error falls with their square root.
    batch : int
        Variants that run together.
    seed : int
        Of the draws.

    Returns
    -------
    MeasuredLosses
        The standard errors are those of the draws.

    References
    ----------
    S. Amari, Natural Gradient Works Efficiently in Learning (1998): the Fisher information as
    the second-order term of the KL divergence. Its use for cache budgets is ours.
    """
    estimated = _nothing_lost(probe, levels, job)
    gradients = probe.sensitivities(n_draws, seed=seed)
    for layer, variants in _variants_by_layer(probe, levels, job):
        whole = probe.outputs(layer, None)
        slopes = gradients[layer].double().flatten(1)
        n_predictions = whole.shape[1]
        for begin in range(0, len(variants), batch):
            some = variants[begin : begin + batch]
            shifts = probe.outputs(layer, torch.stack([keep for _, keep in some])) - whole
            squares = (shifts.double().flatten(1) @ slopes.T) ** 2 / (2 * n_predictions)
            for (where, _), values in zip(some, squares.cpu().numpy(), strict=True):
                estimated.losses[layer, *where] = values.mean()
                estimated.stderr[layer, *where] = _stderr(values)
        layer_done()
    return estimated


def _nothing_lost(probe: LossProbe, levels: IntArray, job: LossJob) -> MeasuredLosses:
    n_kv_heads = next(iter(probe.scores.values())).shape[0]
    shape = (job.n_layers, n_kv_heads if job.level == "head" else 1, levels.size)
    return MeasuredLosses(losses=np.zeros(shape), stderr=np.zeros(shape))


def _variants_by_layer(
    probe: LossProbe, levels: IntArray, job: LossJob
) -> Iterator[tuple[int, list[_Variant]]]:
    kept = _tokens_of_prompt(levels[:-1], job.context_tokens, probe.n_tokens, job.protected_tokens)
    for layer, scores in sorted(probe.scores.items()):
        yield layer, list(_variants(scores, kept, job))


def _stderr(values: FloatArray) -> float:
    return float(values.std(ddof=1)) / values.size**0.5 if values.size > 1 else 0.0


def _tokens_of_prompt(
    levels: IntArray, context_tokens: int, n_tokens: int, protected_tokens: int
) -> list[int]:
    share = (levels - protected_tokens) / (context_tokens - protected_tokens)
    evictable = max(0, n_tokens - protected_tokens)
    return [min(n_tokens, protected_tokens + round(float(s) * evictable)) for s in share]


def _variants(scores: Tensor, kept: list[int], job: LossJob) -> Iterator[_Variant]:
    for index, budget in enumerate(kept):
        best = select_entries(scores[None], budget, sinks=job.sinks, window=job.window)[0]
        keep = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
        keep.scatter_(1, best, True)
        if job.level == "layer":
            yield (0, index), keep
            continue
        for head in range(scores.shape[0]):
            alone = torch.ones_like(keep)
            alone[head] = keep[head]
            yield (head, index), alone
