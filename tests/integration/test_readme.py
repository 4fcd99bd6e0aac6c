"""If it is shown, it runs: the README's Python block, with the real model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvalloc.runtime.account import kept_bytes

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.model
def test_the_python_block_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    folder = README.parent / "kvalloc" / "data" / "texts"
    text = (folder / "profile_monroe_1821.txt").read_text(encoding="utf-8")
    (tmp_path / "prompt.txt").write_text(" ".join(text.split()[:600]), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(block, str(README), "exec"), names)
    said = capsys.readouterr().out.splitlines()[-1]
    assert "58% of the entries at 5 bits" in said
    cache, tokens = names["applied"].last_cache, names["inputs"]["input_ids"].shape[1]
    stored = kept_bytes(cache.layers)
    assert stored is not None
    assert 0.19 < cache.profile.of_16_bits(stored, tokens) <= 0.2  # with positions and biases


def test_both_commands_stand_at_the_top() -> None:
    top = README.read_text(encoding="utf-8")[:900]
    assert "make demo" in top
    assert "make test" in top


def test_the_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text(encoding="utf-8")):
        assert (README.parent / target).exists(), target
