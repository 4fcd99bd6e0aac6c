"""Write the golden files of the core anew, after a change of behaviour that is wanted.

    python tests/golden/make_core_golden.py

Then look at the difference before committing it: every changed number is a changed answer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parent / "data"
SCORES = DATA / "scores.safetensors"
DECISIONS = DATA / "decisions.json"
PROFILE = DATA / "budget_profile.json"
SCHEMA = Path(__file__).parents[2] / "docs" / "budget_profile.schema.json"

# name of the case: solver, options, arguments of solve
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    f"{solver}{suffix}, {goal}, {level}": (solver, options, {**target, "level": level})
    for solver, suffix, options in (
        ("greedy", "", {}),
        ("ilp", "", {}),
        ("uniform", "", {}),
        ("pyramid", "", {}),
        ("pyramid", " reference", {"exact": False}),
        ("adaptive_head", "", {}),
        ("adaptive_head", " floor", {"safeguard": "floor", "alpha": 0.5}),
    )
    for goal, target in (
        ("20%", {"budget": "20%"}),
        ("retention 0.9", {"target_retention": 0.9}),
        ("30 tokens in pages of 8", {"budget_tokens": 30, "page": 8}),
    )
    for level in (["head"] if solver == "adaptive_head" else ["layer", "head"])
}


def decide(scores: Any, case: str) -> Any:
    from kvalloc.solving import solve

    solver, options, arguments = CASES[case]
    return solve(scores, solver=solver, solver_options=options, **arguments)


def described(profile: Any) -> dict[str, Any]:
    """What must not move: the decision and what is claimed about it."""
    return {
        "budgets": profile.budgets.tolist(),
        "budgets at 1000": profile.budgets_for(1000).tolist(),
        "objective": profile.objective,
        "bound": profile.bound,
        "retention": profile.retention,
        "retained_bytes": profile.retained_bytes,
        "termination": profile.termination,
    }


def make_scores() -> Any:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from factories import curves_of, make_scores, make_shape

    rng = np.random.default_rng(20240101)
    shape = make_shape(n_layers=4, n_kv_heads=3, head_dim=8)
    raw = rng.random((2, 4, 3, 90)) ** rng.uniform(1, 12, (2, 4, 3, 1)) + 1e-3
    return make_scores(
        shape=shape,
        context_tokens=96,
        sinks=2,
        window=4,
        curves=curves_of(raw),
        masses=raw.sum(axis=-1),
    )


def main() -> None:
    from kvalloc.schema import budget_profile_schema
    from kvalloc.score_profile import ScoreProfile

    DATA.mkdir(exist_ok=True)
    if not SCORES.exists():
        make_scores().save(SCORES)
    scores = ScoreProfile.load(SCORES)
    decisions = {case: described(decide(scores, case)) for case in CASES}
    rows = ",\n".join(
        f" {json.dumps(case)}: {json.dumps(decision)}" for case, decision in decisions.items()
    )
    DECISIONS.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")
    decide(scores, "greedy, retention 0.9, head").save(PROFILE)
    text = json.dumps(budget_profile_schema(), indent=1, sort_keys=True)
    SCHEMA.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
