"""What a user is told where a request cannot be met, beyond what the command line tests show."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from factories import make_scores, make_shape

from kvalloc.accounting.costs import POSITION_BYTES
from kvalloc.allocation.decision import solve
from kvalloc.allocation.infeasibility import advise
from kvalloc.allocation.request import Request
from kvalloc.errors import InfeasibleError
from kvalloc.problem import Solution, Solver

ENTRY = make_shape().bytes_per_entry


class CannotReach(Solver):
    name: ClassVar[str] = "cannot_reach"
    summary: ClassVar[str] = "a rule that does not get there"

    def solve(self, problem: Any, *, time_limit_seconds: float | None = None) -> Solution:
        raise InfeasibleError("this rule reaches 0.5 at most; use greedy", nearest=0.5)


def test_a_rule_that_cannot_where_others_can_keeps_its_word() -> None:
    with pytest.raises(InfeasibleError, match="^this rule reaches 0.5 at most") as caught:
        solve(make_scores(0), target_retention=0.9, solver=CannotReach())
    assert caught.value.nearest == 0.5


def test_sliding_layers_are_part_of_the_cap_that_is_offered() -> None:
    shape = make_shape(n_layers=3, layer_types=("full", "sliding", "full"), sliding_window=9)
    scores = make_scores(1, shape=shape)
    request = Request.parse(budget=0.9, cap=("0-1=400B",))
    sliding, floors = 2 * 8 * ENTRY, 2 * 5 * (ENTRY + POSITION_BYTES)
    found = advise(scores, request, InfeasibleError("no"))
    assert f"cap='0-1={sliding + floors}B'" in str(found)
    solve(scores, budget=0.9, cap=f"0-1={sliding + floors}B")


def test_what_was_not_searched_to_the_end_says_so() -> None:
    request = Request.parse(target_retention=0.9, cap=("0=300B",))
    error = InfeasibleError("a word of the solver")
    assert advise(make_scores(0), request, error, time_limit_seconds=0.0) is error
