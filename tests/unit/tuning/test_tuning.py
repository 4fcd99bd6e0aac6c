"""Descent on the whole cache's loss, on random models."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY, WordTokenizer, tiny_model, words

import kvalloc
from kvalloc.errors import InputError, UnsupportedRequestError
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.measure.loss_probe import LossProbe
from kvalloc.models.loading import shape_of
from kvalloc.problem.registry import SCORERS, names
from kvalloc.prompts.texts import Prompt
from kvalloc.scorers import get_scorer
from kvalloc.tuning.descent import Descent, _shares, held_out
from kvalloc.tuning.fixed_budgets import DEFAULT_POLICIES, tune, tune_shares

SCORER = get_scorer("xkv", window=4, pool=3)
POLICIES = ("tova", "keydiff")
CONTEXT = 60
QUICK = Descent(steps=4, batch=2, continuation_tokens=5, checks=2, held_out=0.34)


@pytest.fixture(scope="module")
def model():
    model = tiny_model()
    model.generation_config.eos_token_id = None
    return model


def prompts(count=3, n_words=CONTEXT):
    return [Prompt(text=words(n_words, seed=seed)) for seed in range(count)]


def tuned(model, **options):
    settings = {"shares": [0.4], "scorer": SCORER, "policies": POLICIES, "context": CONTEXT}
    settings |= {"sinks": 2, "descent": QUICK, **options}
    texts = settings.pop("texts", prompts())
    return list(tune_shares(model, WordTokenizer(), texts, **settings))


def probe_of(model, seed=5, n_tokens=40):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCABULARY, (n_tokens,), generator=generator)
    return LossProbe(model, ids, SCORER, sinks=2, shape=shape_of(model), continuation_tokens=6)


def test_the_soft_loss_of_sharp_masks_is_the_loss(model):
    probe = probe_of(model)
    keep = {layer: torch.rand(2, 40) < 0.5 for layer in (0, 2)}
    soft = {layer: mask.float().clamp(min=1e-30) for layer, mask in keep.items()}
    expected = probe.settle(keep).losses.mean()
    assert float(expected) > 1e-3
    assert float(probe.soft_loss(soft).detach()) == pytest.approx(float(expected), rel=1e-4)
    everything = {1: torch.ones(2, 40)}
    assert float(probe.soft_loss(everything).detach()) == pytest.approx(0.0, abs=1e-6)


def test_its_slope_is_that_of_differences(model):
    probe = probe_of(model)
    torch.manual_seed(0)
    parts = (torch.rand(2, 40) * 0.8 + 0.1).requires_grad_()
    (slope,) = torch.autograd.grad(probe.soft_loss({1: parts}), parts)
    direction = torch.randn(2, 40)
    with torch.no_grad():
        step = 1e-2
        ahead = float(probe.soft_loss({1: parts + step * direction * parts}))
        behind = float(probe.soft_loss({1: parts - step * direction * parts}))
    along = float((slope * direction * parts).sum().detach())
    assert along == pytest.approx((ahead - behind) / (2 * step), rel=0.05, abs=1e-5)
    for parameter in model.parameters():
        assert parameter.grad is None


def test_shares_meet_the_mean_and_their_slopes_keep_it():
    theta = torch.tensor([[0.5, -2.0], [3.0, 0.0]], requires_grad=True)
    shares = _shares(theta, 0.2)
    assert float(shares.mean()) == pytest.approx(0.2, abs=1e-6)
    (slope,) = torch.autograd.grad(shares.mean(), theta)
    assert torch.allclose(slope, torch.zeros_like(slope), atol=1e-7)
    (slope,) = torch.autograd.grad(_shares(theta, 0.2)[1, 0], theta)
    for place in ((0, 0), (1, 0), (1, 1)):
        ahead, behind = theta.detach().double().clone(), theta.detach().double().clone()
        ahead[place] += 1e-3
        behind[place] -= 1e-3
        difference = (_shares(ahead, 0.2) - _shares(behind, 0.2))[1, 0] / 2e-3
        assert float(slope[place]) == pytest.approx(float(difference), rel=1e-2)


def test_what_comes_out_is_a_profile_within_its_budget(model, tmp_path):
    (found,) = tuned(model)
    profile = found.profile
    assert profile.level == "head"
    assert profile.retained_tokens <= 0.4 * profile.budgets.size * CONTEXT
    assert profile.retained_tokens >= 0.4 * profile.budgets.size * CONTEXT - profile.budgets.size
    assert profile.budgets.min() >= 6
    titles = [policy.title for policy in profile.policies]
    assert titles[0] == "xkv"
    assert set(titles[1:]) <= set(POLICIES)
    profile.save(tmp_path / "p.json")
    again = BudgetProfile.load(tmp_path / "p.json")
    assert np.array_equal(again.budgets, profile.budgets)
    assert again.policies == profile.policies
    ids = torch.randint(2, VOCABULARY, (1, 50))
    cache = again.cache(model)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    assert cache.retained_bytes < 0.5 * cache.full_bytes


@pytest.mark.parametrize(
    ("scorer", "policies"),
    [
        (SCORER, POLICIES),
        (get_scorer("lookahead", window=4, tokens=3), ("reconstruction:chunk=25",)),
        (get_scorer("reconstruction", window=4, chunk=25), ("lookahead:tokens=6", "h2o")),
    ],
)
def test_the_stated_loss_is_that_of_the_profiles_cache(model, scorer, policies):
    """Held-out prompt through the real runtime, teacher-forced, against the full cache."""
    from transformers import DynamicCache

    texts = prompts()
    (found,) = tuned(model, texts=texts, scorer=scorer, policies=policies)
    (index,) = held_out(3, QUICK.held_out, 0)
    ids = torch.tensor([WordTokenizer()(texts[index].text)["input_ids"]])
    with torch.no_grad():
        full = DynamicCache(config=model.config)
        token = model(input_ids=ids, past_key_values=full).logits[0, -1].argmax()
        continuation, right = [int(token)], []
        for _ in range(QUICK.continuation_tokens):
            logits = model(
                input_ids=torch.tensor([[continuation[-1]]]), past_key_values=full
            ).logits[0, -1]
            right.append(logits.log_softmax(-1))
            continuation.append(int(logits.argmax()))
        cache = found.profile.cache(model)
        model(input_ids=ids, past_key_values=cache)
        fed = torch.tensor([continuation[: QUICK.continuation_tokens]])
        mine = model(input_ids=fed, past_key_values=cache).logits[0].log_softmax(-1)
    right = torch.stack(right)
    kl = float((right.exp() * (right - mine)).sum(-1).mean())
    assert found.held_out_losses[0] == pytest.approx(kl, rel=1e-3, abs=1e-5)


def test_the_stated_loss_of_a_question_after_is_that_of_the_profiles_cache(model):
    """The context is compressed, the question is read then, and the answer's tokens count."""
    from transformers import DynamicCache

    tokenizer = WordTokenizer()
    texts = [
        Prompt(text=one.text, question=words(7, seed=50 + place), answer=words(4, seed=90 + place))
        for place, one in enumerate(prompts())
    ]
    (found,) = tuned(model, texts=texts)
    (index,) = held_out(3, QUICK.held_out, 0)
    asked = texts[index]
    question = tokenizer(asked.question)["input_ids"]
    fed = torch.tensor([question + tokenizer(asked.answer)["input_ids"]])
    logits = []
    for cache in (DynamicCache(config=model.config), found.profile.cache(model)):
        with torch.no_grad():
            model(input_ids=torch.tensor([tokenizer(asked.text)["input_ids"]]),
                  past_key_values=cache)  # fmt: skip
            logits.append(model(input_ids=fed, past_key_values=cache).logits[0].log_softmax(-1))
    right, mine = (one[len(question) - 1 :] for one in logits)
    kl = float((right.exp() * (right - mine)).sum(-1).mean())
    assert kl > 1e-4
    assert found.held_out_losses[0] == pytest.approx(kl, rel=1e-3, abs=1e-5)


def test_held_out_prompts_never_get_worse_than_with_equal_budgets(model):
    (found,) = tuned(model)
    assert found.held_out_losses.mean() <= found.uniform_losses.mean()
    assert [step for step, _ in found.stages] == [0, 2, 4]


def test_it_finds_the_head_that_matters():
    """One head's values are the only ones that reach the output: it gets what the others spare."""
    model = tiny_model(seed=1)
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            weight = layer.self_attn.o_proj.weight  # columns: 6 query heads of 8
            weight[:, 24:] = 0.0  # KV head 1 is mute everywhere
            if index:
                weight[:, :24] *= 0.01
    descent = Descent(steps=25, batch=2, continuation_tokens=6, checks=1, held_out=0.34)
    (found,) = tuned(model, texts=prompts(4), descent=descent, shares=[0.5])
    budgets = found.profile.budgets
    assert budgets[0, 0] > 1.5 * budgets[:, 1].max()
    assert found.held_out_losses.mean() < 0.7 * found.uniform_losses.mean()


def test_the_same_seed_decides_the_same(model):
    first, second = tuned(model)[0], tuned(model)[0]
    assert np.array_equal(first.profile.budgets, second.profile.budgets)
    assert np.array_equal(first.held_out_losses, second.held_out_losses)


class Killed(Exception):
    """Stands for a kill."""


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_a_killed_descent_goes_on_to_the_same_numbers(model, tmp_path, monkeypatch, steps):
    whole = tuned(model)[0]
    file = tmp_path / "p.json.partial"

    def kill(done, total):
        if done == 3 + steps:
            raise Killed

    with pytest.raises(Killed):
        tuned(model, state_files=[file], progress=kill)
    taken = []
    soft_loss = LossProbe.soft_loss
    monkeypatch.setattr(LossProbe, "soft_loss", lambda *given: taken.append(1) or soft_loss(*given))
    again = tuned(model, state_files=[file], resume=True)[0]
    assert len(taken) == (QUICK.steps - steps) * QUICK.batch
    assert np.array_equal(again.profile.budgets, whole.profile.budgets)
    assert np.array_equal(again.held_out_losses, whole.held_out_losses)
    assert again.stages == whole.stages
    assert again.profile.policies == whole.profile.policies


def test_what_was_begun_is_neither_overwritten_nor_mixed_up(model, tmp_path):
    file = tmp_path / "p.json.partial"
    tuned(model, state_files=[file])
    with pytest.raises(InputError, match="unfinished descent"):
        tuned(model, state_files=[file])
    with pytest.raises(InputError, match="begun with another seed"):
        tuned(model, state_files=[file], resume=True, seed=3)
    with pytest.raises(InputError, match="begun with another text_digest"):
        tuned(model, state_files=[file], resume=True, texts=prompts(4)[1:])
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(InputError, match="cannot be read"):
        tuned(model, state_files=[file], resume=True)


def test_in_the_library(model, tmp_path):
    file = tmp_path / "state"
    options = {"scorer": SCORER, "policies": POLICIES, "context": CONTEXT, "sinks": 2}
    profile = tune(
        *(model, WordTokenizer(), prompts()),
        **{**options, "budget": "40%", "descent": QUICK, "state_file": file},
    )
    assert np.array_equal(profile.budgets, tuned(model)[0].profile.budgets)
    assert kvalloc.tune is tune
    assert not file.exists()
    with pytest.raises(InputError, match="state_file"):
        tune(model, WordTokenizer(), prompts(), budget=0.4, resume=True)
    with pytest.raises(InputError, match="not a share"):
        tune(model, WordTokenizer(), prompts(), budget="a lot")


def test_the_profile_states_what_it_loses_on_which_prompts(model, tmp_path):
    descent = Descent(steps=2, batch=2, continuation_tokens=5, checks=1, held_out=0.5)
    (found,) = tuned(model, texts=prompts(8), descent=descent)
    profile = found.profile
    losses = found.held_out_losses
    assert profile.predicted_loss == pytest.approx(losses.mean())
    low, high = profile.requested["predicted_interval"]
    assert losses.min() <= low < losses.mean() < high <= losses.max()
    assert profile.requested["predicted_on_prompts"] == losses.size == 4
    assert "8 of 8 prompts" in profile.requested["text"]
    profile.save(tmp_path / "p.json")
    assert BudgetProfile.load(tmp_path / "p.json").predicted_loss == profile.predicted_loss
    assert tuned(model)[0].profile.requested["predicted_interval"] is None


@pytest.mark.parametrize("name", sorted(names(SCORERS)))
def test_every_scorer_can_be_chosen(model, name):
    descent = Descent(steps=1, batch=1, continuation_tokens=3, checks=1, held_out=0.34)
    (found,) = tuned(model, policies=[_within(name)], descent=descent)
    assert np.isfinite(found.held_out_losses).all()
    assert len(found.profile.solver_options["policies"]) == (1 if name == SCORER.name else 2)


def _within(name):
    """With a window that the profile's protects, and what else it takes from its own scorer."""
    window = getattr(get_scorer(name), "window", 0)
    if name == SCORER.name:
        return f"{name}:window=4:pool=3"
    return f"{name}:window=4" if window > 4 else name


def test_the_usual_policies_are_the_default_ones(model):
    scorer = get_scorer("xkv", window=8, pool=3)
    one_step = Descent(steps=1, batch=1, continuation_tokens=3, checks=1, held_out=0.34)
    options = {"scorer": scorer, "descent": one_step}
    usual, default = (
        tuned(model, policies=policies, **options)[0].profile.solver_options["policies"]
        for policies in (["usual"], DEFAULT_POLICIES)
    )
    assert usual == default
    assert len(usual) > 3


def test_several_shares_read_the_prompts_once(model):
    found = tuned(model, shares=[0.6, 0.3])
    kept = [one.profile.retained_tokens / one.profile.budgets.size / CONTEXT for one in found]
    assert kept == pytest.approx([0.6, 0.3], abs=0.02)
    alone = tuned(model, shares=[0.3])[0]
    assert np.array_equal(alone.profile.budgets, found[1].profile.budgets)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shares": [0.05]}, "not more than the 6 of sinks and"),
        ({"shares": [1.0]}, "less than all"),
        ({"shares": []}, "no budget"),
        ({"texts": prompts(1)}, "at least two prompts"),
        ({"texts": prompts(2, n_words=5)}, "tokens"),
    ],
)
def test_what_cannot_be_tuned_is_refused(model, options, said):
    with pytest.raises(InputError, match=said):
        tuned(model, **options)


def test_policies_that_are_not_nested_are_refused(model):
    with pytest.raises(UnsupportedRequestError, match="cannot be made smooth"):
        tuned(model, policies=["critical"])


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"held_out": 1.0}, {"softness": (0.1, 0.0)}])
def test_a_descent_that_goes_nowhere_is_refused(wrong):
    with pytest.raises(InputError):
        Descent(**wrong)


def test_held_out_prompts_are_spread():
    chosen = held_out(24, 0.2, 0)
    assert len(chosen) == 5
    assert [sorted(chosen)[i] // 5 for i in range(5)] == sorted(place // 5 for place in chosen)
    assert held_out(2, 0.9, 0) in ({0}, {1})


def test_the_command(model, tmp_path, capsys, monkeypatch):
    from kvalloc.cli.main import main
    from kvalloc.models.loading import LoadedModel

    loaded = LoadedModel(model=model, tokenizer=WordTokenizer(), model_id="tiny")
    monkeypatch.setattr("kvalloc.models.loading.load_model", lambda *_, **__: loaded)
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"text": one.text}) + "\n" for one in prompts()))
    out = tmp_path / "p.json"
    command = ["tune", "tiny", "--prompts", str(file), "--context", "60", "--window", "4"]
    command += ["--policies", "tova", "--steps", "1", "-o", str(out), "--json", "--quiet"]
    assert main([*command, "--budget", "60%", "--budget", "30%"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["output"] for row in rows] == [str(tmp_path / f"p-{n}.json") for n in (60, 30)]
    assert main(["inspect", str(tmp_path / "p-30.json")]) == 0
    capsys_text = capsys.readouterr().out
    assert "descent" in capsys_text
    assert "on 3 of 3 prompts" in capsys_text
    kept = tmp_path / "p.json.partial"
    kept.write_text("")
    assert main([*command, "--budget", "50%"]) == 2
    assert "go on with --resume" in capsys.readouterr().err
    kept.unlink()
    assert not list(tmp_path.glob("*.partial"))
    assert main([*command, "--budget", "2%"]) == 2
    assert "ask for another budget" in capsys.readouterr().err
    made = ["tune", "tiny", "--tasks", "kl", "--question", "both", "--samples", "4", *command[4:]]
    assert main([*made, "--budget", "50%"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["held_out_prompts"] == 1
    assert "4 of 4 prompts of kl in" in BudgetProfile.load(out).requested["text"]
    without = [part for part in command if part not in ("--prompts", str(file))]
    assert main([*without, "--budget", "30%"]) == 2
    assert "give --tasks, --prompts or --text" in capsys.readouterr().err
