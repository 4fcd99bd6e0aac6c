"""What a solver sees: arrays, constraints, bounds, and the contract that it keeps.

All that the author of a solver needs is here. Each module uses only those before it: `arrays`;
`constraints`, `bounds` and `dominance`; `solver`; `registry`.
"""

from kvalloc.problem.arrays import (
    Aggregate,
    AllocationProblem,
    GroupCap,
    Sense,
    SideConstraint,
    first_where,
)
from kvalloc.problem.bounds import (
    best_response,
    bound_at,
    cheapest_reaching,
    dual_bound,
    steps_above,
)
from kvalloc.problem.constraints import MaxDistinct, cap_tree
from kvalloc.problem.solver import Solution, Solver, Termination, deadline_after, is_closed

__all__ = [
    "Aggregate",
    "AllocationProblem",
    "GroupCap",
    "MaxDistinct",
    "Sense",
    "SideConstraint",
    "Solution",
    "Solver",
    "Termination",
    "best_response",
    "bound_at",
    "cap_tree",
    "cheapest_reaching",
    "deadline_after",
    "dual_bound",
    "first_where",
    "is_closed",
    "steps_above",
]
