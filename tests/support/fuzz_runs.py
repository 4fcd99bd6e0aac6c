"""Hostile files of every kind, by seed: each is refused in one line or read, and nothing crashes.

    python tests/support/fuzz_runs.py [--seconds 3600] [--executions N] [--seed 0] [--processes 2]

`hostile_files.py` says what is done to files and what counts as a crash. A worker process may
take 1 GiB more than it begins with; one that ends by itself is a crash, too. An execution is made
again by its seed and number: --executions 1 --first NUMBER.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import resource
import signal
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process is copied while it has one thread
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hostile_files

TOLD_SECONDS = 2.0
"""How often a worker tells what it has done: what it loses by ending is counted as not done."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--executions", type=int, help="stop after so many")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--files-only", action="store_true", help="without models and caches")
    asked = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "sound").mkdir()
        kinds = hostile_files.make_kinds(folder / "sound", models=not asked.files_only)
        workers = [Worker(kinds, folder, asked, place) for place in range(asked.processes)]
        going = workers
        while going := [worker for worker in going if worker.goes_on()]:
            time.sleep(0.1)
    found = hostile_files.Outcomes()
    for worker in workers:
        found.add(worker.found)
    return told(found, asked, time.monotonic() - start, max(one.grown_bytes for one in workers))


class Worker:
    """A process that executes every so-manieth case; begun again where it ends too early."""

    def __init__(
        self, kinds: dict[str, Any], folder: Path, asked: argparse.Namespace, place: int
    ) -> None:
        self.found, self.grown_bytes = hostile_files.Outcomes(), 0
        self._kinds, self._asked, self._end = kinds, asked, time.monotonic() + asked.seconds
        self._folder = folder / f"worker-{place}"
        self._folder.mkdir()
        self._next, self._now = asked.first + place, mmap.mmap(-1, 8)
        self._left = None
        if asked.executions is not None:
            self._left = len(range(place, asked.executions, asked.processes))
        self._begin()

    def goes_on(self) -> bool:
        """Take what the process has told; False when it is done."""
        if self._pid == 0:
            return False
        self._take()
        ended, status = os.waitpid(self._pid, os.WNOHANG)
        if not ended:
            return True
        self._take()
        os.close(self._told)
        self._pid = 0
        if status == 0:
            return False
        (number,) = struct.unpack("<q", self._now)
        code = os.waitstatus_to_exitcode(status)
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self.found.crashes.append(f"case {number}: the process has ended: {how}")
        self._next = number + self._asked.processes
        self._begin()
        return True

    def _begin(self) -> None:
        self._told, telling = os.pipe()
        os.set_blocking(self._told, False)
        self._buffer = b""
        self._pid = os.fork()
        if self._pid:
            os.close(telling)
            return
        try:
            os.chdir(self._folder)
            self._work(telling)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(3)
        os._exit(0)

    def _take(self) -> None:
        while True:
            try:
                some = os.read(self._told, 2**16)
            except BlockingIOError:
                return
            if not some:
                return
            *lines, self._buffer = (self._buffer + some).split(b"\n")
            for line in lines:
                said = json.loads(line)
                for kind, outcome, count in said["counts"]:
                    self.found.by_kind[kind, outcome] += count
                    if self._left is not None:
                        self._left -= count
                self.found.crashes += said["crashes"]
                for crash in said["crashes"]:
                    print(crash, file=sys.stderr, flush=True)
                self.grown_bytes = max(self.grown_bytes, said["grown_bytes"])

    def _work(self, telling: int) -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        hostile_files.limit_memory()
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 2)
        last, crashes, numbers = (
            time.monotonic(),
            0,
            itertools.count(self._next, self._asked.processes),
        )

        def tell(outcomes: hostile_files.Outcomes) -> None:
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            counts = [[*key, count] for key, count in outcomes.by_kind.items()]
            said = {"counts": counts, "crashes": outcomes.crashes, "grown_bytes": grown * 1024}
            os.write(telling, json.dumps(said).encode() + b"\n")
            outcomes.by_kind.clear()
            outcomes.crashes.clear()

        def numbered() -> Any:
            for number in numbers:
                self._now[:] = struct.pack("<q", number)
                yield number

        done = 0

        def more(outcomes: hostile_files.Outcomes) -> bool:
            nonlocal last, crashes, done
            now = time.monotonic()
            going = now < self._end and crashes < 20 and (self._left is None or done < self._left)
            done += 1
            if not going or now - last > TOLD_SECONDS or outcomes.crashes:
                crashes += len(outcomes.crashes)
                tell(outcomes)
                last = now
            return going

        hostile_files.run_many(self._kinds, self._folder, self._asked.seed, numbered(), more)


def told(
    found: hostile_files.Outcomes, asked: argparse.Namespace, seconds: float, grown_bytes: int
) -> int:
    """Print what came of it; the exit code."""
    kinds = sorted({kind for kind, _ in found.by_kind})
    total = found.by_kind.total() + len(found.crashes)
    print(f"seed {asked.seed}, {asked.processes} processes, {seconds:,.0f} s")
    print(f"{'kind':26} {'refused':>10} {'read':>10}")
    for kind in kinds:
        refused, read = (found.by_kind[kind, outcome] for outcome in ("refused", "read"))
        print(f"{kind:26} {refused:10,} {read:10,}")
    print(f"executions: {total:,}, {total / seconds:,.0f} a second")
    print(f"most memory beyond that of the beginning: {grown_bytes / 2**20:,.0f} MiB")
    print(f"crashes: {len(found.crashes)}")
    for crash in found.crashes[:20]:
        print(crash)
    return int(bool(found.crashes))


if __name__ == "__main__":
    sys.exit(main())
