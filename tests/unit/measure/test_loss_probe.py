"""The loss probe against whole forwards with the hidden entries masked."""

import numpy as np
import pytest
import torch
from factories import make_budget_profile
from named_models import named_model
from runtime_oracle import logits_after
from tiny_models import VOCABULARY, tiny_model

from kvalloc.errors import InputError
from kvalloc.measure import loss_curves
from kvalloc.measure.cache_loss import CacheLosses
from kvalloc.measure.job import Job, LossPlan
from kvalloc.measure.loss_curves import estimate_losses, measure_losses
from kvalloc.measure.loss_probe import LossProbe
from kvalloc.measure.sampling import Sample
from kvalloc.models.loading import shape_of
from kvalloc.runtime.policies.score import Score
from kvalloc.scorers import get_scorer

SINKS, WINDOW, SHARES = 2, 4, (0.0, 0.2, 0.6)
SCORER = get_scorer("snapkv", window=WINDOW, pool=3, pooling="max")
QUESTION, ANSWER = torch.tensor([11, 4, 7, 9, 30]), torch.tensor([5, 9, 17, 3])
FULL_LAYERS = {"llama": (0, 1, 2), "qwen3": (0, 1, 2), "gemma3": (1,)}


def make_probe(
    kind="llama", *, n_tokens=40, answer=None, question=None, make=tiny_model, **options
):
    model = make(kind, **options)
    ids = torch.randint(2, VOCABULARY, (n_tokens,), generator=torch.Generator().manual_seed(1))
    answer, question = (None if one is None else one.numpy() for one in (answer, question))
    sample = Sample(token_ids=ids.numpy(), answer_ids=answer, question_ids=question)
    more = {"continuation_tokens": 6, "shape": shape_of(model)}
    return model, ids, LossProbe(model, sample, Score(scorer=SCORER), sinks=SINKS, **more)


def job(level, *shares, bits=()):
    """Levels at some shares of a context of 40 tokens."""
    rest = {"samples": None, "shape": shape_of(tiny_model()), "bits": bits}
    plan = LossPlan(shares=shares, level=level)
    return Job(scorer=SCORER, sinks=SINKS, context_tokens=40, losses=plan, **rest)


def log_likely(model, ids, following, kept):
    """Log-probabilities at tokens after a prompt of which some layers keep only these entries."""
    kept = {layer: keep[None] for layer, keep in kept.items()}
    logits = logits_after(model, ids[None], following[None], kept)[0]
    return logits.double().log_softmax(-1)


ASKED = {"question": QUESTION, "answer": ANSWER}


def kl_of(full, reduced):
    return (full.exp() * (full - reduced)).sum(-1)


@pytest.mark.parametrize(
    ("kind", "asked"),
    [("llama", {}), ("qwen3", {}), ("gemma3", {}), ("llama", ASKED), ("gemma3", ASKED)],
)
def test_loss_equals_that_of_a_masked_forward(kind, asked):
    """A question is read, and only what follows it counts."""
    model, ids, probe = make_probe(kind, **asked)
    if asked:
        assert probe.continuation_ids.tolist() == [*QUESTION.tolist(), *ANSWER.tolist()]
        assert (probe.n_tokens, probe.n_measured) == (ids.numel(), 1 + ANSWER.numel())
    generator = torch.Generator().manual_seed(5)
    for layer in FULL_LAYERS[kind]:
        keep = torch.rand(3, 2, ids.numel(), generator=generator) < 0.4
        full = log_likely(model, ids, probe.continuation_ids, {})
        for found, kept in zip(probe.losses(layer, keep), keep, strict=True):
            reduced = log_likely(model, ids, probe.continuation_ids, {layer: kept})
            expected = kl_of(full, reduced)[-probe.n_measured :]
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)
            assert float(expected.max()) > 1e-3  # something was at stake


@pytest.mark.parametrize("name", ["bamba", "ctrl", "longcat_flash", "zamba2", "zaya"])
def test_a_forward_that_begins_at_a_layer_loses_what_a_whole_one_loses(name):
    """Layers may return or read more than hidden states, write to them, or attend twice."""
    model, ids, probe = make_probe(name, make=named_model)
    for layer, entries in probe.scores.items():
        keep = torch.rand(2, *entries.shape, generator=torch.Generator().manual_seed(5)) < 0.2
        found = probe.losses(layer, keep)
        torch.testing.assert_close(found, probe.joint_losses({layer: keep}), rtol=1e-3, atol=1e-6)
        assert float(found.max()) > 1e-5


def head_profile(model, context, budgets, bits=None):
    how = {"shape": shape_of(model), "policy": SCORER.policy(SINKS)}
    return make_budget_profile(budgets, context_tokens=context, bits=bits, **how)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("asked", [False, True])
def test_the_loss_of_a_whole_cache_is_that_of_a_masked_forward(kind, asked):
    question, answer = (QUESTION, ANSWER) if asked else (None, None)
    model, ids, probe = make_probe(kind, question=question, answer=answer)
    full, budgets = FULL_LAYERS[kind], np.full((3, 2), 16)
    budgets[list(full)] = [[9, 30], [20, 7], [8, 11]][: len(full)]
    kept = {
        layer: torch.stack([probe.kept(layer, [int(n)])[0][h] for h, n in enumerate(row)])
        for layer, row in zip(full, budgets[list(full)], strict=True)
    }
    whole, reduced = (log_likely(model, ids, probe.continuation_ids, some) for some in ({}, kept))
    expected = kl_of(whole, reduced)[-probe.n_measured :]
    given = {"question_ids": QUESTION.numpy(), "answer_ids": ANSWER.numpy()} if asked else {}
    losses = CacheLosses(model, [Sample(token_ids=ids.numpy(), **given)], continuation_tokens=6)
    for _ in range(2):  # the full cache's predictions are those of the first call
        found = losses.loss(0, head_profile(model, 40, budgets))
        assert found == pytest.approx(float(expected.mean()), rel=1e-3)
    assert found > 1e-3
    assert losses.loss(0, head_profile(model, 40, np.where(budgets == 16, 16, 40))) == 0


def test_a_model_that_says_nothing_has_no_loss():
    model, ids, _ = make_probe()
    model.generation_config.eos_token_id = list(range(VOCABULARY))
    losses = CacheLosses(model, [Sample(token_ids=ids.numpy(), name="q.jsonl, line 1")])
    with pytest.raises(InputError, match="q.jsonl, line 1: the model ends its turn at once"):
        losses.loss(0, head_profile(model, 40, np.full((3, 2), 12)))


@pytest.mark.parametrize("question", [None, QUESTION])
def test_the_continuation_is_what_the_model_writes(question):
    model, ids, probe = make_probe(question=question)
    before = ids if question is None else torch.cat([ids, question])
    with torch.no_grad():
        written = model.generate(before[None], max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert [*ids.tolist(), *probe.continuation_ids.tolist()] == written[0].tolist()
    assert probe.n_measured > 1


def test_sliding_layers_and_last_level_have_no_loss():
    _, _, probe = make_probe("gemma3")
    asked = job("head", 0.0, 0.5)
    assert asked.loss_levels.tolist() == [6, 23, 40]
    measured = measure_losses(probe, asked)
    assert measured["losses"].shape == (3, 2, 1, 3)
    assert (measured["losses"][[0, 2]] == 0).all()
    assert (measured["losses"][1, ..., 2] == 0).all()
    assert (measured["losses"][1, ..., 0] > 0).all()


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_losses_at_fewer_bits_are_those_of_the_cache_that_stores_them(kind):
    model, ids, probe = make_probe(kind, n_tokens=150, initializer_range=0.15)
    full, widths = FULL_LAYERS[kind], np.array([[8, 3], [16, 4], [5, 4]])
    sample = Sample(token_ids=ids.numpy())
    losses = CacheLosses(model, [sample], continuation_tokens=6)
    kept = [[150, 70], [9, 101], [40, 150]]
    for layer, row, stored in zip(full, kept, widths[::-1], strict=False):
        budgets, bits = np.full((3, 2), 150), np.full((3, 2), 16)
        budgets[[n for n in range(3) if n not in full]] = 16
        budgets[layer], bits[layer] = row, stored
        keep = torch.stack([probe.kept(layer, [n])[0][h] for h, n in enumerate(row)])
        found = float(probe.losses(layer, keep[None], bits=stored[None]).mean())
        expected = losses.loss(0, head_profile(model, 150, budgets, bits))
        assert expected > 1e-6
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-7)


@pytest.mark.parametrize("level", ["layer", "head"])
@pytest.mark.parametrize("run", [measure_losses, estimate_losses])
def test_each_width_gets_losses_at_every_level(run, level):
    """Everything kept at fewer bits loses something; 16 bits lose what they did alone."""
    _, _, probe = make_probe(initializer_range=0.15)
    both = job(level, *SHARES, bits=(8, 3))
    found = run(probe, both)["losses"]
    assert both.loss_bits == (16, 8, 3)
    alone = run(probe, job(level, *SHARES))["losses"]
    np.testing.assert_allclose(found[:, :, :1], alone, rtol=1e-3, atol=1e-7)
    at_8, at_3 = found[:, :, 1, -1], found[:, :, 2, -1]
    assert (at_3 > 10 * abs(at_8)).all()
    bits = np.full((1, 2), 16)
    bits[0, 0 if level == "head" else slice(None)] = 3
    keep = torch.stack(probe.kept(2, [probe.budget(int(both.loss_levels[1]), 40)]))
    if level == "head":
        keep[:, 1:] = True
    if run is measure_losses:
        expected = float(probe.losses(2, keep, bits=bits).mean())
        assert found[2, 0, 2, 1] == pytest.approx(expected, rel=1e-4)


def test_a_batch_of_variants_gives_what_each_gives_alone(monkeypatch):
    _, _, probe = make_probe()
    at_once = measure_losses(probe, job("head", 0.1))["losses"]
    monkeypatch.setattr(loss_curves, "BATCH", 1)
    assert abs(at_once - measure_losses(probe, job("head", 0.1))["losses"]).max() < 1e-5


@pytest.mark.parametrize(
    ("level", "asked"), [("layer", {}), ("head", {"question": QUESTION, "answer": ANSWER})]
)
def test_second_order_estimate_agrees_where_the_harm_is_small(level, asked):
    # keep nearly everything: the change is small, where a second-order estimate must hold
    _, _, probe = make_probe(initializer_range=0.15, **asked)
    nearly = job(level, 0.8, 0.9, bits=(8, 5))
    measured = measure_losses(probe, nearly)["losses"]
    estimated = estimate_losses(probe, nearly, n_draws=1000)["losses"]
    first, again, other = (
        estimate_losses(probe, nearly, n_draws=4, seed=seed)["losses"] for seed in (3, 3, 4)
    )
    assert (first == again).all()
    assert (first != other).any()
    assert measured.shape == estimated.shape
    large = measured > 1e-6
    assert large.any()
    ratio = estimated[large] / measured[large]
    assert ratio.min() > 0.8
    assert ratio.max() < 1.25
