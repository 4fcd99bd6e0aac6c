"""Several workloads, and layers that share entries, on the command line."""

from __future__ import annotations

import pytest
from cli_tools import refused, run
from factories import make_shared_scores

from kvalloc.formats.budget_profile import BudgetProfile


@pytest.fixture
def folder(tmp_path):
    make_shared_scores(3, n_samples=3).save(tmp_path / "s.safetensors")
    return tmp_path


@pytest.fixture
def scores(folder):
    return folder / "s.safetensors"


def test_compare_says_why_the_others_do_not_apply(scores):
    ran = run("compare", scores, "--budget", "40%", "--workloads", "worst", "--json", "-q")
    assert ran.code == 0
    rows = {row["solver"]: row for row in ran.json}
    assert "use cvar or ilp" in rows["greedy"]["reason"]
    values = {n: rows[n]["objective"] for n in ("auto", "cvar", "ilp")}
    assert values["ilp"] == pytest.approx(max(values.values()), abs=1e-9)


@pytest.mark.parametrize("groups", ["2-3,4-5", "4"])
def test_layers_that_share(folder, scores, groups):
    out = folder / "p.json"
    ran = run("solve", scores, "--budget", "40%", "--share-groups", groups, "-o", out, "-q")
    assert (ran.code, ran.err) == (0, "")
    profile = BudgetProfile.load(out)
    assert profile.share_groups
    assert run("verify", out, scores, "-q").code == 0
    shown = run("inspect", out).out
    assert "keep the same entries" in shown
    assert ("bound over all groupings" in shown) == (groups == "4")
    assert run("inspect", out, "--json").json["share_groups"] == [
        list(group) for group in profile.share_groups
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--workloads", "best"), "expected 'mean', 'worst' or 'cvar'"),
        (("--workloads", "cvar"), "needs both"),
        (("--tail", "0.5"), "needs both"),
        (("--workloads", "worst", "--solver", "greedy"), "use cvar or ilp"),
        (("--share-groups", "2"), "--share-groups 4"),
        (("--share-groups", "2-5"), "--share-length 4"),
    ],
)
def test_refused_in_one_line(folder, scores, arguments, words):
    told = refused(folder, "solve", scores, "--budget", "40%", *arguments, "-o", folder / "p.json")
    assert words in told
