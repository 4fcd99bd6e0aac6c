"""Write the shipped profiles anew: in today's format, with what their model is known by.

    python benchmarks/quality/identify.py

Budgets and evaluations stay as they are.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.models.loading import load_model, shape_of

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
IDENTITY = ("vocab_size", "rotary", "weights_digest", "weights_signs")


def main() -> int:
    loaded = load_model("demo")
    shape = shape_of(loaded.model, model_id=loaded.model_id)
    known = {name: getattr(shape, name) for name in IDENTITY}
    for file in sorted(PROFILES.glob("*.json")):
        profile = BudgetProfile.load(file)
        known_again = profile.replace(shape=replace(profile.shape, **known))
        known_again.save(file)
        print(f"{file.name}: {known_again!r}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
