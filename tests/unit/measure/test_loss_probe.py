"""The loss probe against whole forwards with the hidden entries masked, and losses of policies."""

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY, equal_budgets, tiny_model

import kvalloc
from kvalloc.errors import InputError, UnsupportedRequestError
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.measure import loss_curves
from kvalloc.measure.cache_loss import CacheLosses
from kvalloc.measure.job import Job
from kvalloc.measure.loss_curves import estimate_losses, measure_losses
from kvalloc.measure.loss_plan import LossPlan, named_policies
from kvalloc.measure.loss_probe import LossProbe
from kvalloc.measure.sampling import Sample
from kvalloc.models.attention import intercept_attention
from kvalloc.models.loading import shape_of
from kvalloc.runtime.policies import policy_of
from kvalloc.scorers import get_scorer

SINKS, WINDOW, SHARES = 2, 4, (0.0, 0.2, 0.6)
SCORER = get_scorer("snapkv", window=WINDOW, pool=3, pooling="max")
QUESTION, ANSWER = torch.tensor([11, 4, 7, 9, 30]), torch.tensor([5, 9, 17, 3])
FULL_LAYERS = {"llama": (0, 1, 2), "qwen3": (0, 1, 2), "gemma3": (1,)}


def named(*texts):
    return named_policies(texts, SCORER, sinks=SINKS)


def make_probe(
    kind="llama",
    *,
    n_tokens=40,
    answer=None,
    question=None,
    policies=(),
    scorer=SCORER,
    **options,
):
    model = tiny_model(kind, **options)
    ids = torch.randint(2, VOCABULARY, (n_tokens,), generator=torch.Generator().manual_seed(1))
    more = {"answer_ids": answer, "question_ids": question, "continuation_tokens": 6}
    more |= {"shape": shape_of(model), "policies": [policy_of(each) for each in named(*policies)]}
    return model, ids, LossProbe(model, ids, scorer, sinks=SINKS, **more)


def probe_of(*policies, **options):
    return make_probe(policies=policies, initializer_range=0.15, **options)[2]


def job(level, *shares, policies=(), bits=()):
    """Levels at some shares of a context of 40 tokens."""
    rest = {"samples": None, "shape": shape_of(tiny_model()), "bits": bits}
    plan = LossPlan(shares=shares, level=level, policies=policies)
    return Job(scorer=SCORER, sinks=SINKS, context_tokens=40, losses=plan, **rest)


def masked_everywhere(model, ids, kept, n_prompt):
    """One forward over everything; later tokens do not see what is hidden in some layers."""
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
    everything = torch.cat([ids, probe.continuation_ids])
    generator = torch.Generator().manual_seed(5)
    for layer in FULL_LAYERS[kind]:
        keep = torch.rand(3, 2, ids.numel(), generator=generator) < 0.4
        full = masked_everywhere(model, everything, {}, ids.numel())
        for found, kept in zip(probe.losses(layer, keep), keep, strict=True):
            reduced = masked_everywhere(model, everything, {layer: kept}, ids.numel())
            expected = kl_of(full, reduced)[-probe.n_measured :]
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)
            assert float(expected.max()) > 1e-3  # something was at stake


def head_profile(model, context, budgets, bits=None):
    return BudgetProfile(
        shape=shape_of(model),
        level="head",
        context_tokens=context,
        budgets=budgets,
        bits=bits,
        policy=SCORER.policy(SINKS),
    )


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("asked", [False, True])
def test_the_loss_of_a_whole_cache_is_that_of_a_masked_forward(kind, asked):
    question, answer = (QUESTION, ANSWER) if asked else (None, None)
    model, ids, probe = make_probe(kind, question=question, answer=answer)
    full, budgets = FULL_LAYERS[kind], np.full((3, 2), 16)
    budgets[list(full)] = [[9, 30], [20, 7], [8, 11]][: len(full)]
    kept = {
        layer: torch.stack([probe.kept(layer, 0, [int(n)])[0][h] for h, n in enumerate(row)])
        for layer, row in zip(full, budgets[list(full)], strict=True)
    }
    everything = torch.cat([ids, probe.continuation_ids])
    whole, reduced = (
        masked_everywhere(model, everything, some, ids.numel()) for some in ({}, kept)
    )
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
    assert measured["losses"].shape == (3, 2, 1, 1, 3)
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
        keep = torch.stack([probe.kept(layer, 0, [n])[0][h] for h, n in enumerate(row)])
        found = float(probe.losses(layer, keep[None], bits=stored[None]).mean())
        expected = losses.loss(0, head_profile(model, 150, budgets, bits))
        assert expected > 1e-6
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-7)


@pytest.mark.parametrize("level", ["layer", "head"])
@pytest.mark.parametrize("run", [measure_losses, estimate_losses])
def test_each_width_gets_losses_at_every_level(run, level):
    """Everything kept at fewer bits loses something; 16 bits lose what they did alone."""
    probe, both = probe_of("tova"), job(level, *SHARES, policies=("tova",), bits=(8, 3))
    found = run(probe, both)["losses"]
    assert (both.loss_bits, both.loss_kinds) == ((16, 8, 3), (3, 2))
    alone = run(probe, job(level, *SHARES, policies=("tova",)))["losses"]
    np.testing.assert_allclose(found[:, :, :1], alone, rtol=1e-3, atol=1e-7)
    at_8, at_3 = found[:, :, 1, :, -1], found[:, :, 2, :, -1]
    assert (at_3 > 10 * abs(at_8)).all()
    np.testing.assert_allclose(at_3[..., 0], at_3[..., 1], rtol=1e-6)  # whoever ranks, all is kept
    bits = np.full((1, 2), 16)
    bits[0, 0 if level == "head" else slice(None)] = 3
    keep = torch.stack(probe.kept(2, 1, [probe.budget(int(both.loss_levels[1]), 40)]))
    if level == "head":
        keep[:, 1:] = True
    if run is measure_losses:
        expected = float(probe.losses(2, keep, bits=bits).mean())
        assert found[2, 0, 2, 1, 1] == pytest.approx(expected, rel=1e-4)


def test_a_batch_of_variants_gives_what_each_gives_alone(monkeypatch):
    _, _, probe = make_probe()
    at_once = measure_losses(probe, job("head", 0.1))["losses"]
    monkeypatch.setattr(loss_curves, "TOGETHER", 1)
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


def test_texts_name_policies_and_scorers_at_the_profiles_settings():
    critical, tova, other, xkv = named(
        "critical", "tova", "snapkv:window=2:pool=1", "xkv:group-reduce=max"
    )
    assert [each.title for each in (critical, tova)] == ["critical", "tova"]
    assert (critical.name, critical.scorer) == ("critical", "snapkv")
    assert critical.scorer_parameters == SCORER.parameters()
    assert critical.parameters == {"alpha": 0.5, "epsilon": 0.0001}
    assert (tova.name, tova.scorer, tova.scorer_parameters) == ("score", "tova", {"window": 4})
    expected = {"window": 2, "pool": 1, "pooling": "max", "group_reduce": "mean"}
    assert other.scorer_parameters == expected
    assert other.label == "snapkv:window=2:pool=1"
    assert (other.sinks, other.window) == (SINKS, WINDOW)
    assert xkv.scorer_parameters == {"window": 4, "pool": 3, "group_reduce": "max"}
    (critical,) = named("critical:alpha=0.25:window=2")  # options of the policy and of its scorer
    assert critical.parameters["alpha"] == 0.25
    assert critical.scorer_parameters == {**SCORER.parameters(), "window": 2}


@pytest.mark.parametrize(
    ("texts", "titles"),
    [
        (["snapkv", "score"], []),  # the scorer's own is measured in any case
        (["snapkv", "tova"], ["tova"]),
        (["usual", "keydiff"], ["critical", "tova", "snapkv:window=1:pool=1", "keydiff"]),
    ],
)
def test_texts_stand_for_policies_beside_the_scorers_own(texts, titles):
    assert [each.title for each in named(*texts)] == titles


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["nothing"], "no policy or scorer 'nothing'"),
        (["tova:pool=3"], "no option 'pool'"),
        (["critical:beta=3"], "no option 'beta'"),
        (["tova:=3"], "is not NAME or NAME:KEY=VALUE"),
        (["snapkv:pool=1:pool=3"], "gives pool twice"),
        (["snapkv:pool=2"], "expected an odd number"),
        (["snapkv:window=8"], "looks at the last 8 tokens.*window=8"),
        (["tova", "tova:window=4"], "are the same policy"),
        ([""], "no policy or scorer ''"),
        *(([name], "cannot be one of several") for name in ("merge", "mpcache")),
        (["attention_matching"], "cannot be one of several"),
    ],
)
def test_texts_that_name_nothing_are_refused(texts, said):
    with pytest.raises((InputError, UnsupportedRequestError), match=said):
        named(*texts)


@pytest.mark.parametrize("level", ["layer", "head"])
@pytest.mark.parametrize("run", [measure_losses, estimate_losses])
def test_each_policy_gets_the_losses_that_it_gets_as_the_scorer(run, level):
    """H2O looks at all queries, TOVA at the last, KeyDiff at none."""
    found = run(
        probe_of("tova", "keydiff", "h2o"), job(level, *SHARES, policies=("tova", "keydiff", "h2o"))
    )["losses"]
    for place, name in enumerate(("tova", "keydiff", "h2o"), start=1):
        alone = probe_of(scorer=get_scorer(name, window=WINDOW))
        expected = run(alone, job(level, *SHARES))["losses"][:, :, :, 0]
        np.testing.assert_allclose(found[:, :, :, place], expected, rtol=1e-3, atol=1e-7)
    plain = run(probe_of(), job(level, *SHARES))["losses"]
    assert plain.shape[3] == 1
    np.testing.assert_allclose(found[:, :, :, :1], plain, rtol=1e-4, atol=1e-8)
    assert (found[:, :, 0, 1:, 1] != found[:, :, 0, :1, 1]).any()


def test_policies_that_keep_the_same_are_run_once(monkeypatch):
    monkeypatch.setattr(loss_curves, "TOGETHER", 64)
    probe = probe_of("tova", "streaming")
    seen = []
    losses = probe.losses

    def counted(layer, keep, bits):
        seen.append(len(keep))
        return losses(layer, keep, bits=bits)

    probe.losses = counted
    found = measure_losses(probe, job("head", *SHARES, policies=("tova", "streaming")))["losses"]
    # sinks and window alone are the same for all: one variant a head instead of three
    assert max(seen) <= 2 * (1 + 3 * 2)
    assert (found[:, :, 0, 1:, 0] == found[:, :, 0, :1, 0]).all()


def test_critical_keeps_what_the_policy_keeps():
    probe = probe_of("critical:window=2")
    policy, states = probe.policies[0], probe.prompt_states[1]
    budgets = [torch.full((1, 2), budget) for budget in (6, 13, 27)]
    each = policy.keep_each(states, budgets, sinks=SINKS, window=WINDOW)
    for budget, kept in zip(budgets, each, strict=True):
        assert torch.equal(kept, policy.keep(states, budget, sinks=SINKS, window=WINDOW))


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_scorers_see_the_second_read_that_a_cache_makes(kind):
    text, scorer = "reconstruction:chunk=20", get_scorer("reconstruction", window=4, chunk=30)
    answer = torch.tensor([3, 4, 5])
    model, ids, probe = make_probe(kind, n_tokens=50, answer=answer, policies=[text], scorer=scorer)
    (policy,) = named(text)
    assert policy.scorer_parameters["pool"] == 1  # the method's own
    reduced = equal_budgets(model, 20, context_tokens=50).replace(policy=policy)
    cache = kvalloc.make_cache(model, reduced)
    with torch.no_grad():
        model(input_ids=ids[None], past_key_values=cache)
    for layer in FULL_LAYERS[kind]:
        states = probe.prompt_states[layer]
        kept = policy_of(policy).keep(states, torch.full((1, 2), 20), sinks=2, window=4)
        places = cache.kept_indices(layer)[0].long()
        assert torch.equal(kept[0].nonzero()[:, 1].view(-1, 20), places)
    first = FULL_LAYERS[kind][0]
    again = scorer.score(probe.prompt_states[first], sinks=2)[0]
    assert torch.equal(probe.scores[first], again)
