"""docs/runtime.md: its examples run, on a tiny model."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import kvalloc

PAGE = Path(__file__).resolve().parents[3] / "docs" / "runtime.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


class Words:
    """A tokenizer of which only the way back is asked."""

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split("(")[0][:30])
def test_every_example_runs(
    tiny: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    block: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tiny.tiny_model()
    profile, ids = tiny.make_profile(model, 60, 0.4), tiny.prompt(60)
    questions = [tiny.prompt(3, seed=seed) for seed in (1, 2)]
    names: dict[str, Any] = {
        "kvalloc": kvalloc,
        "model": model,
        "profile": profile,
        "inputs": {"input_ids": ids, "max_new_tokens": 3},
        "document": {"input_ids": ids},
        "cache": profile.cache(model),
        "questions": questions,
        "tokenizer": Words(),
    }
    exec(block, names)
    if "questions" in block:
        first, second = capsys.readouterr().out.splitlines()
        assert first != second
        assert names["cache"].get_seq_length() == 60
    assert names["cache"].profile.shape.n_layers == tiny.N_LAYERS


def test_the_ten_failures_are_named_as_their_tests_are() -> None:
    tests = Path(__file__).with_name("test_ten_failures.py").read_text(encoding="utf-8")
    found = re.findall(r"^def (test_\d+_\w+)", tests, re.MULTILINE)
    assert [int(name.split("_")[1]) for name in found] == list(range(1, 11))
    assert re.findall(r"`(test_\d+_\w+)`", PAGE.read_text(encoding="utf-8")) == found
