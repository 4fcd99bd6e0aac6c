"""If it is shown, it runs: the README's Python block, with the real model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.model
def test_the_python_block_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    from kvalloc.models.loading import load_model

    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    folder = README.parent / "kvalloc" / "data" / "texts"
    text = (folder / "profile_monroe_1821.txt").read_text(encoding="utf-8")
    prompt = " ".join(text.split()[:600])
    inputs = load_model("demo").tokenizer(prompt, return_tensors="pt")
    names: dict[str, Any] = {"texts": [text], "inputs": inputs}
    exec(compile(block, str(README), "exec"), names)
    retained, full = map(int, capsys.readouterr().out.split())
    tokens = inputs["input_ids"].shape[1]
    profile = names["profile"]
    new = names["answer"].shape[1] - tokens
    # The newest token has been sampled and not yet run, so its entry is in neither count.
    per_token = profile.shape.n_layers * profile.shape.n_kv_heads * profile.shape.bytes_per_entry
    assert full == (tokens + new - 1) * per_token
    assert retained == profile.retained_bytes_at(tokens) + (new - 1) * per_token
    assert profile.retention >= 0.9


def test_both_commands_stand_at_the_top() -> None:
    top = README.read_text(encoding="utf-8")[:900]
    assert "make demo" in top
    assert "make test" in top


def test_the_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text(encoding="utf-8")):
        assert (README.parent / target).exists(), target
