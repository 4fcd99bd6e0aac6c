"""The votes' weight: losses against the model's own attention with entries hidden; the choice."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import WordTokenizer, tiny_model, words

from kvalloc.measure.kl import divergence
from kvalloc.measure.sampling import choose_samples
from kvalloc.measure.vote_weights import (
    CONTINUATION,
    KEPT,
    WEIGHTS,
    WINDOW,
    best_weight,
    vote_losses,
)
from kvalloc.models.attention import intercept_attention
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
    votes = []

    def look(states, compute):
        votes.append(latest_votes(window=WINDOW, rotates=True).score(states, sinks=SINKS)[0])
        return compute(states.mask)

    with torch.no_grad(), intercept_attention(model, look):
        model(ids[:, :n_prompt], use_cache=False)
    read = np.exp(logs[..., : n_prompt - WINDOW - SINKS])
    found = vote_losses(model, shape, sample, logs, SINKS)
    with torch.no_grad():
        full = model(ids, use_cache=False).logits[0, n_prompt:]
    for weight, loss in zip(WEIGHTS, found, strict=True):
        voted = weight * torch.stack(votes).numpy()[..., SINKS : n_prompt - WINDOW]
        scores = np.maximum(read, voted).ravel()
        hidden = np.ones(scores.size, dtype=bool)
        hidden[np.argsort(-scores)[: round(KEPT * scores.size)]] = False
        hidden = torch.from_numpy(hidden.reshape(read.shape))

        def hide(states, compute, hidden=hidden):
            mask = states.mask.expand(-1, states.queries.shape[1], -1, -1).clone()
            group = states.queries.shape[1] // states.keys.shape[1]
            columns = hidden[states.layer].repeat_interleave(group, dim=0)[None, :, None]
            part = mask[:, :, n_prompt:, SINKS : n_prompt - WINDOW]
            part.masked_fill_(columns, torch.finfo(mask.dtype).min)
            return compute(mask)

        with torch.no_grad(), intercept_attention(model, hide):
            reduced = model(ids, use_cache=False).logits[0, n_prompt:]
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
