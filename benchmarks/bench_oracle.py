"""Every solver against brute force on tiny problems of every kind: claims counted, misses shown.

    python benchmarks/bench_oracle.py [--problems N] [--seed N] [--quick] [--json]

Problems of all curves x all side constraints x sum and worst unit, both senses, units of heads
and of layers, each so small that every choice is looked at. Every
solver of kvalloc that accepts a problem solves it. A miss is

- optimal claimed, and brute force finds better; or a bound that brute force beats,
- no choice claimed, and there is one; or an answer where there is none,
- an answer that breaks the capacity, the target or a side constraint,
- an exact solver (ilp, auto; dp, flow, greedy on what they accept; max_min for the worst unit)
  that ends without a proof.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from typing import Any

from _common import describe_where, where_it_ran

from kvalloc.allocation.verification import solve_problem
from kvalloc.errors import InfeasibleError, SolverError
from kvalloc.problem import Aggregate, AllocationProblem, Sense, Solver, Termination
from kvalloc.problem.registry import get_solver, solver_names
from kvalloc.testing import brute_force, tiny_problem
from kvalloc.testing.oracle import Optimum
from kvalloc.testing.problems import CURVES, SIDES

PROBLEMS = 2240
FEWEST = 2000
SLACK = 1e-10
LONG_SECONDS = 2.0
EXACT = ("ilp", "auto", "dp", "flow", "greedy")
PROVING = (*EXACT, "max_min", "hull", "lagrangian")
SCOPES = {"": "sum", "worst:": "worst unit"}


def main() -> int:
    arguments = parse_arguments()
    solvers = ours()
    where = where_it_ran("numpy", "scipy", "ortools", "kvalloc")
    if not arguments.json:
        print(describe_where(where))
        print(heading(), flush=True)
    wanted = 224 if arguments.quick else arguments.problems
    per_curve = -(-wanted // (len(SCOPES) * len(SIDES) * len(CURVES)))
    rows = []
    for scope, of_what in SCOPES.items():
        for side in SIDES:
            names = [f"{scope}{c}" + ("" if side == "plain" else f"+{side}") for c in CURVES]
            row = row_of(f"{of_what}, {side}", names, per_curve, arguments.seed, solvers)
            rows.append(row)
            if not arguments.json:
                print(describe(row), flush=True)
    total = sum(row["problems"] for row in rows)
    misses = sum(len(row["misses"]) for row in rows)
    met = misses == 0 and (arguments.quick or total >= FEWEST)
    if arguments.json:
        print(json.dumps({"rows": rows, "problems": total, "misses": misses, "where": where}))
    else:
        claims = sum(sum(row["optimal"].values()) for row in rows)
        print(
            f"{total:,} problems (wanted >= {FEWEST:,}), {claims:,} claims of optimality, "
            f"{misses} misses (wanted 0) {'met' if met else 'MISSED'}"
        )
    return 0 if met else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="every solver against brute force")
    parser.add_argument("--problems", type=int, default=PROBLEMS)
    parser.add_argument("--seed", type=int, default=40_000)
    parser.add_argument("--quick", action="store_true", help="few problems, to see that it runs")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def ours() -> dict[str, Solver]:
    """The solvers of this package; others may be installed too."""
    made = {name: get_solver(name) for name in solver_names()}
    return {n: s for n, s in made.items() if type(s).__module__.startswith("kvalloc.solvers.")}


def row_of(
    title: str, kinds: list[str], per_kind: int, seed: int, solvers: dict[str, Solver]
) -> dict[str, Any]:
    """All problems of some kinds by all solvers: counts, and every miss in words."""
    optimal: Counter[str] = Counter()
    slowest = (0.0, "")
    misses, feasible, problems = [], 0, 0
    for kind in kinds:
        for number in range(per_kind):
            sense = (Sense.MAX_VALUE, Sense.MIN_COST)[number % 2]
            level = ("head", "layer")[number // 2 % 2]
            name = f"tiny_problem({kind!r}, seed={seed + number}, sense={sense}, level={level!r})"
            problem = tiny_problem(kind, seed=seed + number, sense=sense, level=level)
            optimum = brute_force(problem)
            problems += 1
            feasible += optimum is not None
            for label, solver in solvers.items():
                if solver.can_solve(problem) is not True:
                    continue
                start = time.perf_counter()
                claimed, fault = judged(problem, label, solver, optimum)
                slowest = max(slowest, (time.perf_counter() - start, f"{label} on {name}"))
                optimal[label] += claimed
                if fault is not None:
                    misses.append(f"{label} on {name}: {fault}")
    return {
        "name": title,
        "problems": problems,
        "feasible": feasible,
        "optimal": dict(optimal),
        "misses": misses,
        "slowest_seconds": slowest[0],
        "slowest": slowest[1],
    }


def judged(
    problem: AllocationProblem, label: str, solver: Solver, optimum: Optimum | None
) -> tuple[bool, str | None]:
    """Whether optimal was claimed, and what is wrong with the answer, or None."""
    worst = problem.aggregate is Aggregate.WORST
    exact = label in EXACT or (label == "max_min" and worst)
    try:
        answer = solve_problem(problem, solver)
    except InfeasibleError as error:
        wrong = exact and optimum is not None
        return False, f"claims there is no choice: {error}" if wrong else None
    except SolverError as error:
        # A rule may give up. "The solver x breaks ..." is what the check of answers says.
        wrong = exact or str(error).startswith("the solver ")
        return False, str(error) if wrong else None
    claimed = answer.termination is Termination.OPTIMAL
    if optimum is None:
        return claimed, "answers where brute force finds no choice"
    best = optimum.objective
    if problem.is_better(answer.objective, best, SLACK):
        return claimed, f"{answer.objective} is better than all choices there are, {best}"
    if answer.bound is not None and problem.is_better(best, answer.bound, SLACK):
        return claimed, f"the bound {answer.bound} is beaten by {best}"
    if claimed and problem.is_better(best, answer.objective, SLACK):
        return claimed, f"claims that {answer.objective} is optimal, {best} is"
    if exact and not claimed:
        return claimed, f"ends without a proof: {answer.termination.value}, {answer.detail}"
    return claimed, None


def heading() -> str:
    columns = " ".join(f"{name:>10}" for name in (*PROVING, "others"))
    return f"optimal claimed by         {'problems':>8} {'feasible':>8} {columns} {'misses':>6}"


def describe(row: dict[str, Any]) -> str:
    counts = [row["optimal"].get(name, 0) for name in PROVING]
    counts.append(sum(row["optimal"].values()) - sum(counts))
    columns = " ".join(f"{count or '-':>10}" for count in counts)
    lines = [
        f"{row['name']:26} {row['problems']:8,} {row['feasible']:8,} {columns} "
        f"{len(row['misses']):6}  slowest {row['slowest_seconds']:.2f} s"
    ]
    if row["slowest_seconds"] > LONG_SECONDS:
        lines.append(f"    slowest: {row['slowest']}")
    lines += [f"    MISS {miss}" for miss in row["misses"][:10]]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
