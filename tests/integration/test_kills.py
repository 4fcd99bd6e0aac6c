"""Killed commands and run again, in a process of their own; see `kill_runs`."""

import subprocess
import sys

import kill_runs
import pytest


@pytest.mark.kill
def test_nothing_is_lost_or_left_by_kills(request):
    kills = request.config.getoption("--kills")
    jobs = ("fit", "merge") if kills < 10 else ()
    subprocess.run([sys.executable, kill_runs.__file__, str(kills), *jobs], check=True)
