"""Tokens and bits together: every solver that takes such problems, against every choice."""

from __future__ import annotations

import pytest
from exact_cases import check_all, tiny_cases

from kvalloc.problem.registry import get_solver
from kvalloc.testing import tiny_problem

SIDES = ["bits", "bits+nested_caps", "bits+crossing_caps", "bits+rank_balance", "worst:bits"]


@pytest.mark.parametrize(
    ("name", "kinds", "exact"),
    [
        ("dp", SIDES[:1], True),
        ("ilp", SIDES, True),
        ("auto", SIDES, True),
        ("max_min", SIDES[4:], True),
        ("lagrangian", SIDES[:3], False),
        ("hull", SIDES[:1], False),
    ],
)
def test_against_every_choice(name: str, kinds: list[str], exact: bool) -> None:
    solver = get_solver(name)
    ends = check_all(solver, tiny_cases(40 * len(kinds), kinds), exact=exact, may_give_up=not exact)
    assert sum(ends.values()) == 40 * len(kinds)


def test_dearer_options_may_keep_fewer_tokens() -> None:
    problems = [tiny_problem("bits", seed=seed) for seed in range(10)]
    assert any(bool((problem.tokens[:, 1:] < problem.tokens[:, :-1]).any()) for problem in problems)
    assert all(problem.bits is not None for problem in problems)
