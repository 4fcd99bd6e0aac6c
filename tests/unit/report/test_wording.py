"""What is said of profiles in plain words, and tables of a terminal."""

import numpy as np
import pytest
from factories import make_budget_profile, make_scores, make_shape

import kvalloc
from kvalloc.report.terminal import merged_names, short_name, table_lines
from kvalloc.report.wording import cap_lines, ended_text, proof_text, score_notes

# What is said of profiles in plain words


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"solver": "", "decided_by": ""}, "No solver decided these budgets"),
        ({"solver": "descent"}, "No bound is known"),
        ({"objective": 0.9, "bound": 0.9}, "optimal: no budgets in these bytes retain more."),
        (
            {"objective": 0.855, "bound": 0.9},
            "retain more than 0.900000; these retain at most 5% less than the most possible.",
        ),
        (
            {"sense": "min_cost", "objective": 3.0 * 2**20, "bound": 2.0 * 2**20},
            "take less than 2.00 MiB; these take at most 1.5 times the least possible.",
        ),
        (
            {"objective": -0.1, "bound": -0.0125, "requested": {"objective": "loss"}},
            "than 0.012500 nats per token; these lose at most 8 times the least possible.",
        ),
        (
            {"objective": -0.1, "bound": 0.0, "requested": {"objective": "loss"}},
            "which says little of these.",
        ),
    ],
)
def test_how_good_a_decision_is(stated, said):
    assert said in proof_text(make_budget_profile(np.full((2, 2), 20), **stated))


OPTIMAL = {"objective": -0.1, "bound": -0.1, "termination": "optimal", "bound_source": "dual"}


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({}, "optimal"),
        ({"requested": {"objective": "loss"}}, "optimal for the sum of single losses"),
        ({"requested": {"target": "loss"}}, "optimal for the sum of single losses"),
        ({"bound_source": "dp"}, "optimal, not proven again: dp's word"),
        ({"termination": "time_limit", "requested": {"objective": "loss"}}, "time limit"),
    ],
)
def test_of_what_optimal_is_optimal(stated, said):
    profile = make_budget_profile(np.full((6, 2), 20), **{**OPTIMAL, **stated})
    assert ended_text(profile) == said
    if profile.termination == "optimal":
        assert said.removeprefix("optimal").partition(",")[0] in proof_text(profile)


def test_down_to_which_budget_answers_stay_right():
    def note_of(*scores):
        names = (("full", 1.0), ("8 bits", 0.53), ("budget='10%'", 0.1), ("budget='20%'", 0.2))
        shown = [
            {"task": "tools", "name": name, "share_of_16_bits": share, "score": score}
            for (name, share), score in zip(names, scores, strict=True)
        ]
        return [*score_notes(shown)]

    begin = "tools: the full cache's score of 80% is reached"
    assert note_of(0.8, 0.1, 0.5, 0.9) == [f"{begin} down to 20.0% of the bytes; 50% at 10.0%"]
    assert note_of(0.8, 0.1, 0.8, 0.8) == [f"{begin} down to 10.0% of the bytes"]
    assert note_of(0.8, 0.8, 0.9, 0.7) == [f"{begin} at no budget; 70% at 20.0%"]
    assert note_of(None, None, None, None) == note_of(0.0, 0.0, 0.0, 0.0) == []


def test_caps_that_nest_are_drawn_as_a_tree():
    scores = make_scores(1, shape=make_shape(n_layers=6))
    caps = ["0-3=2KiB", "4-5=1MiB", "0-1=600B"]
    nested = kvalloc.solve(scores, budget="50%", cap=caps)
    assert cap_lines(nested) == [
        "+-- model",
        "    |-> layers 0-3: 2.00 KiB",
        "    |   L-> layers 0-1: 600 bytes",
        "    L-> layers 4-5: 1.00 MiB",
    ]
    crossing = kvalloc.solve(scores, budget="50%", cap=["0-3=2KiB", "3-5=2KiB"])
    assert cap_lines(crossing) == cap_lines(kvalloc.solve(scores, budget="50%")) == []


# Bars and tables of a terminal


def test_equal_budgets_share_a_name_which_is_cut_where_there_is_no_room():
    budgets = {"greedy": [10, 20], "uniform": [15, 15], "ilp": [10, 20], "dp": [10, 20]}
    profiles = {
        name: make_budget_profile(np.array([[b, b] for b in some]), level="layer")
        for name, some in budgets.items()
    }
    assert list(merged_names(profiles)) == ["greedy = ilp = dp", "uniform"]
    assert short_name("greedy = ilp = dp", 40) == "greedy = ilp = dp"
    assert short_name("greedy = ilp = dp", 15) == "greedy = 2 more"


def test_tables_are_aligned_and_narrow_ones_move_together(monkeypatch):
    rows = [("a", "1", "end"), ("bb", "2,200", "e")]
    lines = table_lines(("name", "n", "z"), rows, left=(0, -1))
    assert lines == ["name      n  z", "a         1  end", "bb    2,200  e"]
    monkeypatch.setenv("COLUMNS", "14")
    assert table_lines(("name", "n", "z"), rows, left=(0, -1))[0] == "name     n z"
