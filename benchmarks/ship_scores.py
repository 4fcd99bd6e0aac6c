r"""Put a score profile into profiles/, small enough to ship: fewer ranks, everything else as it is.

    kvalloc profile demo --tasks needle,kl --context 1024 --scorer tova --loss \
        --loss-level layer -o losses.safetensors
    python benchmarks/ship_scores.py losses.safetensors smollm2-135m-instruct

The first ranks, where curves bend, stay one by one, the rest are spaced geometrically; how far a
curve is from the lines between them stands in the file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from kvalloc.formats.score_profile import ScoreProfile, interpolate_curves
from kvalloc.formats.shipped_profiles import SCORES

FOLDER = Path(__file__).resolve().parents[1] / "profiles"
DENSE, POINTS = 24, 72
"""Ranks one by one, and all: 230 kB of a model of 90 KV heads and 4 samples."""


def main() -> int:
    parser = argparse.ArgumentParser(description="a score profile that ships")
    parser.add_argument("file", type=Path)
    parser.add_argument("name")
    given = parser.parse_args()
    scores = ScoreProfile.load(given.file)
    last = scores.evictable_tokens
    ranks = np.rint(np.geomspace(DENSE, last, POINTS - DENSE))
    ranks = np.unique(np.concatenate([np.arange(DENSE), ranks])).astype(np.int64)
    places = np.searchsorted(scores.ranks, ranks)
    ranks, curves = scores.ranks[places], np.ascontiguousarray(scores.curves[..., places])
    between = interpolate_curves(curves, ranks, scores.ranks.astype(np.float64))
    error = scores.interpolation_error + float(abs(between - scores.curves).max())
    shipped = scores.replace(ranks=ranks, curves=curves, interpolation_error=error)
    shipped.save(FOLDER / f"{given.name}{SCORES}")
    print(f"{given.name}: {ranks.size} ranks, at most {error:.2g} from the whole curves")
    return 0


if __name__ == "__main__":
    sys.exit(main())
