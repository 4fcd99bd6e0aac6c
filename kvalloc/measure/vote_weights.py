"""The weight of a prompt's last queries beside a second read, if their attention helps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvalloc.accounting import FloatArray
from kvalloc.models.attention import probe_of
from kvalloc.scorers.lookahead import latest_votes

if TYPE_CHECKING:
    from kvalloc.measure.sampling import Sample
    from kvalloc.shape import ModelShape

WEIGHTS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0)
"""Candidates, 0 for no use of the last queries."""

WINDOW = 8
"""Last tokens of the prompt, which are never evicted."""

KEPT = 0.3
"""Share of the evictable entries that stay."""

CONTINUATION = 24
"""Tokens on which a loss is measured, at most; the last ones of a sample without an answer."""

LEAST_LOSS = 1e-4
"""Nats per token below which two losses count as equal."""


def vote_losses(
    model: Any, shape: ModelShape, sample: Sample, logs: FloatArray, sinks: int
) -> FloatArray:
    """Return the loss of a sample's reduced cache at each weight of the last queries.

    The entries with the largest scores of all heads stay. A score is the larger of a second read's
    attention and of the weighted attention of the last queries.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    shape : ModelShape
    sample : Sample
        Its answer is the continuation; without one its last tokens are.
    logs : ndarray, (n_full_layers, n_kv_heads, n_tokens - sinks)
        Log of the score of a second read.
    sinks : int
        First tokens, which stay.

    Returns
    -------
    ndarray of float64, (n_weights,)
        KL(full cache || reduced cache), mean over the continuation, nats per token.
    """
    import torch

    from kvalloc.measure.loss_probe import LossProbe

    if sample.answer_ids is None:
        end = max(sample.token_ids.size - CONTINUATION, sinks + 1)
        sample = replace(
            sample, token_ids=sample.token_ids[:end], answer_ids=sample.token_ids[end:]
        )
    voting = latest_votes(window=WINDOW, rotates=probe_of(model).moves_queries)
    probe = LossProbe(
        model, sample, voting, sinks=sinks, shape=shape, continuation_tokens=CONTINUATION
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

    It is the smallest weight with a loss that is not surely larger than the best one's, if it is
    surely smaller than without them. Surely is by more than the standard error of the mean log
    ratio over the samples.

    Parameters
    ----------
    losses : ndarray, (n_samples, n_weights)
        As `vote_losses` gives them.

    Returns
    -------
    tuple of float
        0 and 1 if they do not help.
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
    """Return the standard error of the mean over the samples, ``(n_weights,)``."""
    error: FloatArray = ratios.std(axis=0) / np.sqrt(len(ratios))
    return error
