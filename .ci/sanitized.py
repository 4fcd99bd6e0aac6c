"""The C for the CPU under AddressSanitizer: its tests, and crafted files of saved caches.

    python .ci/sanitized.py [FILES]

A read or write of one byte beyond a tensor ends the process. Leaks are not looked for: torch and
Python keep what they have until the end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = [f"tests/unit/runtime/test_{name}.py" for name in ("attention", "hostile_caches", "packed")]
REPORT = "ERROR: AddressSanitizer"
BEYOND = """
import torch
from attention_cases import even_of
from kvalloc.runtime.attention import call, cpu
assert cpu.CpuBackend().unavailable() is None, cpu.CpuBackend().unavailable()
states = torch.randn(1, 1, 100, 16)
asked = call.AttentionCall(queries=states[:, :, :1], keys=states, values=states, scaling=1.0)
kept = even_of(states.clone(), states.clone())
kept.pieces[0, 0, 1] += {more}
cpu.CpuBackend().attend(asked, kept)
"""


def main() -> int:
    files = sys.argv[1] if sys.argv[1:] else "10000"
    with tempfile.TemporaryDirectory() as made:
        build = ("build_ext", "--build-lib", made, "--build-temp", f"{made}/temp")
        flags = "-fsanitize=address -fno-omit-frame-pointer -g"
        run("setup.py", "-q", *build, check=True, CFLAGS=flags)
        (library,) = Path(made).rglob("_cpu.*so")
        find = ("gcc", "-print-file-name=libasan.so")
        environment = {
            "LD_PRELOAD": subprocess.run(find, capture_output=True, text=True).stdout.strip(),
            "ASAN_OPTIONS": "detect_leaks=0",
            "KVALLOC_CPU_KERNEL": str(library),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}",
            "PYTHONMALLOC": "malloc",
        }
        run("-c", BEYOND.format(more=0), check=True, **environment)
        beyond = run("-c", BEYOND.format(more=1), **environment)
        if REPORT not in beyond.stderr:
            print(f"a read of one entry too many is not noticed: {beyond.stderr[-3000:]}")
            return 1
        options = ("-q", "-s", "-p", "no:cacheprovider", f"--hostile-files={files}")
        tests = run("-m", "pytest", *options, *TESTS, **environment)
    printed = tests.stdout + tests.stderr
    print(printed[-3000:])
    print(json.dumps({"what": "reports of AddressSanitizer", "figure": f"{printed.count(REPORT)}"}))
    return int(tests.returncode != 0)


def run(*command: str, check: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the project's root."""
    return subprocess.run(
        (sys.executable, *command),
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=check,
    )


if __name__ == "__main__":
    sys.exit(main())
