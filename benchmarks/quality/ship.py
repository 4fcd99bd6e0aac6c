"""Put what the quality benchmark measured into budget profiles, and these into profiles/.

    python benchmarks/quality/ship.py p.json=smollm2-135m-instruct-bits-20 ...

Each profile gets a row a cell of its own, which must have been measured with just these budgets.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from quality.cells import digest_of
from quality.tables import (
    HELD_OUT,
    POSITIONS,
    SEED,
    Row,
    cell_file,
    current,
    mean_kl,
    mean_of,
    read_rows,
)

from kvalloc.evaluate.scoring import known
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.prompts.intervals import interval

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description="profiles with their evaluation inside")
    parser.add_argument("pairs", nargs="+", metavar="FILE=NAME")
    for pair in parser.parse_args().pairs:
        file, _, name = pair.partition("=")
        profile = BudgetProfile.load(file)
        folder = cell_file(profile.shape.model_id, "text").parent
        rows = [row for each in sorted(folder.glob("*.jsonl")) for row in read_rows(each)]
        found = evaluation_of(rows, digest_of(profile))
        settings = {"made_by": "make bench-quality", "split": HELD_OUT, "seed": SEED}
        evaluation = {"settings": settings, "rows": found}
        profile.replace(evaluation=evaluation).save(ROOT / "profiles" / f"{name}.json")
        print(f"{name}: {len(found)} cells")
    return 0


def evaluation_of(rows: Sequence[Row], digest: str) -> list[dict[str, Any]]:
    """A row a cell of the profile with that digest."""
    cells: dict[Any, list[Row]] = defaultdict(list)
    for row in current(rows):
        if row["method"].endswith(f"#{digest}"):
            cells[row["context"], row["cell"]].append(row)
    found = []
    for (context, cell), own in sorted(cells.items()):
        kls = known([mean_kl(row) for row in own])
        found.append(
            {
                "task": cell,
                "context": context,
                "n": len(own),
                "kl": mean_of(kls),
                "ci95": interval([np.array(kls)]) if kls else None,
                "kl_by_position": {
                    name: mean_of([row["kl"][name][0] for row in own]) for name in POSITIONS
                },
                "exact_tokens": mean_of([row["exact"] for row in own]),
                "share_of_16_bits": mean_of([row["bytes"] for row in own]),
            }
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
