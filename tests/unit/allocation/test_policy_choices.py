"""Budgets and policies chosen together: the envelope, its labels, and what is told of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from factories import make_choices
from hypothesis import given, settings
from hypothesis import strategies as st

from kvalloc.allocation.comparison import compare_profiles
from kvalloc.allocation.decision import solve
from kvalloc.allocation.formulation import formulate
from kvalloc.allocation.frontier import frontier
from kvalloc.allocation.request import Request
from kvalloc.errors import InputError

LOSS: dict[str, Any] = {"objective": "loss"}


@given(st.integers(0, 10_000), st.sampled_from(["layer", "head"]), st.booleans())
@settings(max_examples=40)
def test_options_are_the_envelope_and_name_who_reached_it(
    seed: int, level: Any, whole_layers: bool
) -> None:
    per = "layer" if whole_layers and level == "layer" else "head"
    scores = make_choices(seed, per=per)
    problem = formulate(scores, Request.parse(budget=0.5, level=level, **LOSS))
    alone = [
        formulate(scores, Request.parse(budget=0.5, level=level, loss_policies=[name], **LOSS))
        for name in (one.title for one in scores.policies)
    ]
    table = np.stack([each.values for each in alone])
    np.testing.assert_array_equal(problem.values, table.max(axis=0))
    for unit, option in np.ndindex(problem.values.shape):
        first = next(k for k in range(3) if table[k, unit, option] == problem.values[unit, option])
        assert problem.policies[unit, option] == first
    np.testing.assert_array_equal(problem.tokens, alone[0].tokens)
    np.testing.assert_array_equal(problem.costs, alone[0].costs)
    assert alone[0].policies is None
    assert problem.digest() not in {each.digest() for each in alone}


def test_policies_that_no_unit_takes_are_not_listed() -> None:
    scores = make_choices(3)
    only = solve(scores, budget="40%", level="head", loss_policies=["critical"], **LOSS)
    assert [policy.title for policy in only.policies] == ["xkv", "critical"]
    assert only.unit_policies is not None
    assert (only.unit_policies == 1).all()
    own = solve(scores, budget="40%", level="head", loss_policies=["xkv"], **LOSS)
    assert own.other_policies == ()
    assert own.unit_policies is None
    assert own.retention is not None
    implied = solve(scores, budget="40%", level="head", loss_policies="critical")
    assert implied.objective == only.objective
    retained = solve(scores, budget="40%", level="head", objective="mean")
    assert retained.unit_policies is None


def test_a_policy_that_holds_the_whole_prompt_does_not_go_with_a_peak() -> None:
    scores = make_choices(3, names=("tova", "lookahead"))
    refusal = "lookahead holds the whole prompt .* give loss_policies='xkv,tova', or a size"
    with pytest.raises(InputError, match=refusal):
        solve(scores, memory="5kB", **LOSS)
    chosen = solve(scores, memory="5kB", loss_policies="xkv,tova", level="head")
    assert chosen.other_policies


BAD_TABLES: dict[str, tuple[Any, str]] = {
    "beyond": (lambda p: {"unit_policies": p.unit_policies + 7}, "places in the list"),
    "below": (lambda p: {"unit_policies": p.unit_policies - 1}, "places in the list"),
    "shape": (lambda p: {"unit_policies": p.unit_policies[:1]}, "unit_policies is int64 shaped"),
    "no table": (lambda p: {"unit_policies": None}, "unit_policies that say which"),
    "window": (
        lambda p: {"other_policies": tuple(other.replace(window=0) for other in p.other_policies)},
        "in every policy",
    ),
}


@pytest.mark.parametrize("fault", BAD_TABLES)
def test_tables_that_cannot_be_are_refused(fault: str) -> None:
    found = solve(make_choices(3), budget="40%", level="head", **LOSS)
    changes, said = BAD_TABLES[fault]
    with pytest.raises(InputError, match=said):
        found.replace(**changes(found))


def test_frontiers_and_differences_tell_of_policies() -> None:
    scores = make_choices(3)
    points = frontier(scores, shares=[0.3, 0.6, 1.0], level="head", objective="loss")
    assert points[0].retention is None
    assert points[-1].retention == pytest.approx(1.0)
    asked: dict[str, Any] = {"budget": "40%", "level": "head", **LOSS}
    together = solve(scores, **asked)
    alone = solve(scores, loss_policies=["xkv"], **asked)
    fields = compare_profiles(alone, together).fields
    assert fields["policies"][0] == "xkv in 6"
    assert "heads; " in fields["policies"][1]
    assert "policies" not in compare_profiles(together, together).fields
