"""The main job from end to end, as a newcomer types it."""

from __future__ import annotations

import pytest
from cli_tools import run

from kvalloc.prompts.splits import split_texts

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def kvalloc(line, *more):
    """Run a command line that must succeed."""
    ran = run(*line.split(), *more)
    assert ran.code == 0, ran.err
    return ran


def generate(folder, profile, n_characters, new_tokens):
    """What a profile makes of a speech with a question behind it."""
    speech = split_texts("development")["carter_1978"][:n_characters]
    (folder / "prompt.txt").write_text(f"{speech}\n\nWho speaks here, and to whom?")
    asked = f"generate demo --profile {profile} --prompt-file prompt.txt --json"
    found = kvalloc(asked, "--max-new-tokens", new_tokens).json
    assert found["answer"].strip()
    return found


def test_profile_solve_inspect_generate(folder):
    kvalloc("profile demo --samples 2 --context 1024 -o s.safetensors")
    solved = kvalloc(
        "solve s.safetensors --target-retention 0.9 --solver greedy --json -o p.json"
    ).json
    assert solved["retention"] >= 0.9 - 1e-9
    assert solved["gap"] == 0
    assert solved["retained_bytes"] < 0.5 * solved["full_bytes"]
    picture = kvalloc("inspect p.json").out
    assert "SmolLM2-135M-Instruct" in picture
    assert len(picture.partition("\n\n")[2].splitlines()) == 31
    found = generate(folder, "p.json", 4000, 16)
    assert found["prompt_tokens"] > 700
    share = found["retained_bytes"] / found["full_bytes"]
    assert share == pytest.approx(solved["retained_bytes"] / solved["full_bytes"], abs=0.05)
    assert sorted(path.name for path in folder.iterdir()) == ["p.json", "prompt.txt",
                                                              "s.safetensors"]  # fmt: skip


def test_entries_at_fewer_bits_from_solve_to_generate_and_eval(folder):
    """More entries at 8 bits do less harm than fewer at 16, for the same bytes."""
    kvalloc("profile demo --samples 1 --context 384 --loss fast --bits 16,8,4 -o s.safetensors")
    kvalloc("solve s.safetensors --budget 20% -o plain.json")
    kvalloc("solve s.safetensors --budget 40% --bits 16,8,4 -o bits.json")  # of 16-bit bytes
    kvalloc("verify bits.json s.safetensors --resolve")
    generate(folder, "bits.json", 2000, 8)
    measured = "eval demo --profile plain.json --profile bits.json --tasks kl --samples 1"
    rows = {row["name"]: row for row in kvalloc(f"{measured} --context 384 --json").json}
    assert 0 < rows["bits"]["kl"] < 0.2 * rows["plain"]["kl"]
    for name in ("plain", "bits"):
        assert rows[name]["retained_bytes"] <= 0.2 * rows[name]["full_bytes"]
