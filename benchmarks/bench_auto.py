"""The solver auto against all others on a set of problems of every kind, and what choosing costs.

    python benchmarks/bench_auto.py [--scores FILE] [--repeats N] [--quick] [--json]

The set: curves of the real model (demo, or --scores), by layer and by KV head, a budget of 20% and
a retention of 0.9, without side constraints, in pages of 16, and with caps, one budget a layer,
few budgets, four ranks, the worst unit, and curves with dents; and made-up problems of all kinds
of `kvalloc.testing.KINDS`, 8 layers x 4 heads x 32 options, both senses.

- auto is never worse: its objective against the best that any other solver of kvalloc reaches
  within the time limit.
- choosing costs under 1%: what auto takes to find the solver, beyond what that solver needs to
  say itself that it can (both on a fresh problem, of which nothing is known yet, in turns, the
  least of many), over the seconds of that solver on the problem, its own check included. Judged
  on all problems together, and on each that takes 10 ms or more: choosing takes up to a tenth of
  a millisecond whatever the size, which no solve of a millisecond can hide. Every share is shown.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from _common import describe_where, guarded, where_it_ran
from _real import CONTEXT_TOKENS, SAMPLES, real_scores

from kvalloc.allocation.formulation import formulate
from kvalloc.allocation.request import Request
from kvalloc.allocation.verification import CheckedSolution, solve_problem
from kvalloc.errors import InfeasibleError, KVAllocError
from kvalloc.problem import AllocationProblem, Sense, Solver, Termination
from kvalloc.problem.constraints import GroupCap, MaxDistinct, SameBudget
from kvalloc.problem.registry import get_solver, solver_names
from kvalloc.solvers.auto import Auto
from kvalloc.testing import KINDS, larger_problem

SLACK = 1e-9
CHOICE_TARGET = 0.01
JUDGED_SECONDS = 0.01
MEASURED_SECONDS = 0.5
LIMIT_SECONDS = 20.0
SIZE = {"n_layers": 8, "n_heads": 4, "n_options": 32}


def main() -> int:
    arguments = parse_arguments()
    where = where_it_ran("numpy", "scipy", "ortools", "kvalloc")
    if not arguments.json:
        real = arguments.scores or f"demo, {SAMPLES} samples of {CONTEXT_TOKENS:,} tokens"
        print(f"{describe_where(where)}\nreal: {real}", flush=True)
    rows = []
    for row in all_rows(arguments):
        rows.append(row)
        if not arguments.json:
            print(describe(row), flush=True)
    totals = in_all(rows)
    if arguments.json:
        print(json.dumps({"rows": rows, **totals, "where": where}, indent=1))
    else:
        print(describe_totals(totals))
    return 0 if arguments.quick or totals["met"] else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="auto against all other solvers")
    parser.add_argument("--scores", help="a score profile; the demo model is measured without")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="few problems, to see that it runs")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def all_rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row for each problem of the stated set."""
    repeats = arguments.repeats
    kinds = KINDS[:4] if arguments.quick else KINDS
    yield from guarded("real curves", lambda: rows_of(real_problems(arguments.scores), repeats))
    yield from guarded("made-up problems", lambda: rows_of(made_up_problems(kinds), repeats))


def rows_of(
    problems: Iterable[tuple[str, AllocationProblem]], repeats: int
) -> Iterator[dict[str, Any]]:
    for name, problem in problems:
        yield row_of(name, problem, repeats)


def made_up_problems(kinds: Sequence[str]) -> Iterator[tuple[str, AllocationProblem]]:
    for kind in kinds:
        for sense in Sense:
            yield f"{kind}, {sense.value}", larger_problem(kind, seed=1, sense=sense, **SIZE)


def real_problems(path: str | None) -> Iterator[tuple[str, AllocationProblem]]:
    scores = real_scores(path)
    goals: tuple[dict[str, Any], ...] = ({"budget": 0.2}, {"target_retention": 0.9})
    for goal in goals:
        word = "20%" if "budget" in goal else "retention 0.9"
        yield f"real layers, {word}", formulate(scores, Request.parse(level="layer", **goal))
        heads = formulate(scores, Request.parse(level="head", **goal))
        yield f"real heads, {word}", heads
        worst = formulate(scores, Request.parse(level="head", objective="worst", **goal))
        yield f"real heads, worst unit, {word}", worst
        yield f"real heads, dents, {word}", dented(heads)
        pages = formulate(scores, Request.parse(level="head", page=16, **goal))
        yield f"real heads, pages, {word}", pages
        for side, constraints in sides(pages).items():
            yield (
                f"real heads, pages, {side}, {word}",
                dataclasses.replace(pages, constraints=constraints),
            )


def dented(problem: AllocationProblem) -> AllocationProblem:
    """The same with noise on the curves: no longer concave, nor rising."""
    noise = np.random.default_rng(1).normal(0, 0.002, problem.values.shape)
    values = np.clip(problem.values * (1 + noise), 0, problem.values[:, -1:])
    values[:, -1] = problem.values[:, -1]
    return dataclasses.replace(problem, values=values)


def sides(problem: AllocationProblem) -> dict[str, tuple[Any, ...]]:
    """What else engines ask for."""
    layers = np.unique(problem.layers).tolist()
    half = problem.layers < layers[len(layers) // 2]
    caps = []
    for number, inside in enumerate((half, ~half)):
        units = np.flatnonzero(inside)
        low, high = (int(problem.costs[units, at].sum()) for at in (0, -1))
        most = low + int((0.12, 0.5)[number] * (high - low))
        caps.append(
            GroupCap(name=f"device {number}", units=tuple(units.tolist()), capacity_bytes=most)
        )
    groups = tuple(tuple(np.flatnonzero(problem.layers == n).tolist()) for n in layers)
    found: dict[str, tuple[Any, ...]] = {
        "one budget a layer": (SameBudget(groups=groups),),
        "4 budgets": (MaxDistinct(most=4),),
    }
    if problem.sense is Sense.MAX_VALUE:  # within these caps a retention of 0.9 is out of reach
        found["caps"] = tuple(caps)
    return found


def row_of(name: str, problem: AllocationProblem, repeats: int) -> dict[str, Any]:
    auto = solved(problem, Auto())
    chosen = next(iter(Auto()._able(fresh(problem))))[0].solver
    answers = {other: solved(problem, solver) for other, solver in others(problem).items()}
    values = {other: a for other, a in answers.items() if isinstance(a, CheckedSolution)}
    if not isinstance(auto, CheckedSolution):
        rightly = not values and isinstance(auto, InfeasibleError)
        return {"name": name, "chosen": chosen, "met": rightly, "error": str(auto)}
    beaten = {
        other: answer.objective
        for other, answer in values.items()
        if problem.is_better(answer.objective, auto.objective, SLACK)
    }
    choosing, solving = choice_seconds(problem, chosen, repeats)
    return {
        "name": name,
        "chosen": chosen,
        "objective": auto.objective,
        "optimal": auto.termination is Termination.OPTIMAL,
        "gap": auto.gap,
        "others": len(values),
        "beaten_by": beaten,
        "choosing_seconds": choosing,
        "solving_seconds": solving,
        "choice_share": choosing / solving,
        "met": not beaten and (solving < JUDGED_SECONDS or choosing / solving < CHOICE_TARGET),
    }


def others(problem: AllocationProblem) -> dict[str, Solver]:
    """Every other solver of kvalloc that accepts the problem."""
    made = {n: get_solver(n) for n in solver_names() if n != "auto"}
    return {
        name: solver
        for name, solver in made.items()
        if type(solver).__module__.startswith("kvalloc.solvers.")
        and solver.can_solve(problem) is True
    }


def solved(problem: AllocationProblem, solver: Solver) -> CheckedSolution | KVAllocError:
    try:
        return solve_problem(problem, solver, time_limit_seconds=LIMIT_SECONDS)
    except KVAllocError as error:
        return error


def fresh(problem: AllocationProblem) -> AllocationProblem:
    """The same problem with nothing computed from its arrays yet."""
    return dataclasses.replace(problem)


def choice_seconds(problem: AllocationProblem, chosen: str, repeats: int) -> tuple[float, float]:
    """What auto's choice adds to the chosen solver's own check, and that check with its solve.

    Each on a copy of which nothing is known, first one, then the other, then the other way round;
    the least of all rounds, as anything more is somebody else's doing.
    """
    solver, auto = get_solver(chosen), Auto()
    rounds: dict[str, list[float]] = {"choose": [], "check": [], "solve": []}
    calls: list[tuple[str, Callable[[AllocationProblem], object]]] = [
        ("choose", lambda copy: next(iter(auto._able(copy)))),
        ("check", solver.can_solve),
    ]
    until = time.perf_counter() + MEASURED_SECONDS
    while len(rounds["solve"]) < 2 * repeats or time.perf_counter() < until:
        for name, call in calls:
            copy = fresh(problem)
            rounds[name].append(timed(lambda call=call, copy=copy: call(copy)))
        rounds["solve"].append(timed(lambda copy=copy: solver.solve(copy)))
        calls.reverse()
        if time.perf_counter() > until and len(rounds["solve"]) >= 2:
            break
    least = {name: min(seconds) for name, seconds in rounds.items()}
    return max(0.0, least["choose"] - least["check"]), least["check"] + least["solve"]


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_all(rows: list[dict[str, Any]]) -> dict[str, Any]:
    measured = [row for row in rows if "choice_share" in row]
    shares = sorted(row["choice_share"] for row in measured) or [math.nan]
    choosing, solving = (
        sum(row[part] for row in measured) for part in ("choosing_seconds", "solving_seconds")
    )
    return {
        "problems": len(rows),
        "optimal": sum(bool(row.get("optimal")) for row in rows),
        "worse": sum(bool(row.get("beaten_by")) for row in rows),
        "failed": sum("error" in row and not row["met"] for row in rows),
        "share_median": statistics.median(shares),
        "share_largest": shares[-1],
        "share_judged": max(
            (r["choice_share"] for r in measured if r["solving_seconds"] >= JUDGED_SECONDS),
            default=math.nan,
        ),
        "share_of_all": choosing / solving if measured else math.nan,
        "met": all(row["met"] for row in rows) and choosing < CHOICE_TARGET * solving,
    }


def describe(row: dict[str, Any]) -> str:
    verdict = "met" if row["met"] else "MISSED"
    head = f"{row['name']:48} {row.get('chosen', ''):8}"
    if "error" in row:
        return f"{head} {row['error'][:120]} {verdict}"
    proof = "optimal" if row["optimal"] else f"gap {row['gap']:.1e}"
    worse = "".join(f", WORSE than {n} {v:.9g}" for n, v in row["beaten_by"].items())
    return (
        f"{head} {row['objective']:<14.9g} {proof:11} of {row['others']:2} others{worse}; choice "
        f"{1e6 * row['choosing_seconds']:6.0f} us of {row['solving_seconds']:7.4f} s, "
        f"{100 * row['choice_share']:5.2f}% {verdict}"
    )


def describe_totals(totals: dict[str, Any]) -> str:
    return (
        f"{totals['problems']} problems, {totals['optimal']} proven optimal: auto is worse than "
        f"another solver on {totals['worse']} (wanted 0), fails on {totals['failed']}; its choice "
        f"takes {100 * totals['share_of_all']:.3f}% of all solving, median "
        f"{100 * totals['share_median']:.2f}%, largest {100 * totals['share_largest']:.2f}%, "
        f"largest of those of 10 ms or more {100 * totals['share_judged']:.2f}% "
        f"(wanted < {100 * CHOICE_TARGET:g}%) {'met' if totals['met'] else 'MISSED'}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
