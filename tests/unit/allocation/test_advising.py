"""What a user is told where a request cannot be met, beyond what the command line tests show."""

import ast
import re

import pytest
from factories import make_bits, make_scores, make_shape
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from scripted_solver import Scripted

from kvalloc.accounting.costs import POSITION_BYTES
from kvalloc.allocation.decision import solve
from kvalloc.allocation.infeasibility import advise
from kvalloc.allocation.request import Request
from kvalloc.errors import InfeasibleError, InputError

ENTRY = make_shape().bytes_per_entry
SLIDING = make_shape(layer_types=("full", "sliding", "full"), sliding_window=8)


def cannot_reach(problem):
    """A rule that does not get there."""
    raise InfeasibleError("this rule reaches 0.5 at most; use greedy", nearest=0.5)


def test_a_rule_that_cannot_where_others_can_keeps_its_word():
    with pytest.raises(InfeasibleError, match="^this rule reaches 0.5 at most") as caught:
        solve(make_scores(0), target_retention=0.9, solver=Scripted(cannot_reach))
    assert caught.value.nearest == 0.5


def test_sliding_layers_are_part_of_the_cap_that_is_offered():
    shape = make_shape(n_layers=3, layer_types=("full", "sliding", "full"), sliding_window=9)
    scores = make_scores(1, shape=shape)
    request = Request.parse(budget=0.9, cap=("0-1=400B",))
    sliding, floors = 2 * 8 * ENTRY, 2 * 5 * (ENTRY + POSITION_BYTES)
    found = advise(scores, request, InfeasibleError("no"))
    assert f"cap='0-1={sliding + floors}B'" in str(found)
    solve(scores, budget=0.9, cap=f"0-1={sliding + floors}B")


def test_what_was_not_searched_to_the_end_says_so():
    request = Request.parse(target_retention=0.9, cap=("0=300B",))
    error = InfeasibleError("a word of the solver")
    assert advise(make_scores(0), request, error, time_limit_seconds=0.0) is error


TIGHT = [
    ({"budget": 0.02, "cap": "0=150B"}, "budget=0.02 is not possible with cap='0=150B', and nei"),
    ({"budget": 0.02, "cap": "0=500B"}, "the least is budget='"),
    ({"budget_tokens": 10, "page": 32, "context": 12}, "ask for at least budget_tokens=12$"),
    ({"budget_tokens": 6, "page": 16, "context": 7}, "ask for at least budget_tokens=7$"),
    ({"memory": 500, "page": 16, "context": 10}, "ask for at least memory="),
]


@pytest.mark.parametrize(("asked", "words"), TIGHT)
def test_below_the_floors_too_only_what_is_possible_is_offered(asked, words):
    with pytest.raises(InfeasibleError, match=words):
        solve(make_scores(0), **asked)


GOALS = [
    *({"budget": share} for share in (0.02, 0.1, 0.2)),
    *({"budget_tokens": tokens} for tokens in (1, 5, 6, 10)),
    *({"memory": size} for size in (500, 1500, 2500)),
    *({"target_retention": share} for share in (0.8, 1.0)),
]
CAPS = (None, "0=150B", "0-1=500B", ["0-1=900B", "0=300B"], ["0-1=400B", "1-2=400B"])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    make=st.sampled_from([make_scores, make_bits, lambda: make_scores(1, shape=SLIDING)]),
    goal=st.sampled_from(GOALS),
    limits=st.fixed_dictionaries(
        {
            "level": st.sampled_from(["head", "layer"]),
            "cap": st.sampled_from(CAPS),
            "page": st.sampled_from([None, 4, 8, 32]),
            "context": st.sampled_from([None, 7, 12, 30]),
            "min_tokens": st.sampled_from([None, 6]),
            "max_tokens": st.sampled_from([None, 16]),
            "max_distinct": st.sampled_from([None, 1]),
        }
    ),
)
def test_what_is_offered_can_be_had(make, goal, limits):
    scores = make()
    try:
        solve(scores, **goal, **limits)
        return
    except InputError:
        reject()
    except InfeasibleError as error:
        said = str(error)
    offered = re.search(r"(?:(?:least|most) is|at least) (\w+)=([^\s;,]+)", said)
    assert offered or "and neither is any other target" in said
    if offered:
        solve(scores, **{offered[1]: ast.literal_eval(offered[2])}, **limits)
