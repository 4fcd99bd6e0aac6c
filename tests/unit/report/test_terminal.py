"""Bars and tables of a terminal."""

from __future__ import annotations

import numpy as np
from factories import make_budget_profile

from kvalloc.report.terminal import merged_names, short_name, table_lines


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
