"""Where measuring a loss is worth its price: around the solutions that are still undecided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import pi, sqrt
from typing import Any

import numpy as np

from kvalloc.accounting import BoolArray, FloatArray, IntArray
from kvalloc.accounting.costs import stored_bytes
from kvalloc.engine.contract import Advance, Engine, Failed
from kvalloc.measure.checkpoint import Checkpoint
from kvalloc.measure.job import Job, Measured, Steps

OPERATING_SHARES = (0.1, 0.2, 0.5)
"""Shares of all entries around whose solutions figures are measured."""

ESTIMATE_ERROR = 0.5
"""Relative error that an estimate from one backward pass is believed to have."""


def choose_probes(
    losses: FloatArray,
    costs: IntArray,
    most: int,
    *,
    shares: Sequence[float] = OPERATING_SHARES,
) -> BoolArray:
    """The figures whose measurement is most likely to change what is chosen.

    At the price of a byte that a size stands for, every unit takes the option of the least loss
    and price together. An option that is worse by a gap g, with an uncertainty u of its loss, may
    turn out to be better: by ``u * (phi(g / u) - g / u * Q(g / u))`` on average, phi being the
    normal density and Q its upper tail. That is what measuring it may gain; the sum over the sizes
    ranks the figures. u is the standard error over the samples and `ESTIMATE_ERROR` of the loss.

    Parameters
    ----------
    losses : ndarray of float64, (n_samples, n_units, n_options)
        Estimates, nats per token.
    costs : ndarray of int64, (n_options,)
        Of each option; the largest one keeps everything as it is and is never measured.
    most : int
        How many figures.
    shares : sequence of float
        Sizes, as shares of keeping everything.

    Returns
    -------
    ndarray of bool, (n_units, n_options)
        At most `most` True.

    References
    ----------
    D. R. Jones, M. Schonlau and W. J. Welch, Efficient Global Optimization of Expensive Black-Box
    Functions (1998), Eq. 15: the expected improvement.
    """
    mean = losses.mean(axis=0)
    spread = losses.std(axis=0, ddof=1) / sqrt(losses.shape[0]) if losses.shape[0] > 1 else 0.0
    uncertain = np.sqrt(spread**2 + (ESTIMATE_ERROR * mean) ** 2)
    gain = np.zeros_like(mean)
    for share in shares:
        total = mean + _price(mean, costs, share) * costs
        gain += _expected_improvement(total - total.min(axis=1, keepdims=True), uncertain)
    gain[:, costs == costs.max()] = -1.0
    wanted = np.zeros(mean.shape, dtype=np.bool_)
    order = np.argsort(-gain, axis=None, kind="stable")[:most]
    wanted.flat[order] = gain.flat[order] > 0
    return wanted


def scaled_to_probes(estimates: FloatArray, probed: FloatArray, where: BoolArray) -> FloatArray:
    """Measured losses where there are some, and estimates scaled to them elsewhere.

    The factor of a curve is the mean measured over the mean estimated loss at its own probed
    levels, linear in between and constant beyond them; a curve without any takes that of all
    curves together.

    Parameters
    ----------
    estimates : ndarray of float64, (n_samples, n_curves, n_levels)
    probed : ndarray of float64, (n_samples, n_curves, n_levels)
        Measured losses; of no meaning where there are none.
    where : ndarray of bool, (n_curves, n_levels)
        Where there are some.

    Returns
    -------
    ndarray of float64, (n_samples, n_curves, n_levels)
    """
    estimated, measured = estimates.mean(axis=0), probed.mean(axis=0)
    whole = float(estimated[where].sum())
    common = max(0.0, float(measured[where].sum())) / whole if whole > 0 else 1.0
    levels = np.arange(where.shape[1])
    result = estimates.copy()
    for curve, own in enumerate(where):
        usable = own & (estimated[curve] > 0)
        factors = np.full(levels.size, common)
        if usable.any():
            at = levels[usable]
            ratio = np.maximum(measured[curve, at], 0.0) / estimated[curve, at]
            factors = np.interp(levels, at, ratio)
        result[:, curve] *= factors
        result[:, curve, own] = probed[:, curve, own]
    return result


def _price(mean: FloatArray, costs: IntArray, share: float) -> float:
    """What a byte costs, in nats, where the units take about a share of all bytes."""
    wanted = share * float(costs.max()) * mean.shape[0]
    low, high = 0.0, float(np.abs(mean).max()) + 1e-12
    for _ in range(60):
        price = (low + high) / 2
        taken = costs[np.argmin(mean + price * costs, axis=1)].sum()
        low, high = (price, high) if taken > wanted else (low, price)
    return high


def _expected_improvement(gap: FloatArray, uncertain: FloatArray) -> FloatArray:
    """What an option that is worse by a gap is better by on average, where it is better."""
    from scipy.special import ndtr  # only a job with probes needs SciPy

    away = np.divide(gap, uncertain, out=np.zeros_like(gap), where=uncertain > 0)
    found: FloatArray = np.exp(-(away**2) / 2) / sqrt(2 * pi) - away * ndtr(-away)
    return uncertain * np.maximum(found, 0.0)


def probed_samples(
    job: Job,
    engine: Engine,
    estimated: Mapping[int, Measured],
    kept: Checkpoint | None,
    steps: Steps,
) -> tuple[dict[int, Measured], BoolArray]:
    """Measure the undecided figures of every sample, and scale the estimates to them.

    Parameters
    ----------
    job : Job
        With `LossPlan.probes`.
    engine : Engine
    estimated : mapping of int to Measured
        With estimated losses, by sample.
    kept : Checkpoint or None
        Holds the second pass of sample i as sample ``n_samples + i``.
    steps : Steps
        Where what is done is counted.

    Returns
    -------
    samples : dict of int to Measured
    where : ndarray of bool, (n_layers, n_kv_heads or 1, n_kinds, n_levels)
        Which figures were measured.
    """
    plan, n_samples = job.loss_plan, len(job.samples.samples)
    assert plan.probes is not None  # only a job with probes comes here
    losses, stderr = _stacked(estimated)
    shape, full = losses.shape, list(job.shape.full_layers)
    # of each layer or head, all its policies, widths and levels compete
    options = losses[:, full].reshape(shape[0], len(full) * shape[2], -1)
    widths = [width for width, _ in job.loss_kinds]
    costs = stored_bytes(job.loss_levels, np.array(widths)[:, None], job.shape).ravel()
    chosen = choose_probes(options, costs, plan.probes)
    where = np.zeros(shape[1:], dtype=np.bool_)
    where[full] = chosen.reshape(len(full), *shape[2:])
    finished = {index: job.finished(kept, n_samples + index) for index in estimated}
    measured = {index: sample for index, sample in finished.items() if sample is not None}
    steps.advance(len(measured) * job.sample_steps)
    left = {index: (index, sample) for index, sample in estimated.items() if index not in measured}
    for index, found in engine.run(partial(_measure_where, job, where), left, steps.advance):
        if isinstance(found, Failed):  # the figures were chosen with its estimates
            raise found.error
        job.keep(kept, n_samples + index, found)
        measured[index] = found
    probed, errors = _stacked(dict(sorted(measured.items())))
    n_levels, curves = shape[-1], (shape[0], -1, shape[-1])
    scaled = scaled_to_probes(
        losses.reshape(curves), probed.reshape(curves), where.reshape(-1, n_levels)
    ).reshape(shape)
    ratio = np.divide(scaled, losses, out=np.ones(shape), where=losses > 0)
    errors = np.where(where, errors, stderr * ratio)
    return {
        index: sample | {"losses": own, "loss_stderr": error}
        for (index, sample), own, error in zip(estimated.items(), scaled, errors, strict=True)
    }, where


def _measure_where(
    job: Job, where: BoolArray, model: Any, sample: tuple[int, Measured], advance: Advance
) -> Measured:
    """The undecided figures of one sample that was estimated."""
    from kvalloc.measure.loss_curves import sample_losses  # loads torch

    index, estimated = sample
    measured = sample_losses(model, job, index, layer_done=lambda: None, only=where)
    advance(job.sample_steps)
    return estimated | measured


def _stacked(samples: Mapping[int, Measured]) -> list[FloatArray]:
    """Losses and errors, (n_samples, n_layers, n_kv_heads or 1, n_kinds, n_levels)."""
    return [np.stack([one[name] for one in samples.values()]) for name in ("losses", "loss_stderr")]
