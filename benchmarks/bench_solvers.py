"""Solvers against the clock: greedy against one np.partition, ilp against greedy.

    python benchmarks/bench_solvers.py [--repeats N] [--quick] [--json]

greedy: 80 layers x 8 heads x 32,768 ranks of stored curves, both senses, against one
`np.partition` of the same numbers at the rank that the budget keeps. Timed is everything from the
bare arrays on: a fresh `AllocationProblem` is built and checked, its concavity is established,
and greedy solves it. How much of that is the building is reported too. The two run in turns; the
figure is the ratio of the medians, with the quartiles of the ratio of each round.

ilp: 30 layers x 3 KV heads x about 1,000 options, both senses; the same objective as greedy, the
bound shown, and the seconds `kvalloc.solve_problem` measures. The same again on curves with dents,
which greedy refuses: there the bound alone says how good the answer is.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
from _common import describe_where, ratios, summary, timed_in_turns, where_it_ran

from kvalloc.allocation.verification import solve_problem
from kvalloc.problem import AllocationProblem, Sense
from kvalloc.problem.registry import get_solver

GREEDY_TARGET = 2.0
ILP_TARGET_SECONDS = 5.0
BYTES_PER_ENTRY = 512
SHARE = 0.2
RETENTION = 0.9


def main() -> int:
    arguments = parse_arguments()
    layers, heads, ranks = (80, 8, 32_768) if not arguments.quick else (8, 8, 4096)
    rows = [
        greedy_row(layers, heads, ranks, sense, arguments.repeats)
        for sense in (Sense.MAX_VALUE, Sense.MIN_COST)
    ]
    rows += [
        ilp_row(30, 3, 1000, sense, dented=dented)
        for dented in (False, True)
        for sense in (Sense.MAX_VALUE, Sense.MIN_COST)
    ]
    where = where_it_ran("numpy", "ortools", "kvalloc")
    if arguments.json:
        print(json.dumps({"rows": rows, "where": where}, indent=1))
    else:
        print(describe_where(where))
        for row in rows:
            print(describe(row))
    return 0 if arguments.quick or all(row["met"] for row in rows) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="solvers against the clock")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def curves(n_units: int, n_ranks: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Retention curves of units with power-law scores of different steepness and random wiggles.

    Returns
    -------
    ndarray of float64, (n_units, n_ranks + 1)
        Rising and concave from 0 to 1.
    """
    rng = np.random.default_rng(seed)
    values = np.zeros((n_units, n_ranks + 1))
    place = np.arange(1, n_ranks + 1, dtype=np.float64)
    for row in values:
        scores = place ** -rng.uniform(0.6, 1.6) * rng.lognormal(0, 0.5, n_ranks)
        np.cumsum(np.sort(scores)[::-1], out=row[1:])
        row /= row[-1]
    return values


def problem_of(
    values: np.ndarray[Any, np.dtype[np.float64]], layers: int, heads: int, sense: Sense
) -> AllocationProblem:
    """The head-level problem of stored curves: nothing is copied, all is checked."""
    n_units, n_options = values.shape
    tokens = np.arange(12, 12 + n_options, dtype=np.int64)
    costs = tokens * BYTES_PER_ENTRY
    capacity = int(SHARE * n_units * n_options) * BYTES_PER_ENTRY
    maximise = sense is Sense.MAX_VALUE
    return AllocationProblem(
        tokens=np.broadcast_to(tokens, values.shape),
        values=values,
        costs=np.broadcast_to(costs, values.shape),
        option_counts=np.full(n_units, n_options, dtype=np.int64),
        weights=np.full(n_units, 1.0 / n_units),
        layers=np.repeat(np.arange(layers), heads),
        heads=np.tile(np.arange(heads), layers),
        sense=sense,
        capacity_bytes=capacity if maximise else None,
        target=None if maximise else RETENTION,
        context_tokens=int(tokens[-1]),
        protected_tokens=12,
    )


def greedy_row(layers: int, heads: int, ranks: int, sense: Sense, repeats: int) -> dict[str, Any]:
    values = curves(layers * heads, ranks - 1)
    greedy = get_solver("greedy")
    kept = int(SHARE * values.size)

    def build() -> AllocationProblem:
        return problem_of(values, layers, heads, sense)

    def build_and_solve() -> object:
        problem = build()
        able = greedy.can_solve(problem)
        if able is not True:
            raise SystemExit(f"greedy refuses the benchmark's own problem: {able}")
        return greedy.solve(problem)

    seconds = timed_in_turns(
        {
            "greedy": build_and_solve,
            "partition": lambda: np.partition(values, values.size - kept, axis=None),
            "build": build,
        },
        repeats=repeats,
    )
    found = ratios(seconds, "greedy", "partition")
    answer = solve_problem(build(), greedy)
    return {
        "name": "greedy / np.partition",
        "sense": sense.value,
        "size": f"{layers} x {heads} x {ranks:,}",
        "repeats": repeats,
        **found,
        "target_ratio": GREEDY_TARGET,
        "met": found["ratio"] <= GREEDY_TARGET,
        "objective": answer.objective,
        "bound": answer.bound,
        "gap": answer.gap,
        **{name: summary(times) for name, times in seconds.items()},
    }


def ilp_row(layers: int, heads: int, options: int, sense: Sense, *, dented: bool) -> dict[str, Any]:
    values = curves(layers * heads, options)
    if dented:
        rng = np.random.default_rng(1)
        values = np.clip(values + rng.normal(0, 0.01, values.shape), 0, 1)
    problem = problem_of(values, layers, heads, sense)
    found = solve_problem(problem, get_solver("ilp"))
    best = None if dented else solve_problem(problem, get_solver("greedy")).objective
    same = best is None or abs(found.objective - best) <= 1e-10 * max(1.0, best)
    return {
        "name": "ilp, dented curves" if dented else "ilp",
        "sense": sense.value,
        "size": f"{layers} x {heads} x {problem.n_options:,}",
        "seconds": found.seconds,
        "target_seconds": ILP_TARGET_SECONDS,
        "objective": found.objective,
        "greedy_objective": best,
        "same_objective": same,
        "bound": found.bound,
        "gap": found.gap,
        "termination": found.termination.value,
        "detail": found.detail,
        "met": same and found.gap == 0 and found.seconds <= ILP_TARGET_SECONDS,
    }


def describe(row: dict[str, Any]) -> str:
    head = f"{row['name']:22} {row['sense']:9} {row['size']:>16}: "
    verdict = "met" if row["met"] else "MISSED"
    if "ratio" in row:
        return head + (
            f"ratio {row['ratio']:.2f} [{row['ratio_quartile_1']:.2f}, "
            f"{row['ratio_quartile_3']:.2f}] of {row['target_ratio']:g} {verdict}; "
            f"greedy {row['greedy']['median_seconds']:.3f} s, of which building "
            f"{row['build']['median_seconds']:.3f} s; "
            f"partition {row['partition']['median_seconds']:.3f} s; gap {row['gap']:g}"
        )
    greedy = row["greedy_objective"]
    beside = "greedy refuses" if greedy is None else f"greedy {greedy:.9g}"
    return head + (
        f"{row['seconds']:.2f} s of {row['target_seconds']:g} {verdict}; objective "
        f"{row['objective']:.9g}, {beside}, bound {row['bound']:.9g}, "
        f"gap {row['gap']:g} ({row['termination']}; {row['detail']})"
    )


if __name__ == "__main__":
    raise SystemExit(main())
