"""The HTML report of a model of 126 layers and 8 KV heads: its size, and when a browser paints it.

The score profile is made up, with curves of real ones' form; the page is opened from its file in
headless Chromium, each time in a fresh profile, and the browser says when it first painted.

    python benchmarks/bench_report.py [--rounds 5] [--layers 126] [--heads 8] [--json]
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench_startup import made_up_scores
from playwright.sync_api import sync_playwright

from kvalloc.allocation.decision import solve
from kvalloc.report.page import write_report

PAINT_SECONDS, MOST_BYTES = 2.0, 2_000_000
"""First paint and size that the page keeps within."""

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SOLVERS = ("greedy", "uniform", "adaptive_head")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=126)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chromium = next(filter(None, map(shutil.which, BROWSERS)), None)
    if chromium is None:
        print("no chromium is installed", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), chromium, options)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    return 0 if result["met"] else 1


def measure(folder: Path, chromium: str, options: argparse.Namespace) -> dict[str, object]:
    scores = made_up_scores(n_layers=options.layers, n_kv_heads=options.heads)
    scores.save(folder / "s.safetensors")
    files = [folder / "s.safetensors"]
    for name in SOLVERS:
        level = "head" if name == "adaptive_head" else "layer"
        solve(scores, budget=0.2, solver=name, level=level).save(folder / f"{name}.json")
        files.append(folder / f"{name}.json")
    start = time.perf_counter()
    write_report(files, folder / "report.html")
    writing = time.perf_counter() - start
    paints, drawn = [], []
    with sync_playwright() as playwright:
        for _ in range(options.rounds):
            # without its sandbox, which root cannot have: the page is our own
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page()
            page.goto((folder / "report.html").as_uri())
            page.wait_for_selector("body[data-drawn]")
            drawn.append(page.evaluate("performance.now()") / 1000)
            paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
            paints.append(page.evaluate(paint) / 1000)
            version = browser.version
            browser.close()
    size = (folder / "report.html").stat().st_size
    return {
        "benchmark": "report",
        "layers": options.layers,
        "heads": options.heads,
        "profiles": len(SOLVERS),
        "chromium": version,
        "bytes": size,
        "writing_seconds": writing,
        "paint_seconds": paints,
        "drawn_seconds": drawn,
        "met": max(paints) < PAINT_SECONDS and size < MOST_BYTES,
    }


def show(result: dict[str, object]) -> None:
    print(
        f"{result['layers']} layers x {result['heads']} KV heads, one score profile and "
        f"{result['profiles']} budget profiles; Chromium {result['chromium']}"
    )
    print(f"page           {result['bytes']:>9,} bytes (at most {MOST_BYTES:,})")
    print(f"written in     {result['writing_seconds']:9.2f} s, the frontiers included")
    for name, what in (("paint", "first paint"), ("drawn", "all drawn")):
        seconds = result[f"{name}_seconds"]
        assert isinstance(seconds, list)
        print(
            f"{what:<14} {statistics.median(seconds):9.2f} s, median of {len(seconds)} "
            f"({min(seconds):.2f} to {max(seconds):.2f})"
        )
    limits = f"within {PAINT_SECONDS:g} s and {MOST_BYTES:,} bytes"
    print(f"first paint and size {limits}: {'yes' if result['met'] else 'NO'}")


if __name__ == "__main__":
    sys.exit(main())
