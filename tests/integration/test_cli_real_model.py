"""The main job from end to end, as a newcomer types it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

pytestmark = [pytest.mark.model, pytest.mark.slow]


def kvalloc(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from kvalloc.cli.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_profile_solve_inspect_generate(tmp_path):
    text = (resources.files("kvalloc") / "data" / "texts" / "haystack_carter_1978.txt").read_text()
    prompt = text[:4000] + "\n\nWho speaks here, and to whom? Answer in one sentence."
    (tmp_path / "prompt.txt").write_text(prompt)
    kvalloc(
        tmp_path,
        *("profile", "demo", "--samples", "4", "--context", "1024", "-o", "s.safetensors"),
    )
    solved = json.loads(
        kvalloc(
            tmp_path,
            *("solve", "s.safetensors", "--target-retention", "0.9", "--solver", "greedy"),
            *("--json", "-o", "p.json"),
        ).stdout
    )
    assert solved["retention"] >= 0.9 - 1e-9
    assert solved["gap"] == 0
    assert solved["retained_bytes"] < 0.5 * solved["full_bytes"]
    picture = kvalloc(tmp_path, "inspect", "p.json").stdout
    assert "SmolLM2-135M-Instruct" in picture
    assert len(picture.partition("\n\n")[2].splitlines()) == 31
    answered = kvalloc(
        tmp_path,
        *("generate", "demo", "--profile", "p.json", "--prompt-file", "prompt.txt"),
        *("--max-new-tokens", "16", "--json"),
    )
    found = json.loads(answered.stdout)
    assert found["answer"].strip()
    assert found["prompt_tokens"] > 700
    share = found["retained_bytes"] / found["full_bytes"]
    assert share == pytest.approx(solved["retained_bytes"] / solved["full_bytes"], abs=0.05)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "p.json",
        "prompt.txt",
        "s.safetensors",
    ]


@pytest.mark.parametrize("level", ["layer", "head"])
def test_layers_that_share_entries_from_solve_to_generate(tmp_path, level):
    """What the command solves, another one runs: each group of layers keeps the same entries."""
    text = (resources.files("kvalloc") / "data" / "texts" / "haystack_carter_1978.txt").read_text()
    (tmp_path / "prompt.txt").write_text(text[:2500] + "\n\nWho speaks here?")
    kvalloc(
        tmp_path,
        *("profile", "demo", "--samples", "2", "--context", "512", "--share-length", "2"),
        *("-o", "s.safetensors"),
    )
    solved = json.loads(
        kvalloc(
            tmp_path,
            *("solve", "s.safetensors", "--budget", "30%", "--share-groups", "20"),
            *("--level", level, "--json", "-o", "p.json"),
        ).stdout
    )
    kvalloc(tmp_path, "verify", "p.json", "s.safetensors")
    answered = kvalloc(
        tmp_path,
        *("generate", "demo", "--profile", "p.json", "--prompt-file", "prompt.txt"),
        *("--max-new-tokens", "8", "--json"),
    )
    found = json.loads(answered.stdout)
    assert found["answer"].strip()
    share = found["retained_bytes"] / found["full_bytes"]
    assert share == pytest.approx(solved["retained_bytes"] / solved["full_bytes"], abs=0.05)


def test_entries_at_fewer_bits_from_solve_to_generate_and_eval(tmp_path):
    """More entries at 8 bits do less harm than fewer at 16, for the same bytes."""
    text = (resources.files("kvalloc") / "data" / "texts" / "haystack_carter_1978.txt").read_text()
    (tmp_path / "prompt.txt").write_text(text[:2000] + "\n\nWho speaks here?")
    kvalloc(
        tmp_path,
        *("profile", "demo", "--samples", "1", "--context", "384", "--bits", "16,8,4"),
        *("-o", "s.safetensors"),
    )
    for name, more in (("plain", ()), ("bits", ("--bits", "16,8,4"))):
        asked = ("solve", "s.safetensors", "--budget", "20%", *more, "-o", f"{name}.json")
        kvalloc(tmp_path, *asked)
    kvalloc(tmp_path, "verify", "bits.json", "s.safetensors")
    answered = kvalloc(
        tmp_path,
        *("generate", "demo", "--profile", "bits.json", "--prompt-file", "prompt.txt"),
        *("--max-new-tokens", "8", "--json"),
    )
    assert json.loads(answered.stdout)["answer"].strip()
    measured = kvalloc(
        tmp_path,
        *("eval", "demo", "--profile", "plain.json", "--profile", "bits.json"),
        *("--tasks", "kl", "--samples", "1", "--context", "384", "--json"),
    )
    rows = {row["name"]: row for row in json.loads(measured.stdout)}
    assert 0 < rows["bits"]["kl"] < 0.2 * rows["plain"]["kl"]
    for name in ("plain", "bits"):
        assert rows[name]["retained_bytes"] <= 0.2 * rows[name]["full_bytes"]
