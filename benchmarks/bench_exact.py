"""Exact solvers and bounds against the clock: lagrangian, dp and ilp, and what a library takes.

    python benchmarks/bench_exact.py [--scores FILE] [--repeats N] [--quick] [--json]

Non-concave curves, 80 layers x 8 heads x 64 pages of 16 tokens (40,960 options), most value within
30% of the bytes. What is compared runs in turns; a figure is the ratio of the medians, with the
quartiles of the ratio of each round.

- lagrangian: its gap, and its seconds against ilp as everybody gets it, which proves the optimum;
  the ratio is stated as it is, without a verdict.
  ilp starts from the same dual bound and leaves out nearly all options by it, so most of the speed
  is in both.
- dp: exact, against the same.
- ilp to a gap of 1e-6 against `scipy.optimize.milp` called directly on the same model, to the
  same gap; and both with 88 caps more, one for each layer and one for each head's place.
- few budgets: pages of 16, at most 4 different budgets: the best
  rounding of greedy against ilp, on curves of the real model: the demo's, measured on the spot,
  or those of ``--scores``.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from _common import (
    describe_where,
    guarded,
    ratios,
    summary,
    timed_in_turns,
    where_it_ran,
)
from _real import described, real_scores

from kvalloc.allocation.formulation import formulate
from kvalloc.allocation.request import Request
from kvalloc.allocation.verification import solve_problem
from kvalloc.problem import AllocationProblem, GroupCap, MaxDistinct, Sense, Solution
from kvalloc.problem.registry import get_solver

PAGE_TOKENS = 16
BYTES_PER_TOKEN = 256
GAP = 1e-6
LAGRANGIAN_GAP = 1e-5
LIBRARY_RATIO = 1.5
LEVELS = 4


def main() -> int:
    arguments = parse_arguments()
    where = where_it_ran("numpy", "scipy", "ortools", "kvalloc")
    if not arguments.json:
        print(describe_where(where), flush=True)
    rows = []
    for row in all_rows(arguments):
        rows.append(row)
        if not arguments.json:
            print(describe(row), flush=True)
    if arguments.json:
        print(json.dumps({"rows": rows, "where": where}, indent=1))
    return 0 if arguments.quick or all(row["met"] for row in rows) else 1


def all_rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    layers, heads, pages = (80, 8, 64) if not arguments.quick else (8, 8, 16)
    plain = jagged_problem(layers, heads, pages)
    capped = with_caps(plain)
    library, caps = "ilp / scipy milp", f"{layers + heads} caps"
    yield from guarded("lagrangian, dp", lambda: against_ilp(plain, arguments.repeats))
    yield from guarded("few budgets", lambda: few_budgets(arguments.scores))
    yield from guarded(library, lambda: [against_library(library, plain, arguments.repeats)])
    name = f"{library}, {caps}"
    yield from guarded(name, lambda: [against_library(name, capped, 1)])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="exact solvers against the clock")
    parser.add_argument("--scores", help="a score profile; the demo model is measured without")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def jagged_problem(layers: int, heads: int, pages: int, seed: int = 0) -> AllocationProblem:
    """Gains that fall on the whole and jump from page to page: ranked by one, paid in another."""
    random = np.random.default_rng(seed)
    n_units = layers * heads
    fall = random.uniform(3, 30, (n_units, 1))
    gains = random.exponential(1.0, (n_units, pages - 1)) * random.exponential(1, (n_units, 1))
    gains *= np.exp(-np.arange(pages - 1) / fall)
    return paged_problem(gains, layers, heads)


def paged_problem(
    gains: np.ndarray[Any, np.dtype[np.float64]], layers: int, heads: int, share: float = 0.3
) -> AllocationProblem:
    n_units, pages = gains.shape[0], gains.shape[1] + 1
    values = np.concatenate([np.zeros((n_units, 1)), np.cumsum(gains, axis=1)], axis=1)
    values /= values[:, -1].sum()
    tokens = PAGE_TOKENS * np.arange(1, pages + 1, dtype=np.int64)
    costs = tokens * BYTES_PER_TOKEN
    low, high = n_units * int(costs[0]), n_units * int(costs[-1])
    return AllocationProblem(
        tokens=np.broadcast_to(tokens, values.shape),
        values=values,
        costs=np.broadcast_to(costs, values.shape),
        option_counts=np.full(n_units, pages, dtype=np.int64),
        weights=np.ones(n_units),
        layers=np.repeat(np.arange(layers), heads),
        heads=np.tile(np.arange(heads), layers),
        sense=Sense.MAX_VALUE,
        capacity_bytes=int(low + share * (high - low)),
        context_tokens=int(tokens[-1]),
        protected_tokens=8,
    )


def with_caps(problem: AllocationProblem, seed: int = 1) -> AllocationProblem:
    """A cap for every layer and for the heads at each place, many of them tight."""
    random = np.random.default_rng(seed)

    def cap(name: str, units: np.ndarray[Any, Any], share: float) -> GroupCap:
        most = int(problem.costs[units, -1].sum())
        return GroupCap(name=name, units=tuple(units.tolist()), capacity_bytes=int(share * most))

    caps = [
        cap(f"layer {n}", np.flatnonzero(problem.layers == n), float(random.uniform(0.25, 0.5)))
        for n in np.unique(problem.layers).tolist()
    ]
    caps += [
        cap(f"rank {n}", np.flatnonzero(problem.heads == n), 0.3)
        for n in np.unique(problem.heads).tolist()
    ]
    return dataclasses.replace(problem, constraints=tuple(caps))


def against_ilp(problem: AllocationProblem, repeats: int) -> list[dict[str, Any]]:
    solvers = {
        "lagrangian": get_solver("lagrangian"),
        "dp": get_solver("dp"),
        "ilp": get_solver("ilp"),
    }
    answers = {name: solve_problem(problem, solver) for name, solver in solvers.items()}
    seconds = timed_in_turns(
        {name: caller(solver, problem) for name, solver in solvers.items()},
        repeats=repeats,
        warm_up=0,  # each has just solved it
    )
    exact = answers["ilp"].objective
    rows = []
    for name in ("lagrangian", "dp"):
        found, answer = ratios(seconds, "ilp", name), answers[name]
        good, wanted = (answer.gap or 0.0) <= LAGRANGIAN_GAP, f"<= {LAGRANGIAN_GAP:g}"
        if name == "dp":
            good, wanted = abs(answer.objective - exact) <= 1e-10 and answer.gap == 0, "0"
        rows.append(
            {
                "name": f"ilp / {name}",
                **found,
                "met": good,
                "note": f"gap {answer.gap:.2g} (wanted {wanted}) {verdict_of(good)}, "
                f"{answer.termination.value}",
                name: summary(seconds[name]),
                "ilp": summary(seconds["ilp"]),
            }
        )
    return rows


def caller(solver: Any, problem: AllocationProblem) -> Callable[[], object]:
    # A fresh copy each time: nothing that one call has computed is there for the next.
    return lambda: solver.solve(dataclasses.replace(problem))


def against_library(name: str, problem: AllocationProblem, repeats: int) -> dict[str, Any]:
    ilp = get_solver("ilp", gap=GAP)
    answers: list[Solution] = []
    direct: list[float] = []
    seconds = timed_in_turns(
        {
            "ilp": lambda: answers.append(ilp.solve(dataclasses.replace(problem))),
            "milp": lambda: direct.append(milp_directly(problem)),
        },
        repeats=repeats,
        warm_up=0,
    )
    found = ratios(seconds, "ilp", "milp")
    choice, bound = answers[0].choice, answers[0].bound
    fault = problem.side_fault(choice)
    if fault is not None or problem.cost(choice) > (problem.capacity_bytes or 0) or bound is None:
        raise ValueError(f"ilp breaks a constraint or has no bound: {fault}")
    objective = problem.objective(choice)
    gap = abs(bound - objective) / abs(objective)
    close = abs(objective - direct[0]) <= 2 * GAP * abs(direct[0])
    return {
        "name": name,
        **found,
        "target": f"<= {LIBRARY_RATIO:g}",
        "met": found["ratio"] <= LIBRARY_RATIO and close and gap <= 1.001 * GAP,
        "note": f"gap {gap:.2g}, objective {objective:.9g}, directly {direct[0]:.9g}; "
        f"rounds: {repeats}",
        "ilp": summary(seconds["ilp"]),
        "milp": summary(seconds["milp"]),
    }


def milp_directly(problem: AllocationProblem) -> float:
    """The whole problem given to HiGHS as it stands."""
    from scipy import sparse
    from scipy.optimize import Bounds, LinearConstraint, milp

    from kvalloc.solvers._ilp_program import stdout_kept_clean

    n, k = problem.values.shape
    worth = (problem.weights[:, None] * problem.values).ravel()
    costs = (problem.costs / problem.lattice_bytes).ravel()
    picks = np.arange(n * k).reshape(n, k)
    every = (np.arange(n), problem.capacity_bytes)
    caps = [(np.asarray(c.units), c.capacity_bytes) for c in problem.constraints]  # type: ignore[attr-defined]
    rows = []
    for units, _ in (every, *caps):
        row = sparse.lil_matrix((1, n * k))
        row[0, picks[units].ravel()] = costs[picks[units].ravel()]
        rows.append(row.tocsr())
    limits = np.array([capacity / problem.lattice_bytes for _, capacity in (every, *caps)])
    one = sparse.csr_matrix((np.ones(n * k), (np.repeat(np.arange(n), k), np.arange(n * k))))
    with stdout_kept_clean():
        answer = milp(
            -worth,
            integrality=np.ones(n * k),
            bounds=Bounds(0, 1),
            constraints=[
                LinearConstraint(sparse.vstack(rows), -np.inf, limits),
                LinearConstraint(one, 1, 1),
            ],
            options={"mip_rel_gap": GAP},
        )
    return float(-answer.fun)


def few_budgets(path: str | None) -> Iterator[dict[str, Any]]:
    """Problems of whole pages, at most 4 different budgets."""
    sides = (MaxDistinct(most=LEVELS),)
    scores = real_scores(path)
    for share in ("10%", "20%", "40%"):
        request = Request.parse(budget=share, level="head", page=PAGE_TOKENS)
        problem = dataclasses.replace(formulate(scores, request), constraints=sides)
        yield rounding_beaten(f"few budgets, {described(scores)}, {share} kept", problem)


def rounding_beaten(name: str, problem: AllocationProblem) -> dict[str, Any]:
    free = solve_problem(dataclasses.replace(problem, constraints=()), get_solver("greedy"))
    start = time.perf_counter()
    rounded = best_rounding(problem, free.choice)
    rounding_seconds = time.perf_counter() - start
    answer = solve_problem(problem, get_solver("ilp"), time_limit_seconds=300)
    beaten = answer.objective - rounded
    return {
        "name": name,
        "rounding": rounded,
        "rounding_seconds": rounding_seconds,
        "ilp": answer.objective,
        "bound": answer.bound,
        "termination": answer.termination.value,
        "seconds": answer.seconds,
        "without_sides": free.objective,
        "lost_by_rounding": free.objective - rounded,
        "lost_by_ilp": free.objective - answer.objective,
        "met": beaten > 0 and answer.gap == 0,
    }


def best_rounding(problem: AllocationProblem, choice: np.ndarray[Any, Any]) -> float:
    """The best of many ways to round greedy's budgets to 4 levels.

    Levels: quantiles of the budgets, means of runs of like budgets (the best 1-D clustering), and
    both moved by a page or two. Rounded down, up or to the nearest; what is then too much is taken
    from the units that lose least, and what is left is given to those that gain most.
    """
    pages = problem.chosen_tokens(choice)
    levels = problem.tokens[0]
    starts = {tuple(np.quantile(pages, q)) for q in _quantiles()} | {tuple(_clusters(pages))}
    best = -np.inf
    for start in starts:
        for move in itertools.product((-PAGE_TOKENS, 0, PAGE_TOKENS), repeat=LEVELS):
            places = np.searchsorted(levels, np.asarray(start) + move)
            places = np.unique(np.clip(places, 0, levels.size - 1))
            for side in ("down", "nearest", "up"):
                rounded = _repaired(problem, _rounded(levels, places, pages, side), places)
                if rounded is not None:
                    best = max(best, problem.objective_value(rounded))
    return float(best)


def _quantiles() -> list[list[float]]:
    return [[0.1, 0.4, 0.7, 1.0], [0.0, 0.33, 0.67, 1.0], [0.25, 0.5, 0.75, 1.0]]


def _clusters(pages: np.ndarray[Any, Any]) -> list[float]:
    """Means of the best split into 4 runs by squared distance."""
    ordered = np.sort(pages).astype(np.float64)
    n = ordered.size
    sums, squares = np.cumsum(np.append(0, ordered)), np.cumsum(np.append(0, ordered**2))

    def spread(a: int, b: int) -> float:
        return float(squares[b] - squares[a] - (sums[b] - sums[a]) ** 2 / (b - a))

    cost = np.full((LEVELS + 1, n + 1), np.inf)
    cost[0, 0] = 0.0
    cut = np.zeros((LEVELS + 1, n + 1), dtype=np.int64)
    for k in range(1, LEVELS + 1):
        for b in range(k, n + 1):
            options = [cost[k - 1, a] + spread(a, b) for a in range(k - 1, b)]
            cut[k, b] = k - 1 + int(np.argmin(options))
            cost[k, b] = min(options)
    means, b = [], n
    for k in range(LEVELS, 0, -1):
        a = int(cut[k, b])
        means.append(float(ordered[a:b].mean()))
        b = a
    return means[::-1]


def _rounded(
    levels: np.ndarray[Any, Any],
    places: np.ndarray[Any, Any],
    pages: np.ndarray[Any, Any],
    side: str,
) -> np.ndarray[Any, Any]:
    chosen = levels[places]
    above = np.clip(np.searchsorted(chosen, pages), 0, places.size - 1)
    below = np.clip(np.searchsorted(chosen, pages, side="right") - 1, 0, places.size - 1)
    if side == "down":
        return below
    if side == "up":
        return above
    nearer = np.abs(chosen[above] - pages) < np.abs(pages - chosen[below])
    return np.where(nearer, above, below)


def _repaired(
    problem: AllocationProblem, at: np.ndarray[Any, Any], places: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any] | None:
    """Down to the capacity, up with what is left; None where the levels start too high."""
    worth = problem.weights[:, None] * problem.values[:, places]
    costs = problem.costs[:, places]
    units = np.arange(problem.n_units)
    assert problem.capacity_bytes is not None
    while int(costs[units, at].sum()) > problem.capacity_bytes:
        under = np.maximum(at - 1, 0)
        saved = costs[units, at] - costs[units, under]
        loss = np.where(
            saved > 0, (worth[units, at] - worth[units, under]) / np.maximum(saved, 1), np.inf
        )
        if not np.isfinite(loss.min()):
            return None
        at[int(np.argmin(loss))] -= 1
    while True:
        over = np.minimum(at + 1, places.size - 1)
        extra = costs[units, over] - costs[units, at]
        left = problem.capacity_bytes - int(costs[units, at].sum())
        able = (extra > 0) & (extra <= left)
        if not able.any():
            break
        gain = np.where(able, worth[units, over] - worth[units, at], -np.inf)
        at[int(np.argmax(gain))] += 1
    choice: np.ndarray[Any, Any] = places[at]
    return choice


def verdict_of(met: bool) -> str:
    return "met" if met else "MISSED"


def describe(row: dict[str, Any]) -> str:
    verdict = verdict_of(row["met"])
    if "error" in row:
        return f"{row['name']}: FAILED: {row['error']}"
    if "ratio" in row:
        wanted = f" (wanted {row['target']}) {verdict}" if "target" in row else ""
        times = ", ".join(
            f"{name} {part['median_seconds']:.3f} s"
            for name, part in row.items()
            if isinstance(part, dict)
        )
        return (
            f"{row['name']:42} ratio {row['ratio']:.3g} [{row['ratio_quartile_1']:.3g}, "
            f"{row['ratio_quartile_3']:.3g}]{wanted}; {times}; {row['note']}"
        )
    return (
        f"{row['name']}: best rounding of greedy {row['rounding']:.6f} loses "
        f"{row['lost_by_rounding']:.6f} of {row['without_sides']:.6f}, ilp {row['ilp']:.6f} loses "
        f"{row['lost_by_ilp']:.6f} ({row['termination']} in {row['seconds']:.2f} s) {verdict}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
