"""docs/interop.md: it has every target and every loss, and its example runs."""

from __future__ import annotations

import re
from pathlib import Path

from kvalloc.interop.exporting import TARGETS
from kvalloc.interop.target import RESTRICTIONS

PAGE = (Path(__file__).parents[3] / "docs" / "interop.md").read_text(encoding="utf-8")


def test_every_target_and_every_loss_has_a_row():
    rows = {name for row in re.findall(r"^\| (`.*?) \|", PAGE, re.M) for name in row.split(", ")}
    rows.discard("`--accept`")
    assert rows == {f"`{name}`" for name in (*TARGETS, *(one.name for one in RESTRICTIONS))}


def test_the_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        exec(block, names)
    assert (names["again"].budgets == names["profile"].budgets).all()
    assert names["half"].budgets.mean() == 750
