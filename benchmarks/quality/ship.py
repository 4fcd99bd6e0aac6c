"""Put what the quality benchmark measured into budget profiles, and these into profiles/.

    python benchmarks/quality/ship.py tuned-50.json=smollm2-135m-instruct-loss-50 ...

Each profile gets a row a task of its own cells, which must have been measured with just these
budgets, and states what it lost on prompts of the development split, where there are such cells.
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
from quality.tables import FIRST_SEED, current, read_rows, split_loss

from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.prompts.intervals import interval

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description="profiles with their evaluation inside")
    parser.add_argument("pairs", nargs="+", metavar="FILE=NAME")
    rows = read_rows()
    for pair in parser.parse_args().pairs:
        file, _, name = pair.partition("=")
        profile = BudgetProfile.load(file)
        found = evaluation_of(rows, digest_of(profile))
        expected = split_loss(
            rows, digest_of(profile), split="development", context=profile.context_tokens
        )
        settings: dict[str, Any] = {
            "made_by": "make bench-quality",
            "split": "held-out",
            "seed": seeds_of(rows, digest_of(profile)),
        }
        if expected is not None:
            settings["development_loss"], settings["development_prompts"] = expected
        evaluation = {"settings": settings, "rows": found}
        profile.replace(evaluation=evaluation).save(ROOT / "profiles" / f"{name}.json")
        print(f"{name}: {len(found)} tasks, on development prompts {expected}")
    return 0


def evaluation_of(rows: Sequence[dict[str, Any]], digest: str) -> list[dict[str, Any]]:
    """Rows of the profile with that digest, the full cache's answers beside them."""
    full = {key_of(row): row for row in rows if row["method"] == "full"}
    cells: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for row in current(rows):
        if row["method"].endswith(f"#{digest}"):
            cells[row["context"], row["after"], row["task"]].append(row)
    found = []
    for (context, after, task), own in sorted(cells.items()):
        scores = [row["score"] for row in own if row["score"] is not None]
        wholes = [full[key_of(row)]["score"] for row in own if row["score"] is not None]
        kls = [row["kl"] for row in own]
        found.append(
            {
                "task": task,
                "context": context,
                "question": "after" if after else "inside",
                "n": len(own),
                "kl": sum(kls) / len(kls),
                "ci95": interval([np.array(kls)]),
                "top1_agreement": sum(row["agree"] for row in own) / len(own),
                "score": sum(scores) / len(scores) if scores else None,
                "full_score": sum(wholes) / len(wholes) if wholes else None,
                "kept_share": sum(row["kept"] for row in own) / len(own),
            }
        )
    return found


def seeds_of(rows: Sequence[dict[str, Any]], digest: str) -> str:
    """With which seeds the held-out prompts of a profile's cells were drawn."""
    own = (row for row in current(rows) if row["method"].endswith(f"#{digest}"))
    return ", ".join(map(str, sorted({row.get("seed", FIRST_SEED) for row in own})))


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["task"], row["after"], row["digest"]


if __name__ == "__main__":
    sys.exit(main())
