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
from typing import Any, ClassVar

import pytest
from factories import make_problem, make_scores

from kvalloc.allocation.verification import (
    GRACE_SECONDS,
    NoAnswerError,
    call_in_time,
    solve_problem,
)
from kvalloc.errors import SolverError
from kvalloc.problem import Solution, Solver
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
    run = [sys.executable, "-c", "import sys; from kvalloc.cli.main import main; sys.exit(main())"]
    done = subprocess.run(
        [*run, *map(str, arguments)], env=env, capture_output=True, text=True, timeout=60
    )
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
    assert "10 passed" in done.stdout


# --- what others may do wrong ----------------------------------------------------------------


class Slow(Solver):
    """Ignores its time limit."""

    name: ClassVar[str] = "slow"
    summary: ClassVar[str] = "sleeps"

    def __init__(self, seconds: float = 0.0, where: str = "solve") -> None:
        self.seconds = seconds
        self.where = where
        self.thread = ""

    def can_solve(self, problem: Any) -> bool | str:
        if self.where == "can_solve":
            time.sleep(self.seconds)
        return True

    def solve(self, problem: Any, *, time_limit_seconds: float | None = None) -> Solution:
        self.thread = threading.current_thread().name
        if self.where == "solve":
            time.sleep(self.seconds)
        if self.where == "raise":
            raise ZeroDivisionError("a plug-in's own mistake")
        return Solution.of(problem, problem.last_options * 0)


PROBLEM = make_problem([[0.0, 1.0]] * 2, capacity=1)


@pytest.mark.parametrize("where", ["solve", "can_solve"])
def test_one_that_hangs_is_given_up(where, monkeypatch):
    monkeypatch.setattr("kvalloc.allocation.verification.GRACE_SECONDS", 0.2)
    with pytest.raises(SolverError, match=r"slow ignores its time limit: no answer after 0\.4 s"):
        solve_problem(PROBLEM, Slow(30.0, where), time_limit_seconds=0.1)


def test_one_that_is_a_little_late_is_forgiven():
    assert GRACE_SECONDS == 5.0
    for seconds, limit in ((0.15, 0.05), (0.0, float("inf"))):
        answer = solve_problem(PROBLEM, Slow(seconds), time_limit_seconds=limit)
        assert answer.choice.tolist() == [0, 0]


def test_without_a_limit_it_runs_where_it_is_called_and_ours_always_do():
    slow, before = Slow(), threading.active_count()
    solve_problem(PROBLEM, slow)
    assert slow.thread == threading.current_thread().name
    solve_problem(PROBLEM, slow, time_limit_seconds=10.0)
    assert slow.thread == "kvalloc-call"
    solve_problem(PROBLEM, get_solver("greedy"), time_limit_seconds=10.0)
    assert threading.active_count() <= before


def test_the_watchdog_hands_over_what_a_call_raises():
    def leave():
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        call_in_time(leave, seconds=5.0)
    with pytest.raises(NoAnswerError):
        call_in_time(lambda: time.sleep(5.0), seconds=0.05)


def test_the_process_ends_although_a_plug_in_hangs():
    code = """
import sys, time
import kvalloc.allocation.verification
from kvalloc.errors import SolverError
from test_third_party import PROBLEM, Slow
kvalloc.allocation.verification.GRACE_SECONDS = 0.1
try:
    kvalloc.allocation.verification.solve_problem(PROBLEM, Slow(600.0), time_limit_seconds=0.1)
except SolverError:
    print("given up")
"""
    path = os.pathsep.join((str(Path(__file__).parent), str(Path(__file__).parents[2] / "support")))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout.strip() == "given up", done.stderr
