"""The budget profiles that ship by measured losses: entries and bits of each head, together.

    python benchmarks/ship_bits.py FOLDER [--scores FILE]

Writes ``NAME-bits-20.json`` and ``NAME-bits-10.json``, decided as `bench_bits` does. The shares are
a little smaller than their names say, so that sinks and window fit into them from 400 tokens on.
After them: ``make bench-quality``, and ``python benchmarks/quality/ship.py FILE=NAME ...``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench_bits import WIDTHS, decided, measured, policy_of

from kvalloc.formats.score_profile import ScoreProfile

SHARES = {20: 0.197, 10: 0.0965}
NAME = "smollm2-135m-instruct-bits"


def main() -> int:
    parser = argparse.ArgumentParser(description="entries and bits by measured losses")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scores", type=Path, help="measured already")
    parser.add_argument("--samples", type=int, default=16, help="prompts that losses are of")
    parser.add_argument("--context", type=int, default=600)
    asked = parser.parse_args()
    scores = measured(asked) if asked.scores is None else ScoreProfile.load(asked.scores)
    for percent, share in SHARES.items():
        policy = policy_of(scores, percent / 100, asked)
        decided(scores, share, WIDTHS, policy).save(asked.folder / f"{NAME}-{percent}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
