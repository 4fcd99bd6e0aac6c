"""Install kvalloc into fresh environments and use each as a new user would, in an empty home.

    python .ci/check_install.py               both: core, run
    python .ci/check_install.py run

core is the wheel without an extra: a command that needs one has to say which, in one line. run is
a clone in which every line of README.md is run in its order, and what the page shows is printed.
Both get the newest versions that pyproject.toml allows. Only torch has the one of constraints.txt,
as another may be a CUDA build of gigabytes. (Older transformers: ``make test-versions``.)
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

from wheel_test import ROOT, built, copy_tree, environment, files_of_the_tree

sys.path.insert(0, str(ROOT / "tests" / "support"))

from docs_pages import blocks

FIRST_STEPS_SECONDS = 60
LINKS = "import os,kvalloc; f=os.path.dirname(kvalloc.__file__); " + (
    "found=[os.path.join(d, n) for d, ds, ns in os.walk(f) for n in (*ds, *ns) "
    "if os.path.islink(os.path.join(d, n))]; assert not found, found"
)

WITHOUT_A_MODEL = (
    "--version",
    "solve smollm2-135m-instruct --budget 20% -o p.json",
    "compare smollm2-135m-instruct --budget 20%",
    "frontier smollm2-135m-instruct --points 4",
    "inspect p.json",
    "verify p.json smollm2-135m-instruct",
    "report p.json smollm2-135m-instruct -o report.html",
    "list profiles",
    "list solvers",
    "list scorers",
    "doctor",
)
NEED_AN_EXTRA = {
    "generate demo --budget 20% --prompt hello": "kvalloc[run]",
    "eval demo --budget 20%": "kvalloc[run]",
    "profile demo -o s.safetensors": "kvalloc[run]",
    "fit demo -o f.safetensors": "kvalloc[run]",
    "list policies": "kvalloc[run]",
    "demo": "kvalloc[run]",
    "inspect hf://owner/repo/p.json": "kvalloc[hub]",
}
HOMES = ("HOME", "KVALLOC_CACHE", "XDG_CACHE_HOME", "HF_HOME")


def use(commands: Path, folder: Path, lines: Sequence[str]) -> None:
    """Run command lines that have to go well."""
    for line in lines:
        begun = time.perf_counter()
        done = call(commands / "kvalloc", folder, *line.split())
        if done.returncode:
            raise SystemExit(
                f"check-install: 'kvalloc {line}' ended with {done.returncode}: {done}"
            )
        print(f"  {time.perf_counter() - begun:5.1f} s  kvalloc {line}", flush=True)


def refused(commands: Path, folder: Path, lines: dict[str, str]) -> None:
    """Run command lines that have to name the extra that they miss, in one line."""
    for line, extra in lines.items():
        done = call(commands / "kvalloc", folder, *line.split())
        one = done.returncode == 2 and done.stderr.count("\n") == 1 and not done.stdout
        if not one or f"pip install '{extra}'" not in done.stderr:
            raise SystemExit(f"check-install: 'kvalloc {line}' does not ask for {extra}: {done}")
    print(f"  {len(lines)} commands name the extra that they need")


def call(command: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [command, *words],
        cwd=folder, env=surroundings(folder), stdin=subprocess.DEVNULL,
        capture_output=True, text=True,
    )  # fmt: skip


def surroundings(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a process, with homes and caches that nobody has used, beside a folder."""
    # PYTHONPATH could put the working tree back in sight.
    own = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHONPATH", "VIRTUAL_ENV"))}
    homes = {name: f"{folder}-{name.lower()}" for name in HOMES}
    return {**own, **homes, "COLUMNS": "80", **more}


def follow_the_readme(folder: Path) -> None:
    """Run every line of README.md in a clone; pip alone has the home that it has elsewhere."""
    copy_tree(files_of_the_tree(), clone := folder / "clone")
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    held = folder / "torch.txt"
    held.write_text("\n".join(line for line in pinned if line.startswith("torch==")))
    venv.create(folder / "run", with_pip=True, symlinks=True)
    path = f"{folder / 'run' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    pip = {"HOME": os.path.expanduser("~"), "PIP_CONSTRAINT": str(held)}
    for block in blocks(clone / "README.md"):
        python = block.language == "python"
        for text in [block.text] if python else block.commands():
            begun = time.perf_counter()
            done = subprocess.run(
                ["python", "-c", text] if python else ["bash", "-euc", text],
                cwd=clone, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                env=surroundings(clone, PATH=path, **(pip if block.reason else {})),
            )  # fmt: skip
            shown = block.printed is None or done.stdout.split() == block.printed.split()
            if done.returncode or not shown:
                raise SystemExit(
                    f"check-install: README.md's {text!r} ended with {done.returncode} and printed"
                    f"\n{done.stdout}{done.stderr}"
                )
            print(f"  {time.perf_counter() - begun:5.1f} s  {text.splitlines()[0]}", flush=True)
        if block.reason:
            check_newest(folder / "run" / "bin" / "python")


def check_newest(python: Path) -> None:
    """Refuse an environment without the newest transformers that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (wanted,) = (t for t in project["optional-dependencies"]["run"] if t.startswith("transformers"))
    pip = (python, "-m", "pip", "install", "--upgrade", "--no-deps", "--dry-run", wanted)
    output = subprocess.check_output(pip, text=True).strip()
    if "Would install" in output:
        raise SystemExit(f"check-install: pip did not take the newest {wanted}: {output}")
    print(f"  {wanted}: {output.rpartition('(')[2].rstrip(')')}, the newest", flush=True)


def use_the_core(folder: Path) -> None:
    """Install the wheel without an extra and use it."""
    begun = time.perf_counter()
    commands = environment(folder / "core", built(folder), constraints=None)
    print(f"core: installed in {time.perf_counter() - begun:.0f} s", flush=True)
    elsewhere = folder / "core-use"
    elsewhere.mkdir()
    call(commands / "python", elsewhere, "-c", LINKS).check_returncode()
    begun = time.perf_counter()
    use(commands, elsewhere, WITHOUT_A_MODEL[:2])
    if (seconds := time.perf_counter() - begun) > FIRST_STEPS_SECONDS:
        raise SystemExit(f"check-install: the first steps took {seconds:.0f} s")
    use(commands, elsewhere, WITHOUT_A_MODEL[2:])
    refused(commands, elsewhere, NEED_AN_EXTRA)


def main() -> None:
    environments = {"core": use_the_core, "run": follow_the_readme}
    names = sys.argv[1:] or list(environments)
    with tempfile.TemporaryDirectory(prefix="kvalloc-install-") as made:
        for name in names:
            environments[name](Path(made))
    print(f"installed and used: {', '.join(names)}")


if __name__ == "__main__":
    main()
