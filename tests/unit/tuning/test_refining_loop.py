"""Refining on small random models, against forwards with the hidden entries masked."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import WordTokenizer, tiny_model, words

from kvalloc import refine
from kvalloc.allocation.audit import verify
from kvalloc.allocation.decision import solve
from kvalloc.errors import InfeasibleError, InputError, ModelMismatchError
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.measure import Document, Prompt, profile
from kvalloc.measure.loss_plan import LossPlan
from kvalloc.measure.loss_probe import LossProbe
from kvalloc.models.attention import intercept_attention
from kvalloc.runtime.selection import keep_best
from kvalloc.scorers import get_scorer
from kvalloc.tuning.measurement import JointProbes

TOKENIZER = WordTokenizer()
PLAN = LossPlan(shares=(0.0, 0.15, 0.3, 0.6), level="head", continuation_tokens=5, method="fast")


def prompts(count=9):
    every = words(80 * count).split()
    texts = [" ".join(every[80 * i : 80 * i + 60 - i]) for i in range(count)]
    return [
        Prompt(text=text, answer="w3 w1 w4 w1 w5" if i % 2 else "", task="" if i else "text")
        for i, text in enumerate(texts)
    ]


@pytest.fixture(scope="module")
def model():
    return tiny_model(initializer_range=0.3)


@pytest.fixture(scope="module")
def scores(model):
    return profile(model, TOKENIZER, prompts(4), context=60, samples=4, loss=PLAN)


def run(scores, model, given=None, **options):
    values = {"level": "head", "rounds": 2, "continuation_tokens": 5, **options}
    return refine(scores, model, TOKENIZER, prompts() if given is None else given, **values)


def masked_loss(model, scores, prompt, budgets):
    """KL of the given answer's predictions with all heads at their budgets, by whole forwards."""
    ids = TOKENIZER(prompt.text)["input_ids"]
    answer = TOKENIZER(f" {prompt.answer}", add_special_tokens=False)["input_ids"]
    everything, n = torch.tensor([ids + answer]), len(ids)
    scorer = get_scorer(scores.scorer, **scores.scorer_parameters)
    kept = {}
    share = (n - scores.protected_tokens) / (scores.context_tokens - scores.protected_tokens)

    def look(states, compute):
        rows = torch.from_numpy(budgets[states.layer].copy())[None] - scores.protected_tokens
        wanted = scores.protected_tokens + (rows * share).round().long()
        found = scorer.score(states, sinks=scores.sinks)
        kept[states.layer] = keep_best(found, wanted, sinks=scores.sinks, window=scores.window)[0]
        return compute(states.mask)

    def hide(states, compute):
        size = everything.shape[1]
        mask = torch.ones(size, size).tril().bool().expand(1, 6, -1, -1).clone()
        mask[0, :, n:, :n] &= kept[states.layer].repeat_interleave(3, dim=0)[:, None]
        return compute(mask)

    with torch.no_grad():
        with intercept_attention(model, look):
            model(input_ids=everything[:, :n], use_cache=False)
        full = model(input_ids=everything, use_cache=False).logits[0, n:].double().log_softmax(-1)
        with intercept_attention(model, hide):
            logits = model(input_ids=everything, use_cache=False).logits[0, n:]
    reduced = logits.double().log_softmax(-1)
    return float((full.exp() * (full - reduced)).sum(-1).mean())


def test_stated_losses_are_those_of_masked_forwards(model, scores):
    given = [Prompt(text=p.text, answer="w3 w1 w4 w1 w5") for p in prompts()]
    decided = run(scores, model, given, budget="40%")
    told = decided.refinement
    for side, stated in (("training", "predicted_loss"), ("held_out", "measured_loss")):
        found = [
            masked_loss(model, scores, given[i], decided.budgets) for i in told[f"{side}_prompts"]
        ]
        assert told[stated] == pytest.approx(np.mean(found), rel=1e-3)
        low, high = told[stated.replace("loss", "interval")]
        assert low <= told[stated] <= high
    assert decided.predicted_loss == told["predicted_loss"]
    assert decided.retained_bytes <= decided.requested["bytes"]


def test_the_best_round_by_held_out_loss_is_kept(tmp_path, model, scores):
    decided = run(scores, model, budget="35%", rounds=3)
    told = decided.refinement
    rounds = told["rounds"]
    assert [one["round"] for one in rounds] == list(range(len(rounds)))
    assert len(rounds) > 1
    best = min(rounds, key=lambda one: one["judged"])
    assert [one for one in rounds if one["kept"]][-1] == best
    assert best["choosing"] == pytest.approx(told["choosing_loss"])
    first = solve(scores, budget="35%", level="head", objective="loss")
    assert rounds[0]["predicted"] == pytest.approx(first.predicted_loss)
    decided.save(tmp_path / "p.json")
    again = BudgetProfile.load(tmp_path / "p.json")
    assert again.refinement["rounds"] == [{**one} for one in rounds]
    assert all(check.passed for check in verify(again, scores))
    assert told["tasks"] == ["text", "answers"] * 4 + ["text"]
    assert told["note"] == ""
    assert set(told["measured_by_task"]) == {"text", "answers"}


def test_a_killed_refinement_goes_on_where_it_was(tmp_path, model, scores):
    class Killed(Exception):
        pass

    def stop(done, total):
        assert done <= total
        if done == 11:
            raise Killed

    asked = {"budget": "35%", "output": tmp_path / "x"}
    with pytest.raises(Killed):
        run(scores, model, progress=stop, **asked)
    files = list((tmp_path / "x.partial").glob("measured_*"))
    assert len(files) == 11
    with pytest.raises(InputError, match="unfinished work.*resume=True"):
        run(scores, model, **asked)
    with pytest.raises(InputError, match="begun with continuation_tokens 5, now it is 4"):
        run(scores, model, resume=True, **{**asked, "continuation_tokens": 4})
    # what is there is not measured again
    before = {file.name: file.stat().st_mtime_ns for file in files}
    resumed = run(scores, model, resume=True, **asked)
    unbroken = run(scores, model, budget="35%")
    assert np.array_equal(resumed.budgets, unbroken.budgets)
    assert resumed.refinement == unbroken.refinement
    assert before
    assert [file.name for file in tmp_path.iterdir()] == ["x"]


def test_fewest_bytes_within_a_held_out_loss(model, scores):
    half = run(scores, model, budget="40%", rounds=1).refinement
    target = half["choosing_loss"]
    decided = run(scores, model, target_loss=target, rounds=4)
    told = decided.refinement
    assert told["choosing_loss"] <= target
    assert decided.retained_bytes < decided.full_bytes
    within = [one for one in told["rounds"] if one["choosing"] <= target]
    assert min(one["cost_bytes"] for one in within) == decided.retained_bytes
    beyond = told["largest_size_beyond_target"]
    assert beyond is None or beyond < decided.retained_bytes
    assert all(check.passed for check in verify(decided, scores))


def test_curves_that_promise_too_much_are_asked_for_less(model, scores):
    half = run(scores, model, budget="40%", rounds=1).refinement
    hopeful = scores.replace(losses=scores.losses * 0.1)
    target = half["choosing_loss"]
    decided = run(hopeful, model, target_loss=target, rounds=1)
    told = decided.refinement
    first, second = told["rounds"][:2]
    assert first["round"] == second["round"] == 0
    assert first["choosing"] > target
    assert second["predicted"] < first["predicted"]
    assert second["cost_bytes"] > first["cost_bytes"]
    assert told["choosing_loss"] <= target
    assert told["largest_size_beyond_target"] >= first["cost_bytes"]
    assert decided.retained_bytes < decided.full_bytes
    assert all(check.passed for check in verify(decided, hopeful))


@pytest.mark.parametrize(
    ("promised", "said"),
    [
        (1e-9, r"no round came within 1e-06 nats.*bytes: ask for"),  # too much is promised
        (1.0, r"a loss of 1e-06 nats.*curves end at \d+\.\d+; ask"),
    ],
)
def test_a_target_that_cannot_be_met_names_the_nearest(model, scores, promised, said):
    hopeful = scores.replace(losses=scores.losses * promised)
    with pytest.raises(InfeasibleError, match=said):
        run(hopeful, model, target_loss=1e-6, rounds=1, max_tokens=scores.context_tokens // 2)


def test_by_default_it_refines_on_prompts_of_every_kind(monkeypatch):
    from kvalloc.measure import default_texts
    from kvalloc.prompts import calibration
    from kvalloc.tuning import refinement_prompts

    asked = []

    def made(tokenizer, n_prompts, n_tokens, *, seed):
        asked.append((n_prompts, n_tokens, seed))
        if n_tokens < 100:
            raise InputError("no prompt of the task needle fits")
        return prompts()

    monkeypatch.setattr(calibration, "calibration_prompts", made)
    assert refinement_prompts(tokenizer=TOKENIZER, context_tokens=512) == (prompts(), "")
    texts, said = refinement_prompts(tokenizer=TOKENIZER, context_tokens=60)
    assert texts == [*default_texts()]
    assert "on prose alone, because prompts of every kind cannot be made (no prompt of the" in said
    assert refinement_prompts() == ([*default_texts()], "")
    assert [one[0] for one in asked] == [16, 16]
    assert all(seed > 0 for *_, seed in asked)  # others than losses are measured on by default


def test_fewer_probes_measure_the_least_decided_units(tmp_path, model, scores):
    decided = run(scores, model, budget="35%", rounds=1, probes=3)
    assert decided.refinement is not None
    whole = run(scores, model, budget="35%", rounds=1)
    assert decided.refinement["rounds"][0] == whole.refinement["rounds"][0]
    moved = (decided.budgets != solve(scores, budget="35%", level="head").budgets).sum()
    assert moved <= 3


@pytest.mark.parametrize("level", ["layer", "head"])
def test_layers_and_heads(model, scores, level):
    decided = run(scores, model, budget="50%", level=level, rounds=1, page=4)
    assert decided.level == level
    assert decided.refinement is not None
    if level == "layer":
        assert (decided.budgets == decided.budgets[:, :1]).all()


def test_policies_chosen_with_budgets_are_what_is_measured(model):
    plan = LossPlan(
        shares=(0.0, 0.2, 0.5), level="head", method="fast", policies=("tova", "knorm", "critical")
    )
    # as long as the reference context, where no budget is rounded
    every = words(400).split()
    texts = [" ".join(every[70 * i : 70 * i + 60]) for i in range(5)]
    given = [Prompt(text=text, answer="w3 w1 w4 w1 w5") for text in texts]
    found = profile(model, TOKENIZER, given, context=60, samples=4, loss=plan)
    decided = run(found, model, given, budget="40%", rounds=2)
    assert decided.unit_policies is not None
    told = decided.refinement
    # the cache keeps what was measured: the same answers through the runtime
    losses = []
    for index in told["held_out_prompts"]:
        prompt = given[index]
        ids = torch.tensor([TOKENIZER(prompt.text)["input_ids"]])
        answer = torch.tensor([TOKENIZER(prompt.answer, add_special_tokens=False)["input_ids"]])
        cache = decided.cache(model, allow_other_model=True)
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache)
            reduced = model(input_ids=answer, past_key_values=cache).logits[0].double()
            full = model(input_ids=torch.cat([ids, answer], dim=1)).logits[0, ids.shape[1] :]
        full, reduced = full.double().log_softmax(-1), reduced.log_softmax(-1)
        losses.append(float((full.exp() * (full - reduced)).sum(-1).mean()))
    assert told["measured_by_task"]["answers"] == pytest.approx(np.mean(losses), rel=1e-3)


def test_budgets_and_bits_are_refined_together(model):
    """What is stated is what the cache with these bits loses, all heads at once."""
    given = [Prompt(text=words(60, seed), answer="w3 w1 w4 w1 w5") for seed in range(8)]
    found = profile(model, TOKENIZER, given[:4], context=60, samples=4, loss=PLAN, bits=(8, 3))
    decided = run(found, model, given, budget="60%", bits=(16, 8, 3), rounds=1)
    assert len(np.unique(decided.bits)) > 1
    assert all(check.passed for check in verify(decided, found))
    scorer = get_scorer(found.scorer, **found.scorer_parameters)
    fixed = {"sinks": found.sinks, "shape": found.shape, "continuation_tokens": 5}
    losses = []
    for index in decided.refinement["held_out_prompts"]:
        ids, answer = (
            torch.tensor(TOKENIZER(text, add_special_tokens=False)["input_ids"])
            for text in (given[index].text, given[index].answer)
        )
        probe = LossProbe(model, ids, scorer, answer_ids=answer, **fixed)
        losses.append(probe.cache_loss(decided.cache(model)))
    assert decided.refinement["measured_loss"] == pytest.approx(np.mean(losses), rel=1e-3)


def test_sliding_layers_are_left_alone():
    model = tiny_model("gemma3")
    found = profile(model, TOKENIZER, prompts(2), context=60, samples=2, loss=PLAN)
    decided = run(found, model, budget="60%", rounds=1)
    assert (decided.budgets[[0, 2]] == found.shape.sliding_entries(60)).all()
    assert decided.refinement is not None


def test_what_cannot_be_refined_is_refused(model, scores):
    plain = scores.replace(
        losses=None, loss_stderr=None, loss_tokens=None, loss_method="", other_losses=None
    )
    ended = tiny_model(initializer_range=0.3)
    ended.generation_config.eos_token_id = list(range(101))
    for options, message in (
        ({"budget": None, "target_retention": 0.9}, "leave out the retention"),
        ({"objective": "mean"}, "leave out the retention and the objective"),
        ({"weights": [1, 1, 1]}, "leave out the weights"),
        ({"rounds": 0}, "at least 1 round"),
        ({"colour": 1}, "no option 'colour'"),
        ({"given": prompts(3)}, "at least 4 prompts"),
        ({"given": [Prompt(text="w1 w2")] * 4}, "has 2 tokens"),
        ({"given": [Prompt(text=words(60)), words(60)]}, "are mixed"),
        ({"scores": plain}, "no loss curves"),
        (
            {"model": ended, "given": [Prompt(text=words(60))] * 4},
            "prompt 0: the model ends its turn at once",
        ),
    ):
        with pytest.raises(InputError, match=message):
            run(**{"scores": scores, "model": model, "budget": 0.3, **options})
    with pytest.raises(ModelMismatchError):
        run(scores, tiny_model(num_hidden_layers=2), budget=0.3)


@pytest.mark.parametrize("target", [{"budget": "40%"}, {"target_loss": 0.4}])
def test_the_stated_loss_is_of_prompts_that_decide_nothing(monkeypatch, model, scores, target):
    """Whatever they lose after the split is drawn, the budgets and the rounds are the same."""
    measure, plain = JointProbes.measure, run(scores, model, **target)
    report = plain.refinement["held_out_prompts"]
    sides = [plain.refinement[f"{one}_prompts"] for one in ("training", "choosing", "held_out")]
    assert sorted(sum(sides, [])) == list(range(9))
    seen = {}

    def other(self, index, *rest):
        seen[index] = seen.get(index, 0) + 1
        found = measure(self, index, *rest)
        late = index in report and seen[index] > 1
        return replace(found, loss=100 * found.loss) if late else found

    monkeypatch.setattr(JointProbes, "measure", other)
    changed = run(scores, model, **target)
    assert np.array_equal(changed.budgets, plain.budgets)
    for name in ("rounds", "predicted_loss", "choosing_loss"):
        assert changed.refinement[name] == plain.refinement[name]
    assert all(seen[index] <= 2 for index in report)
    forged = {**plain.refinement, "choosing_prompts": plain.refinement["held_out_prompts"]}
    checks = verify(plain.replace(refinement=forged), scores)
    assert [check.name for check in checks if not check.passed] == ["held-out prompts"]


def test_a_refinement_on_prose_says_so(monkeypatch, model, scores):
    from kvalloc.tuning import tasks

    monkeypatch.setattr(tasks, "default_texts", lambda: [Document(text=words(60 * 18))])
    told = refine(scores, model, TOKENIZER, budget=0.4, level="head", rounds=1).refinement
    assert told["tasks"] == ["text"] * 16
    assert "measured on prose alone" in told["note"]
