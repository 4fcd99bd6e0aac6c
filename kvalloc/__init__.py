"""kvalloc decides how many KV-cache entries each layer and head keeps, and applies it.

The names below are imported when they are first used, so that ``import kvalloc`` loads neither
torch nor a solver.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvalloc.budget_profile import BudgetProfile, Policy
    from kvalloc.errors import KVAllocError
    from kvalloc.library import load_profile, shipped_profiles
    from kvalloc.measure import profile
    from kvalloc.measure.tuning import tune
    from kvalloc.problem import AllocationProblem
    from kvalloc.prompting import apply
    from kvalloc.refining import refine
    from kvalloc.runtime import load_cache
    from kvalloc.score_profile import ScoreProfile
    from kvalloc.shape import ModelShape
    from kvalloc.solver import Solution, Solver, Termination
    from kvalloc.solving import solve

__version__ = "0.1.0.dev0"

_WHERE = {
    "AllocationProblem": "kvalloc.problem",
    "BudgetProfile": "kvalloc.budget_profile",
    "KVAllocError": "kvalloc.errors",
    "ModelShape": "kvalloc.shape",
    "Policy": "kvalloc.budget_profile",
    "ScoreProfile": "kvalloc.score_profile",
    "Solution": "kvalloc.solver",
    "Solver": "kvalloc.solver",
    "Termination": "kvalloc.solver",
    "apply": "kvalloc.prompting",
    "load_cache": "kvalloc.runtime",
    "load_profile": "kvalloc.library",
    "profile": "kvalloc.measure",
    "refine": "kvalloc.refining",
    "shipped_profiles": "kvalloc.library",
    "solve": "kvalloc.solving",
    "tune": "kvalloc.measure.tuning",
}

__all__ = [
    "AllocationProblem",
    "BudgetProfile",
    "KVAllocError",
    "ModelShape",
    "Policy",
    "ScoreProfile",
    "Solution",
    "Solver",
    "Termination",
    "apply",
    "load_cache",
    "load_profile",
    "profile",
    "refine",
    "shipped_profiles",
    "solve",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'kvalloc' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
