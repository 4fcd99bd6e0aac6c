"""kvalloc decides how many KV-cache entries each layer and head keeps, and applies it.

Names are imported at first use: ``import kvalloc`` loads no torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvalloc.allocation.decision import compare as compare
    from kvalloc.allocation.decision import solve as solve
    from kvalloc.allocation.pool import solve_pool as solve_pool
    from kvalloc.errors import KVAllocError as KVAllocError
    from kvalloc.extensions.documents import blend as blend
    from kvalloc.extensions.making import make_cache as make_cache
    from kvalloc.extensions.saved import load_cache as load_cache
    from kvalloc.extensions.saved import save_cache as save_cache
    from kvalloc.formats.budget_profile import BudgetProfile as BudgetProfile
    from kvalloc.formats.budget_profile import Policy as Policy
    from kvalloc.formats.score_profile import ScoreProfile as ScoreProfile
    from kvalloc.formats.shipped_profiles import load_profile as load_profile
    from kvalloc.formats.shipped_profiles import load_scores as load_scores
    from kvalloc.formats.shipped_profiles import shipped_profiles as shipped_profiles
    from kvalloc.measure import profile as profile
    from kvalloc.models.loading import load_model as load_model
    from kvalloc.online.application import apply as apply
    from kvalloc.online.fitting import fit as fit
    from kvalloc.online.planning import plan_batch as plan_batch
    from kvalloc.online.solving import solve_measured as solve_measured
    from kvalloc.problem import AllocationProblem as AllocationProblem
    from kvalloc.problem import Solution as Solution
    from kvalloc.problem import Solver as Solver
    from kvalloc.problem import Termination as Termination
    from kvalloc.report.page import write_report as write_report
    from kvalloc.shape import ModelShape as ModelShape

__version__ = "0.1.0.dev0"

_NAMES = {
    "kvalloc.allocation.decision": ("compare", "solve"),
    "kvalloc.allocation.pool": ("solve_pool",),
    "kvalloc.errors": ("KVAllocError",),
    "kvalloc.extensions.documents": ("blend",),
    "kvalloc.extensions.making": ("make_cache",),
    "kvalloc.extensions.saved": ("load_cache", "save_cache"),
    "kvalloc.formats.budget_profile": ("BudgetProfile", "Policy"),
    "kvalloc.formats.score_profile": ("ScoreProfile",),
    "kvalloc.formats.shipped_profiles": ("load_profile", "load_scores", "shipped_profiles"),
    "kvalloc.measure": ("profile",),
    "kvalloc.models.loading": ("load_model",),
    "kvalloc.online.application": ("apply",),
    "kvalloc.online.fitting": ("fit",),
    "kvalloc.online.planning": ("plan_batch",),
    "kvalloc.online.solving": ("solve_measured",),
    "kvalloc.problem": ("AllocationProblem", "Solution", "Solver", "Termination"),
    "kvalloc.report.page": ("write_report",),
    "kvalloc.shape": ("ModelShape",),
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(importlib.import_module(_WHERE[name]), name)
        globals()[name] = value
        return value
    if name.startswith("_") or importlib.util.find_spec(f"kvalloc.{name}") is None:
        raise AttributeError(f"module 'kvalloc' has no attribute {name!r}")
    return importlib.import_module(f"kvalloc.{name}")  # a room, such as kvalloc.runtime


def __dir__() -> list[str]:
    return sorted(__all__)


def _show_in_notebook() -> None:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        html = shell.display_formatter.formatters["text/html"]
        for name in ("BudgetProfile", "ScoreProfile"):
            html.for_type_by_name(
                _WHERE[name],
                name,
                lambda one: importlib.import_module("kvalloc.report.notebook").profile_html(one),
            )


_show_in_notebook()
