"""Commands that are killed at moments by chance, and run again: what must be left in the end.

    python tests/support/kill_runs.py KILLS [JOB ...]

A parent process imports everything and stays at one thread; each command is a copy of it, killed
for real before a call that opens, renames or deletes a file, chosen by chance. Between two
such calls nothing changes on the disk but a file that has no name of its own yet.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from cli_tools import files_in

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # a process is copied while it has one thread
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["HF_HUB_OFFLINE"] = "1"

CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "tempfile.mkdtemp")
MAX_SECONDS = 300.0

PROFILE = "profile model --text text.txt --context 48 --scorer xkv:window=4"
OF_HEADS = f"{PROFILE} --samples 2 --loss fast --loss-level head"
MEASURED = "--level head --measure model --measure-prompts prompts.jsonl"
JOBS = {
    "profile": f"{PROFILE} --samples 5 --loss fast -o out.safetensors",
    "solve": f"solve scores.safetensors --budget 45% {MEASURED} -o out.json",
    "fit": "fit model --text text.txt --context 48 --samples 5 -o out.safetensors",
    "merge": "merge part-1.safetensors part-2.safetensors -o out.safetensors",
}
RESUMING = {"profile", "solve", "fit"}
INPUTS = {
    "scores.safetensors": OF_HEADS,
    "part-1.safetensors": f"{PROFILE} --samples 4 --shard 1/2",
    "part-2.safetensors": f"{PROFILE} --samples 4 --shard 2/2",
}
"""Files that commands of ours make."""


class Day(datetime):
    """The same date in every run, since files name the date of their making."""

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return datetime(2026, 1, 2, tzinfo=tz)


def run(work: Path, line: str, *, kill_at: int = 0) -> tuple[int, int]:
    """Run a command in a copy of this process; return its exit code and its changes of files.

    Parameters
    ----------
    work : Path
        Its folder.
    line : str
    kill_at : int
        Which of its changes of files it does not live to see; 0 for none.
    """
    log, changes = work.parent / "log", multiprocessing.Value("q", 0)
    process = multiprocessing.Process(target=in_copy, args=(work, line, log, changes, kill_at))
    process.start()
    process.join(MAX_SECONDS)
    if process.is_alive():
        process.kill()
        raise TimeoutError(f"{line}: not ended after {MAX_SECONDS:g} s")
    if process.exitcode not in (0, -signal.SIGKILL):
        raise AssertionError(f"{line}: {process.exitcode}: {log.read_text(errors='replace')}")
    return process.exitcode, changes.value


def in_copy(work: Path, line: str, log: Path, changes: Any, kill_at: int) -> None:
    """Run a command, and end this process before a change of a file."""
    from kvalloc import files
    from kvalloc.cli.main import main

    files.datetime = Day  # type: ignore[attr-defined]
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    os.chdir(work)
    inside = os.path.realpath(work)

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        path = arguments[0] if event == "open" or event in CHANGES else None
        if event == "open":
            _, mode, flags = arguments
            writing = (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or "w" in (mode or "")
            path = path if writing else None
        if isinstance(path, str | os.PathLike) and os.path.abspath(path).startswith(inside):
            changes.value += 1
            if changes.value == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(note)
    sys.exit(main(line.split()))


def make_inputs(folder: Path) -> Path:
    """Write a tiny model, texts, and what commands make of them."""
    from cli_tools import prose, save_tiny_model, write_prompts
    from tiny_models import tiny_model

    save_tiny_model(folder / "model", tiny_model(initializer_range=0.3))
    write_prompts(folder / "prompts.jsonl")
    (folder / "text.txt").write_text(prose(300))
    for name, line in INPUTS.items():
        run(folder, f"{line} -o {name}")
    return folder


@contextlib.contextmanager
def copy_of(inputs: Path) -> Iterator[Path]:
    """Copy a folder for one run; what else the run needs lies beside the copy."""
    with tempfile.TemporaryDirectory(dir=inputs.parent) as made:
        yield shutil.copytree(inputs, Path(made) / "work")


def unbroken(inputs: Path, line: str) -> tuple[dict[str, bytes], int]:
    """Return the files that a command leaves if nobody kills it, and its changes of files."""
    with copy_of(inputs) as work:
        _, changes = run(work, line)
        return files_in(work), changes


def kill(inputs: Path, name: str, whole: dict[str, bytes], n_changes: int, seed: int) -> int:
    """Kill a command up to three times, then let it end; return the number of kills."""
    line, rng, killed = JOBS[name], random.Random(seed), 0
    again = line + " --resume" * (name in RESUMING)
    with copy_of(inputs) as work:
        output = line.split()[-1]
        if rng.random() < 0.25:
            (work / output).write_bytes(b"from before")
        old = files_in(work)
        for _ in range(rng.randint(1, 3)):
            at = rng.randint(1, n_changes)
            if not run(work, again if killed else line, kill_at=at)[0]:
                continue  # less was left to change
            killed += 1
            for path, content in files_in(work).items():
                if path == output:  # never half there
                    assert content in (whole[path], old.get(path))
                else:
                    assert path in old or path.startswith(".") or ".partial" in path, path
        run(work, again)
        assert files_in(work) == whole
    return killed


def main(kills: int, names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as made:
        inputs = make_inputs(Path(made) / "inputs")
        jobs = [(name, *unbroken(inputs, JOBS[name])) for name in names or JOBS]
        done = case = 0
        while done < kills:
            job = jobs[case % len(jobs)]
            try:
                done += kill(inputs, *job, seed=case)
            except AssertionError as error:
                error.add_note(f"{job[0]}, case {case}")
                raise
            case += 1
    note = f"outputs equal and nothing left after {done} of {done}"
    print(json.dumps({"what": "kills", "figure": f"{done}", "note": note}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
