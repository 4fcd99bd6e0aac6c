"""Weights of scores, by descent on the loss of caches that hand out entries by prompt."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from tiny_models import WordTokenizer, tiny_model, words

import kvalloc
from kvalloc.errors import InputError, UnsupportedRequestError
from kvalloc.evaluate.kl import divergence
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.measure.loss_probe import LossProbe
from kvalloc.measure.sampling import choose_samples
from kvalloc.models.loading import shape_of
from kvalloc.prompts.texts import Prompt
from kvalloc.runtime.policies import policies_of
from kvalloc.tuning.descent import held_out
from kvalloc.tuning.per_prompt import tune_by_prompt
from kvalloc.tuning.score_mixing import WeighedPrompt, Weighing, WeighingJob, _threshold

SCORER = "lookahead:tokens=3:window=4:votes=0:pool=1"
OTHERS = ("lookahead:tokens=0:votes=6:window=4:pool=1", "tova", "keydiff")
CONTEXT = 60
QUICK = Weighing(steps=4, batch=2, continuation_tokens=5, checks=2, held_out=0.34)


@pytest.fixture(scope="module")
def model():
    model = tiny_model()
    model.generation_config.eos_token_id = None
    return model


def prompts(count=3):
    return [Prompt(text=words(CONTEXT, seed=seed)) for seed in range(count)]


def tuned(model, **options):
    settings = {"shares": [0.4], "scorer": SCORER, "policies": OTHERS, "context": CONTEXT}
    settings |= {"sinks": 2, "weighing": QUICK, "combine": None, **options}
    texts = settings.pop("texts", prompts())
    return list(tune_by_prompt(model, WordTokenizer(), texts, **settings))


def test_the_loss_that_is_descended_on_is_that_of_the_cache(model):
    """What the probe measures with weights is what a cache with these weights loses."""
    (found,) = tuned(model)
    profile = found.profile
    samples = choose_samples(
        prompts(1),
        WordTokenizer(),
        context_tokens=CONTEXT,
        least_tokens=8,
        samples=None,
        sampling_ratio=1.0,
        seed=0,
    )
    job = WeighingJob(
        shape=shape_of(model), share=0.4, context=CONTEXT, sinks=2, window=4, weighing=QUICK
    )
    scorers = policies_of(profile).scorers
    read = WeighedPrompt.read(model, samples, 0, scorers, job)
    weights = torch.tensor(profile.unit_weights, dtype=torch.float32)
    cache = profile.cache(model)
    ids = torch.from_numpy(samples.token_ids[0])[None]
    following = read.probe.continuation_ids[None]
    with torch.no_grad():
        model(ids, past_key_values=cache)
        kept = cache.kept_tokens
        reduced = model(following, past_key_values=cache).logits[0]
        full = model(torch.cat([ids, following], dim=1)).logits[0, ids.shape[1] :]
    assert kept.tolist() == read.budgets(job, weights).tolist()
    expected = divergence(full, reduced).kl
    assert expected > 1e-3
    assert read.hard_loss(job, weights) == pytest.approx(expected, rel=1e-3)


def test_the_loss_it_tells_is_that_of_caches_that_combine(model):
    """The same weights; what is told comes from the caches, which match what is evicted."""
    (plain,), (found,) = tuned(model), tuned(model, combine="attention_matching:rows=20:draft=3")
    profile = found.profile
    assert profile.policy.name == "attention_matching"
    assert (profile.policy.parameters["rows"], profile.policy.parameters["draft"]) == (20, 3)
    assert {policy.name for policy in profile.other_policies} == {"score"}
    assert np.array_equal(profile.unit_weights, plain.profile.unit_weights)
    assert np.array_equal(profile.budgets, plain.profile.budgets)
    held = held_out(3, QUICK.held_out, 0)
    expected = []
    for place in held:
        ids = torch.tensor([WordTokenizer()(prompts()[place].text)["input_ids"][:CONTEXT]])
        following = model.generate(
            ids, max_new_tokens=QUICK.continuation_tokens, do_sample=False, pad_token_id=0
        )[:, ids.shape[1] :]
        cache = profile.cache(model)
        with torch.no_grad():
            model(ids, past_key_values=cache)
            reduced = model(following, past_key_values=cache).logits[0]
            full = model(torch.cat([ids, following], dim=1)).logits[0, ids.shape[1] :]
        expected.append(divergence(full, reduced).kl)
    assert found.held_out_losses == pytest.approx(expected, rel=1e-3)
    assert profile.predicted_loss == pytest.approx(np.mean(expected), rel=1e-3)
    assert profile.predicted_loss != plain.profile.predicted_loss


@pytest.mark.parametrize("combine", ["merge", "score", "snapkv", "attention_matching:rows=-1"])
def test_other_ways_to_combine_are_refused(model, combine):
    with pytest.raises(InputError, match="attention_matching"):
        tuned(model, combine=combine)


def test_a_profile_says_what_it_kept_in_the_mean(model):
    (found,) = tuned(model)
    profile = found.profile
    assert profile.by_prompt
    assert profile.level == "head"
    assert profile.budgets.sum() == int(0.4 * CONTEXT * profile.budgets.size + 1e-6)
    assert profile.budgets.min() >= profile.policy.protected_tokens
    assert profile.unit_weights.shape == (*profile.budgets.shape, 4)
    assert profile.unit_weights.max() == 1.0
    assert [step for step, _ in found.stages] == [0, 2, 4]
    least = min(loss for _, loss in found.stages)
    assert float(found.held_out_losses.mean()) == pytest.approx(least)
    assert found.profile.objective == pytest.approx(-least)


def test_two_shares_read_the_prompts_once_and_the_same_seed_gives_the_same(model, tmp_path):
    told = []
    both = tuned(model, shares=[0.4, 0.6], progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (3 + 2 * QUICK.steps, 3 + 2 * QUICK.steps)
    (again,) = tuned(model)
    again.profile.save(tmp_path / "p.json")
    loaded = BudgetProfile.load(tmp_path / "p.json")
    assert np.array_equal(loaded.unit_weights, both[0].profile.unit_weights)
    assert np.array_equal(loaded.budgets, both[0].profile.budgets)
    assert both[1].profile.budgets.sum() > both[0].profile.budgets.sum()


class Killed(Exception):
    """Stands for a kill."""


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6])
def test_a_killed_descent_goes_on_to_the_same_numbers(model, tmp_path, monkeypatch, steps):
    """Before, at and after a check of the held-out prompts, and within the second share."""
    shares = [0.4, 0.6]
    whole = tuned(model, shares=shares)
    files = [tmp_path / f"{share}.partial" for share in shares]

    def kill(done, total):
        if done == 3 + steps:
            raise Killed

    with pytest.raises(Killed):
        tuned(model, shares=shares, state_files=files, progress=kill)
    taken = []
    soft_loss = LossProbe.soft_loss
    monkeypatch.setattr(LossProbe, "soft_loss", lambda *given: taken.append(1) or soft_loss(*given))
    again = tuned(model, shares=shares, state_files=files, resume=True)
    assert len(taken) == (2 * QUICK.steps - steps) * QUICK.batch
    for resumed, unbroken in zip(again, whole, strict=True):
        resumed.profile.save(tmp_path / "resumed.json")
        unbroken.profile.save(tmp_path / "whole.json")
        saved = [(tmp_path / f"{name}.json").read_bytes() for name in ("resumed", "whole")]
        assert saved[0] == saved[1]
        assert np.array_equal(resumed.held_out_losses, unbroken.held_out_losses)
        assert np.array_equal(resumed.uniform_losses, unbroken.uniform_losses)
        assert resumed.stages == unbroken.stages


def test_what_was_begun_is_neither_overwritten_nor_mixed_up(model, tmp_path):
    file = tmp_path / "p.json.partial"
    tuned(model, state_files=[file])
    with pytest.raises(InputError, match="unfinished descent"):
        tuned(model, state_files=[file])
    for options, field in (
        ({"seed": 3}, "seed"),
        ({"shares": [0.5]}, "budget"),
        ({"context": CONTEXT + 1}, "context_tokens"),
        ({"policies": OTHERS[:2]}, "policies"),
        ({"weighing": dataclasses.replace(QUICK, steps=5)}, "descent"),
    ):
        with pytest.raises(InputError, match=f"begun with another {field}"):
            tuned(model, state_files=[file], resume=True, **options)


def test_in_the_library(model, tmp_path):
    options = {"scorer": SCORER, "policies": OTHERS, "context": CONTEXT, "sinks": 2}
    profile = kvalloc.tune(
        *(model, WordTokenizer(), prompts()),
        **{**options, "budget": "40%", "by_prompt": True, "weighing": QUICK, "combine": "none"},
        state_file=tmp_path / "state",
    )
    assert profile.by_prompt
    assert np.array_equal(profile.unit_weights, tuned(model)[0].profile.unit_weights)
    assert not list(tmp_path.iterdir())


def test_it_learns(model):
    """With more steps the prompts that it learns from lose less than in the beginning."""
    many = dataclasses.replace(QUICK, steps=12, batch=3, checks=1, learning_rate=0.3)
    texts = [Prompt(text=words(CONTEXT, seed=1))] * 3
    (found,) = tuned(model, texts=texts, weighing=many)
    (_, before), (_, after) = found.stages
    assert after < before


@pytest.mark.parametrize("softness", [1.0, 0.1])
def test_the_threshold_keeps_the_part_and_so_does_its_slope(softness):
    torch.manual_seed(0)
    places = (3 * torch.randn(2, 3, 40, dtype=torch.float64)).requires_grad_()

    def part(states):
        return torch.sigmoid((states - _threshold(states, 0.3, softness)) / softness).mean()

    assert float(part(places).detach()) == pytest.approx(0.3, abs=1e-6)
    (slope,) = torch.autograd.grad(part(places), places)
    assert float(slope.abs().max()) < 1e-9
    ahead = places.detach().clone()
    ahead[0, 0, 0] += 1e-3
    moved = float(_threshold(ahead, 0.3, softness) - _threshold(places.detach(), 0.3, softness))
    (slope,) = torch.autograd.grad(_threshold(places, 0.3, softness), places)
    assert float(slope[0, 0, 0]) == pytest.approx(moved / 1e-3, rel=0.02, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shares": []}, "at least one share"),
        ({"shares": [0.05]}, "not more than the 6 of sinks and window"),
        ({"texts": prompts(1)}, "at least two prompts"),
        ({"scorer": "lookahead:tokens"}, "NAME:KEY=VALUE"),
        ({"scorer": "nobody"}, "nobody"),
    ],
)
def test_bad_input_is_told_in_one_line(model, options, said):
    with pytest.raises(InputError, match=said) as error:
        tuned(model, **options)
    assert "\n" not in str(error.value).split("choose")[0]


def test_the_usual_scorers_take_another_window(model):
    (found,) = tuned(model, policies=["usual"])
    assert len(found.profile.policies) == 7
    windows = {policy.scorer_parameters["window"] for policy in found.profile.policies}
    assert windows == {4}


def test_only_scores_can_be_weighed(model):
    with pytest.raises(UnsupportedRequestError, match="does not keep at a larger one"):
        tuned(model, policies=["nacl"])


@pytest.mark.parametrize("changes", [{"steps": 0}, {"held_out": 1.0}, {"softness": (1.0, 0.0)}])
def test_settings_are_checked(changes):
    with pytest.raises(InputError):
        Weighing(**changes)


def test_the_command(model, tmp_path, capsys, monkeypatch):
    from kvalloc.cli.main import main
    from kvalloc.models.loading import LoadedModel

    loaded = LoadedModel(model=model, tokenizer=WordTokenizer(), model_id="tiny")
    monkeypatch.setattr("kvalloc.models.loading.load_model", lambda *_, **__: loaded)
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"text": one.text}) + "\n" for one in prompts()))
    out = tmp_path / "p.json"
    command = ["tune", "tiny", "--by-prompt", "--prompts", str(file), "--context", "60"]
    command += ["--policies", "tova", "--steps", "1", "--budget", "60%", "-o", str(out), "--quiet"]
    assert main([*command, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["policies"][1] == "tova"
    assert main(["inspect", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "handed out by each prompt" in shown
    assert "least loss of the whole reduced cache in 60.0% of all entries, on 3 of 3" in shown
    assert "tova" in shown
    assert "attention_matching" in shown
    assert main([*command, "--combine", "none"]) == 0
    assert BudgetProfile.load(out).policy.name == "score"
    fixed = [one for one in command if one != "--by-prompt"]
    assert main([*fixed, "--combine", "none"]) == 2
    assert "--combine goes with --by-prompt" in capsys.readouterr().err
    assert main(["diff", str(out), str(out)]) == 0


def test_the_command_goes_on_after_a_kill(model, tmp_path, capsys, monkeypatch):
    from kvalloc.cli.main import main
    from kvalloc.models.loading import LoadedModel
    from kvalloc.tuning.descent_state import StateFile

    loaded = LoadedModel(model=model, tokenizer=WordTokenizer(), model_id="tiny")
    monkeypatch.setattr("kvalloc.models.loading.load_model", lambda *_, **__: loaded)
    file, out = tmp_path / "prompts.jsonl", tmp_path / "p.json"
    file.write_text("".join(json.dumps({"text": one.text}) + "\n" for one in prompts()))
    command = ["tune", "tiny", "--by-prompt", "--prompts", str(file), "--context", "60"]
    command += ["--policies", "tova", "--steps", "2", "--budget", "60%", "--quiet"]
    assert main([*command, "-o", str(tmp_path / "whole.json")]) == 0
    save = StateFile.save

    def killed(self, tensors, values):
        save(self, tensors, values)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StateFile, "save", killed)
        assert main([*command, "-o", str(out)]) == 130
    assert "the same command and --resume" in capsys.readouterr().err
    assert not out.exists()
    assert main([*command, "-o", str(out)]) == 2
    assert "unfinished descent" in capsys.readouterr().err
    assert main([*command, "-o", str(out), "--resume"]) == 0
    again, whole = (BudgetProfile.load(each) for each in (out, tmp_path / "whole.json"))
    assert again.predicted_loss == whole.predicted_loss
    assert np.array_equal(again.unit_weights, whole.unit_weights)
    assert not list(tmp_path.glob("*.partial"))
