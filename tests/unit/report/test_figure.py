"""The PNG of budgets."""

from __future__ import annotations

import importlib.util
import struct
from types import SimpleNamespace

import pytest
from factories import make_scores, make_shape

from kvalloc.allocation.decision import solve
from kvalloc.errors import InputError, MissingDependencyError
from kvalloc.report.figure import save_budget_figure

PNG = b"\x89PNG\r\n\x1a\n"


def png_size(path):
    head = path.read_bytes()[:24]
    assert head[:8] == PNG
    return struct.unpack(">II", head[16:24])


@pytest.fixture(scope="module")
def scores():
    return make_scores()


@pytest.fixture(scope="module")
def profiles(scores):
    names = ("uniform", "greedy", "ilp", "pyramid")
    return {name: solve(scores, target_retention=0.9, solver=name) for name in names}


HARM = {
    "uniform": [
        SimpleNamespace(share=0.8, kl=0.1, all_found=True),
        SimpleNamespace(share=0.2, kl=1.0, all_found=False),
    ],
    "greedy = ilp": [SimpleNamespace(share=0.8, kl=0.1, all_found=True)],
}
MADE_UP = {"harm": HARM, "title": "made up"}


def test_it_is_a_png_of_1000_pixels(tmp_path, scores, profiles):
    save_budget_figure(tmp_path / "b.png", scores, profiles, **MADE_UP)
    assert png_size(tmp_path / "b.png")[0] == 1000
    assert [file.name for file in tmp_path.iterdir()] == ["b.png"]


def test_sliding_layers_and_one_layer_models(tmp_path):
    mixed = make_shape(n_layers=3, layer_types=("sliding", "full", "sliding"), sliding_window=16)
    for shape in (mixed, make_shape(n_layers=1)):
        scores = make_scores(shape=shape)
        profiles = {name: solve(scores, budget=0.7) for name in ("uniform", "greedy")}
        save_budget_figure(tmp_path / "b.png", scores, profiles, **MADE_UP)
        assert png_size(tmp_path / "b.png")[0] == 1000


def test_nothing_to_draw_and_a_missing_folder_are_refused(tmp_path, scores, profiles):
    for path, given, said in (
        ("b.png", {}, "no budget profile"),
        ("none/b.png", profiles, "does not exist"),
    ):
        with pytest.raises(InputError, match=said):
            save_budget_figure(tmp_path / path, scores, given, **MADE_UP)


def test_a_missing_matplotlib_says_how_to_get_it(tmp_path, scores, profiles, monkeypatch):
    find = importlib.util.find_spec

    def without(name, package=None):
        return None if name == "matplotlib" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(MissingDependencyError, match="pip install matplotlib"):
        save_budget_figure(tmp_path / "b.png", scores, profiles, **MADE_UP)
    assert list(tmp_path.iterdir()) == []
