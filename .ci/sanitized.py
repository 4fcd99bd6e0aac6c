"""The kernel for the CPU under AddressSanitizer: its tests, and crafted files of saved caches.

    python .ci/sanitized.py [--files 10000]

A read or write of one byte beyond a tensor, which is memory of its own there, ends the process.
Leaks are not looked for: torch and Python keep what they have until the end.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ("test_attention.py", "test_hostile_caches.py")
BEYOND = """
import numpy, torch
from kvalloc.runtime import kept
from kvalloc.runtime.attention import call, cpu
assert cpu.unavailable() is None, cpu.unavailable()
states = torch.randn(1, 1, {entries}, 16)
asked = call.AttentionCall(queries=states[:, :, :1], keys=states, values=states, scaling=1.0)
places = torch.arange({entries}, dtype=torch.int32)
lengths = numpy.array([[{entries}]])
flat = kept.KeptEntries(
    keys=states[0, 0].clone(), values=states[0, 0].clone(), positions=places, lengths=lengths
)
flat.spans.ends[0] += {more}
cpu.CpuBackend().attend(asked, flat)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=10_000)
    files: int = parser.parse_args().files
    with tempfile.TemporaryDirectory() as made:
        build(Path(made))
        (library,) = Path(made).rglob("_cpu.*so")
        runtime = subprocess.run(
            ["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
        ).stdout.strip()
        environment = {
            **os.environ,
            "LD_PRELOAD": runtime,
            "ASAN_OPTIONS": "detect_leaks=0",
            "KVALLOC_CPU_KERNEL": str(library),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "PYTHONMALLOC": "malloc",
        }
        for more, noticed in ((0, False), (1, True)):  # that a read beyond an end is noticed
            code = BEYOND.format(entries=100, more=more)
            if reports(environment, "-c", code) != noticed:
                print(f"a read {more} entries beyond the end: noticed is not {noticed}")
                return 1
        print("a read of one entry too many is noticed, the right number is not")
        command = ("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", f"--hostile-files={files}")
        tests = [f"tests/unit/runtime/{name}" for name in TESTS]
        done = subprocess.run(
            [sys.executable, *command, *tests],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
    said = done.stdout + done.stderr
    for line in re.findall(r"saved cache: .*|.*\d+ passed.*", said):
        print(line.lstrip("."))
    found = len(re.findall(r"ERROR: AddressSanitizer", said))
    print(f"reports of AddressSanitizer: {found}")
    if found or done.returncode:
        print(said[-3000:], file=sys.stderr)
    return int(bool(found or done.returncode))


def build(folder: Path) -> None:
    """The kernel as it is installed, with AddressSanitizer."""
    subprocess.run(
        [
            *(sys.executable, "setup.py", "-q", "build_ext"),
            *("--build-lib", str(folder), "--build-temp", str(folder / "temp")),
        ],
        cwd=ROOT,
        env={**os.environ, "CFLAGS": "-fsanitize=address -fno-omit-frame-pointer -g"},
        check=True,
    )


def reports(environment: dict[str, str], *arguments: str) -> bool:
    """Whether AddressSanitizer ends a program."""
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True
    )
    found = "ERROR: AddressSanitizer" in done.stderr
    if done.returncode and not found:
        raise RuntimeError(done.stderr)
    return found


if __name__ == "__main__":
    sys.exit(main())
