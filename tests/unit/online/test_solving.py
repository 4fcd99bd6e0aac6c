"""Deciding by what the whole cache loses, on small random models."""

from typing import Any

import numpy as np
import pytest
from tiny_models import WordTokenizer, tiny_model, words

import kvalloc
from kvalloc.allocation.audit import verify
from kvalloc.errors import InfeasibleError, InputError, ModelMismatchError
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.measure import Prompt, cache_loss, profile
from kvalloc.measure.cache_loss import CacheLosses
from kvalloc.measure.job import LossPlan
from kvalloc.online import solving
from kvalloc.online.solving import solve_measured
from kvalloc.prompts.intervals import interval

TOKENIZER = WordTokenizer()
PLAN = LossPlan(shares=(0.0, 0.15, 0.3, 0.6), level="head", continuation_tokens=5, method="fast")
ANSWER = "w3 w1 w4 w1 w5"


def prompts(first=0, count=6):
    tasks = ("", "copy")
    return [
        Prompt(text=words(60 - n % 3, 100 + n), answer=ANSWER, task=tasks[n % 2])
        for n in range(first, first + count)
    ]


@pytest.fixture(scope="module")
def model():
    return tiny_model(initializer_range=0.3)


@pytest.fixture(scope="module")
def scores(model):
    return profile(model, TOKENIZER, prompts(50, 4), context=60, samples=4, loss=PLAN)


def run(scores, model, given=None, **options):
    given = prompts() if given is None else given
    return solve_measured(scores, model, TOKENIZER, given, **{"level": "head", **options})


def losses_of(model, decided, given):
    samples = solving.choose_samples(
        given, TOKENIZER, context_tokens=60, least_tokens=1, sampling_ratio=1.0
    )
    whole = CacheLosses(model, samples.samples)
    return [whole.loss(index, decided) for index in range(len(given))]


def test_a_size_is_decided_and_measured_once(model, scores, tmp_path):
    told = []
    decided = run(scores, model, budget="40%", progress=lambda *now: told.append(now))
    plain = kvalloc.solve(scores, budget="40%", level="head")
    assert np.array_equal(decided.budgets, plain.budgets)
    stated, losses = decided.measured_loss, losses_of(model, decided, prompts())
    by_task = [np.array(losses[0::2]), np.array(losses[1::2])]
    assert stated.loss == pytest.approx(np.mean([one.mean() for one in by_task]))
    assert stated.interval == pytest.approx(interval(by_task))
    assert stated.by_task == pytest.approx(
        {"answers": by_task[0].mean(), "copy": by_task[1].mean()}
    )
    assert (stated.target, stated.prompts, len(stated.tries)) == (None, 6, 1)
    assert told[-1] == (6, 6)
    decided.save(tmp_path / "p.json")
    assert BudgetProfile.load(tmp_path / "p.json").measured_loss == stated
    assert all(check.passed for check in verify(decided, scores))
    assert decided.with_policy(decided.policy).measured_loss is None
    assert kvalloc.solve_measured is solve_measured


def test_curves_that_promise_too_much_are_asked_for_less(model, scores):
    reference = run(scores, model, budget="50%").measured_loss
    target, hopeful = reference.loss, scores.replace(losses=scores.losses * 0.1)
    decided = run(hopeful, model, target_loss=target)
    stated = decided.measured_loss
    assert stated.loss <= target == stated.target
    first, *_ = stated.tries
    (own,) = (one for one in stated.tries if one.retained_bytes == decided.retained_bytes)
    assert first.target == target
    assert first.loss > target
    assert first.predicted <= target
    assert (decided.requested["value"], stated.loss) == (own.target, own.loss)
    within = [one.retained_bytes for one in stated.tries if one.loss <= target]
    assert decided.retained_bytes == min(within)
    assert first.retained_bytes < decided.retained_bytes < decided.full_bytes
    assert np.mean(losses_of(model, decided, prompts())) == pytest.approx(stated.loss)
    assert all(check.passed for check in verify(decided, hopeful))
    worse = decided.replace(measured_loss=stated.replace(loss=2 * target))
    failed = [check.name for check in verify(worse, hopeful) if not check.passed]
    assert failed == ["measured target met"]


@pytest.mark.parametrize(
    ("promised", "said"), [(1e-9, r"not reached in \d tries.*lost \d\.\d+: ask"), (1.0, "least is")]
)
def test_a_target_that_cannot_be_met_says_what_can(model, scores, promised, said):
    hopeful = scores.replace(losses=scores.losses * promised)
    with pytest.raises(InfeasibleError, match=said):
        run(hopeful, model, target_loss=1e-6, max_tokens=30)


def test_bits_are_measured_as_the_cache_has_them(model):
    both = profile(model, TOKENIZER, prompts(50, 4), context=60, samples=4, loss=PLAN, bits=(8, 3))
    decided = run(both, model, budget="60%", bits=(16, 8, 3))
    assert decided.bits is not None
    assert len(np.unique(decided.bits)) > 1
    assert decided.measured_loss.loss == pytest.approx(
        np.mean(losses_of(model, decided, prompts()))
    )


def test_a_killed_measurement_goes_on_where_it_was(model, scores, tmp_path, monkeypatch):
    class Killed(Exception):
        pass

    def stop(done, total):
        if done == 4:
            raise Killed

    asked = {"budget": "35%", "output": tmp_path / "x.json"}
    with pytest.raises(Killed):
        run(scores, model, progress=stop, **asked)
    with pytest.raises(InputError, match="unfinished work.*resume=True"):
        run(scores, model, **asked)
    with pytest.raises(InputError, match="text_digest"):
        run(scores, model, prompts(20), resume=True, **asked)
    caches, make = list[Any](), cache_loss.make_cache
    monkeypatch.setattr(
        cache_loss, "make_cache", lambda *given, **more: caches.append(1) or make(*given, **more)
    )
    resumed = run(scores, model, resume=True, **asked)
    assert len(caches) == 2  # of the last two prompts
    assert resumed.measured_loss == run(scores, model, budget="35%").measured_loss
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


def test_by_default_prompts_of_every_kind_are_made_that_no_curve_was_measured_on(
    monkeypatch, model, scores
):
    asked = []

    def made(tokenizer, n_prompts, n_tokens, *, seed):
        asked.append((n_prompts, n_tokens, seed > 0))
        if len(asked) > 1:
            raise InputError("no prompt of the task needle fits")
        return prompts(count=2)

    monkeypatch.setattr(solving, "calibration_prompts", made)
    stated = solve_measured(scores, model, TOKENIZER, budget="40%").measured_loss
    assert stated.interval is None
    with pytest.raises(InputError, match="needle fits; give others with prompts"):
        solve_measured(scores, model, TOKENIZER, budget="40%")
    assert asked == [(16, 60, True)] * 2


def test_what_cannot_be_measured_is_refused(model, scores):
    wrong = [
        (prompts(50, 4), "those of the score profile's curves"),
        ([Prompt(text="w1 w2")], "has 2 tokens"),
        ([], "no text to measure"),
    ]
    for given, said in wrong:
        with pytest.raises(InputError, match=said):
            run(scores, model, given, budget="30%")
    with pytest.raises(ModelMismatchError):
        run(scores, tiny_model(num_hidden_layers=2), budget="30%")
