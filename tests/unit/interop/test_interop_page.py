"""docs/interop.md has every target and every loss."""

from __future__ import annotations

import re
from pathlib import Path

from kvalloc.interop.exporting import TARGETS
from kvalloc.interop.target import RESTRICTIONS

PAGE = (Path(__file__).parents[3] / "docs" / "interop.md").read_text(encoding="utf-8")


def test_every_target_and_every_loss_has_a_row():
    rows = {name for row in re.findall(r"^\| (`.*?) \|", PAGE, re.M) for name in row.split(", ")}
    rows.discard("`--accept`")
    assert rows == {f"`{name}`" for name in (*TARGETS, *RESTRICTIONS)}
