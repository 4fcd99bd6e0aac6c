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
