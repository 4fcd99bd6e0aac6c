"""``kvalloc demo``."""

from __future__ import annotations

import io
import os
import shlex
import textwrap
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvalloc.cli.options import takes
from kvalloc.cli.output import is_quiet, wants_json
from kvalloc.files import make_folder
from kvalloc.report.terminal import terminal_width
from kvalloc.units import Option, size

if TYPE_CHECKING:
    from kvalloc.formats.evaluation import Evaluation

TARGET_RETENTION = 0.9
SOLVERS = {"greedy": "layer", "uniform": "layer", "pyramid": "layer", "adaptive_head": "head"}
"""Solvers that are tried, and the level of each; the size of the first one's budgets holds for all.
"""

MEASURED_LOSSES = "smollm2-135m-instruct"
"""Shipped losses of the demo's model, on texts that the demo does not ask about."""

BY_LOSS = "least_loss"


FULL, QUICK = (4, 2, 1500), (1, 1, 240)
"""Samples to profile, prompts of each task, tokens of each."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Size of the demo, and its folder."""

    output: Annotated[Path, Option("FOLDER")] = Path("demo-output")
    """Folder for profiles, results, page and picture; made if missing."""

    samples: Annotated[int | None, Option("N", minimum=1)] = None
    """Prompts of each task; 2 by default, 1 with `quick`."""

    seed: Annotated[int, Option("N", minimum=0)] = 0
    """Seed of the prompts."""

    quick: Annotated[bool, Option()] = False
    """One short sample and prompt, to try it out."""


@takes()
def demo(options: DemoOptions) -> None:
    """Profile a model, decide in several ways, and ask through the smaller caches.

    The model is SmolLM2-135M-Instruct. Every step is a command that is shown before it runs.
    Prompts are made by rule, and all figures are measured, good or bad.

    Examples
    --------
    kvalloc demo
    kvalloc demo --quick
    kvalloc demo --samples 5 --seed 7 -o seven
    """
    # Before torch is loaded: threads that spin while they wait make everything several times
    # slower on a machine that is not idle.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from kvalloc.formats.budget_profile import BudgetProfile
    from kvalloc.formats.evaluation import Evaluation
    from kvalloc.models.loading import require_run_packages

    require_run_packages()
    output = options.output
    make_folder(output)
    profiled, n_prompts, tokens = QUICK if options.quick else FULL
    measured, results_file = output / "scores.safetensors", output / "results.json"
    files = {name: output / f"{name}.json" for name in (*SOLVERS, BY_LOSS)}

    _say("1. Measure: where the model looks")
    texts = ("--samples", profiled, "--context", tokens)
    _step("profile", "demo", *texts, "-o", measured)

    _say(f"2. Decide: the fewest bytes that retain {TARGET_RETENTION:g} of the attention")
    target = ("--target-retention", TARGET_RETENTION)
    _step("compare", measured, *target)
    first, *remaining = SOLVERS
    _step("solve", measured, *target, "--solver", first, "-o", files[first], "-q")
    decided = BudgetProfile.load(files[first])
    kept = f"{size(decided.retained_bytes)} of {size(decided.full_bytes)}"
    _say(f"The same {kept} by other rules, and by losses that were measured before:")
    budget = ("--budget-tokens", decided.retained_tokens // decided.budgets.size)
    for name in remaining:
        how = (*budget, "--level", SOLVERS[name], "--solver", name)
        _step("solve", measured, *how, "-o", files[name], "-q")
    loss = (*budget, "--objective", "loss", "--context", decided.context_tokens)
    _step("solve", MEASURED_LOSSES, *loss, "-o", files[BY_LOSS], "-q")

    _say("3. Apply: needles and KL with each, and what kvalloc does by default")
    named = [word for file in files.values() for word in ("--profile", file)]
    prompts = (
        "--samples",
        options.samples or n_prompts,
        "--context",
        tokens,
        "--seed",
        options.seed,
    )
    default = ("--budget", f"{decided.share:.1%}", "--tasks", "needle,kl")
    _step("eval", "demo", *named, *default, *prompts, "-o", results_file, result=True)

    _say("4. Look at it")
    inputs = (measured, *files.values(), results_file)
    _step("report", *inputs, "-o", output / "report.html")
    _step("report", *inputs, "--what", "overview", "-o", output / "demo.png")
    _say(*_lessons(first, Evaluation.load(results_file)), f"In {output}: all files above.")


def _lessons(first: str, results: Evaluation) -> list[str]:
    from kvalloc.evaluate.scoring import ALL_TASKS

    kls = {row["name"]: row["kl"] or 0.0 for row in results.rows if row["task"] == ALL_TASKS}
    return [
        f"{first} retains most of the attention, with a KL of {kls[first]:.3f}; budgets by "
        f"measured loss do {kls[BY_LOSS]:.3f}. Retained attention is a weak guide to harm.",
        "On your own model and prompts: 'kvalloc profile MODEL --prompts FILE --scorer tova "
        "--loss', then 'kvalloc solve --budget 40%'.",
    ]


def _say(*paragraphs: str) -> None:
    for text in () if wants_json() or is_quiet() else paragraphs:
        print("\n" + textwrap.fill(text, min(terminal_width(), 80)), flush=True)


def _step(*words: object, result: bool = False) -> None:
    """Show a command and run it; with ``--json`` only a ``result`` is printed."""
    from kvalloc.cli.main import run_command

    line = [*map(str, words)]
    if not (wants_json() or is_quiet()):
        print(f"\n$ {shlex.join(['kvalloc', *line])}", flush=True)
    line += ["--json"] if wants_json() else []
    line += ["--quiet"] if is_quiet() else []
    shown = result if wants_json() else not is_quiet()
    with nullcontext() if shown else redirect_stdout(io.StringIO()):
        code = run_command(line)
    if code:
        raise typer.Exit(code)
