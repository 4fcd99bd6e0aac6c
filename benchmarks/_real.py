"""Retention curves of the real model for benchmarks: the demo's, measured on the spot."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from pathlib import Path

from kvalloc.formats.score_profile import ScoreProfile

SAMPLES, CONTEXT_TOKENS = 4, 1024


@functools.cache
def real_scores(path: str | None = None) -> ScoreProfile:
    """A score profile from a file, or of the demo model on the texts that ship with kvalloc.

    Parameters
    ----------
    path : str, optional
        A score profile; by default one is measured with ``kvalloc profile demo``, which takes
        some seconds and is thrown away after.

    Raises
    ------
    RuntimeError
        If the demo model is not there; ``make`` installs it.
    """
    if path is not None:
        return ScoreProfile.load(path)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "demo.safetensors"
        command = [
            *(sys.executable, "-c", "from kvalloc.cli.main import main; raise SystemExit(main())"),
            *("profile", "demo", "--samples", str(SAMPLES), "--context", str(CONTEXT_TOKENS)),
            *("--quiet", "-o", str(file)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"cannot profile the demo model: {done.stderr.strip()[-300:]}")
        return ScoreProfile.load(file)


def described(scores: ScoreProfile) -> str:
    """Model, samples and context in a few words."""
    return f"{scores.shape.model_id}, {scores.n_samples} x {scores.context_tokens:,} tokens"
