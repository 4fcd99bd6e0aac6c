"""The second pass of adaptive losses: measure where estimates leave the solution undecided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kvalloc.accounting import BoolArray, FloatArray
from kvalloc.errors import InputError
from kvalloc.measure.checkpoint import Checkpoint, MeasuredSample
from kvalloc.measure.job import Job
from kvalloc.measure.probing import choose_probes, scaled_to_probes


def probed_samples(
    job: Job,
    estimated: list[MeasuredSample],
    kept: Checkpoint | None,
    sample_done: Callable[[int], None],
) -> tuple[list[MeasuredSample], BoolArray]:
    """Measure the undecided figures of every sample, and scale the estimates to them.

    Parameters
    ----------
    job : Job
        With `LossPlan.probes`.
    estimated : list of MeasuredSample
        With estimated losses.
    kept : Checkpoint or None
        Holds the second pass of sample i as sample ``n_samples + i``.
    sample_done : callable
        Called with the number of samples done.

    Returns
    -------
    samples : list of MeasuredSample
    where : ndarray of bool, (n_layers, n_kv_heads or 1, 1 + n_policies, n_levels)
        Which figures were measured.
    """
    losses, stderr = _stacked(estimated, "loss"), _stacked(estimated, "stderr")
    where = _chosen(job, losses)
    measured = []
    for index, sample in enumerate(estimated):
        measured.append(_measured(job, index, sample, where, kept))
        sample_done(index + 1)
    n_levels, shape = losses.shape[-1], losses.shape
    curves = (len(estimated), -1, n_levels)
    probed, errors = _stacked(measured, "loss"), _stacked(measured, "stderr")
    scaled = scaled_to_probes(
        losses.reshape(curves), probed.reshape(curves), where.reshape(-1, n_levels)
    ).reshape(shape)
    ratio = np.divide(scaled, losses, out=np.ones(shape), where=losses > 0)
    errors = np.where(where, errors, stderr * ratio)
    return [
        _with(sample, *pair) for sample, *pair in zip(estimated, scaled, errors, strict=True)
    ], where


def _chosen(job: Job, losses: FloatArray) -> BoolArray:
    """Which figures to measure: of each layer or head, all its policies and levels compete."""
    assert job.losses is not None  # the caller has looked
    assert job.losses.probes is not None
    assert job.loss_levels is not None
    full, shape = list(job.shape.full_layers), losses.shape
    options = losses[:, full].reshape(shape[0], len(full) * shape[2], -1)
    tokens = np.tile(job.loss_levels, shape[3])
    found = choose_probes(options, tokens, job.losses.probes)
    where = np.zeros(shape[1:], dtype=np.bool_)
    where[full] = found.reshape(len(full), *shape[2:])
    return where


def _measured(
    job: Job, index: int, sample: MeasuredSample, where: BoolArray, kept: Checkpoint | None
) -> MeasuredSample:
    """One sample's measured figures, from the checkpoint where they are there."""
    place = len(job.samples.token_ids) + index
    done = None if kept is None else kept.load(place, job.curves_shape, len(job.shared_runs))
    if done is not None and job.has_all(done):
        return done
    assert job.losses is not None  # the caller has looked
    try:
        found = job.losses.measure(
            job.model,
            job.shape,
            job.scorer,
            job.samples.token_ids[index],
            job.samples.answer_ids[index],
            context_tokens=job.context_tokens,
            sinks=job.sinks,
            layer_done=lambda: None,
            only=where,
            question_ids=job.samples.question_ids[index],
        )
    except InputError as error:
        raise InputError(f"sample {index}: {error}") from error
    done = replace(
        sample,
        losses=found.losses,
        loss_stderr=found.stderr,
        other_losses=found.other_losses,
        other_loss_stderr=found.other_stderr,
    )
    if kept is not None:
        kept.save(place, done)
    return done


def _stacked(samples: list[MeasuredSample], kind: str) -> FloatArray:
    """Losses or errors, (n_samples, n_layers, n_kv_heads or 1, 1 + n_policies, n_levels)."""
    own, others = {
        "loss": ("losses", "other_losses"),
        "stderr": ("loss_stderr", "other_loss_stderr"),
    }[kind]
    rows = []
    for sample in samples:
        first = getattr(sample, own)[:, :, None]
        more = getattr(sample, others)
        rows.append(first if more is None else np.concatenate([first, more], axis=2))
    return np.stack(rows)


def _with(sample: MeasuredSample, losses: FloatArray, stderr: FloatArray) -> MeasuredSample:
    several = losses.shape[2] > 1
    return replace(
        sample,
        losses=losses[:, :, 0],
        loss_stderr=stderr[:, :, 0],
        other_losses=losses[:, :, 1:] if several else None,
        other_loss_stderr=stderr[:, :, 1:] if several else None,
    )
