"""A solver in a package of its own: built, installed, found, run, and kept in check."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from cli_tools import python
from factories import make_problem, make_scores
from scripted_solver import Scripted, says

from kvalloc.allocation.verification import (
    GRACE_SECONDS,
    solve_problem,
)
from kvalloc.errors import SolverError
from kvalloc.problem.registry import get_solver

SOURCE = Path(__file__).parents[2] / "third_party" / "kvalloc_example_solver"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The environment in which the example is installed, offline and into a folder of its own."""
    folder = tmp_path_factory.mktemp("third_party")
    copy = shutil.copytree(SOURCE, folder / "source")  # a build writes into its source
    target = folder / "installed"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    offline = ["--no-deps", "--no-index", "--no-build-isolation", "--target", str(target)]
    subprocess.run([*pip, *offline, str(copy)], check=True, capture_output=True, text=True)
    path = os.pathsep.join(filter(None, (str(target), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "160"}


def kvalloc(*arguments, env, code=0):
    program = "import sys; from kvalloc.cli.main import main; sys.exit(main())"
    done = python(program, *arguments, env=env)
    assert done.returncode == code, done.stderr
    return done


def test_it_is_listed_with_its_options_and_solves(installed, tmp_path):
    rows = json.loads(kvalloc("list", "solvers", "--json", env=installed).stdout)
    row = next(row for row in rows if row["name"] == "square_root")
    assert (row["error"], row["options"]) == (None, {"offset": 0.0})
    assert "square root" in row["summary"]
    scores, profile = tmp_path / "s.safetensors", tmp_path / "p.json"
    make_scores(4).save(scores)
    asked = ["solve", scores, "--budget", "50%", "--solver", "square_root", "--json"]
    answer = json.loads(kvalloc(*asked, "-o", profile, env=installed).stdout)
    assert (answer["solver"], answer["termination"]) == ("square_root", "heuristic")
    assert answer["bound"] >= answer["objective"]
    assert json.loads(profile.read_text())["solver"] == "square_root"
    for option, said in (
        ("offset=-1", "offset is -1, expected >= 0"),
        ("size=2", "square_root has no option 'size'; choose from: offset"),
    ):
        done = kvalloc(*asked, "--solver", f"square_root:{option}", env=installed, code=2)
        assert said in done.stderr
        assert "Traceback" not in done.stderr


def test_it_keeps_the_contract(installed):
    test = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", "-c", os.devnull]
    done = subprocess.run(
        [sys.executable, *test, str(SOURCE / "test_square_root.py")],
        env=installed,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert "8 passed" in done.stdout


# --- what others may do wrong ----------------------------------------------------------------


PROBLEM, FLOORS = make_problem([[0.0, 1.0]] * 2, capacity=1), says(np.array([0, 0]))


def slow(seconds):
    """Return the answer of a solver that ignores its time limit."""

    def answer(problem):
        time.sleep(seconds)
        return FLOORS(problem)

    return answer


HANGING = {"solve": Scripted(slow(30.0)), "can_solve": Scripted(slow(0.0), able=slow(30.0))}


@pytest.mark.parametrize("where", HANGING)
def test_one_that_hangs_is_given_up(where, monkeypatch):
    monkeypatch.setattr("kvalloc.allocation.verification.GRACE_SECONDS", 0.2)
    with pytest.raises(SolverError, match=r"scripted ignores its time limit: no answer after 0\.4"):
        solve_problem(PROBLEM, HANGING[where], time_limit_seconds=0.1)


def test_one_that_is_a_little_late_is_forgiven():
    assert GRACE_SECONDS == 5.0
    for seconds, limit in ((0.15, 0.05), (0.0, float("inf"))):
        answer = solve_problem(PROBLEM, Scripted(slow(seconds)), time_limit_seconds=limit)
        assert answer.choice.tolist() == [0, 0]


def test_without_a_limit_it_runs_where_it_is_called_and_ours_always_do():
    before, threads = threading.active_count(), []

    def answer(problem):
        threads.append(threading.current_thread())
        return FLOORS(problem)

    for limit in (None, 10.0):
        solve_problem(PROBLEM, Scripted(answer), time_limit_seconds=limit)
    here, other = threads
    assert here is threading.current_thread() is not other
    assert other.daemon  # a process ends although one hangs
    solve_problem(PROBLEM, get_solver("greedy"), time_limit_seconds=10.0)
    assert threading.active_count() <= before
