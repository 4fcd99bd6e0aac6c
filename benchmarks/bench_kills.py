"""SIGKILL at moments by chance in every long command, then the same again: nothing lost or left.

    python benchmarks/bench_kills.py [--kills 200] [--seed 0] [--jobs profile,merge]

`tests/kill_runs.py` says which commands on a tiny model, when they are killed, and what has to be
equal to an unbroken run's then. Each command is also run by two processes at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # a process is copied while it has one thread
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import kill_runs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", help="names with commas; all by default")
    parser.add_argument("--keep", type=Path, help="an empty folder, left as it is in the end")
    asked = parser.parse_args()
    names = tuple(asked.jobs.split(",")) if asked.jobs else tuple(kill_runs.JOBS)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as made:
        runs = kill_runs.Runs.prepared(asked.keep or Path(made), names)
        broken = []
        for name in names:
            try:
                runs.two_at_once(name)
            except kill_runs.Broken as error:
                broken.append(str(error))
        broken += kill_runs.kill_all(runs, asked.kills, asked.seed)
    print(f"seed {asked.seed}, {time.monotonic() - start:,.0f} s")
    print(f"{'command':16} {'killed':>7} {'by time':>8} {'at a file':>10} {'unbroken':>9}")
    for name in names:
        by_time, at_a_file = (runs.kills[name, how] for how in ("by time", "at a file"))
        seconds = f"{runs.unbroken[name].seconds:.1f} s"
        print(f"{name:16} {by_time + at_a_file:7} {by_time:8} {at_a_file:10} {seconds:>9}")
    total = runs.kills.total()
    well = total - len(broken)
    print(f"kills: {total}; outputs equal and nothing left after {well} of {total}")
    print("of an evaluation, these may differ: its times, and the digest over them")
    for one in broken:
        print(one)
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
