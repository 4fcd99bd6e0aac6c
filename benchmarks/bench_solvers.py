"""The solvers: time against one np.partition and SciPy's milp, memory, limits, and auto's choice.

    python benchmarks/bench_solvers.py [limits exact scale] [--quick]

What is compared runs in turns in one process; a figure is the median of the ratios of each round,
with their quartiles.

- limits: time over the limit and peak of memory on 126 x 8 x 131,072. Wrong claims are left to
  the tests of forgeries and of brute force.
- exact: lagrangian and dp against ilp on non-concave curves, 80 layers x 8 heads x 64 pages; ilp
  against `scipy.optimize.milp` on the same model to the same gap, without and with a cap for each
  layer and each head's place; and ilp against the clock on 30 x 3 x 1,001 options, as they are and
  with dents.
- scale: greedy and a frontier of 100 budgets on a gigabyte of curves, 126 x 8 x 131,072, from the
  bare arrays on (the problem is built and checked, its concavity is established, greedy solves it),
  against one `np.partition` of the same numbers; and the peak memory of a fresh process over the
  bytes of the curves.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from _common import (
    InTurns,
    Row,
    guarded,
    in_fresh_process,
    in_turns,
    made_up_shape,
    median_of,
    memory_bytes,
    parser_of,
    print_rows,
    ratio_of,
)

from kvalloc.accounting import FloatArray
from kvalloc.allocation.decision import solve
from kvalloc.allocation.formulation import formulate
from kvalloc.allocation.frontier import trace_frontier
from kvalloc.allocation.request import Request
from kvalloc.allocation.verification import limits_of, price_at, solve_problem
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.measure.curves import rank_grid
from kvalloc.problem import Aggregate, AllocationProblem, GroupCap, Sense
from kvalloc.problem.arrays import MaxDistinct
from kvalloc.problem.registry import get_solver

SHARE, RETENTION, POINTS = 0.2, 0.9, 100
PARTITION_TARGET, FRONTIER_TARGET, MEMORY_TARGET = 2.0, 10.0, 1.5
ILP_TARGET_SECONDS, LIBRARY_TARGET = 5.0, 1.5
GAP, LAGRANGIAN_GAP = 1e-6, 1e-5
OVER_TARGET, SHORT_LIMIT_SECONDS = 1.2, 10.0
LIMITED_CASES = (
    *("greedy", "flow", "uniform", "proportional", "adaptive_head"),
    *("adaptive_head:safeguard=floor", "max_min", "lagrangian", "hull"),
    *("max_min worst", "ilp worst crossing", "ilp crossing", "ilp few", "lagrangian crossing"),
    *("hull dents", "lagrangian dents", "ilp dents", "lagrangian crossing dents"),
)
MEMORY_CASES = {
    "every rank, budget": "every rank in the score profile, solve --budget",
    "every rank, retention": "every rank in the score profile, solve --target-retention",
    "every rank, frontier": f"every rank in the score profile, frontier of {POINTS}",
    "grid, budget": "grid in the score profile, solve --budget",
}


def main() -> int:
    parser = parser_of(__doc__, PARTS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit-of", choices=LIMITED_CASES, help=argparse.SUPPRESS)
    parser.add_argument("--memory-of", choices=MEMORY_CASES, help=argparse.SUPPRESS)
    requested = parser.parse_args()
    if requested.limit_of:
        print(json.dumps(measure_limit(requested.limit_of, scale_size(requested))))
        return 0
    if requested.memory_of:
        print(json.dumps(measure_memory(requested.memory_of, scale_size(requested))))
        return 0
    names = requested.parts or list(PARTS)
    rows = (
        row for name in names for row in guarded(name, lambda name=name: PARTS[name](requested))
    )
    return print_rows(rows, requested, "numpy", "scipy", "ortools", "kvalloc")


def limits(requested: argparse.Namespace) -> Iterator[Row]:
    for case in LIMITED_CASES:
        result = in_fresh_process(__file__, "--limit-of", case, *["--quick"][: requested.quick])
        peak = result["peak_bytes"] / 2**30
        yield {
            "name": f"time / limit, {case}",
            "figure": result["seconds"] / SHORT_LIMIT_SECONDS,
            "at_most": OVER_TARGET,
            "met": result["seconds"] <= OVER_TARGET * SHORT_LIMIT_SECONDS and peak <= 2.0,
            "note": f"{peak:.2f} GiB at the peak, wanted <= 2; {result['answer']}",
        }


def measure_limit(case: str, size: tuple[int, int, int]) -> Row:
    """Time and peak of solving, checking and pricing on a problem of 126 x 8 x 131,072."""
    name, *what = case.split(" ")
    layers, heads, ranks = size
    values = curves(layers * heads, np.arange(ranks))
    if "dents" in what:
        values[:, 1::2] -= 1e-9
    problem = problem_of(values, layers, heads, Sense.MAX_VALUE)
    if "worst" in what:
        problem = problem.replace(aggregate=Aggregate.WORST)
    if "crossing" in what:
        third, units = problem.n_units // 3, problem.units
        parts = (("first", units[: 2 * third], 0.19), ("last", units[third:], 0.18))
        problem = problem.replace(constraints=tuple(capped(problem, *part) for part in parts))
    if "few" in what:
        problem = problem.replace(constraints=(MaxDistinct(maximum=4),))
    start = time.perf_counter()
    solver, seconds = get_solver(name), SHORT_LIMIT_SECONDS
    answer = solve_problem(problem, solver, time_limit_seconds=seconds)
    price_at(problem, answer.choice, multiplier=answer.multiplier, prices=answer.prices)
    limits_of(problem, answer.choice, answer.prices or (answer.multiplier,))
    return {
        "seconds": time.perf_counter() - start,
        "peak_bytes": memory_bytes("VmHWM"),
        "answer": f"gap {answer.gap:.2g}, {answer.termination.value}",
    }


def exact(requested: argparse.Namespace) -> Iterator[Row]:
    layers, heads, pages = (8, 8, 16) if requested.quick else (80, 8, 64)
    plain = jagged_problem(layers, heads, pages)
    yield from against_ilp(plain, requested.repeats)
    yield against_library("ilp / scipy milp", plain, requested.repeats)
    yield against_library(f"ilp / scipy milp, {layers + heads} caps", with_caps(plain), 1)
    for dented in (False, True):
        for sense in Sense:
            yield ilp_row(sense, dented=dented)


def scale(requested: argparse.Namespace) -> Iterator[Row]:
    layers, heads, ranks = scale_size(requested)
    for case, words in MEMORY_CASES.items():
        result = in_fresh_process(__file__, "--memory-of", case, *["--quick"][: requested.quick])
        at, before, size = (result[f"{name}_bytes"] / 2**20 for name in ("peak", "before", "curve"))
        note = f"{at:,.0f} MiB at the peak, {before:,.0f} before, curves {size:,.0f}"
        yield {
            "name": f"memory / curves, {words}",
            "figure": at / size,
            "at_most": MEMORY_TARGET,
            "note": f"{note}; {result['answer']}",
        }
    values = curves(layers * heads, np.arange(ranks))
    size = f"{layers} x {heads} x {ranks:,}"
    timed = greedy_in_turns(values, layers, heads, requested.repeats)
    for sense in Sense:
        yield greedy_row(timed, sense, size)
    yield {
        "name": f"frontier of {POINTS} / one solve",
        **ratio_of(timed, "frontier", "max_value"),
        "at_most": FRONTIER_TARGET,
        "note": f"frontier {median_of(timed, 'frontier'):.3f} s; {size}",
    }


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "limits": limits,
    "exact": exact,
    "scale": scale,
}


# Problems


def curves(n_units: int, ranks: np.ndarray[Any, np.dtype[np.int64]], seed: int = 0) -> FloatArray:
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


def problem_of(values: FloatArray, layers: int, heads: int, sense: Sense) -> AllocationProblem:
    """The head-level problem of stored curves, 512 bytes an entry: nothing is copied."""
    tokens = np.arange(12, 12 + values.shape[1], dtype=np.int64)
    capacity = int(SHARE * values.size) * 512
    weights = np.full(values.shape[0], 1.0 / values.shape[0])
    return stacked(values, tokens, 512, weights, heads, sense, capacity)


def stacked(
    values: FloatArray,
    tokens: Any,
    entry_bytes: int,
    weights: FloatArray,
    heads: int,
    sense: Sense,
    capacity: int,
) -> AllocationProblem:
    """A problem whose units have the same options."""
    n_units, n_options = values.shape
    maximise = sense is Sense.MAX_VALUE
    return AllocationProblem(
        tokens=np.broadcast_to(tokens, values.shape),
        values=values,
        costs=np.broadcast_to(tokens * entry_bytes, values.shape),
        option_counts=np.full(n_units, n_options, dtype=np.int64),
        weights=weights,
        layers=np.repeat(np.arange(n_units // heads), heads),
        heads=np.tile(np.arange(heads), n_units // heads),
        capacity_bytes=capacity if maximise else None,
        target=None if maximise else RETENTION,
        context_tokens=int(tokens[-1]),
        protected_tokens=8,
    )


def jagged_problem(layers: int, heads: int, pages: int) -> AllocationProblem:
    """Gains that fall on the whole and jump from page to page, 30% of the bytes."""
    random = np.random.default_rng(0)
    n_units = layers * heads
    fall = random.uniform(3, 30, (n_units, 1))
    gains = random.exponential(1.0, (n_units, pages - 1)) * random.exponential(1, (n_units, 1))
    gains *= np.exp(-np.arange(pages - 1) / fall)
    values = np.concatenate([np.zeros((n_units, 1)), np.cumsum(gains, axis=1)], axis=1)
    values /= values[:, -1].sum()
    tokens = 16 * np.arange(1, pages + 1, dtype=np.int64)
    low, high = (n_units * int(tokens[at]) * 256 for at in (0, -1))
    capacity = int(low + 0.3 * (high - low))
    return stacked(values, tokens, 256, np.ones(n_units), heads, Sense.MAX_VALUE, capacity)


def capped(problem: AllocationProblem, name: str, units: Any, share: float) -> GroupCap:
    """A cap of a group at a share of what it may take."""
    maximum = int(share * int(problem.costs[units, -1].sum()))
    return GroupCap(name=name, units=tuple(units.tolist()), capacity_bytes=maximum)


def with_caps(problem: AllocationProblem) -> AllocationProblem:
    """A cap for every layer and for the heads at each place, many of them tight."""
    random = np.random.default_rng(1)
    caps = [
        capped(
            problem, f"layer {n}", np.flatnonzero(problem.layers == n), random.uniform(0.25, 0.5)
        )
        for n in np.unique(problem.layers).tolist()
    ]
    caps += [
        capped(problem, f"place {n}", np.flatnonzero(problem.heads == n), 0.3)
        for n in np.unique(problem.heads).tolist()
    ]
    return dataclasses.replace(problem, constraints=tuple(caps))


def scale_size(requested: argparse.Namespace) -> tuple[int, int, int]:
    return (8, 8, 8192) if requested.quick else (126, 8, 131_072)


def score_profile(
    layers: int, heads: int, n_ranks: int, *, grid: bool = False, samples: int = 1
) -> ScoreProfile:
    """Return made-up curves, with every rank or on the grid of long contexts."""
    context = n_ranks - 1 + 12
    ranks = rank_grid(n_ranks - 1, context) if grid else np.arange(n_ranks, dtype=np.int64)
    return ScoreProfile(
        shape=made_up_shape(layers, heads),
        scorer="xkv",
        scorer_parameters={},
        context_tokens=context,
        sinks=4,
        window=8,
        ranks=ranks,
        curves=curves(samples * layers * heads, ranks).reshape(samples, layers, heads, -1),
        masses=np.random.default_rng(1).uniform(0.5, 1.5, (samples, layers, heads)),
        sample_tokens=np.full(samples, context),
        text_description="made up",
    )


# Measurements


def greedy_in_turns(values: FloatArray, layers: int, heads: int, repeats: int) -> InTurns:
    """Greedy from the bare arrays on, a frontier of it, and one np.partition."""
    greedy, kept = get_solver("greedy"), int(SHARE * values.size)

    def solved(sense: Sense) -> object:
        problem = problem_of(values, layers, heads, sense)
        if (able := greedy.can_solve(problem)) is not True:
            raise SystemExit(f"greedy refuses the benchmark's own problem: {able}")
        return greedy.solve(problem)

    def traced() -> object:
        problem = problem_of(values, layers, heads, Sense.MAX_VALUE)
        steps = np.geomspace(1, values.shape[1] - 1, POINTS).astype(np.int64)
        sizes = problem.min_cost_bytes + steps * layers * heads * 512
        return trace_frontier(problem, greedy, sizes.tolist())

    calls: dict[str, Callable[[], object]] = {
        sense.value: lambda sense=sense: solved(sense) for sense in Sense
    }
    calls["partition"] = lambda: np.partition(values, values.size - kept, axis=None)
    calls["frontier"] = traced
    return in_turns(calls, repeats=repeats)


def greedy_row(result: InTurns, sense: Sense, size: str) -> Row:
    mine, partition = (median_of(result, name) for name in (sense.value, "partition"))
    return {
        "name": f"greedy {sense.value} / np.partition, {size}",
        **ratio_of(result, sense.value, "partition"),
        "at_most": PARTITION_TARGET,
        "note": f"{mine:.3f} s; partition {partition:.3f} s",
    }


def ilp_row(sense: Sense, *, dented: bool) -> Row:
    values = curves(90, np.arange(1001))
    if dented:
        noise = np.random.default_rng(1).normal(0, 0.01, values.shape)
        values = np.clip(values + noise, 0, 1)
    problem = problem_of(values, 30, 3, sense)
    result = solve_problem(problem, get_solver("ilp"))
    best = None if dented else solve_problem(problem, get_solver("greedy")).objective
    same = best is None or abs(result.objective - best) <= 1e-10 * max(1.0, best)
    reference = "greedy refuses" if best is None else f"greedy {best:.9g}"
    return {
        "name": f"ilp{', dented curves' if dented else ''} {sense.value}, 30 x 3 x 1,001",
        "figure": result.seconds,
        "unit": "s",
        "at_most": ILP_TARGET_SECONDS,
        "met": same and result.gap == 0 and result.seconds <= ILP_TARGET_SECONDS,
        "note": f"objective {result.objective:.9g}, {reference}, "
        f"gap {result.gap:g} ({result.detail})",
    }


def against_ilp(problem: AllocationProblem, repeats: int) -> Iterator[Row]:
    solvers = {name: get_solver(name) for name in ("lagrangian", "dp", "ilp")}
    answers = {name: solve_problem(problem, solver) for name, solver in solvers.items()}
    result = in_turns(
        {
            name: lambda one=one: one.solve(dataclasses.replace(problem))
            for name, one in solvers.items()
        },
        repeats=repeats,
        warm_up=0,
    )
    best = answers["ilp"].objective
    for name in ("lagrangian", "dp"):
        answer, seconds = answers[name], median_of(result, name)
        good = (answer.gap or 0.0) <= LAGRANGIAN_GAP
        if name == "dp":
            good = abs(answer.objective - best) <= 1e-10 and answer.gap == 0
        yield {
            "name": f"ilp / {name}",
            **ratio_of(result, "ilp", name),
            "met": good,
            "note": f"{name} {seconds:.3f} s, ilp {median_of(result, 'ilp'):.3f} s; gap "
            f"{answer.gap:.2g}, {answer.termination.value}",
        }


def against_library(name: str, problem: AllocationProblem, repeats: int) -> Row:
    ilp = get_solver("ilp", gap=GAP)
    answers: list[Any] = []
    direct: list[float] = []
    result = in_turns(
        {
            "ilp": lambda: answers.append(ilp.solve(dataclasses.replace(problem))),
            "milp": lambda: direct.append(milp_directly(problem)),
        },
        repeats=repeats,
        warm_up=0,
    )
    choice, bound = answers[0].choice, answers[0].bound
    fault = problem.side_fault(choice)
    if fault is not None or problem.cost(choice) > (problem.capacity_bytes or 0) or bound is None:
        raise ValueError(f"ilp breaks a constraint or has no bound: {fault}")
    objective = problem.objective(choice)
    gap = abs(bound - objective) / abs(objective)
    if abs(objective - direct[0]) > 2 * GAP * abs(direct[0]) or gap > 1.001 * GAP:
        raise ValueError(f"ilp reaches {objective} with a gap of {gap}, milp {direct[0]}")
    return {
        "name": name,
        **ratio_of(result, "ilp", "milp"),
        "at_most": LIBRARY_TARGET,
        "note": f"ilp {median_of(result, 'ilp'):.3f} s, milp {median_of(result, 'milp'):.3f} s; "
        f"gap {gap:.2g}; rounds: {repeats}",
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
    caps: list[tuple[Any, Any]] = [(np.arange(n), problem.capacity_bytes)]
    caps += [(np.asarray(c.units), c.capacity_bytes) for c in problem.constraints]  # type: ignore[attr-defined]
    rows = []
    for units, _ in caps:
        row = sparse.lil_matrix((1, n * k))
        row[0, picks[units].ravel()] = costs[picks[units].ravel()]
        rows.append(row.tocsr())
    limits = np.array([capacity / problem.lattice_bytes for _, capacity in caps])
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


def measure_memory(case: str, size: tuple[int, int, int]) -> Row:
    """Peak memory of this process around one call on a score profile made here."""
    layers, heads, n_ranks = size
    where, what = case.split(", ")
    scores = score_profile(layers, heads, n_ranks, grid=where == "grid")
    before = memory_bytes("VmHWM")
    if what == "frontier":
        problem = formulate(scores, Request.parse(budget=1.0, level="head"))
        sizes = np.geomspace(problem.min_cost_bytes, problem.max_cost_bytes, POINTS)
        points = trace_frontier(problem, get_solver("greedy"), sizes.astype(np.int64).tolist())
        answer = f"{len(points)} points"
    else:
        goal = {"target_retention": RETENTION} if what == "retention" else {"budget": SHARE}
        result: Any = solve(scores, level="head", solver="greedy", **goal)  # type: ignore[arg-type]
        answer = f"retention {result.retention:.6f}, gap {result.gap:g}"
    return {
        "before_bytes": before,
        "peak_bytes": memory_bytes("VmHWM"),
        "curve_bytes": layers * heads * (n_ranks if where == "grid" else scores.ranks.size) * 8,
        "answer": answer,
    }


if __name__ == "__main__":
    raise SystemExit(main())
