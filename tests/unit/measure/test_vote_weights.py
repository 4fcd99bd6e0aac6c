"""The votes' weight: losses against the model's own attention with entries hidden; the choice."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from prompt_runs import states_seen
from runtime_oracle import logits_after
from tiny_models import WordTokenizer, tiny_model, words

from kvalloc.measure.kl import divergence
from kvalloc.measure.sampling import choose_samples
from kvalloc.measure.scorer_fitting import (
    CONTINUATION,
    KEPT,
    WEIGHTS,
    WINDOW,
    best_weight,
    vote_losses,
)
from kvalloc.models.loading import shape_of
from kvalloc.scorers.lookahead import latest_votes

SINKS = 4


@pytest.mark.parametrize("answer", [None, np.arange(5, 12)])
def test_losses_are_those_of_the_model_with_entries_hidden(answer):
    """The best entries of all heads stay, by numbers put in order; the rest is masked."""
    model = tiny_model(attention="eager")
    shape = shape_of(model)
    (sample,) = choose_samples(
        [words(400)], WordTokenizer(), context_tokens=80, least_tokens=8, samples=1
    ).samples
    sample = replace(sample, answer_ids=answer)
    n_prompt = 80 if answer is not None else 80 - CONTINUATION
    following = sample.token_ids[n_prompt:] if answer is None else answer
    ids = torch.from_numpy(np.concatenate([sample.token_ids[:n_prompt], following]))[None]
    logs = np.random.default_rng(0).normal(-4, 2, (3, 2, 80 - SINKS)).astype(np.float32)
    voter = latest_votes(window=WINDOW, rotates=True)
    seen = states_seen(model, ids[:, :n_prompt]).values()
    votes = torch.cat([voter.score(states, sinks=SINKS) for states in seen]).numpy()
    read = np.exp(logs[..., : n_prompt - WINDOW - SINKS])
    found = vote_losses(model, shape, sample, logs, SINKS)
    parts = ids[:, :n_prompt], ids[:, n_prompt:]
    full = logits_after(model, *parts, {})[0]
    for weight, loss in zip(WEIGHTS, found, strict=True):
        voted = weight * votes[..., SINKS : n_prompt - WINDOW]
        scores = np.maximum(read, voted).ravel()
        hidden = np.ones(scores.size, dtype=bool)
        hidden[np.argsort(-scores)[: round(KEPT * scores.size)]] = False
        shown = torch.ones(3, 1, 2, n_prompt, dtype=torch.bool)
        shown[:, 0, :, SINKS : n_prompt - WINDOW] = ~torch.from_numpy(hidden.reshape(read.shape))
        reduced = logits_after(model, *parts, dict(enumerate(shown)))[0]
        assert loss == pytest.approx(divergence(full, reduced).kl, rel=1e-3, abs=1e-7)
    assert len(set(np.round(found, 9))) > 2


def test_a_sample_of_few_tokens_keeps_all():
    model = tiny_model()
    (sample,) = choose_samples(
        [words(20)], WordTokenizer(), context_tokens=8, least_tokens=6, samples=1
    ).samples
    losses = vote_losses(model, shape_of(model), sample, np.zeros((3, 2, 4), np.float32), SINKS)
    np.testing.assert_allclose(losses, 0, atol=1e-6)


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ([[1, 0.9, 0.5, 0.25, 0.5, 3]] * 4, (WEIGHTS[3], 0.25)),
        ([[1, 0.9, 0.51, 0.5, 0.5, 3], [1, 0.9, 0.48, 0.5, 0.51, 3]], (WEIGHTS[2], 0.4948)),
        ([[1, 1.1, 1.2, 2, 3, 4]] * 4, (0, 1)),  # they harm
        ([[1, 0.5, 1, 1, 1, 1], [1, 1.8, 2, 2, 2, 2]], (0, 1)),  # they may help
        ([[1] * 6] * 3, (0, 1)),
    ],
)
def test_votes_count_where_they_surely_help(factors, expected):
    losses = np.array(factors) * np.linspace(0.01, 0.1, len(factors))[:, None]
    assert best_weight(losses) == pytest.approx(expected, rel=1e-4)
    assert best_weight(np.zeros_like(losses)) == (0, 1)
