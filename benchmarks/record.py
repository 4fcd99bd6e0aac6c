"""Run benchmarks; keep their rows in results.jsonl, and make RESULTS.md of it.

python benchmarks/record.py              # all of them
python benchmarks/record.py solvers      # all parts of bench_solvers.py; the other results stay
python benchmarks/record.py "runtime late --repeats 3 1"  # one part, with options
python benchmarks/record.py --tables-only  # RESULTS.md anew from results.jsonl
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import gettempdir

from _common import where_it_ran
from results import BENCHMARKS, RESULTS, Record, parts_of, results_page, rows_in

FOLDER = Path(__file__).parent
PACKAGES = ("kvalloc", "torch", "transformers", "numpy", "scipy", "ortools")


def main(arguments: list[str]) -> int:
    aim = [] if arguments == ["--tables-only"] else arguments or list(BENCHMARKS)
    unknown = [name for name in aim if name.split()[0] not in BENCHMARKS]
    if unknown:
        print(f"no benchmark {unknown[0]!r}; choose from {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    missed = []
    for name in aim:
        benchmark, parts, options = parts_of(shlex.split(name))
        for part in parts:
            print(f"== {benchmark} {part}", flush=True)
            command = shlex.split(BENCHMARKS[benchmark].parts[part].command)
            if not command:
                print(f"the script of {benchmark} {part} was removed", file=sys.stderr)
                return 2
            record = run(benchmark, part, command + options)
            RESULTS.write_text(results_page(), encoding="utf-8")
            if record.exit_code:
                missed.append(f"{benchmark} {part}")
    RESULTS.write_text(results_page(), encoding="utf-8")
    if missed:
        print(f"missed a target or failed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


def run(benchmark: str, part: str, command: list[str]) -> Record:
    """Run one part, show its output as it is printed, and store the output and its rows."""
    load, lines = os.getloadavg()[0], []
    with subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        text=True,
        cwd=FOLDER.parent,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    printed = "".join(lines).replace(f"{FOLDER.parent}/", "")  # wherever it ran
    printed = re.sub(rf"{re.escape(gettempdir())}/[^/\s]+/", "", printed).strip("\n")
    record = Record(
        benchmark=benchmark,
        part=part,
        command=shlex.join(["python", *map(short, command)]),
        exit_code=process.returncode,
        rows=rows_in(printed),
        **where_it_ran(*PACKAGES, load=load),
    )
    record.save(printed)
    return record


def short(word: str) -> str:
    """Return a word of a command without the folders of this machine."""
    path = Path(word)
    if path.is_relative_to(FOLDER.parent):
        return str(path.relative_to(FOLDER.parent))
    return path.name if path.is_absolute() else word


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
