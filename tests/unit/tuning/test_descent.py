"""Descent on the whole cache's loss, on random models: fixed budgets, and mixed scores."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from cli_tools import full_disk, run
from safetensors import safe_open
from safetensors.numpy import save
from scorer_oracle import SCORERS
from tiny_models import VOCABULARY, WordTokenizer, tiny_model, words

import kvalloc
from kvalloc.errors import InputError, UnsupportedRequestError
from kvalloc.evaluate.kl import divergence
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.record import digest_over
from kvalloc.measure.checkpoint import checkpoint_folder
from kvalloc.measure.loss_probe import LossProbe
from kvalloc.models.loading import LoadedModel, shape_of
from kvalloc.prompts.texts import Prompt
from kvalloc.scorers import get_scorer
from kvalloc.tuning import tune, tune_each
from kvalloc.tuning.descent import held_out, threshold
from kvalloc.tuning.fixed_budgets import FixedBudgets, shares_of
from kvalloc.tuning.score_mixing import MixedScores

SCORER = get_scorer("xkv", window=4, pool=3)
CONTEXT = 60
QUICK = {"steps": 4, "batch": 2, "continuation_tokens": 5, "checks": 2, "held_out": 0.34}
KINDS = {
    "fixed": {"scorer": SCORER, "policies": ("tova", "keydiff")},
    "mixed": {
        "by_prompt": True,
        "scorer": "lookahead:tokens=3:window=4:votes=0:pool=1",
        "policies": ("lookahead:tokens=0:votes=6:window=4:pool=1", "tova", "keydiff"),
        "combine": None,
    },
}
LOOKAHEAD, RECONSTRUCTION = "lookahead:window=4:tokens=3", "reconstruction:window=4:chunk=25"
MOVES = {"fixed": FixedBudgets, "mixed": MixedScores}
both = pytest.mark.parametrize("kind", KINDS)


def endless(*kind, **options):
    """A tiny model that never ends its turn."""
    model = tiny_model(*kind, **options)
    model.generation_config.eos_token_id = None
    return model


model = pytest.fixture(scope="module")(lambda: endless())


def prompts(count=3, n_words=CONTEXT):
    return [Prompt(text=words(n_words, seed=seed)) for seed in range(count)]


def quick(kind="fixed", **changes):
    return replace(MOVES[kind].settings, **{**QUICK, **changes})


def tuned(model, kind="fixed", texts=None, **options):
    settings = {"shares": [0.4], "context": CONTEXT, "sinks": 2, "descent": quick(kind)}
    texts = prompts() if texts is None else texts
    return list(tune_each(model, WordTokenizer(), texts, **{**settings, **KINDS[kind], **options}))


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


def test_shares_meet_the_mean_and_their_slopes_keep_it():
    theta = torch.tensor([[0.5, -2.0], [3.0, 0.0]], requires_grad=True)
    shares = shares_of(theta, 0.2)
    assert float(shares.detach().mean()) == pytest.approx(0.2, abs=1e-6)
    (slope,) = torch.autograd.grad(shares.mean(), theta)
    assert torch.allclose(slope, torch.zeros_like(slope), atol=1e-7)
    (slope,) = torch.autograd.grad(shares_of(theta, 0.2)[1, 0], theta)
    for place in ((0, 0), (1, 0), (1, 1)):
        ahead, behind = theta.detach().double().clone(), theta.detach().double().clone()
        ahead[place] += 1e-3
        behind[place] -= 1e-3
        difference = (shares_of(ahead, 0.2) - shares_of(behind, 0.2))[1, 0] / 2e-3
        assert float(slope[place]) == pytest.approx(float(difference), rel=1e-2)


@pytest.mark.parametrize("softness", [1.0, 0.1])
def test_the_threshold_keeps_the_part_and_so_does_its_slope(softness):
    torch.manual_seed(0)
    places = (3 * torch.randn(2, 3, 40, dtype=torch.float64)).requires_grad_()

    def part(states):
        return torch.sigmoid((states - threshold(states, 0.3, softness)) / softness).mean()

    assert float(part(places).detach()) == pytest.approx(0.3, abs=1e-6)
    (slope,) = torch.autograd.grad(part(places), places)
    assert float(slope.abs().max()) < 1e-9
    ahead = places.detach().clone()
    ahead[0, 0, 0] += 1e-3
    moved = float(threshold(ahead, 0.3, softness) - threshold(places.detach(), 0.3, softness))
    (slope,) = torch.autograd.grad(threshold(places, 0.3, softness), places)
    assert float(slope[0, 0, 0]) == pytest.approx(moved / 1e-3, rel=0.02, abs=1e-5)


def test_what_comes_out_is_a_profile_within_its_budget(model, tmp_path):
    profile = tuned(model)[0].profile
    assert profile.level == "head"
    wanted = 0.4 * profile.budgets.size * CONTEXT
    assert wanted - profile.budgets.size <= profile.retained_tokens <= wanted
    assert profile.budgets.min() >= 6
    titles = [policy.title for policy in profile.policies]
    assert titles[0] == "xkv"
    assert set(titles[1:]) <= {"tova", "keydiff"}
    profile.save(tmp_path / "p.json")
    again = BudgetProfile.load(tmp_path / "p.json")
    assert np.array_equal(again.budgets, profile.budgets)
    assert again.policies == profile.policies
    assert again.predicted_loss == profile.predicted_loss
    ids = torch.randint(2, VOCABULARY, (1, 50))
    cache = again.cache(model)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    assert cache.retained_bytes < 0.5 * cache.full_bytes


def test_a_profile_by_prompt_says_what_it_kept_in_the_mean(model):
    (found,) = tuned(model, "mixed")
    profile = found.profile
    assert profile.by_prompt
    assert profile.level == "head"
    assert profile.budgets.sum() == int(0.4 * CONTEXT * profile.budgets.size + 1e-6)
    assert profile.budgets.min() >= profile.policy.protected_tokens
    assert profile.unit_weights.shape == (*profile.budgets.shape, 4)
    assert profile.unit_weights.max() == 1.0
    least = min(loss for _, loss in found.course.stages)
    assert float(found.course.held_out_losses.mean()) == pytest.approx(least)
    assert profile.objective == pytest.approx(-least)


@both
def test_sliding_layers_hold_what_a_sliding_cache_holds(kind):
    model = endless("gemma3")
    (found,) = tuned(model, kind)
    shape, budgets = found.profile.shape, found.profile.budgets
    assert shape.sliding_window < CONTEXT
    assert (budgets[[0, 2]] == shape.sliding_entries(CONTEXT)).all()
    cache = found.profile.cache(model)
    with torch.no_grad():
        model(input_ids=torch.randint(2, VOCABULARY, (1, CONTEXT)), past_key_values=cache)
    stored = [layer.keys.shape[-2] for layer in cache.layers]
    assert [stored[0], stored[2]] == [budgets[0, 0], budgets[2, 0]]


def cache_loss(model, profile, ids, following):
    """KL of the predictions after each following token, whole forward against the real runtime.

    What a cache waits for is read, taken back when it has evicted, and read again.
    """
    cache = profile.cache(model)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        if awaited := cache.awaited_tokens:
            model(following[:, :awaited], past_key_values=cache)
            cache.evict()
            cache.crop(ids.shape[1])
        reduced = model(following, past_key_values=cache).logits[0]
        full = model(torch.cat([ids, following], dim=1)).logits[0, ids.shape[1] :]
    return divergence(full, reduced).kl


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("fixed", {}),
        ("fixed", {"scorer": LOOKAHEAD, "policies": ("reconstruction:chunk=25",)}),
        ("fixed", {"scorer": RECONSTRUCTION, "policies": ("lookahead:tokens=6", "h2o")}),
        ("mixed", {}),
        ("mixed", {"combine": "attention_matching:rows=20:following=3"}),
    ],
)
def test_the_stated_loss_is_that_of_the_profiles_cache(model, kind, changes):
    """Held-out prompt through the real runtime, teacher-forced, against the full cache."""
    (found,) = tuned(model, kind, **changes)
    (index,) = held_out(3, QUICK["held_out"], 0)
    ids = torch.tensor([WordTokenizer()(prompts()[index].text)["input_ids"]])
    written = QUICK["continuation_tokens"]
    following = model.generate(ids, max_new_tokens=written, do_sample=False, pad_token_id=0)
    expected = cache_loss(model, found.profile, ids, following[:, ids.shape[1] :])
    assert expected > 1e-4
    assert found.course.held_out_losses[0] == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert found.profile.predicted_loss == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_combining_changes_what_is_stated_and_not_what_is_decided(model):
    (plain,), (found,) = (
        tuned(model, "mixed", combine=combine)
        for combine in ("none", "attention_matching:rows=20:following=3")
    )
    profile = found.profile
    assert profile.policy.name == "attention_matching"
    assert (profile.policy.parameters["rows"], profile.policy.parameters["following"]) == (20, 3)
    assert {policy.name for policy in profile.other_policies} == {"score"}
    assert np.array_equal(profile.unit_weights, plain.profile.unit_weights)
    assert np.array_equal(profile.budgets, plain.profile.budgets)
    assert profile.predicted_loss != plain.profile.predicted_loss


@both
def test_held_out_prompts_choose_among_the_stages(model, kind):
    course = tuned(model, kind)[0].course
    assert course.held_out_losses.mean() == pytest.approx(min(loss for _, loss in course.stages))
    assert [step for step, _ in course.stages] == [0, 2, 4]
    if kind == "fixed":
        assert course.held_out_losses.mean() <= course.uniform_losses.mean()


def test_it_finds_the_head_that_matters():
    """One head's values are the only ones that reach the output: it gets what the others spare."""
    model = endless(seed=1)
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            weight = layer.self_attn.o_proj.weight  # columns: 6 query heads of 8
            weight[:, 24:] = 0.0  # KV head 1 is mute everywhere
            if index:
                weight[:, :24] *= 0.01
    descent = quick(steps=25, continuation_tokens=6, checks=1)
    (found,) = tuned(model, texts=prompts(4), descent=descent, shares=[0.5])
    budgets, course = found.profile.budgets, found.course
    assert budgets[0, 0] > 1.5 * budgets[:, 1].max()
    assert course.held_out_losses.mean() < 0.7 * course.uniform_losses.mean()


def test_mixing_learns(model):
    """With more steps the prompts that it learns from lose less than in the beginning."""
    many = quick("mixed", steps=12, batch=3, checks=1, learning_rate=0.3)
    texts = [Prompt(text=words(CONTEXT, seed=1))] * 3
    (_, before), (_, after) = tuned(model, "mixed", texts=texts, descent=many)[0].course.stages
    assert after < before


class Killed(Exception):
    """Stands for a kill."""


@both
@pytest.mark.parametrize("steps", [1, 2, 4, 6])
def test_a_killed_descent_goes_on_to_the_same_numbers(model, tmp_path, monkeypatch, kind, steps):
    """Before, at and after a check of the held-out prompts, and within the second share."""
    shares, told = [0.4, 0.6], []
    whole = tuned(model, kind, shares=shares, progress=lambda *counts: told.append(counts))
    assert told[-1] == (3 + 2 * QUICK["steps"],) * 2
    assert whole[1].profile.budgets.sum() > whole[0].profile.budgets.sum()
    files = [tmp_path / f"{share}.json" for share in shares]

    def kill(done, total):
        if done == 3 + steps:
            raise Killed

    with pytest.raises(Killed):
        tuned(model, kind, shares=shares, outputs=files, progress=kill)
    assert [file.exists() for file in files] == [steps > 4, False]
    assert [checkpoint_folder(file).exists() for file in files] == [True, steps > 4]
    taken = []
    soft_loss = LossProbe.soft_loss
    monkeypatch.setattr(LossProbe, "soft_loss", lambda *given: taken.append(1) or soft_loss(*given))
    again = tuned(model, kind, shares=shares, outputs=files, resume=True)
    assert len(taken) == (2 * QUICK["steps"] - steps) * QUICK["batch"]
    for resumed, unbroken, file in zip(again, whole, files, strict=True):
        unbroken.profile.save(tmp_path / "whole.json")
        assert file.read_bytes() == (tmp_path / "whole.json").read_bytes()
        for name in ("held_out_losses", "uniform_losses"):
            of_both = (getattr(one.course, name) for one in (resumed, unbroken))
            assert np.array_equal(*of_both)
        assert resumed.course.stages == unbroken.course.stages
    assert not list(tmp_path.glob("*.partial"))


def stop(done, total):
    if done == 4:
        raise Killed


def read_piece(path):
    """Arrays and values of a piece of finished work."""
    with safe_open(path, framework="numpy") as kept:
        told = json.loads(kept.metadata()["kvalloc.values"])
        return {name: kept.get_tensor(name) for name in sorted(kept.keys())}, told


def piece(arrays, told):
    """A piece of finished work with a digest that is right."""
    values = json.dumps(told)
    return save(arrays, {"kvalloc.values": values, "kvalloc.digest": digest_over(values, arrays)})


@both
def test_what_was_begun_is_neither_overwritten_nor_mixed_up(model, tmp_path, kind):
    file = tmp_path / "p.json"
    with pytest.raises(Killed):
        tuned(model, kind, outputs=[file], progress=stop)
    with pytest.raises(InputError, match="unfinished work"):
        tuned(model, kind, outputs=[file])
    for changes, field in (
        ({"seed": 3}, "seed 0, now it is 3"),
        ({"shares": [0.5]}, "budget 0.4"),
        ({"context": CONTEXT + 1}, "context_tokens"),
        ({"policies": KINDS[kind]["policies"][:1]}, "policies"),
        ({"descent": quick(kind, steps=5)}, "descent"),
        ({"texts": prompts(4)[1:]}, "text_digest"),
        ({"model": tiny_model(seed=1)}, "weights"),
    ):
        with pytest.raises(InputError, match=f"begun with {field}"):
            tuned(**{"model": model, "kind": kind, "outputs": [file], "resume": True, **changes})
    state = checkpoint_folder(file) / "descent.safetensors"
    whole, (arrays, told) = state.read_bytes(), read_piece(state)
    less = {name: array for name, array in arrays.items() if name != "held_out_losses"}
    no_scales = piece(arrays, {**told, "scales": 1})
    for crafted in (whole[:200], piece(less, told), piece(arrays, {}), no_scales):
        state.write_bytes(crafted)
        with pytest.raises(InputError, match="cannot be read"):
            tuned(model, kind, outputs=[file], resume=True)
    assert not file.exists()
    state.write_bytes(piece(arrays, told))
    tuned(model, kind, outputs=[file], resume=True)
    assert file.exists()


def test_a_full_disk_is_told_in_one_line_and_loses_no_step(model, tmp_path):
    file = tmp_path / "p.json"
    with pytest.raises(Killed):
        tuned(model, outputs=[file], progress=stop)
    before = (checkpoint_folder(file) / "descent.safetensors").read_bytes()
    said = "cannot write .*descent.safetensors: File too large"
    with full_disk(), pytest.raises(InputError, match=said):
        tuned(model, outputs=[file], resume=True)
    assert (checkpoint_folder(file) / "descent.safetensors").read_bytes() == before
    again, whole = tuned(model, outputs=[file], resume=True)[0], tuned(model)[0]
    assert np.array_equal(again.profile.budgets, whole.profile.budgets)


@both
def test_in_the_library(model, tmp_path, kind):
    file, given = tmp_path / "p.json", (model, WordTokenizer(), prompts())
    options = {**KINDS[kind], "context": CONTEXT, "sinks": 2, "descent": quick(kind)}
    profile = tune(*given, budget="40%", output=file, **options)
    (same,) = tuned(model, kind)
    assert np.array_equal(profile.budgets, same.profile.budgets)
    assert np.array_equal(profile.unit_weights, same.profile.unit_weights)
    assert kvalloc.tune is tune
    assert list(tmp_path.iterdir()) == [file]
    for wrong, error, said in (
        ({"resume": True}, InputError, "name the output"),
        ({"budget": "a lot"}, InputError, "not a share"),
        ({"colour": 1}, TypeError, "colour"),
    ):
        with pytest.raises(error, match=said):
            tune(*given, **{"budget": 0.4, **wrong})


def test_the_profile_states_what_it_loses_on_which_prompts(model):
    descent = quick(steps=2, checks=1, held_out=0.5)
    (found,) = tuned(model, texts=prompts(8), descent=descent)
    profile, losses = found.profile, found.course.held_out_losses
    assert profile.predicted_loss == pytest.approx(losses.mean())
    low, high = profile.requested["predicted_interval"]
    assert losses.min() <= low < losses.mean() < high <= losses.max()
    assert profile.requested["predicted_on_prompts"] == losses.size == 4
    assert "8 of 8 prompts" in profile.requested["text"]
    assert tuned(model)[0].profile.requested["predicted_interval"] is None


@pytest.mark.parametrize("name", SCORERS)
def test_every_scorer_can_be_chosen(model, name):
    own = name == SCORER.name
    wide = getattr(get_scorer(name), "window", 0) > SCORER.window
    text = name + ":window=4:pool=3" * own + ":window=4" * (wide and not own)
    (found,) = tuned(model, policies=[text], descent=quick(steps=1, batch=1, checks=1))
    assert np.isfinite(found.course.held_out_losses).all()
    assert len(found.profile.solver_options["policies"]) == 2 - own


def test_the_usual_policies_are_the_default_ones(model):
    options = {"scorer": "xkv:window=8:pool=3", "descent": quick(steps=1, batch=1, checks=1)}
    usual, default = (
        tuned(model, policies=policies, **options)[0].profile.solver_options["policies"]
        for policies in (["usual"], FixedBudgets.other_scorers)
    )
    assert usual == default
    assert len(usual) > 3
    mixed = tuned(model, "mixed", policies=["usual"])[0].profile.policies
    assert len(mixed) == 7
    assert {policy.scorer_parameters["window"] for policy in mixed} == {4}


def test_several_shares_are_each_decided_for_themselves(model):
    found = tuned(model, shares=[0.6, 0.3])
    kept = [one.profile.retained_tokens / one.profile.budgets.size / CONTEXT for one in found]
    assert kept == pytest.approx([0.6, 0.3], abs=0.02)
    alone = tuned(model, shares=[0.3])[0]
    assert np.array_equal(alone.profile.budgets, found[1].profile.budgets)
    assert np.array_equal(alone.course.held_out_losses, found[1].course.held_out_losses)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("fixed", {"shares": [0.05]}, "not more than the 6 of sinks and"),
        ("fixed", {"shares": [1.0]}, "less than all"),
        ("mixed", {"shares": []}, "no budget.*at least one share"),
        ("fixed", {"texts": prompts(1)}, "at least two prompts"),
        ("fixed", {"texts": prompts(2, n_words=5)}, "tokens"),
        ("fixed", {"combine": "none"}, "combine goes with by_prompt"),
        ("mixed", {"scorer": "lookahead:tokens"}, "NAME:KEY=VALUE"),
        ("mixed", {"scorer": "nobody"}, "nobody"),
        ("fixed", {"policies": ["critical"]}, "larger one.*cannot be made smooth"),
        ("mixed", {"policies": ["nacl"]}, "larger one.*cannot be made smooth"),
        *(
            ("mixed", {"combine": combine}, "attention_matching")
            for combine in ("merge", "score", "snapkv", "attention_matching:rows=-1")
        ),
    ],
)
def test_what_cannot_be_tuned_is_refused(model, kind, options, said):
    kinds = UnsupportedRequestError if "smooth" in said else InputError
    with pytest.raises(kinds, match=said) as error:
        tuned(model, kind, **options)
    assert "\n" not in str(error.value).split("choose")[0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"held_out": 1.0},
        {"softness": (0.1, 0.0)},
        {"temperature": (0.0, 1.0)},
        {"other_weight": 0.0},
    ],
)
def test_a_descent_that_goes_nowhere_is_refused(wrong):
    with pytest.raises(InputError):
        quick(**wrong)


def test_held_out_prompts_are_spread():
    chosen = held_out(24, 0.2, 0)
    assert len(chosen) == 5
    assert [sorted(chosen)[i] // 5 for i in range(5)] == sorted(place // 5 for place in chosen)
    assert held_out(2, 0.9, 0) in ({0}, {1})


@pytest.fixture
def command(model, tmp_path, monkeypatch):
    """``kvalloc tune`` with a tiny model and three prompts; how many steps, and what else."""
    loaded = LoadedModel(model=model, tokenizer=WordTokenizer(), model_id="tiny")
    monkeypatch.setattr("kvalloc.models.loading.load_model", lambda *_, **__: loaded)
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"text": one.text}) + "\n" for one in prompts()))

    def called(*more, given=("--prompts", file), output=tmp_path / "p.json"):
        always = ("--context", 60, "--policies", "tova", "-o", output, "--quiet")
        return run("tune", "tiny", *given, *always, *more)

    return called


def test_the_command(command, tmp_path):
    def refused(said, *more, **options):
        ran = command(*more, **options)
        assert (ran.code, said in ran.err) == (2, True)

    window, once = ("--window", 4), ("--steps", 1, "--json")
    ran = command(*window, *once, "--budget", "60%", "--budget", "30%")
    assert ran.code == 0, ran.err
    assert [row["output"] for row in ran.json] == [str(tmp_path / f"p-{n}.json") for n in (60, 30)]
    shown = run("inspect", tmp_path / "p-30.json").out
    assert "descent" in shown
    assert "on 3 of 3 prompts" in shown
    kept = checkpoint_folder(tmp_path / "p.json")
    kept.mkdir()
    (kept / "descent.safetensors").write_text("")
    refused("go on with --resume", *window, *once, "--budget", "50%")
    (kept / "descent.safetensors").unlink()
    kept.rmdir()
    refused("ask for another budget", *window, *once, "--budget", "2%")
    made = ("--tasks", "kl", "--question", "both", "--samples", 4)
    ran = command(*window, *once, "--budget", "50%", given=made)
    assert ran.json[0]["held_out_prompts"] == 1
    assert "4 of 4 prompts of kl in" in BudgetProfile.load(tmp_path / "p.json").requested["text"]
    refused("give --tasks, --prompts or --text", "--budget", "30%", given=())
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.filterwarnings("error::UserWarning")
def test_the_command_by_prompt(command, tmp_path):
    out, asked = tmp_path / "p.json", ("--steps", 1, "--budget", "60%")
    ran = command("--by-prompt", *asked, "--json")
    assert ran.json[0]["policies"][1] == "tova"
    shown = run("inspect", out).out
    for said in ("handed out by each prompt", "tova", "attention_matching"):
        assert said in shown
    assert "least loss of the whole reduced cache in 60.0% of all entries, on 3 of 3" in shown
    assert command("--by-prompt", *asked, "--combine", "none").code == 0
    assert BudgetProfile.load(out).policy.name == "score"
    ran = command(*asked, "--combine", "none")
    assert (ran.code, "--combine goes with --by-prompt" in ran.err) == (2, True)
    assert run("diff", out, out).code == 0
