"""Killed commands and run again, in a process of their own; see `kill_runs`."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.kill
RUNS = Path(__file__).parents[1] / "support" / "kill_runs.py"


def test_nothing_is_lost_or_left_by_kills(request):
    kills, jobs = request.config.getoption("--kills"), "fit,merge"
    few = ("--jobs", jobs) if kills < 10 else ()
    ran = subprocess.run(
        [sys.executable, RUNS, "--kills", str(kills), *few], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"outputs equal and nothing left after {kills} of {kills}" in ran.stdout
