"""The terminal picture of budgets."""

from __future__ import annotations

import numpy as np
import pytest
from factories import make_budget_profile

from kvalloc.errors import InputError
from kvalloc.report.terminal import bar, budget_columns, merged_names, table_lines


def layers(*budgets: int):
    return make_budget_profile(np.array([[b, b] for b in budgets]), level="layer")


def test_one_row_a_layer_and_the_share_kept():
    lines = budget_columns({"greedy": layers(10, 20, 40)}, width=60, unicode=True)
    assert lines[0].split() == ["layer", "greedy"]
    assert [line.split()[:2] for line in lines[1:]] == [["0", "25%"], ["1", "50%"], ["2", "100%"]]
    bars = [line.split()[2] for line in lines[1:]]
    assert [len(b) for b in bars] == [8, 15, 30]  # 7.5, 15 and 30 of 30 columns
    assert bars[0] == "█" * 7 + "▌"


def test_profiles_stand_side_by_side_and_fit_the_terminal():
    profiles = {f"solver_{i}": layers(10 + i, 20, 30) for i in range(4)}
    lines = budget_columns(profiles, width=80)
    assert len(lines) == 4
    assert max(map(len, lines)) <= 80
    assert all(name in lines[0] for name in profiles)


def test_what_does_not_fit_side_by_side_goes_below():
    profiles = {f"s{i}": layers(10 + i, 20, 30) for i in range(9)}
    lines = budget_columns(profiles, width=50)
    assert max(map(len, lines)) <= 50
    assert len(lines) > 8
    assert all(any(name in line for line in lines) for name in profiles)


def test_equal_budgets_share_a_column():
    profiles = {"greedy": layers(10, 20), "uniform": layers(15, 15), "ilp": layers(10, 20)}
    assert list(merged_names(profiles)) == ["greedy = ilp", "uniform"]
    assert budget_columns(profiles, width=80)[0].count("=") == 1


def test_many_equal_budgets_have_a_short_heading():
    profiles = {"greedy": layers(10, 20)} | {f"solver_{i}": layers(10, 20) for i in range(9)}
    assert budget_columns(profiles, width=40)[0].split("  ", 1)[1] == "greedy = 9 more"


def test_heads_are_averaged():
    lines = budget_columns({"by head": make_budget_profile(np.array([[10, 30]]))}, width=60)
    assert lines[1].split()[1] == "50%"


def test_deep_models_are_averaged_into_few_rows():
    lines = budget_columns({"deep": layers(*[5, 6, 7, 8] * 25)}, width=60)
    assert len(lines) == 1 + 34
    assert lines[1].split()[:2] == ["0-2", "15%"]  # 5, 6, 7 of 40
    assert lines[-1].split()[0] == "99-99"


def test_plain_ascii():
    text = "\n".join(budget_columns({"greedy": layers(10, 20)}, width=60, unicode=False))
    assert text.isascii()
    assert "#" in text


def test_bars_never_leave_their_column():
    for share in np.linspace(0, 1, 101):
        assert len(bar(float(share), 10)) <= 10


def test_nothing_to_draw_is_refused():
    with pytest.raises(InputError, match="no budget profile"):
        budget_columns({})
    with pytest.raises(InputError, match="2, 3 layers"):
        budget_columns({"a": layers(10, 20), "b": layers(10, 20, 30)})


def test_tables_are_aligned_and_narrow_ones_move_together(monkeypatch):
    rows = [("a", "1", "end"), ("bb", "2,200", "e")]
    lines = table_lines(("name", "n", "z"), rows, left=(0, -1))
    assert lines == ["name      n  z", "a         1  end", "bb    2,200  e"]
    ruled = table_lines(("name", "n"), [("long [b]name", "1")], rule=True)
    assert ruled == ["name          n", "---------------", "long [b]name  1"]
    monkeypatch.setenv("COLUMNS", "14")
    assert table_lines(("name", "n", "z"), rows, left=(0, -1))[0] == "name     n z"
    monkeypatch.setenv("COLUMNS", "13")
    assert table_lines(("name", "n", "z"), rows, optional=("z",))[0] == "name      n"


def test_control_characters_in_a_cell_are_shown_escaped():
    assert table_lines(("n",), [("a\x1b[31m\nb",)]) == ["n", "a\\x1b[31m\\nb"]
