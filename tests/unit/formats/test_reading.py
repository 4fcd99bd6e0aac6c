"""Paths in place of profiles, any file by what it says it is, and what a notebook shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree.ElementTree import fromstring

import pytest
from factories import make_losses, make_shape

import kvalloc
from kvalloc.allocation.audit import verify
from kvalloc.allocation.comparison import compare_profiles
from kvalloc.allocation.frontier import frontier
from kvalloc.formats.evaluation import Evaluation
from kvalloc.report.notebook import profile_html


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
    assert not compare_profiles(first, second).same


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
    files = [str(paths / "s.safetensors"), str(paths / "greedy.json")]
    done = subprocess.run(
        [sys.executable, "-c", IN_A_NOTEBOOK, *files], capture_output=True, text=True, check=True
    )
    assert [line for line in done.stdout.split() if line == "3"] == ["3", "3"]
