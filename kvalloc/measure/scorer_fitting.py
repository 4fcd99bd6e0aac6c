"""Fitting of the scorer ``surrogate``: ridge regression over streamed normal equations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Self, TypedDict

import numpy as np

from kvalloc.accounting import FloatArray
from kvalloc.engine.contract import MEASURED_WITH, Advance, Engine
from kvalloc.errors import InputError, option
from kvalloc.files import provenance
from kvalloc.formats.fitted import FittedSurrogate
from kvalloc.measure.checkpoint import Checkpoint
from kvalloc.measure.curves import check_finite
from kvalloc.measure.job import Steps, measured_samples
from kvalloc.measure.mini_prefill import mini_prefill
from kvalloc.measure.sampling import Sample, SampleSet
from kvalloc.models.attention import probe_of
from kvalloc.models.structure import input_device
from kvalloc.scorers.later_pass import LaterStep
from kvalloc.scorers.lookahead import latest_votes
from kvalloc.scorers.reconstruction import Reconstruction
from kvalloc.shape import ModelShape
from kvalloc.units import Option

if TYPE_CHECKING:
    from kvalloc.models.attention import AttentionStates

RIDGES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Candidates; the best predictor of the other half is taken."""

SINKS = 4
"""First tokens of a prompt, which are never evicted, and not learnt from."""

LEAST_SCORE = 1e-6
"""Smaller attention counts as this, so that its log does not dominate."""

PIECE = 256
"""Tokens of the second copy in one forward, as in the default; 2,048 lose twice as much."""

TARGET = Reconstruction(chunk=PIECE)
"""The fitted scorer."""


@dataclass(frozen=True, kw_only=True)
class NormalEquations:
    """Normal equations of rows ``(x, y)``, for several problems.

    Attributes
    ----------
    moments : ndarray of float64, (..., n_features + 2, n_features + 2)
        Sum of outer products of ``(x, y, 1)``.
    """

    moments: FloatArray

    @classmethod
    def of(cls, rows: FloatArray, targets: FloatArray) -> Self:
        """Return sums of rows, (..., n_rows, n_features), and targets, (..., n_rows)."""
        ones = np.ones_like(targets, dtype=np.float64)
        joined = np.concatenate(
            [np.asarray(rows, dtype=np.float64), targets[..., None], ones[..., None]], axis=-1
        )
        return cls(moments=np.swapaxes(joined, -1, -2) @ joined)

    def __add__(self, other: Self) -> Self:
        return replace(self, moments=self.moments + other.moments)

    def fit(self, ridge: float) -> FloatArray:
        """Return the weights that predict the target, the constant last, (..., n_features + 1).

        ``(C + ridge I) w = c`` with the correlations C of the features and c with the target. A
        constant feature gets weight 0.
        """
        means = self.moments[..., -1, :-1] / self.moments[..., -1, -1:]
        rows = self.moments[..., -1, -1][..., None, None]
        covariance = self.moments[..., :-1, :-1] / rows - means[..., :, None] * means[..., None, :]
        variance = np.diagonal(covariance, axis1=-2, axis2=-1)
        squares = np.diagonal(self.moments[..., :-1, :-1] / rows, axis1=-2, axis2=-1)
        # below this, a variance is what float64 leaves of a constant
        changes = variance > 1e-12 * squares
        scale = np.sqrt(np.where(changes, variance, 1.0)) / np.where(changes, 1.0, np.inf)
        inverse = np.divide(1.0, scale, out=np.zeros_like(scale), where=scale > 0)
        scaled = covariance * inverse[..., :, None] * inverse[..., None, :]
        matrix = scaled[..., :-1, :-1] + ridge * np.eye(scaled.shape[-1] - 1)
        solved = np.linalg.solve(matrix, scaled[..., :-1, -1:])[..., 0]
        weights = solved * inverse[..., :-1] * scale[..., -1:]
        constant = means[..., -1] - (weights * means[..., :-1]).sum(axis=-1)
        return np.concatenate([weights, constant[..., None]], axis=-1)

    def r_squared(self, weights: FloatArray) -> FloatArray:
        """Return the share of the targets' variance that weights explain; 0 for constant ones."""
        signed = np.concatenate(
            [weights[..., :-1], -np.ones_like(weights[..., :1]), weights[..., -1:]], axis=-1
        )
        residual = (signed[..., None, :] @ self.moments @ signed[..., :, None])[..., 0, 0]
        rows, total = self.moments[..., -1, -1], self.moments[..., -1, -2]
        variance = self.moments[..., -2, -2] - total**2 / rows
        unexplained = np.zeros_like(residual)
        np.divide(residual, variance, out=unexplained, where=variance > 0)
        return np.where(variance > 0, 1.0 - unexplained, 0.0)


class FitOptions(TypedDict, total=False):
    """Settings of a surrogate, beside model and text."""

    samples: Annotated[int | None, Option("N", "On which text or prompts")]
    """Prompts to fit on, at least 2; by default a tenth of the text's samples."""

    context: int
    """Longest prompt in tokens, 1024 by default; each is read twice."""

    seed: int
    """Seed of the choice of samples; 0 by default."""


def fit_surrogate(
    shape: ModelShape,
    samples: SampleSet,
    context: int,
    engine: Engine,
    kept: Checkpoint | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> FittedSurrogate:
    """Fit the scorer ``surrogate``, which predicts a second read's attention from one.

    Each sample, at most `context` tokens, is written twice and read once. The target is the log of
    the largest attention to a token from the second copy, by KV head. A reduced cache's losses give
    the last queries' weight.

    Returns
    -------
    FittedSurrogate
        Without failed samples, as in `kvalloc.profile`.

    Raises
    ------
    InputError
        If there are fewer than 2 samples or too little text, two reads are beyond the model's
        limit, or all samples of a half fail.
    UnsupportedModelError
        If attention or its rotation of keys cannot be seen.

    References
    ----------
    KVzap (NVIDIA, 2026, arXiv 2601.07891); see `kvalloc.scorers.surrogate.Surrogate`.
    """
    _check_samples(shape, samples, context)
    n_samples, layers = len(samples.samples), len(shape.full_layers)
    steps = Steps(n_samples * layers, progress)
    work = partial(_sample_sums, shape, samples.samples)
    sums, failed = measured_samples(
        engine, work, range(n_samples), kept, steps, sample_steps=layers
    )
    halves: dict[bool, NormalEquations] = {}
    for index, arrays in sums.items():
        half = 2 * index >= n_samples  # neighbours in the text are in the same half
        moments = NormalEquations(moments=arrays["moments"])
        halves[half] = halves[half] + moments if half in halves else moments
    if len(halves) < 2:  # then a sample failed, as there are two at least
        raise failed[min(failed)].of_every_sample(shape.model_id)
    first, second = halves[False], halves[True]
    explained = {
        ridge: (second.r_squared(first.fit(ridge)) + first.r_squared(second.fit(ridge))) / 2
        for ridge in RIDGES
    }
    ridge = max(RIDGES, key=lambda one: float(explained[one].mean()))
    votes_weight, votes_ratio = best_weight(np.stack([one["vote_losses"] for one in sums.values()]))
    return FittedSurrogate(
        shape=shape,
        target=TARGET.name,
        target_parameters=TARGET.parameters(),
        context_tokens=context,
        samples=len(sums),
        sinks=SINKS,
        ridge=ridge,
        weights=(first + second).fit(ridge),
        r_squared=explained[ridge].mean(axis=1),
        votes_weight=votes_weight,
        votes_ratio=votes_ratio,
        text_digest=samples.digest(),
        text_description=samples.description,
        set_aside=samples.set_aside(failed),
        **provenance(*MEASURED_WITH),
    )


def _check_samples(shape: ModelShape, samples: SampleSet, context: int) -> None:
    limit = shape.max_context_tokens
    if limit is not None and 2 * context > limit:
        raise InputError(
            f"prompts of {context:,} tokens are read twice, which is beyond the {limit:,} "
            f"tokens that {shape.model_id} was made for; choose "
            f"{option('context', limit // 2)} or less"
        )
    if len(samples.samples) < 2:
        raise InputError(
            "a surrogate is fitted on at least 2 samples, one half for the test of the other; "
            f"give more text, or {option('samples', 16)}"
        )
    n_weights = 2 * shape.head_dim + shape.head_dim // 2 + 3
    n_tokens = sum(one.token_ids.size - SINKS for one in samples.samples)
    if n_tokens < 2 * n_weights:
        raise InputError(
            f"the samples have {n_tokens:,} tokens, and to fit {n_weights} weights a head on each "
            f"half of them takes {2 * n_weights:,}; give more text, more samples or a longer "
            f"{option('context')}"
        )


def _sample_sums(
    shape: ModelShape, samples: Sequence[Sample], model: Any, index: int, advance: Advance
) -> dict[str, Any]:
    features, targets = _rows(model, shape, samples[index], f"sample {index}", advance)
    losses = vote_losses(model, shape, samples[index], targets, SINKS)
    return {"moments": NormalEquations.of(features, targets).moments, "vote_losses": losses}


def _rows(
    model: Any, shape: ModelShape, sample: Sample, where: str, advance: Advance
) -> tuple[FloatArray, FloatArray]:
    """Return features and log scores, (n_full_layers, n_kv_heads, n_tokens, ...)."""
    import torch

    from kvalloc.scorers.surrogate import entry_features

    ids = torch.from_numpy(sample.token_ids)
    n_tokens, rows = ids.numel(), slice(SINKS, ids.numel())
    first = torch.arange(n_tokens, device="cpu")
    features: list[FloatArray] = []
    targets: list[FloatArray] = []

    def look(states: AttentionStates) -> None:
        keys, values = (one[:, :, :n_tokens] for one in (states.keys, states.values))
        observed = None
        for begin in range(0, n_tokens, PIECE):
            repeated = first[begin : begin + PIECE]
            second_copy = slice(n_tokens + begin, n_tokens + begin + repeated.numel())
            second = replace(
                states,
                queries=states.queries[:, :, second_copy],
                keys=torch.cat([keys, states.keys[:, :, second_copy]], dim=2),
                observed=observed,
            )
            leading = first[:SINKS] if begin else None
            step = LaterStep(n_prompt=n_tokens, repeated=repeated, leading=leading)
            observed = TARGET.observe_later(second, step, sinks=SINKS)
        assert observed is not None
        assert observed.columns is not None  # `observe_later` made it
        score = observed.columns.view(shape.n_kv_heads, -1, n_tokens).amax(dim=1)[:, rows]
        prompt = replace(states, keys=keys, values=values)
        targets.append(score.clamp_(min=LEAST_SCORE).log_().cpu().numpy())
        features.append(entry_features(prompt)[0, :, rows].cpu().numpy())
        what = f"the keys, values or scores of {shape.model_id} in layer {states.layer}, {where}"
        check_finite(what, targets[-1], features[-1])
        advance(1)

    device = input_device(model)
    twice = torch.cat([ids, ids])[None].to(device)
    mini_prefill(model, twice, look, layers=shape.full_layers)
    return np.stack(features), np.stack(targets)


WEIGHTS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0)
"""Candidates; 0 ignores the last queries."""

WINDOW = 8
"""Last tokens of the prompt, which are never evicted."""

KEPT = 0.3
"""Share of the evictable entries that stay."""

CONTINUATION = 24
"""Largest number of tokens of a loss; the last ones of a sample without an answer."""

LEAST_LOSS = 1e-4
"""Nats per token below which two losses count as equal."""


def vote_losses(
    model: Any, shape: ModelShape, sample: Sample, logs: FloatArray, sinks: int
) -> FloatArray:
    """Return a sample's losses by weight of the last queries, nats per token, (n_weights,).

    Entries with the largest scores stay: a second read's attention, or the last queries' weighted
    attention.
    `logs` are of a second read's scores, (n_full_layers, n_kv_heads, n_tokens - sinks).
    """
    import torch

    from kvalloc.measure.loss_probe import LossProbe
    from kvalloc.runtime.policies.score import Score

    if sample.answer_ids is None:
        end = max(sample.token_ids.size - CONTINUATION, sinks + 1)
        sample = replace(
            sample, token_ids=sample.token_ids[:end], answer_ids=sample.token_ids[end:]
        )
    voting = latest_votes(window=WINDOW, rotates=probe_of(model).moves_queries)
    policy = Score(scorer=voting)
    probe = LossProbe(
        model, sample, policy, sinks=sinks, shape=shape, continuation_tokens=CONTINUATION
    )
    votes = torch.stack([probe.scores[layer] for layer in shape.full_layers])
    free = slice(sinks, max(probe.n_tokens - WINDOW, sinks))
    read = torch.from_numpy(np.exp(logs)).to(votes)[..., : free.stop - sinks]
    weights = torch.tensor(WEIGHTS, device=votes.device).view(-1, 1, 1, 1)
    scores = torch.maximum(read, weights * votes[..., free])
    keep = torch.ones(len(WEIGHTS), *votes.shape, dtype=torch.bool, device=votes.device)
    if n_kept := round(KEPT * read.numel()):
        ranked = scores.flatten(1).topk(n_kept, sorted=False).values
        keep[..., free] = scores >= ranked.amin(dim=1).view(-1, 1, 1, 1)
    kls = probe.joint_losses(dict(zip(shape.full_layers, keep.unbind(1), strict=True)))
    losses: FloatArray = kls.mean(dim=1).cpu().numpy()
    return losses


def best_weight(losses: FloatArray) -> tuple[float, float]:
    """Return the weight of the last queries, and the ratio of its loss to the loss without them.

    It is the smallest weight surely better than none and not surely worse than the best; else 0 and
    1. Surely means by over the standard error of the mean log ratio. Losses are (n_samples,
    n_weights).
    """
    logs = np.log(np.maximum(losses, LEAST_LOSS))
    excess = logs - logs[:, [int(logs.mean(axis=0).argmin())]]
    surely_larger = excess.mean(axis=0) > _standard_error(excess)
    gains = logs - logs[:, :1]
    surely_helps = gains.mean(axis=0) < -_standard_error(gains)
    places = np.flatnonzero(surely_helps & ~surely_larger)
    if not places.size:
        return 0.0, 1.0
    return WEIGHTS[places[0]], float(np.exp(gains[:, places[0]].mean()))


def _standard_error(ratios: FloatArray) -> FloatArray:
    error: FloatArray = ratios.std(axis=0) / np.sqrt(len(ratios))
    return error
