"""The loss probe against whole forwards with the hidden entries masked."""

import pytest
import torch
from tiny_models import VOCABULARY, tiny_model

from kvalloc.measure.job import Job
from kvalloc.measure.loss_curves import estimate_losses, measure_losses
from kvalloc.measure.loss_plan import LossPlan
from kvalloc.measure.loss_probe import LossProbe
from kvalloc.models.attention import intercept_attention
from kvalloc.models.loading import shape_of
from kvalloc.scorers import get_scorer

SINKS = 2
SCORER = get_scorer("snapkv", window=4, pool=1)
FULL_LAYERS = {"llama": (0, 1, 2), "qwen3": (0, 1, 2), "gemma3": (1,)}


def make_probe(kind="llama", *, n_tokens=40, answer=None, question=None, **options):
    model = tiny_model(kind, **options)
    ids = torch.randint(2, VOCABULARY, (n_tokens,), generator=torch.Generator().manual_seed(1))
    more = {"answer_ids": answer, "question_ids": question, "continuation_tokens": 6}
    probe = LossProbe(model, ids, SCORER, sinks=SINKS, shape=shape_of(model), **more)
    return model, ids, probe


def job(level, *shares, batch=8):
    """Levels at some shares of a context of 40 tokens."""
    rest = {"samples": None, "model": None, "shape": shape_of(tiny_model())}
    plan = LossPlan(shares=shares, level=level, batch=batch)
    return Job(scorer=SCORER, sinks=SINKS, context_tokens=40, losses=plan, **rest)


def masked_logits(model, ids, layer, keep):
    """One forward over everything; later tokens do not see what is hidden in that layer."""
    return masked_everywhere(model, ids, {} if layer is None else {layer: keep}, keep.shape[-1])


def masked_everywhere(model, ids, kept, n_prompt):
    """The same with entries of several layers hidden."""
    n_all = ids.numel()
    group = model.config.num_attention_heads // model.config.num_key_value_heads

    def handler(states, compute):
        if states.layer not in kept:
            return compute(states.mask)
        keep = kept[states.layer]
        mask = torch.ones(n_all, n_all).tril().bool().expand(1, keep.shape[0] * group, -1, -1)
        mask = mask.clone()
        hidden = ~keep.repeat_interleave(group, dim=0)
        mask[0, :, n_prompt:, :n_prompt] &= ~hidden[:, None]
        return compute(mask)

    with torch.no_grad(), intercept_attention(model, handler):
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
    return logits[n_prompt:].double().log_softmax(-1)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_loss_equals_that_of_a_masked_forward(kind):
    model, ids, probe = make_probe(kind)
    everything = torch.cat([ids, probe.continuation_ids])
    generator = torch.Generator().manual_seed(5)
    for layer in FULL_LAYERS[kind]:
        keep = torch.rand(3, 2, ids.numel(), generator=generator) < 0.4
        found = probe.losses(layer, keep)
        for variant in range(3):
            full = masked_logits(model, everything, None, keep[variant])
            reduced = masked_logits(model, everything, layer, keep[variant])
            expected = (full.exp() * (full - reduced)).sum(-1)
            torch.testing.assert_close(found[variant], expected, rtol=1e-3, atol=1e-6)
            assert float(expected.max()) > 1e-3  # something was at stake


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_loss_around_what_all_layers_keep_equals_that_of_a_masked_forward(kind):
    model, ids, probe = make_probe(kind)
    everything = torch.cat([ids, probe.continuation_ids])
    generator = torch.Generator().manual_seed(6)
    masks = torch.rand(len(FULL_LAYERS[kind]), 3, 2, ids.numel(), generator=generator) < 0.5
    kept = {layer: masks[row, 0] for row, layer in enumerate(FULL_LAYERS[kind])}
    full = masked_everywhere(model, everything, {}, ids.numel())

    def expected(masked):
        reduced = masked_everywhere(model, everything, masked, ids.numel())
        return (full.exp() * (full - reduced)).sum(-1)

    settled = probe.settle(kept)
    torch.testing.assert_close(settled.losses, expected(kept), rtol=1e-3, atol=1e-6)
    for row, layer in enumerate(FULL_LAYERS[kind]):
        found = probe.losses(layer, masks[row], around=settled)
        torch.testing.assert_close(found[0], settled.losses, rtol=1e-3, atol=1e-6)
        for variant in (1, 2):
            wanted = expected({**kept, layer: masks[row, variant]})
            torch.testing.assert_close(found[variant], wanted, rtol=1e-3, atol=1e-6)


def test_continuation_is_what_the_model_writes():
    model, ids, probe = make_probe()
    with torch.no_grad():
        written = model.generate(
            ids[None], max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, ids.numel() :]
    assert probe.continuation_ids.tolist() == written.tolist()


def test_given_answer_is_the_continuation():
    answer = torch.tensor([5, 9, 13])
    _, _, probe = make_probe(answer=answer)
    assert probe.continuation_ids.tolist() == [5, 9, 13]


QUESTION, ANSWER = torch.tensor([11, 4, 7, 9, 30]), torch.tensor([5, 9, 17, 3])


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_question_is_read_and_only_what_follows_it_counts(kind):
    model, ids, probe = make_probe(kind, question=QUESTION, answer=ANSWER)
    assert probe.continuation_ids.tolist() == [*QUESTION.tolist(), *ANSWER.tolist()]
    assert (probe.n_tokens, probe.n_measured) == (ids.numel(), 1 + ANSWER.numel())
    everything = torch.cat([ids, QUESTION, ANSWER])
    keep = torch.rand(1, 2, ids.numel(), generator=torch.Generator().manual_seed(3)) < 0.4
    layer = FULL_LAYERS[kind][0]
    full = masked_logits(model, everything, None, keep[0])
    reduced = masked_logits(model, everything, layer, keep[0])
    expected = (full.exp() * (full - reduced)).sum(-1)[QUESTION.numel() - 1 :]
    assert float(expected.max()) > 1e-3
    torch.testing.assert_close(probe.losses(layer, keep)[0], expected, rtol=1e-3, atol=1e-6)
    settled = probe.settle({layer: keep[0]}).losses
    torch.testing.assert_close(settled, expected, rtol=1e-3, atol=1e-6)
    soft = float(probe.soft_loss({layer: keep[0].float().clamp(min=1e-30)}).detach())
    assert soft == pytest.approx(float(expected.mean()), rel=1e-3)


def test_after_a_question_the_model_writes_its_own_answer():
    model, ids, probe = make_probe(question=QUESTION)
    asked = torch.cat([ids, QUESTION])
    with torch.no_grad():
        written = model.generate(asked[None], max_new_tokens=6, do_sample=False)[0, asked.numel() :]
    n_written = probe.n_measured - 1
    assert probe.continuation_ids[QUESTION.numel() :].tolist() == written[:n_written].tolist()
    assert n_written > 1


def test_nothing_hidden_is_no_loss_and_model_is_left_as_it_was():
    model, ids, probe = make_probe()
    before = [dict(layer.__dict__) for layer in model.model.layers]
    keep = torch.ones(2, 2, ids.numel(), dtype=torch.bool)
    assert float(probe.losses(2, keep).abs().max()) < 1e-6
    for layer, attributes in zip(model.model.layers, before, strict=True):
        assert "forward" not in layer.__dict__
        assert not layer._forward_pre_hooks
        assert layer.__dict__.keys() == attributes.keys()


def test_sliding_layers_and_last_level_have_no_loss():
    _, _, probe = make_probe("gemma3")
    asked = job("head", 0.0, 0.5, batch=3)
    assert asked.loss_levels.tolist() == [6, 23, 40]
    measured = measure_losses(probe, asked)
    assert measured["losses"].shape == (3, 2, 1, 3)
    assert (measured["losses"][[0, 2]] == 0).all()
    assert (measured["losses"][1, ..., 2] == 0).all()
    assert (measured["losses"][1, ..., 0] > 0).all()
    assert (measured["loss_stderr"][1, ..., :2] > 0).all()


def test_layer_loss_hides_in_all_heads_at_once():
    _, _, probe = make_probe()
    whole = measure_losses(probe, job("layer", 0.1, batch=4))
    alone = measure_losses(probe, job("head", 0.1, batch=4))
    assert whole["losses"].shape == (3, 1, 1, 2)
    assert (whole["losses"][:, 0, 0, 0] > alone["losses"][..., 0, 0].max(axis=1) * 0.5).all()
    one_by_one = measure_losses(probe, job("head", 0.1, batch=1))
    assert abs(alone["losses"] - one_by_one["losses"]).max() < 1e-5


@pytest.mark.parametrize("asked", [{}, {"question": QUESTION, "answer": ANSWER}])
@pytest.mark.parametrize("level", ["layer", "head"])
def test_second_order_estimate_agrees_where_the_harm_is_small(level, asked):
    # keep nearly everything: the change is small, where a second-order estimate must hold
    _, _, probe = make_probe(initializer_range=0.15, **asked)
    nearly = job(level, 0.8, 0.9)
    measured = measure_losses(probe, nearly)["losses"][..., :-1]
    estimated = estimate_losses(probe, nearly, n_draws=4000)["losses"][..., :-1]
    assert measured.shape == estimated.shape
    large = measured > 1e-6
    assert large.any()
    ratio = estimated[large] / measured[large]
    assert ratio.min() > 0.8
    assert ratio.max() < 1.25


def test_estimates_repeat_with_their_seed():
    _, _, probe = make_probe()
    first, again = (estimate_losses(probe, job("layer", 0.3), seed=3) for _ in range(2))
    other = estimate_losses(probe, job("layer", 0.3), seed=4)
    assert (first["losses"] == again["losses"]).all()
    assert (first["losses"] != other["losses"]).any()
