"""Run benchmarks and write what they print into RESULTS.md: nothing there is typed by hand.

python benchmarks/record.py              # all of them
python benchmarks/record.py solvers ...  # bench_solvers.py only, the other sections stay
python benchmarks/record.py "runtime --repeats 3"  # bench_runtime.py with options of its own
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from _common import describe_where, where_it_ran

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "RESULTS.md"
PACKAGES = ("kvalloc", "torch", "transformers", "numpy", "scipy", "ortools")
HEADING = """# Results

Written by `python benchmarks/record.py`; do not edit. Each section is what one benchmark printed,
with the command, the machine, the versions and the date. Compared things ran side by side in one
process or in turns, so trust the ratios; the seconds are this machine's on that day.
"""


def main(arguments: list[str]) -> int:
    known = {path.stem.removeprefix("bench_"): path for path in sorted(FOLDER.glob("bench_*.py"))}
    wanted = arguments or list(known)
    unknown = [name for name in wanted if name.split()[0] not in known]
    if unknown:
        print(f"no benchmark {unknown[0]!r}; choose from {', '.join(known)}", file=sys.stderr)
        return 2
    sections = read_sections()
    missed = []
    for name in wanted:
        stem, *options = shlex.split(name)
        print(f"== {name}", flush=True)
        code, text = run(known[stem], options)
        sections[stem] = text
        write_sections(sections)
        if code:
            missed.append(name)
    if missed:
        print(f"missed a target or failed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


def run(path: Path, options: list[str]) -> tuple[int, str]:
    """One benchmark's exit code, and its section of the results."""
    command = ["python", f"benchmarks/{path.name}", *options]
    where = describe_where(where_it_ran(*PACKAGES))
    lines = []
    with subprocess.Popen(
        [sys.executable, str(path), *options],
        stdout=subprocess.PIPE,
        text=True,
        cwd=FOLDER.parent,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None  # it was asked for
        for line in process.stdout:  # shown as it comes: some benchmarks take minutes
            print(line, end="", flush=True)
            lines.append(line)
    code, printed = process.returncode, "".join(lines).rstrip()
    docstring = re.search(r'"""(.*?)(?:\n|""")', path.read_text(encoding="utf-8"))
    title = docstring.group(1) if docstring else path.stem
    verdict = ""
    if code:
        what = "a target was missed" if code == 1 else "it failed"
        verdict = f"\nExit code {code}: {what}.\n"
    section = f"{title}\n\n`{shlex.join(command)}`\n\n{where}\n\n```text\n{printed}\n```\n{verdict}"
    return code, section


def read_sections() -> dict[str, str]:
    """Sections of the results so far, by benchmark."""
    if not RESULTS.exists():
        return {}
    parts = re.split(r"^## (\w+)\n\n", RESULTS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], (part.rstrip() + "\n" for part in parts[2::2]), strict=True))


def write_sections(sections: dict[str, str]) -> None:
    """All sections, sorted."""
    text = "\n".join(f"## {name}\n\n{sections[name]}" for name in sorted(sections))
    RESULTS.write_text(f"{HEADING}\n{text}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
