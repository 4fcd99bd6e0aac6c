"""The integer program under every side constraint, both senses, the sum and the worst unit."""

import os
import time

import numpy as np
import pytest
from exact_cases import (
    answer_or_error,
    hand_problem,
    medium_problem,
)
from factories import make_bits, make_problem
from scipy import optimize

from kvalloc import solve
from kvalloc.allocation.verification import solve_problem
from kvalloc.errors import InfeasibleError, SolverError
from kvalloc.problem import GroupCap, Termination
from kvalloc.problem.constraints import MaxDistinct
from kvalloc.solvers._ilp_program import BACKENDS, encode, stdout_kept_clean
from kvalloc.solvers.ilp import ILP

CAP = GroupCap(name="device 7", units=tuple(range(9)), capacity_bytes=40_000)
APART = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]])


@pytest.mark.parametrize(
    ("problem", "said", "nearest"),
    [
        (medium_problem(1, target=True, share=0.05, constraints=(CAP,)), "device 7", True),
        (
            hand_problem(tokens=APART, constraints=(MaxDistinct(most=2),)),
            r"different budgets \(at most 2\)",
            False,
        ),
    ],
)
def test_the_error_names_what_is_too_much_together(problem, said, nearest):
    with pytest.raises(InfeasibleError, match=said) as raised:
        solve_problem(problem, ILP())
    assert (raised.value.nearest is not None) == nearest


def test_no_time_for_a_first_choice_is_an_error_not_a_lie():
    problem = medium_problem(1, target=True, constraints=(MaxDistinct(most=3),))
    answer = answer_or_error(ILP(), problem, time_limit_seconds=1e-6)
    if isinstance(answer, SolverError):
        assert "give it more time" in str(answer)
    else:
        assert not isinstance(answer, InfeasibleError)
        assert answer.objective >= answer.bound


def test_a_gap_that_was_asked_for_is_not_called_optimal_nor_out_of_time():
    problem = medium_problem(1, n_layers=80, n_heads=8, n_options=64)
    answer = solve_problem(problem, ILP(gap=1e-5))
    assert answer.termination in (Termination.GAP_LIMIT, Termination.OPTIMAL)
    assert answer.gap <= 1e-5
    exact = solve_problem(problem, ILP())
    assert exact.termination is Termination.OPTIMAL
    assert answer.objective <= exact.objective <= (answer.bound or 0.0) + 1e-12


def test_what_a_library_prints_does_not_reach_stdout(capfd):
    with stdout_kept_clean():
        os.write(1, b"HighsMipSolverData::...")
    print("after")
    out, err = capfd.readouterr()
    assert out == "after\n"
    assert err == "HighsMipSolverData::..."


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_a_back_end_that_had_no_time_proves_no_bound(backend):
    """CP-SAT says 0 where it has none: what was known was then called optimal."""
    problem = medium_problem(1, n_layers=30, n_options=24, constraints=(MaxDistinct(most=3),))
    whole = encode(problem, problem.exists, 3, None)
    answer = BACKENDS[backend](whole.program, time.monotonic(), 0.0, 1)
    best = solve_problem(problem, ILP()).objective
    assert whole.bound(answer.bound) >= best


@pytest.mark.parametrize("backend", ["highs", "cp_sat"])
def test_a_target_that_floating_point_misses_by_its_last_bits_is_met(backend):
    """HiGHS took a choice for good that misses the target by 1.4e-12, and nothing was decided."""
    losses = [
        [0.3752515772516255, 0.2555158547759277, 0.11127437446495608, 0.09133348896581964],
        [0.3487461734683406, 0.16321221873281455, 0.06359377290432121, 0.060017000329298464],
    ]
    losses[0].append(0.07139260346668316)
    losses[1].append(0.05644022775427572)
    cap = GroupCap(name="layer 0", units=(0,), capacity_bytes=8 * 388)
    problem = make_problem(
        -np.array(losses), protected_tokens=3, step=388, target=-0.1, constraints=(cap,)
    )
    reached = losses[0][3] + losses[1][2]
    for less in np.arange(1.01e-12, 2.5e-12, 0.02e-12):
        answer = solve_problem(problem.with_target(-(reached - less)), ILP(backend=backend))
        assert (answer.termination, answer.cost_bytes) == (Termination.OPTIMAL, 12 * 388)


def test_every_linear_and_integer_program_has_the_limit(monkeypatch):
    """The search for what caps leave of a target ran without one."""
    given = []
    for name in ("linprog", "milp"):
        call = getattr(optimize, name)

        def limited(*args, call=call, **options):
            given.append(options["options"]["time_limit"])
            return call(*args, **options)

        monkeypatch.setattr(optimize, name, limited)
    scores = make_bits(0)
    asked = {"target_loss": 0.0, "bits": (16, 8, 4), "cap": ("0-1=800", "1-2=800")}
    with pytest.raises(InfeasibleError, match="target_loss=0 is not possible with cap='0-1=800'"):
        solve(scores, **asked, time_limit=20.0)
    assert len(given) > 3
    assert max(given) <= 20.0
