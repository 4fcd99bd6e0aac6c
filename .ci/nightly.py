"""Run the tests with the newest version of one package at a time, and say what that breaks.

    python .ci/nightly.py                       # transformers, torch, ortools
    python .ci/nightly.py ortools -- tests/unit/solvers   # one of them, and some of the tests

Each gets a folder of its own before the environment that is pinned, with what comes along with it,
so that what fails fails for that package. The exit code is 1 if a test fails that passes with what
is pinned: what fails with that, too, is told apart.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from importlib.metadata import distributions, version
from pathlib import Path

from wheel_test import ROOT

NEWEST = {
    "transformers": ("transformers", "tokenizers", "huggingface_hub", "safetensors"),
    "torch": ("torch",),
    "ortools": ("ortools", "protobuf"),
}
"""A package, and what it asks for in versions of its own."""

WITH_ALL = ("torch",)
"""Which bring what they depend on: without the libraries for CUDA torch cannot be imported."""

# These hold the versions themselves, or what the pinned ones write.
OWN = ("tests/unit/test_supply_chain.py",)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def install(names: tuple[str, ...], folder: Path) -> dict[str, str]:
    """The newest of each into a folder; returns the versions."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install")
    alone = () if names[0] in WITH_ALL else ("--no-deps",)
    command = (*pip, "--quiet", "--upgrade", *alone, "--target", str(folder), *names)
    first = ("--index-url", CPU_INDEX) if names[0] == "torch" else ()  # 2 GB less than for CUDA
    for index in (first, ()):
        done = subprocess.run((*command, *index), capture_output=True, text=True)
        if done.returncode == 0:
            break
    else:
        raise SystemExit(f"nightly: cannot install {names[0]}: {done.stderr.strip()[-300:]}")
    return {one.name: one.version for one in distributions(path=[str(folder)])}


def failures(tests: list[str], folder: Path | None, workers: str) -> set[str]:
    """Tests that fail or break off, with a folder of packages before all others."""
    path = os.environ.get("PYTHONPATH", "")
    first = [str(folder)] if folder else []
    with tempfile.TemporaryDirectory() as made:
        report = Path(made) / "report.xml"
        ignored = [f"--ignore={file}" for file in OWN]
        options = ("-q", "-n", workers, "--dist", "loadfile", f"--junitxml={report}", *ignored)
        subprocess.run(
            (sys.executable, "-m", "pytest", *options, *tests),
            cwd=ROOT,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([*first, *filter(None, [path])]),
            },
            stdout=subprocess.DEVNULL,
            check=False,
        )
        if not report.exists():
            return {"pytest itself: it wrote no report"}
        cases = ElementTree.parse(report).getroot().iter("testcase")
        return {
            f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
            for case in cases
            if case.find("failure") is not None or case.find("error") is not None
        }


def main() -> int:
    asked, _, tests = " ".join(sys.argv[1:]).partition("--")
    names, chosen, workers = asked.split() or list(NEWEST), tests.split(), "2"
    known: set[str] | None = None
    broken = False
    for name in names:
        with tempfile.TemporaryDirectory(prefix=f"kvalloc-nightly-{name}-") as made:
            found = install(NEWEST[name], Path(made))
            said = ", ".join(f"{own} {found[own]}" for own in sorted(found))
            if found[name].partition("+")[0] == version(name).partition("+")[0]:
                print(f"{name}: {version(name)}, which is pinned, is the newest", flush=True)
                continue
            print(f"{name}: with {said}, pinned is {version(name)}", flush=True)
            failing = failures(chosen, Path(made), workers)
        if failing:  # once, and only if there is something to tell apart
            known = failures(chosen, None, workers) if known is None else known
        for test in sorted(failing):
            also = ", with what is pinned, too" if test in (known or ()) else ""
            print(f"  {test}{also}", flush=True)
        new = failing - (known or set())
        broken |= bool(new)
        print(f"  {len(new)} tests break with it" if new else "  it breaks nothing", flush=True)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
