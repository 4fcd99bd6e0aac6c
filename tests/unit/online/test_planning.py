"""What to run within one memory: bytes as they are stored, the fastest rows, bad input."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from cli_tools import refused
from cli_tools import run as run_command
from prompt_runs import run

from kvalloc.accounting.costs import plain_bytes, reading_bytes
from kvalloc.errors import InputError
from kvalloc.formats.fitted import FittedModel
from kvalloc.measure.step_times import DEVICES, Line, StepTimes, device_steps
from kvalloc.models.loading import shape_of
from kvalloc.online.decision import PromptSize
from kvalloc.online.default import Default
from kvalloc.online.methods import SecondRead, Solved, method_for
from kvalloc.online.planning import Load, plan_batch
from kvalloc.online.solved import LossTarget, grid_length, share_for_loss
from kvalloc.runtime.options import CacheOptions
from kvalloc.units import parse_bytes

PROMPT, ANSWER, LOSS = 150, 100, 0.01

TIMES = StepTimes(
    rows=(1, 4, 8, 16),
    model_seconds=(1.0, 1.1, 3.0, 3.2),  # products that eight rows do not suit
    plain=Line(0.0, 2e-5),
    kept=Line(0.02, 1e-5),
    followed=Line(0.0, 1e-5),
    evicting=Line(0.5, 1e-3),
    entered=Line(0.0, 1e-3),
    source="made up",
)

Plan = Callable[..., Any]


@pytest.fixture
def model(tiny):
    return tiny.tiny_model(head_dim=16)


@pytest.fixture
def plan(model, fitted_file):
    """Plans for the tiny model, with made-up times."""

    def planned(memory="1MiB", **options):
        given = {"prompt": PROMPT, "answer": ANSWER, "target_loss": LOSS, "times": TIMES}
        return plan_batch(model, memory=memory, **{**given, "fitted": fitted_file, **options})

    return planned


@pytest.fixture
def way_at(model, fitted_file):
    """How the default serves a prompt at a share."""

    def way(share, prompt=PROMPT):
        default = Default(share=share, options=CacheOptions(fitted=fitted_file))
        chosen = method_for(default.setting(shape_of(model)), prompt)
        assert isinstance(chosen, Solved)
        return chosen

    return way


def test_no_share_is_planned_at_which_a_prompt_is_read_twice(plan, model, fitted_file, tmp_path):
    """Its full cache is held meanwhile."""
    fitted, file = FittedModel.load(fitted_file), tmp_path / "twice.safetensors"
    first, *others = fitted.scores.errors
    fitted.with_errors((first.replace(second_read=0.5 * first.loss), *others)).save(file)
    setting = Default.parse("10%", CacheOptions(fitted=str(file))).setting(shape_of(model))

    def method(share):
        return type(method_for(replace(setting, share=share), PROMPT))

    assert method(first.share) is SecondRead
    assert {method(one.share) for one in plan(fitted=file, target_loss=9.0).best} == {Solved}


@pytest.mark.parametrize("answer", [ANSWER, 200])
def test_a_cache_of_each_setting_stores_what_was_planned(tiny, model, plan, fitted_file, answer):
    """As many rows at that share, read and answered: at the peak, no more and hardly less."""
    options = CacheOptions(fitted=fitted_file)
    for one in plan("400KiB", answer=answer).best:
        size = PromptSize(tokens=PROMPT, lengths=(PROMPT,) * one.rows)
        cache = Default(share=one.share, options=options).cache(model, size)
        run(model, tiny.prompt(PROMPT, one.rows), cache)
        assert cache.retained_bytes == one.rows * cache.profile.retained_bytes_at(PROMPT)
        peak = 0
        for step in range(answer):
            run(model, tiny.prompt(1, one.rows, seed=step), cache)
            peak = max(peak, cache.retained_bytes)
        assert 0.9 * one.peak_bytes <= peak <= one.peak_bytes <= 400 * 1024


def test_where_little_is_answered_the_peak_is_that_of_reading(model, plan, way_at):
    """One layer in full of a prompt that is longer than a block of tokens in all layers."""
    prompt = 2 * PROMPT
    for one in plan(prompt=prompt, answer=1).best:
        kept = way_at(one.share, prompt).profile(prompt).retained_bytes_at(prompt, one.rows)
        assert one.peak_bytes == kept + reading_bytes(shape_of(model), prompt, one.rows)


def test_rows_are_the_fastest_that_fit_and_the_smallest_share_is_that_of_the_loss(
    model, plan, way_at, fitted_file
):
    """Against every number of rows, where more rows are not always faster."""
    shape, least = (
        shape_of(model),
        share_for_loss(str(fitted_file), LossTarget(nats=LOSS), grid_length(PROMPT)),
    )
    before, fewer = 0.0, 0
    for memory in range(120_000, 2_000_000, 80_000):
        planned = plan(memory)
        speeds = [one.tokens_per_second for one in planned.best]
        assert speeds == sorted(speeds, reverse=True)
        assert speeds[0] >= before  # more memory is never slower
        before = speeds[0]
        assert planned.best[0].share == least
        for one in planned.best:
            assert 0 < one.predicted_loss <= LOSS
            load = Load.of(way_at(one.share), shape, PROMPT, ANSWER)
            most = memory // load.peak_bytes
            every = [load.tokens_per_second(rows, TIMES) for rows in range(1, most + 1)]
            assert one.tokens_per_second == pytest.approx(max(every), rel=1e-12)
            assert one.tokens_per_second == every[one.rows - 1]
            fewer += one.rows < most
    assert fewer  # eight rows would have fitted where four are faster


def test_a_plain_cache_stands_beside_where_one_fits(model, plan):
    whole = plain_bytes(shape_of(model), PROMPT + ANSWER)
    assert plan(whole - 1).plain is None
    plain = plan(2 * whole).plain
    assert (plain.rows, plain.peak_bytes, plain.share) == (2, 2 * whole, 1)
    seconds = TIMES.of_model(2) + 2 * TIMES.plain.at(plain_bytes(shape_of(model), 200))
    assert plain.tokens_per_second == pytest.approx(2 / seconds)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory": "2KiB"}, ["memory='2KiB'", "one row of 150 and 100 tokens takes", "at least"]),
        ({"memory": "many"}, ["'many' is not a size"]),
        ({"prompt": 1000}, ["1,100 tokens", "made for 1,024"]),
        ({"prompt": 0}, ["prompt=0", "1 or more"]),
        ({"answer": -1}, ["answer=-1", "1 or more"]),
        ({"prompt": 9}, ["no share of a cache of 9 tokens", "give a longer prompt"]),
        (
            {"target_loss": 1e-9},
            ["no share of a cache of 150 tokens", "target_loss='1e-09'", " is possible"],
        ),
        ({"target_loss": -1.0}, ["a target loss of -1"]),
        ({"times": "h10"}, ["'h10'", "'h100'"]),
        ({"fitted": None}, ["tiny was not measured"]),
    ],
)
def test_a_wrong_request_is_refused_in_words_before_anything_is_measured(
    plan, options, words, monkeypatch
):
    monkeypatch.delattr("kvalloc.online.planning.measure_steps")
    with pytest.raises(InputError) as refusal:
        plan(**{"times": None, **options})
    for word in words:
        assert word in str(refusal.value)


def test_the_least_memory_that_is_named_is_enough(plan):
    with pytest.raises(InputError, match="at least memory='") as refusal:
        plan(1000)
    least = parse_bytes(str(refusal.value).split("'")[-2])
    assert plan(least).best[0].rows == 1
    with pytest.raises(InputError):
        plan(least - 1)


def test_steps_are_measured_where_the_model_is(plan):
    times = plan(times=None).times
    assert min(times.model_seconds) > 0
    for line in (times.plain, times.kept, times.followed, times.evicting, times.entered):
        assert min(line) >= 0
    assert times.evicting.at(1000) > 0
    assert times.source.startswith("measured on this cpu in ")


def test_the_figures_of_a_device_bound_a_step_by_bytes_and_by_products(model):
    bandwidth, products = DEVICES["h100"]
    times = device_steps(model, "h100")
    numbers = sum(own.numel() for own in model.parameters())
    table = model.get_input_embeddings().weight
    assert model.get_output_embeddings().weight is not table
    numbers -= table.numel()
    assert times.of_model(1) == pytest.approx(4 * numbers / bandwidth)
    assert times.of_model(100_000) == pytest.approx(2e5 * numbers / products, rel=0.01)
    assert times.kept.at(1e9) == times.plain.at(1e9) == 1e9 / bandwidth


@pytest.mark.model
def test_a_plan_on_the_command_line(tmp_path):
    """Of a device that is not here, so that nothing is measured."""
    where = ("--prompt", 1000, "--answer", 200, "--device", "h200")
    ran = run_command("plan", "demo", "--memory", "64MiB", *where)
    assert ran.code == 0, ran.err
    heads, *lines = ran.out.splitlines()
    assert heads.split("  ")[0] == "rows"
    rows, share = int(lines[0].split()[0]), float(lines[0].split()[1].rstrip("%")) / 100
    assert rows > 1
    assert lines[-1].split()[:3] == ["1", "plain", "cache"]
    assert "published figures of H200" in ran.err
    found = run_command("plan", "demo", "--memory", "64MiB", *where, "--json").json
    best = found["best"][0]
    assert (best["rows"], best["share"]) == (rows, pytest.approx(share, abs=5e-4))
    assert f"kvalloc.apply(model, budget={best['share']:.4g}" in ran.err
    assert found["plain"]["rows"] == 1
    refused(tmp_path, "plan", "demo", "--memory", "1MiB", *where, words=["give at least"])
