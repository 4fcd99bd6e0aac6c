"""Losses of several policies: which can be named, and that each is measured as it would keep."""

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY, tiny_model, tiny_profile

from kvalloc.allocation.audit import verify
from kvalloc.allocation.decision import solve
from kvalloc.errors import InputError, UnsupportedRequestError
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.measure.job import Job
from kvalloc.measure.loss_curves import estimate_losses, measure_losses
from kvalloc.measure.loss_plan import LossPlan, named_policies
from kvalloc.measure.loss_probe import LossProbe
from kvalloc.models.loading import shape_of
from kvalloc.runtime.policies import policy_of
from kvalloc.scorers import get_scorer

SINKS, WINDOW = 2, 4
SCORER = get_scorer("snapkv", window=WINDOW, pool=3, pooling="max")


def named(*texts):
    return named_policies(texts, SCORER, sinks=SINKS)


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


def test_options_of_a_policy_may_be_those_of_its_scorer():
    (critical,) = named("critical:alpha=0.25:window=2")
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
        (["tova:window"], "is not NAME or NAME:KEY=VALUE"),
        (["snapkv:pool=1:pool=3"], "gives pool twice"),
        (["snapkv:pool=2"], "expected an odd number"),
        (["snapkv:window=8"], "looks at the last 8 tokens.*window=8"),
        (["tova", "tova:window=4"], "are the same policy"),
        ([""], "no policy or scorer ''"),
    ],
)
def test_texts_that_name_nothing_are_refused(texts, said):
    with pytest.raises(InputError, match=said):
        named(*texts)


@pytest.mark.parametrize("name", ["merge", "compensate", "attention_matching", "mpcache"])
def test_policies_that_do_more_than_choose_are_refused(name):
    with pytest.raises(UnsupportedRequestError, match="cannot be one of several"):
        named(name)


def make_probe(*texts, scorer=SCORER):
    model = tiny_model("llama", initializer_range=0.15)
    ids = torch.randint(2, VOCABULARY, (40,), generator=torch.Generator().manual_seed(1))
    policies = [policy_of(each) for each in named(*texts)]
    more = {"shape": shape_of(model), "continuation_tokens": 6, "policies": policies}
    return LossProbe(model, ids, scorer, sinks=SINKS, **more)


def job(level, *texts, batch=8):
    rest = {"samples": None, "model": None, "shape": shape_of(tiny_model())}
    plan = LossPlan(shares=(0.0, 0.2, 0.6), level=level, batch=batch, policies=texts)
    return Job(scorer=SCORER, sinks=SINKS, context_tokens=40, losses=plan, **rest)


@pytest.mark.parametrize("level", ["layer", "head"])
@pytest.mark.parametrize("run", [measure_losses, estimate_losses])
def test_each_policy_gets_the_losses_that_it_gets_as_the_scorer(run, level):
    """H2O looks at all queries, TOVA at the last, KeyDiff at none."""
    found = run(make_probe("tova", "keydiff", "h2o"), job(level, "tova", "keydiff", "h2o"))
    for place, name in enumerate(("tova", "keydiff", "h2o"), start=1):
        alone = make_probe(scorer=get_scorer(name, window=WINDOW))
        expected = run(alone, job(level))
        close = {"rtol": 1e-3, "atol": 1e-7}
        for array in ("losses", "loss_stderr"):
            mine, own = found[array][:, :, place], expected[array][:, :, 0]
            np.testing.assert_allclose(mine, own, **close)
    plain = run(make_probe(), job(level))
    assert plain["losses"].shape[2] == 1
    np.testing.assert_allclose(found["losses"][:, :, :1], plain["losses"], rtol=1e-4, atol=1e-8)
    assert (found["losses"][:, :, 1:, 1] != found["losses"][:, :, :1, 1]).any()


def test_policies_that_keep_the_same_are_run_once():
    probe = make_probe("tova", "streaming")
    seen = []
    losses = probe.losses

    def counted(layer, keep):
        seen.append(len(keep))
        return losses(layer, keep)

    probe.losses = counted
    found = measure_losses(probe, job("head", "tova", "streaming", batch=64))["losses"]
    # sinks and window alone are the same for all: one variant a head instead of three
    assert max(seen) <= 2 * (1 + 3 * 2)
    assert (found[:, :, 1:, 0] == found[:, :, :1, 0]).all()


def test_critical_keeps_what_the_policy_keeps():
    probe = make_probe("critical:window=2")
    policy, states = probe.policies[0], probe.prompt_states[1]
    budgets = [torch.full((1, 2), budget) for budget in (6, 13, 27)]
    each = policy.keep_each(states, budgets, sinks=SINKS, window=WINDOW)
    for budget, kept in zip(budgets, each, strict=True):
        assert torch.equal(kept, policy.keep(states, budget, sinks=SINKS, window=WINDOW))


@pytest.mark.parametrize("method", ["measured", "fast"])
def test_profiles_hold_them_and_budgets_come_of_them(tmp_path, method):
    output = tmp_path / "s.safetensors"
    options = {"scorer": SCORER, "sinks": SINKS, "loss_level": "head", "loss": method}
    tiny_profile(output=output, loss_policies=("tova", "critical"), **options)
    found = ScoreProfile.load(output)
    assert [each.title for each in found.policies] == ["snapkv", "tova", "critical"]
    assert found.other_losses.shape == (*found.losses.shape[:3], 2, found.losses.shape[3])
    decided = solve(found, budget="40%", objective="loss", level="head")
    assert all(check.passed for check in verify(decided, found))


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_scorers_that_look_beyond_the_prompt_see_what_the_loss_is_measured_on(kind):
    model = tiny_model(kind)
    model.generation_config.eos_token_id = None
    ids = torch.randint(2, VOCABULARY, (50,), generator=torch.Generator().manual_seed(3))
    shape = shape_of(model)
    scorer = get_scorer("lookahead", window=4, tokens=5)
    others = named("lookahead:tokens=5", "reconstruction:chunk=20")
    assert others[1].scorer_parameters["pool"] == 1  # the method's own, and not the profile's
    probe = LossProbe(
        model,
        ids,
        scorer,
        sinks=2,
        shape=shape,
        answer_ids=torch.tensor([3, 4, 5]),
        policies=[policy_of(policy) for policy in others],
    )
    for policy in others:
        budgets = np.full((shape.n_layers, shape.n_kv_heads), 20)
        for layer in set(range(shape.n_layers)) - set(shape.full_layers):
            budgets[layer] = shape.sliding_entries(50)
        reduced = BudgetProfile(
            shape=shape, level="layer", context_tokens=50, budgets=budgets, policy=policy
        )
        cache = reduced.cache(model)
        with torch.no_grad():
            model(input_ids=ids[None], past_key_values=cache)
            model(input_ids=probe.continuation_ids[None], past_key_values=cache)
        cache.evict()
        for layer in shape.full_layers:
            wanted = torch.full((1, shape.n_kv_heads), 20)
            kept = policy_of(policy).keep(probe.prompt_states[layer], wanted, sinks=2, window=4)
            places = cache.kept_indices(layer)[0].long()
            assert torch.equal(kept[0].nonzero()[:, 1].view(-1, 20), places)
    best = probe.scores[shape.full_layers[0]]
    again = scorer.score(probe.prompt_states[shape.full_layers[0]], sinks=2)[0]
    assert torch.equal(best, again)
