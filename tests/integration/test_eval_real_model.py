"""Tasks put to the real model from the command line, with profiles side by side."""

from __future__ import annotations

import numpy as np
import pytest
from cli_tools import run

from kvalloc.formats.shipped_profiles import load_profile

pytestmark = [pytest.mark.model, pytest.mark.slow]

SHIPPED = "smollm2-135m-instruct-retention-90"


@pytest.fixture(scope="module")
def tiny_budgets(tmp_path_factory):
    """The shipped profile's model with a twentieth of the entries in every layer."""
    shipped = load_profile(SHIPPED)
    profile = shipped.replace(
        budgets=np.full_like(shipped.budgets, shipped.context_tokens // 20),
        **{"solver": "uniform", "objective": 0.0, "bound": None, "bound_source": ""},
        **{"termination": "", "retention": None, "value_per_mib": None, "price_source": ""},
    )
    path = tmp_path_factory.mktemp("profiles") / "tiny.json"
    profile.save(path)
    return path


def test_less_is_worse_when_the_question_comes_after(tiny_budgets):
    ran = run(
        *("eval", "demo", "--profile", SHIPPED, "--profile", tiny_budgets),
        *("--tasks", "needle", "--samples", 2, "--context", 256, "--json", "--quiet"),
        *("--question", "after", "--split", "held-out"),
    )
    assert ran.code == 0, ran.err
    full, large, small = ran.json
    assert [row["name"] for row in ran.json] == ["full", SHIPPED, "tiny"]
    assert full["kl"] == 0
    assert 0 < large["kl"] < small["kl"]
    assert small["retained_bytes"] < 0.1 * small["full_bytes"]
    ratio = small["paired"][1]
    assert ratio["against"] == SHIPPED
    assert ratio["kl_ratio"] == pytest.approx(small["kl"] / large["kl"])
    assert full["score"] == 1.0
    # so few entries cannot hold a number whose question is not known yet
    assert small["score"] == 0.0
    assert small["paired"][0]["score_difference"] == -1.0


def test_what_is_fitted_to_values_loses_less_than_what_drops_them(tmp_path):
    shipped = load_profile("smollm2-135m-instruct-bits-10").replace(evaluation=None)
    assert shipped.policy.name == "attention_matching"
    dropping, matching = tmp_path / "dropping.json", tmp_path / "matching.json"
    shipped.with_policy(shipped.policy.replace(name="score", parameters={})).save(dropping)
    shipped.save(matching)
    ran = run(
        *("eval", "demo", "--profile", matching, "--profile", dropping, "--tasks", "kl"),
        *("--samples", 1, "--context", 512, "--json", "--quiet"),
    )
    assert ran.code == 0, ran.err
    _, matched, dropped = ran.json
    assert [matched["name"], dropped["name"]] == ["matching", "dropping"]
    assert 0 < matched["kl"] < dropped["kl"]
