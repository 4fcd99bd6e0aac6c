"""Build the wheel from a clean copy of the tree, install it elsewhere, and use it there.

What this finds and the other tests cannot: a file that git does not hold or that the wheel
leaves out, a package called ``solvers`` that lands in the user's environment, a command that
needs torch although it should not.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Where each folder of the tree is found in the wheel; the links in kvalloc/ are not folders.
PLACES = {"kvalloc/": "kvalloc/", "solvers/": "kvalloc/solvers/", "profiles/": "kvalloc/profiles/"}
KERNEL = re.compile(r"kvalloc/runtime/attention/_cpu(_avx512)?\..*so$")  # where there is a compiler
HEAVY = ("torch", "transformers", "matplotlib")

USE_THE_INSTALLED_PACKAGE = """
import importlib.util
import kvalloc, kvalloc.data.texts, kvalloc.profiles, kvalloc.solvers
from importlib.metadata import entry_points
from importlib.resources import files

assert importlib.util.find_spec("solvers") is None, "a top-level package 'solvers' is installed"
assert importlib.util.find_spec("profiles") is None, "a top-level package 'profiles' is installed"
solvers = entry_points(group="kvalloc.solvers")
assert {"uniform", "pyramid", "greedy", "adaptive_head", "ilp"} <= solvers.names, solvers.names
scorers = entry_points(group="kvalloc.scorers")
assert {"xkv", "snapkv", "streaming"} <= scorers.names, scorers.names
for point in (*solvers, *scorers):
    point.load()
texts = [f.name for f in files("kvalloc.data.texts").iterdir() if f.name.endswith(".txt")]
assert any(t.startswith("profile_") for t in texts), texts
assert any(t.startswith("haystack_") for t in texts), texts
for file in files("kvalloc.profiles").iterdir():
    if file.name.endswith(".json"):
        kvalloc.load_profile(file.name.removesuffix(".json"))
"""


def run(
    command: Sequence[str | Path], *, cwd: Path, quiet: bool = False, **environment: str
) -> str:
    """Run a command; its output is shown only when it fails, or when `quiet` is false."""
    # PYTHONPATH could put the working tree back in sight.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHONPATH", "VIRTUAL_ENV"))}
    env |= environment
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode or not quiet:
        print(done.stdout, end="", flush=True)
    if done.returncode:
        raise SystemExit(
            f"wheel test: exit code {done.returncode} from {' '.join(map(str, command))}"
        )
    return done.stdout


def files_of_the_tree() -> list[str]:
    """The files that git holds or would hold: what a clean clone contains."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    return sorted(name for name in listed.split("\0") if name and os.path.lexists(ROOT / name))


def copy_tree(names: Sequence[str], to: Path) -> None:
    for name in names:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to / name, follow_symlinks=False)


def place_in_wheel(name: str) -> str | None:
    """Where a file of the tree must be in the wheel; None for what is not part of it."""
    for folder, place in PLACES.items():
        if name.startswith(folder) and not (ROOT / name).is_symlink():
            return place + name.removeprefix(folder)
    return None


def check_contents(wheel: Path, names: Sequence[str]) -> None:
    held = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in held}
    info = {top for top in tops if top.endswith(".dist-info")}
    wanted = {place for name in names if (place := place_in_wheel(name))}
    code = {name for name in held if name.split("/")[0] not in info}
    problems = [
        *(f"unexpected top-level name {top}" for top in sorted(tops - info - {"kvalloc"})),
        *(f"held twice: {name}" for name in sorted({n for n in held if held.count(n) > 1})),
        *(f"left out: {name}" for name in sorted(wanted - code)),
        *(f"not of this tree: {name}" for name in sorted(code - wanted) if not KERNEL.match(name)),
    ]
    builds = len([name for name in held if KERNEL.match(name)])
    if sys.platform == "linux" and shutil.which(os.environ.get("CC", "cc")):
        expected = 2 if platform.machine() == "x86_64" else 1
        problems += [f"{builds} builds of the kernel, not {expected}"] * (builds != expected)
    if problems:
        raise SystemExit("wheel test: " + "; ".join(problems))
    print(
        f"{wheel.name}: {len(held)} files, all of the tree's, each once, {builds} of them builds "
        "of the CPU's kernel"
    )


def environment(
    folder: Path, *packages: str | Path, constraints: Path | None = ROOT / "constraints.txt"
) -> Path:
    """Install packages into a fresh environment; returns its folder of commands."""
    venv.create(folder, with_pip=True, symlinks=True)
    held = () if constraints is None else ("-c", constraints)
    pip = (folder / "bin/python", "-m", "pip", "--disable-pip-version-check", "--no-input")
    run((*pip, "install", "--quiet", *held, *packages), cwd=folder, quiet=True)
    return folder / "bin"


def built(folder: Path) -> Path:
    """The wheel, built from the source archive of a clean copy of the tree, and checked."""
    names = files_of_the_tree()
    copy_tree(names, folder / "tree")
    # Without --wheel the wheel is built from the source archive, which tests that too.
    command = (sys.executable, "-m", "build", "--outdir", folder / "dist", folder / "tree")
    run(command, cwd=folder, quiet=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    check_contents(wheel, names)
    return wheel


def use(wheel: Path, folder: Path) -> None:
    """Install the wheel with its core dependencies alone, and run what needs no model."""
    commands = environment(folder / "env", wheel)
    python = commands / "python"
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    for package in HEAVY:
        find = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is not None)"
        run((python, "-c", find), cwd=elsewhere)
    run((python, "-c", USE_THE_INSTALLED_PACKAGE), cwd=elsewhere)
    command = commands / "kvalloc"
    run((command, "--help"), cwd=elsewhere, quiet=True)
    run((command, "list", "scorers"), cwd=elsewhere, quiet=True)
    print(run((command, "list", "solvers"), cwd=elsewhere, quiet=True), end="")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kvalloc-wheel-") as made:
        use(built(Path(made)), Path(made))
    print("the wheel works from another directory, without torch")


if __name__ == "__main__":
    main()
