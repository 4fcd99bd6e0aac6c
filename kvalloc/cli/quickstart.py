"""``kvalloc quickstart``: from measurements that ship to budgets and a page, without a model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from kvalloc.cli.options import takes
from kvalloc.cli.output import print_result
from kvalloc.cli.steps import say, step
from kvalloc.files import make_folder
from kvalloc.report.wording import model_text
from kvalloc.units import Option, duration

SHIPPED, BUDGET = "smollm2-135m-instruct", "20%"
SOLVERS = ("uniform", "pyramid", "proportional", "auto")

NEXT = """\
Next, on these files:
  kvalloc inspect {0}/auto.json
  kvalloc diff {0}/uniform.json {0}/auto.json
  kvalloc frontier {0}/scores.safetensors
With a model (pip install 'kvalloc[run]'; MODEL is a hub id, a folder, a .gguf):
  kvalloc generate MODEL --budget 20% --prompt-file prompt.txt
  kvalloc profile MODEL --loss -o s.safetensors"""


@takes()
def quickstart(output: Annotated[Path, Option("FOLDER")] = Path("kvalloc-quickstart")) -> None:
    """Decide budgets from measurements that ship with kvalloc, and show them.

    Runs no model and needs no torch: seconds.

    Parameters
    ----------
    output : Path
        Folder for the score profile, the budget profiles and the page; made if missing.

    Examples
    --------
    kvalloc quickstart
    kvalloc quickstart -o first-steps
    """
    from kvalloc.formats.shipped_profiles import load_scores

    begun = time.perf_counter()
    make_folder(output)
    measured, page = load_scores(SHIPPED), output / "report.html"
    decided = {name: output / f"{name}.json" for name in SOLVERS}
    measured.save(scores := output / "scores.safetensors")
    say(
        "1. Measured, and shipped with kvalloc: what each layer of a model can do without "
        f"({model_text(measured.shape)})."
    )
    say(f"2. Decide: which entries to keep in {BUDGET} of the bytes.")
    by_solvers = [word for name in SOLVERS for word in ("--solver", name)]
    step("compare", scores, "--budget", BUDGET, *by_solvers)
    say(
        "uniform and pyramid are fixed rules, proportional is a rule of thumb; auto took a solver "
        "that proves its result: no choice has a lower predicted loss."
    )
    for name, file in decided.items():
        step("solve", scores, "--budget", BUDGET, "--solver", name, "-o", file, "-q")
    say("3. Show: a page for your browser.")
    step("report", scores, *decided.values(), "-o", page)
    seconds = time.perf_counter() - begun
    facts = {"output": output, "files": [scores, *decided.values(), page]}
    took = f"\nAll of it took {duration(seconds)}. {NEXT.format(output)}"
    print_result({**facts, "seconds": seconds}, lambda: print(took))
