"""Greedy and the frontier on a gigabyte of curves: time against one np.partition, and memory.

    python benchmarks/bench_scale.py [--repeats N] [--quick] [--json]

126 layers x 8 heads x 131,072 ranks. What is compared runs in turns in one process; a figure is
the ratio of the medians, with the quartiles of the ratio of each round.

- greedy: both targets, from the bare arrays on (the problem is built and checked, its concavity
  is established, greedy solves it) against one `np.partition` of the same numbers at the rank
  that the budget keeps.
- frontier: 100 budgets with their bounds and prices, from the bare arrays on, against one such
  solve.
- memory: the peak of a fresh process (VmHWM, interpreter and libraries included) over the bytes of
  the curves, for a whole `kvalloc.solve`, the checks of its answer included, and for the frontier.
  Once with the score profile holding every rank, once on the grid of ranks that
  `kvalloc profile` writes at this context; there the curves are those of the problem.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from _common import (
    describe_where,
    guarded,
    peak_bytes,
    ratios,
    summary,
    timed_in_turns,
    where_it_ran,
)
from bench_solvers import BYTES_PER_ENTRY, SHARE, problem_of

from kvalloc.allocation.decision import solve
from kvalloc.allocation.formulation import formulate
from kvalloc.allocation.frontier import trace_frontier
from kvalloc.allocation.request import Request
from kvalloc.formats.score_profile import ScoreProfile, rank_grid
from kvalloc.problem import AllocationProblem, Sense
from kvalloc.problem.registry import get_solver
from kvalloc.shape import ModelShape

LAYERS, HEADS, RANKS = 126, 8, 131_072
GREEDY_TARGET, FRONTIER_TARGET, MEMORY_TARGET = 2.0, 10.0, 1.5
POINTS = 100
SINKS, WINDOW = 4, 8
MEMORY_CASES = {
    "every rank, budget": "every rank in the score profile, solve --budget",
    "every rank, retention": "every rank in the score profile, solve --target-retention",
    "every rank, frontier": f"every rank in the score profile, frontier of {POINTS}",
    "grid, budget": "grid in the score profile, solve --budget",
}


def main() -> int:
    arguments = parse_arguments()
    size = (8, 8, 8192) if arguments.quick else (LAYERS, HEADS, RANKS)
    if arguments.memory_of:
        print(json.dumps(measure_memory(arguments.memory_of, size)))
        return 0
    where = where_it_ran("numpy", "kvalloc")
    if not arguments.json:
        print(describe_where(where), flush=True)
    rows = []
    for row in all_rows(size, arguments):
        rows.append(row)
        if not arguments.json:
            print(describe(row), flush=True)
    if arguments.json:
        print(json.dumps({"rows": rows, "where": where}, indent=1))
    return 0 if arguments.quick or all(row["met"] for row in rows) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="greedy and the frontier on a gigabyte of curves")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--memory-of", choices=MEMORY_CASES, help=argparse.SUPPRESS)
    return parser.parse_args()


def all_rows(size: tuple[int, int, int], arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for case in MEMORY_CASES:
        yield memory_row(case, size, quick=arguments.quick)
    yield from guarded("greedy, frontier", lambda: time_rows(size, arguments.repeats))


def curves(n_units: int, ranks: np.ndarray[Any, np.dtype[np.int64]], seed: int = 0) -> Any:
    """Retention curves of units with power-law scores of different steepness.

    Mixtures of a few curves, so that a gigabyte of them does not take a minute.

    Returns
    -------
    ndarray of float64, (n_units, n_ranks)
        Rising and concave from 0 to 1.
    """
    rng = np.random.default_rng(seed)
    n_entries = int(ranks[-1])
    place = np.arange(1, n_entries + 1, dtype=np.float64)
    basis = np.zeros((32, ranks.size))
    for row in basis:
        scores = place ** -rng.uniform(0.6, 1.6) * rng.lognormal(0, 0.5, n_entries)
        sums = np.concatenate([[0.0], np.cumsum(np.sort(scores)[::-1])])
        row[:] = sums[ranks] / sums[-1]
    values = np.empty((n_units, ranks.size))
    for row in values:
        first, second = rng.choice(basis.shape[0], 2, replace=False)
        share = rng.uniform(0.1, 0.9)
        np.multiply(basis[first], share, out=row)
        row += (1.0 - share) * basis[second]
        row[-1] = 1.0
    return values


def time_rows(size: tuple[int, int, int], repeats: int) -> Iterator[dict[str, Any]]:
    layers, heads, n_ranks = size
    values = curves(layers * heads, np.arange(n_ranks))
    greedy = get_solver("greedy")
    kept = int(SHARE * values.size)

    def problem(sense: Sense) -> AllocationProblem:
        return problem_of(values, layers, heads, sense)

    def solved(sense: Sense) -> Callable[[], object]:
        def call() -> object:
            fresh = problem(sense)
            able = greedy.can_solve(fresh)
            if able is not True:
                raise SystemExit(f"greedy refuses the benchmark's own problem: {able}")
            return greedy.solve(fresh)

        return call

    def traced() -> object:
        fresh = problem(Sense.MAX_VALUE)
        steps = np.geomspace(1, n_ranks - 1, POINTS).astype(np.int64)
        sizes = fresh.min_cost_bytes + steps * layers * heads * BYTES_PER_ENTRY
        return trace_frontier(fresh, greedy, sizes.tolist())

    calls: dict[str, Callable[[], object]] = {
        "max_value": solved(Sense.MAX_VALUE),
        "min_cost": solved(Sense.MIN_COST),
        "partition": lambda: np.partition(values, values.size - kept, axis=None),
        "frontier": traced,
    }
    seconds = timed_in_turns(calls, repeats=repeats)
    note = f"{layers} x {heads} x {n_ranks:,}, {values.nbytes / 2**30:.2f} GiB"
    for name, reference, wanted in (
        ("max_value", "partition", GREEDY_TARGET),
        ("min_cost", "partition", GREEDY_TARGET),
        ("frontier", "max_value", FRONTIER_TARGET),
    ):
        found = ratios(seconds, name, reference)
        what = f"frontier of {POINTS} / one solve" if name == "frontier" else f"greedy {name}"
        yield {
            "name": what if name == "frontier" else f"{what} / np.partition",
            **found,
            "target": wanted,
            "met": found["ratio"] <= wanted,
            "note": note,
            name: summary(seconds[name]),
            reference: summary(seconds[reference]),
        }


def memory_row(case: str, size: tuple[int, int, int], *, quick: bool) -> dict[str, Any]:
    """The case in a process of its own: nothing that was there before counts."""
    command = [sys.executable, __file__, "--memory-of", case, *(["--quick"] if quick else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    name = f"memory / curves, {MEMORY_CASES[case]}"
    if done.returncode:
        return {"name": name, "met": False, "error": done.stderr.strip()[-300:]}
    found = json.loads(done.stdout)
    ratio = found["peak_bytes"] / found["curve_bytes"]
    return {
        "name": name,
        "ratio": ratio,
        "target": MEMORY_TARGET,
        "met": ratio <= MEMORY_TARGET,
        "note": f"{found['peak_bytes'] / 2**20:,.0f} MiB at the peak, "
        f"{found['before_bytes'] / 2**20:,.0f} before, curves "
        f"{found['curve_bytes'] / 2**20:,.0f}; {found['answer']}",
    }


def measure_memory(case: str, size: tuple[int, int, int]) -> dict[str, Any]:
    """Peak memory of this process around one call on a score profile made here."""
    layers, heads, n_ranks = size
    where, what = case.split(", ")
    scores = score_profile(layers, heads, n_ranks, grid=where == "grid")
    before = peak_bytes()
    if what == "frontier":
        problem = formulate(scores, Request.parse(budget=1.0, level="head"))
        sizes = np.geomspace(problem.min_cost_bytes, problem.max_cost_bytes, POINTS)
        points = trace_frontier(problem, get_solver("greedy"), sizes.astype(np.int64).tolist())
        answer = f"{len(points)} points"
    else:
        goal: dict[str, Any] = {"budget": SHARE}
        if what == "retention":
            goal = {"target_retention": 0.9}
        found = solve(scores, level="head", solver="greedy", **goal)
        answer = f"retention {found.retention:.6f}, gap {found.gap:g}"
    return {
        "before_bytes": before,
        "peak_bytes": peak_bytes(),
        "curve_bytes": layers * heads * (n_ranks if where == "grid" else scores.ranks.size) * 8,
        "answer": answer,
    }


def score_profile(layers: int, heads: int, n_ranks: int, *, grid: bool) -> ScoreProfile:
    """One sample of made-up curves, with every rank or on the grid of long contexts."""
    evictable = n_ranks - 1
    context = evictable + SINKS + WINDOW
    ranks = rank_grid(evictable, context) if grid else np.arange(n_ranks, dtype=np.int64)
    values = curves(layers * heads, ranks)
    return ScoreProfile(
        shape=ModelShape(
            model_id="made-up",
            n_layers=layers,
            n_query_heads=heads,
            n_kv_heads=heads,
            head_dim=64,
            dtype_bytes=2,
            layer_types=("full",) * layers,
            sliding_window=None,
            max_context_tokens=None,
        ),
        scorer="xkv",
        scorer_parameters={},
        context_tokens=context,
        sinks=SINKS,
        window=WINDOW,
        ranks=ranks,
        curves=values.reshape(1, layers, heads, ranks.size),
        masses=np.random.default_rng(1).uniform(0.5, 1.5, (1, layers, heads)),
        sample_tokens=np.array([context]),
        text_description="made up",
    )


def describe(row: dict[str, Any]) -> str:
    verdict = "met" if row["met"] else "MISSED"
    if "error" in row:
        return f"{row['name']}: FAILED: {row['error']}"
    spread = ""
    if "ratio_quartile_1" in row:
        spread = f" [{row['ratio_quartile_1']:.2f}, {row['ratio_quartile_3']:.2f}]"
    times = "".join(
        f"; {name} {part['median_seconds']:.3f} s"
        for name, part in row.items()
        if isinstance(part, dict)
    )
    return (
        f"{row['name']}: ratio {row['ratio']:.2f}{spread} (wanted <= {row['target']:g}) "
        f"{verdict}{times}; {row['note']}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
