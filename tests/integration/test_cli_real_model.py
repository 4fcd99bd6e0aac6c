"""The main job from end to end, as a newcomer types it."""

import pytest
from cli_tools import succeed

from kvalloc.prompts.splits import split_texts

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def kvalloc(line):
    return succeed(*line.split())


def test_entries_at_fewer_bits_from_profile_to_generate_and_eval(folder):
    """More entries at 8 bits do less harm than fewer at 16, for the same bytes."""
    kvalloc("profile demo --samples 1 --context 384 --loss fast --bits 16,8,4 -o s.safetensors")
    kvalloc("solve s.safetensors --budget 20% -o plain.json")
    asked = "--budget 40% --bits 16,8,4 --solver lagrangian"
    solved = kvalloc(f"solve s.safetensors {asked} --json -o bits.json").json
    kvalloc("verify bits.json s.safetensors")
    picture = kvalloc("inspect bits.json").out
    assert len(picture.partition("\n\n")[2].splitlines()) == 31
    speech = split_texts("development")["carter_1978"][:2000]
    (folder / "prompt.txt").write_text(f"{speech}\n\nWho speaks here, and to whom?")
    asked = "generate demo --profile bits.json --prompt-file prompt.txt --max-new-tokens 8 --json"
    answered = kvalloc(asked).json
    assert answered["answer"].strip()
    share = answered["retained_bytes"] / answered["full_bytes"]
    assert share == pytest.approx(solved["retained_bytes"] / solved["full_bytes"], abs=0.05)
    measured = "eval demo --profile plain.json --profile bits.json --tasks kl --samples 1"
    rows = {row["name"]: row for row in kvalloc(f"{measured} --context 384 --json").json}
    assert 0 < rows["bits"]["kl"] < 0.2 * rows["plain"]["kl"]
    for name in ("plain", "bits"):
        assert rows[name]["retained_bytes"] <= 0.2 * rows[name]["full_bytes"]
