"""Commands that are killed at moments by chance, and run again: what must be left in the end.

A parent process imports everything and stays at one thread; each command is a copy of it, killed
for real. Half of the kills come after a time by chance, the other half before one of the calls,
chosen by chance, that open, rename or delete a file: the moments that matter are microseconds long.

    python tests/support/kill_runs.py [--kills 200] [--seed 0] [--jobs profile,merge]

Each command is also run by two processes at once.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # a process is copied while it has one thread
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["HF_HUB_OFFLINE"] = "1"

TIMES = ("prefill_seconds", "decode_tokens_per_second", "digest")
"""What legitimately differs in the file of an evaluation: how long it took, and the digest of that.
Dates, which are all else that differs between two days, are the same in every run here."""

CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "tempfile.mkdtemp")
MAX_SECONDS = 300.0


class Broken(Exception):
    """Something is not as it has to be."""


@dataclass(frozen=True)
class Job:
    """One command, in a folder with its inputs.

    Attributes
    ----------
    line : str
    inputs : str
        Files and folders, blanks between.
    outputs : str
        Files that it writes.
    resumes : bool
        Whether it is to go on with ``--resume``.
    """

    line: str
    inputs: str
    outputs: str = "out.safetensors"
    resumes: bool = False


PROFILE = "profile model --text text.txt --context 48 --scorer xkv:window=4"
MEASURED = "--level head --measure model --measure-prompts prompts.jsonl"
EVALUATED = "--prompts questions.jsonl --answer-tokens 4"
JOBS = {
    "profile": Job(
        f"{PROFILE} --samples 5 --loss fast -o out.safetensors", "model text.txt", resumes=True
    ),
    "solve --measure": Job(
        f"solve scores.safetensors --budget 45% {MEASURED} -o out.json",
        *("model scores.safetensors prompts.jsonl", "out.json"),
        resumes=True,
    ),
    "fit": Job(
        "fit model --text text.txt --context 48 --samples 5 -o out.safetensors",
        "model text.txt",
        resumes=True,
    ),
    "merge": Job(
        "merge part-1.safetensors part-2.safetensors -o out.safetensors",
        "part-1.safetensors part-2.safetensors",
    ),
    "eval": Job(
        f"eval model --profile budgets.json {EVALUATED} -o out.json",
        *("model budgets.json questions.jsonl", "out.json"),
    ),
    "report": Job(
        "report scores.safetensors budgets.json -o out.html",
        *("scores.safetensors budgets.json", "out.html"),
    ),
}
MADE = {
    "scores.safetensors": f"{PROFILE} --samples 2 --loss fast --loss-level head",
    "part-1.safetensors": f"{PROFILE} --samples 4 --shard 1/2",
    "part-2.safetensors": f"{PROFILE} --samples 4 --shard 2/2",
    "budgets.json": "solve scores.safetensors --budget 50%",
}
"""Inputs that commands of ours make."""


class Unbroken(NamedTuple):
    """What a job leaves that nobody kills."""

    files: dict[str, Any]
    seconds: float
    changes: int


class Runs:
    """Jobs in folders of their own below one, their inputs and what they leave when unbroken.

    Parameters
    ----------
    folder : Path
        Where inputs are made, and every job is run once.
    names : tuple of str
        Of the jobs.
    """

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        from cli_tools import prose, save_tiny_model, write_prompts
        from tiny_models import tiny_model

        self.folder, self.kills, self._case = folder, Counter[str](), 0
        inputs = folder / "inputs"
        save_tiny_model(inputs / "model", tiny_model(initializer_range=0.3))
        write_prompts(inputs / "prompts.jsonl")
        words = prose(400).split()
        questions = [{"prompt": " ".join(words[i : i + 50]), "answer": "w7"} for i in range(3)]
        (inputs / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
        (inputs / "text.txt").write_text(prose(300))
        for name, line in MADE.items():
            Child(inputs, f"{line} -o {name}").end_well(line)
        self.unbroken = {name: self._unbroken(name) for name in names}

    def _unbroken(self, name: str) -> Unbroken:
        times = []
        for _ in range(2):  # the first one has to import a few modules more
            work, start = self._new_case(name), time.monotonic()
            child = Child(work, JOBS[name].line)
            child.end_well(name)
            times.append(time.monotonic() - start)
            for module in child.report()["modules"]:
                with contextlib.suppress(Exception):
                    importlib.import_module(module)
        return Unbroken(contents(work), min(times), child.report()["changes"])

    def _new_case(self, name: str) -> Path:
        self._case += 1
        work = self.folder / f"case-{self._case}"
        work.mkdir()
        for one in JOBS[name].inputs.split():
            source = self.folder / "inputs" / one
            if source.is_dir():
                (work / one).symlink_to(source)
            else:
                shutil.copy(source, work / one)
        return work

    def kill(self, name: str, rng: random.Random, max_kills: int = 3) -> int:
        """Kill a job up to ``max_kills`` times, then let it end; return the number of kills.

        Raises
        ------
        Broken
            If a half file is seen, the job does not end well then, its outputs are other than those
            of the unbroken run, or anything else stays beside them.
        """
        job, whole, work = JOBS[name], self.unbroken[name], self._new_case(name)
        before = {
            one: b"from before" for one in job.outputs.split() if one not in job.inputs.split()
        }
        before = before if rng.random() < 0.25 else {}
        for one, content in before.items():
            (work / one).write_bytes(content)
        old = contents(work)
        killed = 0
        for _ in range(rng.randint(1, max_kills)):
            by_time = rng.random() < 0.5
            at = 0 if by_time else rng.randint(1, whole.changes)
            child = Child(work, self._line(job, killed), kill_at=at)
            if by_time:
                time.sleep(rng.uniform(0, whole.seconds))
                child.kill()
            if child.wait() != -signal.SIGKILL:
                continue  # it was faster
            killed += 1
            self.kills[name] += 1
            self._check_whole(name, work, old)
        Child(work, self._line(job, 1)).end_well(f"{name} after {killed} kills")
        self._check_equal(name, work, f"after {killed} kills")
        shutil.rmtree(work)
        return killed

    def _line(self, job: Job, killed: int) -> str:
        return f"{job.line} --resume" if killed and job.resumes else job.line

    def two_at_once(self, name: str) -> None:
        """Let two processes write one output: one wins whole, or the second one is refused.

        Raises
        ------
        Broken
            If the output is another one, or the refusal does not name the other process.
        """
        job, work = JOBS[name], self._new_case(name)
        children = [Child(work, self._line(job, 1)) for _ in range(2)]
        codes = [child.wait() for child in children]
        refused = [child for child, code in zip(children, codes, strict=True) if code == 2]
        if 0 not in codes or {*codes} - {0, 2} or (refused and not job.resumes):
            raise Broken(f"{name} twice: exit codes {codes}: {[one.printed() for one in children]}")
        for one in refused:
            (other,) = {child.pid for child in children} - {one.pid}
            if f"another process ({other}) is at work" not in one.printed():
                raise Broken(f"{name} twice: {one.printed()}")
        self._check_equal(name, work, "by two processes")
        shutil.rmtree(work)

    def _check_whole(self, name: str, work: Path, old: dict[str, Any]) -> None:
        """Raise where anything half is visible under a final name, or anything else is left."""
        job, whole = JOBS[name], self.unbroken[name].files
        for path, content in contents(work).items():
            if path in job.outputs.split() and content not in (whole[path], old.get(path)):
                raise Broken(f"{name}: a half {path} is visible after a kill")
            passing = Path(path).parts[0].startswith(".") or ".partial" in path
            if path not in job.outputs.split() and path not in old and not passing:
                raise Broken(f"{name}: {path} is left by a kill")

    def _check_equal(self, name: str, work: Path, when: str) -> None:
        files, whole = contents(work), self.unbroken[name].files
        if files.keys() != whole.keys():
            raise Broken(f"{name} {when}: left {sorted(files.keys() ^ whole.keys())}")
        if other := [path for path in files if files[path] != whole[path]]:
            raise Broken(f"{name} {when}: {other} differ from those of an unbroken run")


def contents(work: Path) -> dict[str, Any]:
    """Return every file and folder below one with its bytes; evaluations without their times."""
    files: dict[str, Any] = {}
    for path in sorted(work.rglob("*")):
        name = str(path.relative_to(work))
        content: Any = path.read_bytes() if path.is_file() else b""
        if b'"kvalloc.evaluation"' in content:
            content = _timeless(json.loads(content))
        if not name.startswith("model/"):
            files[name] = content
    return files


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(one) for key, one in value.items() if key not in TIMES}
    return [_timeless(one) for one in value] if isinstance(value, list) else value


class Child:
    """A command in a copy of this process.

    Parameters
    ----------
    work : Path
        Its folder.
    line : str
    kill_at : int
        Which of its changes of files it does not live to see; 0 for none.
    """

    def __init__(self, work: Path, line: str, *, kill_at: int = 0) -> None:
        self._log = work.parent / f"{work.name}-{time.monotonic_ns()}.log"
        self._changes = 0
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid:
            return
        code = 3
        try:
            os.setsid()
            log = os.open(self._log, os.O_WRONLY | os.O_CREAT)
            for stream in (1, 2):
                os.dup2(log, stream)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.chdir(work)
            _same_day()
            inside = os.path.realpath(work)
            sys.addaudithook(lambda event, given: self._saw(event, given, inside, kill_at))
            code = self._run(line.split())
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _run(self, arguments: list[str]) -> int:
        from kvalloc.cli.main import main

        code = main(arguments)
        report = {"changes": self._changes, "modules": sorted(sys.modules)}
        self._log.with_suffix(".json").write_text(json.dumps(report))
        return code

    def _saw(self, event: str, given: tuple[Any, ...], inside: str, kill_at: int) -> None:
        if event == "open":
            path, mode, flags = given
            writes = (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or "w" in (mode or "")
            if not writes or not isinstance(path, str | os.PathLike):
                return
        elif event not in CHANGES or not isinstance(path := given[0], str | os.PathLike):
            return
        if os.path.abspath(path).startswith(inside):
            self._changes += 1
            if self._changes == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    def kill(self) -> None:
        """Kill it, if it is still there."""
        os.kill(self.pid, signal.SIGKILL)  # not waited for yet: the id is still its own

    def wait(self) -> int:
        """Return its exit code, or minus the signal that ended it."""
        end = time.monotonic() + MAX_SECONDS
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        self.kill()
        raise Broken(f"not ended after {MAX_SECONDS:g} s: {self.printed()}")

    def end_well(self, what: str) -> None:
        """Wait for it; raise where it does not succeed."""
        if self.wait():
            raise Broken(f"{what}: {self.printed()}")

    def printed(self) -> str:
        """Return what it printed."""
        return self._log.read_text(errors="replace")[-1500:]

    def report(self) -> dict[str, Any]:
        """Return how many changes of files it made, and which modules it imported."""
        report: dict[str, Any] = json.loads(self._log.with_suffix(".json").read_text())
        return report


def _same_day() -> None:
    """Give every run the same date."""
    from datetime import datetime

    from kvalloc import files

    class Day(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime(2026, 1, 2, tzinfo=tz)

    files.datetime = Day  # type: ignore[attr-defined]


def kill_all(runs: Runs, kills: int, seed: int) -> Iterator[str]:
    """Kill jobs in turns until there were so many kills; gives what went wrong."""
    done, case, names = 0, 0, list(runs.unbroken)
    while done < kills:
        name, rng = names[case % len(names)], random.Random(f"{seed} {case}")
        try:
            done += runs.kill(name, rng, max_kills=min(3, kills - done))
        except Broken as broken:
            done += 1
            yield f"seed {seed}, case {case}: {broken}"
        case += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", help="names with commas; all by default")
    options = parser.parse_args()
    names = tuple(options.jobs.split(",")) if options.jobs else tuple(JOBS)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as made:
        runs = Runs(Path(made), names)
        broken = []
        for name in names:
            try:
                runs.two_at_once(name)
            except Broken as error:
                broken.append(str(error))
        broken += kill_all(runs, options.kills, options.seed)
    print(f"seed {options.seed}, {time.monotonic() - start:,.0f} s")
    for name in names:
        print(f"{name:16} {runs.kills[name]:4} kills")
    total = runs.kills.total()
    well = total - len(broken)
    print(f"kills: {total}; outputs equal and nothing left after {well} of {total}")
    print("of an evaluation, these may differ: its times, and the digest over them")
    for one in broken:
        print(one)
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
