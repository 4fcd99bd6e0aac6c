"""``kvalloc demo``: profile, compare, eval and report on a real model, one after the other."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from kvalloc.cli.options import takes
from kvalloc.cli.output import print_table, wants_json
from kvalloc.cli.progress import slow
from kvalloc.cli.steps import say, step
from kvalloc.cli.values import make_folder
from kvalloc.units import Option, size

if TYPE_CHECKING:
    from kvalloc.formats.budget_profile import BudgetProfile
    from kvalloc.formats.evaluation import Evaluation
    from kvalloc.formats.score_profile import ScoreProfile

TARGET_RETENTION = 0.9
MEASURED_LOSSES = "smollm2-135m-instruct"
"""Ships with kvalloc: losses of the demo's model, on texts that the demo does not ask about."""

BY_LOSS = "least_loss"


class _Amount(NamedTuple):
    """How much is measured: samples to profile, prompts of each task, tokens of each."""

    samples: int
    prompts: int
    tokens: int


FULL, QUICK = _Amount(4, 2, 1500), _Amount(1, 1, 240)


@takes()
def demo(
    output_dir: Path = Path("demo-output"),
    samples: Annotated[int | None, Option("N", least=1)] = None,
    seed: Annotated[int, Option("N", least=0)] = 0,
    quick: bool = False,
) -> None:
    """Profile a model, solve with every solver, and ask through the smaller caches.

    The model is SmolLM2-135M-Instruct. Every step is a command that is shown before it runs. The
    prompts are made by rule, and what is printed is what was measured, whether it flatters kvalloc
    or not.

    Parameters
    ----------
    output_dir : Path
        Folder for profiles, results, page and picture; made if missing.
    samples : int
        Prompts of each task; 2 by default, 1 with --quick.
    seed : int
        Of the prompts.
    quick : bool
        One short sample and prompt, to try it out.

    Examples
    --------
    kvalloc demo
    kvalloc demo --quick
    kvalloc demo --samples 5 --seed 7 --output-dir seven
    """
    # Before torch is loaded: threads that spin while they wait make everything several times
    # slower on a machine that is not idle.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from kvalloc.formats.evaluation import Evaluation
    from kvalloc.formats.score_profile import ScoreProfile
    from kvalloc.models.loading import require_run_packages

    require_run_packages()
    make_folder(output_dir)
    amount = QUICK if quick else FULL
    measured, results_file = output_dir / "scores.safetensors", output_dir / "results.json"

    say("1. Measure: where the model looks")
    texts = ("--samples", amount.samples, "--context", amount.tokens)
    step("profile", "demo", *texts, "-o", measured)

    say(f"2. Decide: the fewest bytes that retain {TARGET_RETENTION:g} of the attention")
    step("compare", measured, "--target-retention", TARGET_RETENTION)

    profiles = _equal_budgets(ScoreProfile.load(measured))
    files = {name: output_dir / f"{_first(name)}.json" for name in profiles}
    for name, profile in profiles.items():
        profile.save(files[name])
    best, *_, by_loss = files.values()
    decided = profiles[BY_LOSS]
    kept = f"{size(decided.retained_bytes)} of {size(decided.full_bytes)}"
    say(f"3. Apply: the same {kept} for every solver, needles and KL")
    say(*(f"Equal to the entry: {name}." for name in profiles if " = " in name))
    step("diff", best, by_loss)
    named = [word for file in files.values() for word in ("--profile", file)]
    prompts = ("--samples", samples or amount.prompts, "--context", amount.tokens, "--seed", seed)
    step("eval", "demo", *named, "--budget", f"{decided.share:.1%}", "--tasks", "needle,kl",
         *prompts, "-o", results_file, hidden=True)  # fmt: skip
    results = Evaluation.load(results_file)
    _print_results(results)

    say("4. Look at it")
    every = (measured, *files.values(), results_file)
    step("report", *every, "-o", output_dir / "report.html")
    step("plot", *every, "--what", "overview", "-o", output_dir / "demo.png")
    say(*_lessons(profiles, results), f"In {output_dir}: all files above, and demo.png.")


def _equal_budgets(scores: ScoreProfile) -> dict[str, BudgetProfile]:
    """Decide budgets of equal size with every solver, and by losses that were measured before.

    Returns
    -------
    dict of BudgetProfile
        Equal budgets once, under the names of all their solvers: ``"greedy = ilp"``.
    """
    from kvalloc.allocation.decision import compare, solve
    from kvalloc.errors import KVAllocError
    from kvalloc.report.terminal import merged_names

    smallest = solve(scores, target_retention=TARGET_RETENTION, solver="greedy")
    budget: Any = {"budget_tokens": smallest.retained_tokens // smallest.budgets.size}
    with slow("solving"):
        attempts = compare(scores, **budget)
        try:
            refused = [one.solver for one in attempts if one.profile is None]
            attempts += compare(scores, solvers=refused, level="head", **budget)
        except KVAllocError:  # none refused, or heads do not help
            pass
        by_loss = solve(MEASURED_LOSSES, context=scores.context_tokens, objective="loss", **budget)
    decided = {one.solver: one.profile for one in attempts if one.profile is not None}
    names = sorted(decided, key=lambda name: name != "greedy")  # otherwise the best come first
    return {**merged_names({name: decided[name] for name in names}), BY_LOSS: by_loss}


def _lessons(profiles: Mapping[str, BudgetProfile], results: Evaluation) -> list[str]:
    """Say what the measurement shows, whatever it shows."""
    from kvalloc.evaluate.scoring import ALL_TASKS

    kls = {row["name"]: row["kl"] or 0.0 for row in results.rows if row["task"] == ALL_TASKS}
    decided = {_first(name): one for name, one in profiles.items() if name != BY_LOSS}
    best = max(decided, key=lambda name: decided[name].retention or 0.0)
    mildest = min(decided, key=kls.__getitem__)
    return [
        f"{best} retains most of the attention, with a KL of {kls[best]:.3f}; of the budgets by "
        f"retention {mildest} does least harm, {kls[mildest]:.3f}; those by measured loss do "
        f"{kls[BY_LOSS]:.3f}. Retained attention is a weak guide to harm.",
        "On your own model and prompts: 'kvalloc profile MODEL --prompts FILE --scorer tova "
        "--loss', then 'kvalloc solve --budget 40%'.",
    ]


def _first(name: str) -> str:
    """Return the first of the solvers that a name lists."""
    return name.partition(" = ")[0]


def _print_results(results: Evaluation) -> None:
    """Print a row a cache: what it stores, and needles and KL on each task."""
    rows: dict[str, dict[str, Any]] = {}
    for row in results.rows:
        rows.setdefault(row["name"], {})[row["task"]] = row
    cells = []
    for name, by_task in rows.items():
        needle, running = by_task["needle"], by_task["kl"]
        right = f"{needle['score'] * needle['n']:.0f} of {needle['n']}"
        kls = (f"{needle['kl']:.4f}", f"{running['kl']:.4f}")
        cells.append((name, size(needle["retained_bytes"]), right, *kls))
    headings = ("cache", "bytes", "needles", "KL of needles", "KL of text")
    if not wants_json():
        print_table(headings, cells)
