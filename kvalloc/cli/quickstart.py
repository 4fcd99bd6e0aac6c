"""``kvalloc quickstart``: from measurements that ship to budgets and a page, without a model."""

from __future__ import annotations

import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvalloc.cli.options import takes
from kvalloc.cli.output import duration, print_result, print_table
from kvalloc.cli.progress import slow
from kvalloc.cli.values import make_folder
from kvalloc.report.terminal import number_text, terminal_width
from kvalloc.report.wording import LOSS_NOTE, model_text
from kvalloc.units import size

if TYPE_CHECKING:
    from kvalloc.formats.budget_profile import BudgetProfile

EXAMPLES = """\
  kvalloc quickstart
  kvalloc quickstart --output-dir first-steps
"""

SHIPPED, BUDGET = "smollm2-135m-instruct", "20%"
SOLVERS = ("uniform", "pyramid", "proportional", "auto")
SCORES, REPORT = "scores.safetensors", "report.html"

NEXT = """\
Next, on these files:
  kvalloc inspect {0}/auto.json
  kvalloc diff {0}/uniform.json {0}/auto.json
  kvalloc frontier {0}/scores.safetensors
With a model (pip install 'kvalloc[run]'; MODEL is a hub id, a folder, a .gguf):
  kvalloc generate MODEL --budget 20% --prompt-file prompt.txt
  kvalloc profile MODEL --loss -o s.safetensors"""


@takes()
def quickstart(output_dir: Path = Path("kvalloc-quickstart")) -> None:
    """Decide budgets from measurements that ship with kvalloc, and show them on a page.

    Runs no model and needs no torch: seconds.

    Parameters
    ----------
    output_dir : Path
        Folder for the score profile, the budget profiles and the page; made if missing.
    """
    from kvalloc.allocation.decision import solve
    from kvalloc.formats.shipped_profiles import load_scores
    from kvalloc.report.page import write_report

    begun = time.perf_counter()
    make_folder(output_dir)
    scores = load_scores(SHIPPED)
    scores.save(output_dir / SCORES)
    files, decided = [output_dir / SCORES], {}
    for name in SOLVERS:
        with slow(f"solving with {name}"):
            decided[name] = solve(scores, budget=BUDGET, solver=name)
        files.append(output_dir / f"{name}.json")
        decided[name].save(files[-1])
    with slow("writing the page"):
        write_report(files, output_dir / REPORT)
    seconds = time.perf_counter() - begun

    def show() -> None:
        _say(f"1. Measured, and shipped with kvalloc: what each layer of a model can do without "
             f"({model_text(scores.shape)}).")  # fmt: skip
        _say(f"2. Decided: which {BUDGET} of the entries to keep, by {len(decided)} solvers.")
        print()
        _show_table(decided)
        print()
        _say("   uniform and pyramid are fixed rules, proportional is a rule of thumb; auto took a "
             "solver that proves its result: no choice has a lower predicted loss.")  # fmt: skip
        _say(f"   Note: {LOSS_NOTE}.")
        _say(f"3. Shown: {output_dir / REPORT}, for your browser. All of it took "
             f"{duration(seconds)}.")  # fmt: skip
        print("\n" + NEXT.format(output_dir))

    losses = {name: one.predicted_loss for name, one in decided.items()}
    facts = {"output_dir": output_dir, "files": [*files, output_dir / REPORT]}
    print_result({**facts, "predicted_loss": losses, "seconds": seconds}, show)


def _say(text: str) -> None:
    """Print a paragraph, wrapped also in a pipe: it is for people."""
    begin = "   " if text.startswith("   ") else ""
    width = min(terminal_width(), 80)
    print(textwrap.fill(text.strip(), width, initial_indent=begin, subsequent_indent="   "))


def _show_table(decided: dict[str, BudgetProfile]) -> None:
    headings = ("  ", "loss, nats per token", "least possible", "bytes", "of", "solver")
    rows = [
        (
            "",
            number_text(one.predicted_loss, ".4f"),
            number_text(abs(one.bound or 0.0), ".4f"),
            size(one.retained_bytes),
            size(one.full_bytes),
            name if one.decided_by in ("", name) else f"{name} ({one.decided_by})",
        )
        for name, one in decided.items()
    ]
    print_table(headings, rows)
