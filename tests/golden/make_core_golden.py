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
MEASURED = DATA / "measured.safetensors"  # the same with loss curves and fidelities of bits
PROFILE = DATA / "budget_profile.json"
SCHEMA = Path(__file__).parents[2] / "docs" / "budget_profile.schema.json"

SHARED = DATA / "scores_shared.safetensors"
SHARED_DECISIONS = DATA / "decisions_shared.json"

# name of the case: arguments of solve, on a profile with joint curves of layers
SHARED_CASES: dict[str, dict[str, Any]] = {
    "two pairs, 35%": {"budget": "35%", "share_groups": "2-3,4-5"},
    "four groups, 35%, head": {"budget": "35%", "share_groups": 4, "level": "head"},
    "four groups, retention 0.8": {"target_retention": 0.8, "share_groups": 4},
    "worst sample, 35%": {"budget": "35%", "workloads": "worst", "solver": "cvar"},
    "worst half, retention 0.8": {
        "target_retention": 0.8,
        "workloads": "cvar",
        "tail": 0.5,
        "solver": "cvar",
    },
}

CHOICES = DATA / "choices.safetensors"  # with loss curves of several policies
CHOICE_DECISIONS = DATA / "decisions_choices.json"
CHOICE_PROFILE = DATA / "budget_profile_choices.json"

CHOICE_CASES: dict[str, dict[str, Any]] = {
    "least loss in 30%, head": {"budget": "30%", "objective": "loss", "level": "head"},
    "least loss in 30%, layer": {"budget": "30%", "objective": "loss"},
    "loss 0.1, head": {"target_loss": 0.1, "level": "head"},
    "tova alone": {"budget": "30%", "objective": "loss", "loss_policies": ["tova"]},
    "pages, decode bytes, head": {
        "budget": "40%",
        "objective": "loss",
        "level": "head",
        "page": 8,
        "cost": "decode-bytes",
    },
}

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

RETAINED = {"budget": "30%", "objective": "mean"}

# of the profile with loss curves and bits
MEASURED_CASES: dict[str, dict[str, Any]] = {
    f"{name}, {level}": {**arguments, "level": level, "solver": "dp"}
    for name, arguments in (
        ("loss 0.1", {"target_loss": 0.1}),
        ("least loss in 30%", {"budget": "30%", "objective": "loss"}),
        ("bits in 15%", {"budget": "15%", "bits": (16, 8, 4)}),
        ("bits for retention 0.9 in pages", {"target_retention": 0.9, "bits": (8, 4), "page": 8}),
        ("decode bytes in pages", {**RETAINED, "cost": "decode-bytes", "page": 8}),
        ("communication", {**RETAINED, "cost": "communication"}),
        ("weights", {**RETAINED, "weights": (1.0, 0.0, 2.0, 0.5)}),
    )
    for level in ("layer", "head")
}


def decide_measured(scores: Any, case: str) -> Any:
    from kvalloc.allocation.decision import solve

    return solve(scores, **MEASURED_CASES[case])


def decide(scores: Any, case: str) -> Any:
    from kvalloc.allocation.decision import solve

    solver, options, arguments = CASES[case]
    return solve(scores, solver=solver, solver_options=options, **arguments)


def decide_shared(scores: Any, case: str) -> Any:
    from kvalloc.allocation.decision import solve

    return solve(scores, **SHARED_CASES[case])


def decide_choice(scores: Any, case: str) -> Any:
    from kvalloc.allocation.decision import solve

    return solve(scores, solver="dp", **CHOICE_CASES[case])


def described_choice(profile: Any) -> dict[str, Any]:
    table = profile.unit_policies
    return {
        **described(profile),
        "policies": [policy.title for policy in profile.policies],
        "unit_policies": None if table is None else table.tolist(),
    }


def described_shared(profile: Any) -> dict[str, Any]:
    return {
        **described(profile),
        "share_groups": [list(group) for group in profile.share_groups],
        "grouping_bound": profile.grouping_bound,
        "worst_sample_retention": profile.worst_sample_retention,
    }


def described(profile: Any) -> dict[str, Any]:
    """What must not move: the decision and what is claimed about it."""
    optional = {
        "predicted_loss": profile.predicted_loss,
        "cost_bytes": profile.cost_bytes,
        "bits": None if profile.bits is None else profile.bits.tolist(),
    }
    return {name: value for name, value in optional.items() if value is not None} | {
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


def make_measured(scores: Any) -> Any:
    """Loss curves and fidelities on top of a score profile."""

    rng = np.random.default_rng(20240102)
    size = (scores.n_samples, scores.shape.n_layers, scores.shape.n_kv_heads)
    losses = -np.sort(-rng.exponential(0.05, (*size, 6)), axis=-1)
    losses += 0.002 * rng.standard_normal(losses.shape)
    losses[..., -1] = 0.0
    lost = np.array([0.0, 0.02, 0.3]) * rng.random((*size, 3))
    return scores.replace(
        loss_tokens=np.array([8, 16, 24, 48, 72, 96]),
        losses=losses,
        loss_stderr=np.full(losses.shape, 0.002),
        bit_widths=np.array([16, 8, 4]),
        bit_fidelity=1 - lost,
    )


def make_shared() -> Any:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from factories import make_shared_scores

    return make_shared_scores(7, longest=2, n_samples=4)


def make_choices() -> Any:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from factories import make_choices

    return make_choices(7)


def write_choices() -> None:
    from kvalloc.formats.score_profile import ScoreProfile

    if not CHOICES.exists():
        make_choices().save(CHOICES)
    scores = ScoreProfile.load(CHOICES)
    found = {case: described_choice(decide_choice(scores, case)) for case in CHOICE_CASES}
    CHOICE_DECISIONS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    decide_choice(scores, "least loss in 30%, head").save(CHOICE_PROFILE)


def main() -> None:
    from kvalloc.formats.budget_profile import budget_profile_schema
    from kvalloc.formats.score_profile import ScoreProfile

    DATA.mkdir(exist_ok=True)
    if not SCORES.exists():
        make_scores().save(SCORES)
    scores = ScoreProfile.load(SCORES)
    decisions = {case: described(decide(scores, case)) for case in CASES}
    if not MEASURED.exists():
        make_measured(scores).save(MEASURED)
    measured = ScoreProfile.load(MEASURED)
    decisions |= {case: described(decide_measured(measured, case)) for case in MEASURED_CASES}
    rows = ",\n".join(
        f" {json.dumps(case)}: {json.dumps(decision)}" for case, decision in decisions.items()
    )
    DECISIONS.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")
    if not SHARED.exists():
        make_shared().save(SHARED)
    shared = ScoreProfile.load(SHARED)
    found = {case: described_shared(decide_shared(shared, case)) for case in SHARED_CASES}
    SHARED_DECISIONS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    write_choices()
    decide(scores, "greedy, retention 0.9, head").save(PROFILE)
    text = json.dumps(budget_profile_schema(), indent=1, sort_keys=True)
    SCHEMA.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
