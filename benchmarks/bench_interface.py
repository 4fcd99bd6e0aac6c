"""How long `kvalloc solve` takes from its start, and when a browser paints a report.

    python benchmarks/bench_interface.py startup [--rounds 15]
    python benchmarks/bench_interface.py report [--rounds 5] [--layers 126] [--heads 8]

startup: the reference is `python -c "import numpy, pydantic, typer"`; a command that is not much
slower than that is as fast as it can be made. All commands run in turns; a ratio is the median of
the rounds' own ratios.

report: the score profile is made up, with curves of real ones' form; the page is opened from its
file in headless Chromium, each time in a fresh profile, and the browser says when it first painted.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from _common import Row, in_turns, median_of, parser_of, print_rows, quartiles, spread_of
from bench_solvers import score_profile

REFERENCE = "import numpy, pydantic, typer"
START_LIMIT = 3.0
"""`kvalloc solve` with greedy starts and ends within this many times the reference."""
PAINT_SECONDS, MOST_MB = 2.0, 2.0
"""First paint and size that the page keeps within."""
N_RANKS, N_SAMPLES = 1013, 4
"""Of prompts of 1,024 tokens, 12 of which are always kept."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SOLVERS = {"greedy": "layer", "uniform": "layer", "adaptive_head": "head"}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("part", choices=("startup", "report"))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--layers", type=int, default=126)
    parser.add_argument("--heads", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make = {"startup": startup, "report": report}[options.part]
        return print_rows(make(Path(folder), options), options, "kvalloc", "numpy")


def startup(folder: Path, options: argparse.Namespace) -> Iterator[Row]:
    """Return a row for each command."""
    scores, output = folder / "s.safetensors", folder / "p.json"
    score_profile(30, 3, N_RANKS, samples=N_SAMPLES).save(scores)
    run = "import sys; from kvalloc.cli.main import main; sys.exit(main())"
    solve = ["solve", str(scores), "--target-retention", "0.9", "--solver", "greedy"]
    commands = {
        "reference": [REFERENCE],
        "python alone": ["pass"],
        "import kvalloc": ["import kvalloc"],
        "kvalloc --help": [run, "--help"],
        "kvalloc solve": [run, *solve, "-o", str(output)],
    }

    def call(words: list[str]) -> None:
        subprocess.run([sys.executable, "-c", *words], check=True, stdout=subprocess.DEVNULL)

    calls = {name: lambda words=words: call(words) for name, words in commands.items()}
    timed = in_turns(calls, repeats=options.rounds or 15)
    for name in list(commands)[1:]:
        limit = {"at_most": START_LIMIT} if name == "kvalloc solve" else {}
        note = f"{median_of(timed, name):.3f} s; reference {median_of(timed, 'reference'):.3f} s"
        ratios = [a / b for a, b in zip(timed[name][0], timed["reference"][0], strict=True)]
        yield {"name": name, **spread_of(ratios), **limit, "note": note}


def report(folder: Path, options: argparse.Namespace) -> Iterator[Row]:
    """Return the rows of the page: bytes, seconds to write it, seconds until it is shown."""
    from playwright.sync_api import sync_playwright

    from kvalloc.allocation.decision import solve
    from kvalloc.report.page import write_report

    chromium = next(filter(None, map(shutil.which, BROWSERS)), None)
    if chromium is None:
        raise SystemExit("no chromium is installed")
    scores = score_profile(options.layers, options.heads, N_RANKS, samples=N_SAMPLES)
    page = folder / "report.html"
    files = [folder / "s.safetensors"]
    scores.save(files[0])
    for name, level in SOLVERS.items():
        files.append(folder / f"{name}.json")
        solve(scores, budget=0.2, solver=name, level=level).save(files[-1])
    start = time.perf_counter()
    write_report(files, page)
    writing = time.perf_counter() - start
    seconds: dict[str, list[float]] = {"first paint": [], "all drawn": []}
    paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    with sync_playwright() as playwright:
        for _ in range(options.rounds or 5):
            # without its sandbox, which root cannot have: the page is our own
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            tab = browser.new_page()
            tab.goto(page.as_uri())
            tab.wait_for_selector("body[data-drawn]")
            seconds["all drawn"].append(tab.evaluate("performance.now()") / 1000)
            seconds["first paint"].append(tab.evaluate(paint) / 1000)
            version = browser.version
            browser.close()
    yield {
        "name": "size of the page",
        "figure": page.stat().st_size / 1e6,
        "unit": "MB",
        "at_most": MOST_MB,
        "note": f"{options.layers} layers x {options.heads} KV heads, one score profile and "
        f"{len(SOLVERS)} budget profiles",
    }
    note = "the frontiers included"
    yield {"name": "the page is written", "figure": writing, "unit": "s", "note": note}
    for name, each in seconds.items():
        low, middle, high = quartiles(each)
        limit = {"at_most": PAINT_SECONDS} if name == "first paint" else {}
        row = {"name": name, "figure": middle, "unit": "s", "low": low, "high": high, **limit}
        yield {**row, "note": f"slowest {max(each):.2f} s; Chromium {version}"}


if __name__ == "__main__":
    sys.exit(main())
