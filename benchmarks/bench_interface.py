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
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from _common import in_turns, ratio_of

from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.shape import ModelShape

REFERENCE = "import numpy, pydantic, typer"
START_LIMIT = 3.0
"""`kvalloc solve` with greedy starts and ends within this many times the reference."""
PAINT_SECONDS, MOST_BYTES = 2.0, 2_000_000
"""First paint and size that the page keeps within."""
CONTEXT_TOKENS, N_SAMPLES, SINKS, WINDOW = 1024, 4, 4, 8
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SOLVERS = {"greedy": "layer", "uniform": "layer", "adaptive_head": "head"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("startup", "report"))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--layers", type=int, default=126)
    parser.add_argument("--heads", type=int, default=8)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if asked.part == "startup":
            return startup(Path(folder), asked.rounds or 15)
        return report(Path(folder), asked)


def startup(folder: Path, rounds: int) -> int:
    scores, output = folder / "s.safetensors", folder / "p.json"
    made_up_scores(30, 3).save(scores)
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
    found = in_turns(calls, repeats=rounds)
    print(f"{'':<16}{'median':>9}{'min':>9}{'max':>9}{'ratio':>8}   ({rounds} rounds)")
    for name, (seconds, _) in found.items():
        times = (statistics.median(seconds), min(seconds), max(seconds))
        ratio = ratio_of(found, name, "reference")["ratio"]
        print(f"{name:<16}" + "".join(f"{one:>8.3f}s" for one in times) + f"{ratio:>8.2f}")
    met = ratio_of(found, "kvalloc solve", "reference")["ratio"] <= START_LIMIT
    print(f"kvalloc solve within {START_LIMIT}x: {'yes' if met else 'NO'}")
    return int(not met)


def report(folder: Path, asked: argparse.Namespace) -> int:
    from playwright.sync_api import sync_playwright

    from kvalloc.allocation.decision import solve
    from kvalloc.report.page import write_report

    chromium = next(filter(None, map(shutil.which, BROWSERS)), None)
    if chromium is None:
        print("no chromium is installed", file=sys.stderr)
        return 2
    scores, page = made_up_scores(asked.layers, asked.heads), folder / "report.html"
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
        for _ in range(asked.rounds or 5):
            # without its sandbox, which root cannot have: the page is our own
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            tab = browser.new_page()
            tab.goto(page.as_uri())
            tab.wait_for_selector("body[data-drawn]")
            seconds["all drawn"].append(tab.evaluate("performance.now()") / 1000)
            seconds["first paint"].append(tab.evaluate(paint) / 1000)
            version = browser.version
            browser.close()
    size = page.stat().st_size
    print(
        f"{asked.layers} layers x {asked.heads} KV heads, one score profile and {len(SOLVERS)} "
        f"budget profiles; Chromium {version}"
    )
    print(f"page           {size:>9,} bytes (at most {MOST_BYTES:,})")
    print(f"written in     {writing:9.2f} s, the frontiers included")
    for what, own in seconds.items():
        print(
            f"{what:<14} {statistics.median(own):9.2f} s, median of {len(own)} "
            f"({min(own):.2f} to {max(own):.2f})"
        )
    met = max(seconds["first paint"]) < PAINT_SECONDS and size < MOST_BYTES
    limits = f"within {PAINT_SECONDS:g} s and {MOST_BYTES:,} bytes"
    print(f"first paint and size {limits}: {'yes' if met else 'NO'}")
    return int(not met)


def made_up_scores(n_layers: int, n_kv_heads: int) -> ScoreProfile:
    """Curves of a model's size, concave as real ones are."""
    random = np.random.default_rng(0)
    evictable = CONTEXT_TOKENS - SINKS - WINDOW
    steepness = random.uniform(0.7, 2.2, (1, n_layers, 1, 1))
    scores = random.pareto(steepness, (N_SAMPLES, n_layers, n_kv_heads, evictable))
    scores = np.sort(scores, axis=-1)[..., ::-1]
    masses = scores.sum(axis=-1)
    curves = np.zeros((*scores.shape[:3], evictable + 1))
    curves[..., 1:] = np.cumsum(scores, axis=-1) / masses[..., None]
    curves[..., -1] = 1.0
    return ScoreProfile(
        shape=ModelShape(
            model_id="made-up",
            n_layers=n_layers,
            n_query_heads=3 * n_kv_heads,
            n_kv_heads=n_kv_heads,
            head_dim=64,
            dtype_bytes=2,
            layer_types=("full",) * n_layers,
            max_context_tokens=8192,
        ),
        scorer="xkv",
        scorer_parameters={"window": WINDOW, "pool": 7, "group_reduce": "mean"},
        context_tokens=CONTEXT_TOKENS,
        sinks=SINKS,
        window=WINDOW,
        ranks=np.arange(evictable + 1),
        curves=curves,
        masses=masses,
        sample_tokens=np.full(N_SAMPLES, CONTEXT_TOKENS),
    )


if __name__ == "__main__":
    sys.exit(main())
