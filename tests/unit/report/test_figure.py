"""Pictures as files: the demo's, and what 'kvalloc plot' draws."""

from __future__ import annotations

import struct
import xml.etree.ElementTree as ElementTree

import pytest
from cli_tools import refused, run
from factories import make_losses, make_scores, make_shape

from kvalloc.allocation.decision import solve
from kvalloc.errors import InputError
from kvalloc.report.figure import save_budget_figure

PNG = b"\x89PNG\r\n\x1a\n"


def png_size(path):
    head = path.read_bytes()[:24]
    assert head[:8] == PNG
    return struct.unpack(">II", head[16:24])


def words_of(path):
    """All text of an SVG."""
    return [word for word in ElementTree.parse(path).getroot().itertext() if word.strip()]


@pytest.fixture(scope="module")
def scores():
    return make_losses(per="layer")


@pytest.fixture(scope="module")
def profiles(scores):
    names = ("uniform", "greedy", "ilp", "pyramid")
    return {name: solve(scores, target_retention=0.9, solver=name) for name in names}


def row(kl, right):
    return {"kl": kl, "score": right / 3, "n": 3}


HARM = {"uniform": row(0.8, 3), "greedy = ilp": row(0.125, 2), "default": row(0.0013, 3)}
HARM["pyramid"] = row(None, 0)
MADE_UP = {"harm": HARM, "title": "made up"}


def test_the_demos_picture_has_a_panel_for_each_thing_that_it_says(tmp_path, scores, profiles):
    save_budget_figure(tmp_path / "b.svg", scores, profiles, **MADE_UP)
    words = words_of(tmp_path / "b.svg")
    assert {"made up", "greedy = ilp", "Layers differ in what they need"} <= {*words}
    assert "default: this share of a 16-bit cache's bytes" in words
    assert {"Measured harm at this size", "0.8; 3/3", "0.13; 2/3"} <= {*words}
    assert sum("% of the bytes" in word for word in words) == 3  # equal budgets once
    assert [file.name for file in tmp_path.iterdir()] == ["b.svg"]


def test_sliding_layers_one_layer_and_no_measurement(tmp_path):
    mixed = make_shape(n_layers=3, layer_types=("sliding", "full", "sliding"), sliding_window=16)
    for shape in (mixed, make_shape(n_layers=1)):
        scores = make_scores(shape=shape)
        profiles = {name: solve(scores, budget=0.7) for name in ("uniform", "greedy")}
        save_budget_figure(tmp_path / "b.png", scores, profiles, harm={}, title="made up")
        assert png_size(tmp_path / "b.png")[0] > 1200


def test_nothing_to_draw_and_a_missing_folder_are_refused(tmp_path, scores, profiles):
    for path, given, said in (
        ("b.png", {}, "no budget profile"),
        ("none/b.png", profiles, "does not exist"),
        ("b.jpg", profiles, "another ending"),
    ):
        with pytest.raises(InputError, match=said):
            save_budget_figure(tmp_path / path, scores, given, **MADE_UP)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ((), ["tests/tiny: budgets", "p: 50.0% of the bytes", "KV head"]),
        (("--what", "curves"), ["s: retention by scorer xkv", "loss, nats per token"]),
        (("--what", "frontier"), ["best layer budgets by s", "p", "bytes kept, of the full cache"]),
        (("--what", "measured"), ["needle, 40 tokens", "KL to the full cache, nats per token"]),
    ],
)
def test_plot_draws_what_is_asked_for(tmp_path, scores, what, words):
    scores.save(tmp_path / "s.safetensors")
    evaluation = {"rows": [{"task": "needle", "context": 40, "kl": 0.1, "share_of_16_bits": 0.5}]}
    budgets = solve(scores, budget=0.5, objective="mean", solver="uniform")
    budgets.replace(evaluation=evaluation).save(tmp_path / "p.json")
    files = (tmp_path / "s.safetensors", tmp_path / "p.json")
    ran = run("plot", *files, "-o", tmp_path / "x.svg", *what)
    assert ran.code == 0, ran.err
    name = what[1] if what else "budgets"
    assert ran.out == f"written {tmp_path / 'x.svg'}: {name}\n"
    assert {*words} <= {*words_of(tmp_path / "x.svg")}


def test_plot_refuses_what_files_do_not_hold(tmp_path, scores):
    scores.save(tmp_path / "s.safetensors")
    for given, words in (
        (("--what", "budgets", "-o", tmp_path / "x.png"), ["nothing to draw as budgets"]),
        (("--what", "budgts", "-o", tmp_path / "x.png"), ["'budgts'", "budgets, curves, frontier"]),
        (("-o", tmp_path / "x.gif"), ["another ending than .png and .svg"]),
    ):
        refused(tmp_path, "plot", tmp_path / "s.safetensors", *given, words=words)
