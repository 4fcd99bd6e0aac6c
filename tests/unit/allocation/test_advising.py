"""What a user is told where a request cannot be met, beyond what the command line tests show."""

import ast
import re

import pytest
from factories import make_bits, make_losses, make_posed, make_scores, make_shape
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from scripted_solver import Scripted

from kvalloc.allocation.decision import solve
from kvalloc.allocation.infeasibility import advise
from kvalloc.allocation.request import Request, Target
from kvalloc.errors import InfeasibleError, InputError

SLIDING = make_shape(layer_types=("full", "sliding", "full"), sliding_window=8)


def cannot_reach(problem):
    """A rule that does not get there."""
    raise InfeasibleError("this rule reaches 0.5 at most; use greedy", nearest=0.5)


def test_a_rule_that_cannot_where_others_can_keeps_its_word():
    with pytest.raises(InfeasibleError, match="^this rule reaches 0.5 at most") as caught:
        solve(make_scores(0), target_retention=0.9, solver=Scripted(cannot_reach))
    assert str(caught.value).endswith("; the most is target_retention=0.5 with it")
    assert caught.value.nearest == 0.5


def test_what_was_not_searched_to_the_end_says_so():
    request = Request.parse(target_retention=0.9, cap=("0=300B",))
    error = InfeasibleError("a word of the solver")
    assert advise(make_scores(0), request, error, time_limit_seconds=0.0) is error


GOALS = [
    *({"budget": share} for share in (0.02, 0.1, 0.2)),
    *({"budget_tokens": tokens} for tokens in (1, 5, 6, 10)),
    *({"memory": size} for size in (500, 1500, 2500)),
    *({"target_retention": share} for share in (0.8, 1.0)),
    *({"target_loss": loss} for loss in (0.0, 0.05)),
    {"target_loss": 0.01, "bits": (16, 8)},
]
CAPS = (None, "0=150B", "0-1=500B", ["0-1=900B", "0=300B"], ["0-1=400B", "1-2=400B"])
MAKERS = (make_scores, make_bits, make_losses, lambda: make_scores(1, shape=SLIDING))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    make=st.sampled_from(MAKERS),
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
    """Every number of an advice is asked for again as it is printed."""
    scores = make()
    try:
        solve(scores, **goal, **limits)
        return
    except InputError:
        reject()
    except InfeasibleError as error:
        said = str(error)
    nearest = re.search(r"(?:(?:least|most) is|at least) (\w+=[^\s;,]+)", said)
    assert nearest or "and neither is any other target" in said
    ways = said.partition("or use ")[2].replace("or use ", "").split(", or ")
    for offered in [*filter(None, ways), *([nearest[1]] if nearest else [])]:
        name, value = offered.partition(" (a smaller")[0].rstrip(",").split("=", 1)
        changed = {name: ast.literal_eval(value)}
        if name == "cap":  # in place of the one of the same layers
            layers = f"{changed[name].partition('=')[0]}="
            caps = [limits["cap"]] if isinstance(limits["cap"], str) else limits["cap"]
            changed = {name: [changed[name] if c.startswith(layers) else c for c in caps]}
        solve(scores, **goal | limits | changed)


@pytest.mark.parametrize("seed", range(4))
def test_the_least_loss_is_rounded_up(seed):
    scores = make_losses(seed)
    scores = scores.replace(losses=40 * scores.losses)
    with pytest.raises(InfeasibleError, match=r"the least is target_loss=") as caught:
        solve(scores, target_loss=0.0, max_tokens=16)
    least = re.search(r"the least is target_loss=([^;]+)", str(caught.value))[1]
    assert solve(scores, target_loss=float(least), max_tokens=16).predicted_loss <= float(least)


def test_a_share_of_a_large_cache_is_enough_as_it_is_printed():
    shape = make_shape(n_layers=64, n_query_heads=8, n_kv_heads=8, head_dim=128)
    costs = make_posed(make_scores(0, shape=shape), budget=1.0, context=10**6, batch=64).costs
    for part in range(7, 10**4, 7):
        floor = part * costs.full // 10**4
        _, share = Target.of({"budget": 1.0}).nearest(floor, costs)
        assert Target.of({"budget": f"{100 * share.value:g}%"}).capacity(costs, floor) >= floor
