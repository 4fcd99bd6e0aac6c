"""Contract of solvers: arrays, constraints and bounds.

Authors of solvers need nothing else.
"""

from kvalloc.problem.arrays import Aggregate as Aggregate
from kvalloc.problem.arrays import AllocationProblem as AllocationProblem
from kvalloc.problem.arrays import GroupCap as GroupCap
from kvalloc.problem.arrays import MaxDistinct as MaxDistinct
from kvalloc.problem.arrays import Sense as Sense
from kvalloc.problem.arrays import SideConstraint as SideConstraint
from kvalloc.problem.arrays import cap_tree as cap_tree
from kvalloc.problem.arrays import first_where as first_where
from kvalloc.problem.bounds import best_response as best_response
from kvalloc.problem.bounds import bound_at as bound_at
from kvalloc.problem.bounds import cheapest_reaching as cheapest_reaching
from kvalloc.problem.bounds import dual_bound as dual_bound
from kvalloc.problem.bounds import steps_above as steps_above
from kvalloc.problem.solver import Solution as Solution
from kvalloc.problem.solver import Solver as Solver
from kvalloc.problem.solver import Termination as Termination
from kvalloc.problem.solver import deadline_after as deadline_after
from kvalloc.problem.solver import is_closed as is_closed
