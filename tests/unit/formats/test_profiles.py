"""Profiles by path and by name: those that ship, fitted files, and what a notebook shows."""

from dataclasses import replace
from pathlib import Path
from xml.etree.ElementTree import fromstring

import numpy as np
import pytest
from cli_tools import python, succeed
from factories import make_losses, make_shape
from safetensors import safe_open
from safetensors.numpy import save_file

import kvalloc
from kvalloc.allocation.audit import verify
from kvalloc.allocation.frontier import frontier
from kvalloc.errors import ProfileFileError
from kvalloc.formats.evaluation import Evaluation
from kvalloc.formats.fitted import FittedModel, mean_scores
from kvalloc.formats.score_profile import ShareError
from kvalloc.formats.shipped_profiles import find_fitted, load_fitted, shipped_fitted
from kvalloc.online.solved import solve_share
from kvalloc.report.notebook import profile_html
from kvalloc.scorers import get_scorer

# Paths in place of profiles, any file by what it says it is, and what a notebook shows


@pytest.fixture
def paths(tmp_path):
    scores = make_losses(per="layer")
    scores.save(tmp_path / "s.safetensors")
    for solver in ("greedy", "uniform"):
        kvalloc.solve(scores, budget=0.5, solver=solver).save(tmp_path / f"{solver}.json")
    return tmp_path


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_does_wherever_a_profile_does(paths, kind):
    scores, first, second = (
        kind(paths / n) for n in ("s.safetensors", "greedy.json", "uniform.json")
    )
    loaded, profile = kvalloc.load_scores(scores), kvalloc.load_profile(first)
    assert kvalloc.load_scores(loaded) is loaded
    assert kvalloc.load_profile(profile) is profile
    assert (kvalloc.solve(scores, budget=0.5, solver="greedy") == profile) is True
    names = [
        one.solver for one in kvalloc.compare(scores, solvers=["uniform", "greedy"], budget=0.5)
    ]
    assert sorted(names) == ["greedy", "uniform"]
    assert len(frontier(scores, points=3)) == len(frontier(loaded, points=3))
    assert all(check.passed for check in verify(first, scores))


def test_reprs_are_short_and_a_notebook_shows_one_bar_a_layer(paths):
    evaluation = Evaluation(shape=make_shape(), settings={}, profiles={}, rows=())
    scores = kvalloc.load_scores(paths / "s.safetensors")
    profile = kvalloc.load_profile(paths / "greedy.json")
    for one in (scores, profile, evaluation):
        assert len(repr(one)) < 150
    for one in (scores, profile.replace(created="<b>&")):
        shown = fromstring(profile_html(one))
        assert len(shown.findall("svg/rect/title")) == 3
        assert "script" not in profile_html(one)


IN_A_NOTEBOOK = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_cell("import kvalloc").raise_error()
assert not any(name.startswith("kvalloc.report") for name in sys.modules)
for name, file in zip(("load_scores", "load_profile"), sys.argv[1:], strict=True):
    shown = shell.run_cell(f"kvalloc.{name}({file!r})")
    print(shell.display_formatter.format(shown.result)[0]["text/html"].count("<title>layer"))
"""


def test_a_notebook_that_imports_kvalloc_alone_shows_profiles(paths):
    pytest.importorskip("IPython")
    files = paths / "s.safetensors", paths / "greedy.json"
    done = python(IN_A_NOTEBOOK, *files, check=True)
    assert [line for line in done.stdout.split() if line == "3"] == ["3", "3"]


# The budget profiles that ship: they load by name, are whole, and say how they were made


README = Path(__file__).parents[3] / "profiles" / "README.md"


@pytest.mark.parametrize("name", kvalloc.shipped_profiles())
def test_a_shipped_profile_loads_by_name_and_is_explained(name):
    profile = kvalloc.load_profile(name)
    assert 0 < profile.retained_bytes < profile.full_bytes
    assert profile.retained_bytes <= profile.requested.get("bytes", profile.full_bytes)
    assert profile.bound is not None
    assert profile.score_digest
    assert profile.problem_digest
    assert f"`{name}`" in README.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", shipped_fitted())
def test_a_shipped_fitted_file_decides_every_share(name, fitted_here):
    """It is the one that its model takes by itself, and stores no more than each share."""
    fitted = load_fitted(name)
    assert find_fitted(fitted.shape) == name
    assert {one.share for one in fitted.scores.errors} == {0.05, 0.1, 0.2}
    for share in (0.05, 0.1, 0.2, 0.5):
        for tokens in (400, 1000, 8192):
            solved = solve_share(name, share, tokens)
            assert 0.95 * share < solved.share_at(tokens) <= share
            assert solved.gap < 0.01
    # wherever a score profile is named, and what is solved from it can be applied
    succeed("inspect", name)
    decided = kvalloc.solve(name, budget="20%", level="head")
    assert decided.predicted_loss is not None
    assert get_scorer(decided.policy.scorer, **decided.policy.scorer_parameters).file == name
    assert (README.parent / f"{name}.fitted.safetensors").stat().st_size < 2 * 2**20
    assert f"`{name}.fitted.safetensors`" in README.read_text(encoding="utf-8")


# A fitted file: its parts belong together, and its error lies between those that were measured


FILE = Path(__file__).parents[2] / "golden" / "data" / "version_1" / "fitted.safetensors"


def test_the_error_lies_between_those_measured():
    scores = FittedModel.load(FILE).scores
    errors = [
        ShareError(share=share, predicted=0.01, loss=loss, prompts=8)
        for share, loss in ((0.05, 0.02), (0.2, 0.005))
    ]
    scores = scores.replace(errors=tuple(errors))
    ratios = [scores.error_at(share) for share in (0.01, 0.05, 0.1, 0.2, 0.6)]
    assert ratios == pytest.approx([2, 2, 1, 0.5, 0.5])
    assert scores.replace(errors=()).error_at(0.1) is None


def test_the_tail_over_the_mean_lies_between_those_measured():
    scores = FittedModel.load(FILE).scores
    assert scores.tail_at(0.1) is None
    errors = [
        ShareError(share=share, predicted=0.01, loss=0.01, prompts=8, p99=p99)
        for share, p99 in ((0.05, 0.1), (0.2, 0.0), (0.5, None))
    ]
    scores = scores.replace(errors=tuple(errors))
    assert [scores.tail_at(share) for share in (0.01, 0.1, 0.2, 0.9)] == pytest.approx(
        [10, 5, 0, 0]
    )


def test_a_second_read_is_known_up_to_the_largest_share_at_which_it_was_measured():
    scores = FittedModel.load(FILE).scores
    errors = [
        ShareError(share=share, predicted=0.01, loss=loss, prompts=8, second_read=second)
        for share, loss, second in ((0.05, 0.4, 0.1), (0.1, 0.02, 0.02), (0.2, 0.005, None))
    ]
    scores = scores.replace(errors=tuple(errors))
    between = (0.002**0.5, 0.008**0.5)
    for share, losses in ((0.01, (0.1, 0.4)), (0.05 * 2**0.5, between), (0.1, (0.02, 0.02))):
        assert scores.second_read_at(share) == pytest.approx(losses)
    assert scores.second_read_at(0.11) is None
    assert scores.replace(errors=tuple(errors[2:])).second_read_at(0.1) is None


def test_the_mean_of_the_samples_is_what_is_solved():
    scores = make_losses()
    mean = mean_scores(scores)
    assert mean.n_samples == 1
    assert mean.losses[0] == pytest.approx(scores.losses.mean(axis=0))
    at = np.isin(scores.ranks, mean.ranks)
    assert mean.curves[0] == pytest.approx(scores.curves.mean(axis=0)[..., at])


def test_parts_that_do_not_belong_together_are_refused(tmp_path):
    fitted, path = FittedModel.load(FILE), tmp_path / "own.safetensors"
    other = fitted.scores.replace(shape=replace(fitted.shape, model_id="another"))
    parts = {**fitted.parts, "scores": other.header()}
    fitted.replace(scores=other, parts=parts).save(path)
    with pytest.raises(ProfileFileError, match=r"scores.shape is another model's"):
        FittedModel.load(path)
    fitted.replace(parts={"surrogate": fitted.parts["surrogate"]}).save(path)
    with pytest.raises(ProfileFileError, match="parts is surrogate, expected surrogate, scores"):
        FittedModel.load(path)
    with safe_open(FILE, "numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        save_file({**arrays, "more": np.zeros(2)}, path, metadata=file.metadata())
    with pytest.raises(ProfileFileError, match="parts is more, .*, expected surrogate, scores"):
        FittedModel.load(path)
