"""How long `kvalloc solve` takes from its start.

    python benchmarks/bench_interface.py [--rounds 15]

The reference is `python -c "import numpy, pydantic, typer"`; a command that is not much
slower than that is as fast as it can be made. All commands run interleaved; a ratio is the median
of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from _common import Row, in_turns, median_of, parser_of, print_rows, spread_of
from bench_solvers import score_profile

REFERENCE = "import numpy, pydantic, typer"
START_LIMIT = 3.0
"""`kvalloc solve` with greedy starts and ends within this many times the reference."""
N_RANKS, N_SAMPLES = 1013, 4
"""Of prompts of 1,024 tokens, 12 of which are always kept."""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return print_rows(startup(Path(folder), options), options, "kvalloc", "numpy")


def startup(folder: Path, options: argparse.Namespace) -> Iterator[Row]:
    """Return a row for each command."""
    scores, output = folder / "s.safetensors", folder / "p.json"
    score_profile(30, 3, N_RANKS, samples=N_SAMPLES).save(scores)
    run = "import sys; from kvalloc.cli.main import main; sys.exit(main())"
    solve = ["solve", str(scores), "--target-retention", "0.9", "--solver", "greedy"]
    commands = {
        "reference": [REFERENCE],
        "python alone": ["pass"],
        "import kvalloc": ["import kvalloc"],
        "kvalloc --help": [run, "--help"],
        "kvalloc solve": [run, *solve, "-o", str(output)],
    }

    def call(words: list[str]) -> None:
        subprocess.run([sys.executable, "-c", *words], check=True, stdout=subprocess.DEVNULL)

    calls = {name: lambda words=words: call(words) for name, words in commands.items()}
    timed = in_turns(calls, repeats=options.rounds)
    for name in list(commands)[1:]:
        limit = {"at_most": START_LIMIT} if name == "kvalloc solve" else {}
        note = f"{median_of(timed, name):.3f} s; reference {median_of(timed, 'reference'):.3f} s"
        ratios = [a / b for a, b in zip(timed[name][0], timed["reference"][0], strict=True)]
        yield {"name": name, **spread_of(ratios), **limit, "note": note}


if __name__ == "__main__":
    sys.exit(main())
