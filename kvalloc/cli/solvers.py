"""``kvalloc solvers``, ``scorers`` and ``policies``: the plug-ins of each kind."""

from __future__ import annotations

import inspect
import math
import textwrap
from typing import Any

from kvalloc.cli.options import takes
from kvalloc.cli.output import is_quiet, print_json, wants_json
from kvalloc.errors import KVAllocError, plain
from kvalloc.problem.registry import POLICIES, SCORERS, SOLVERS, load, names, plugin_options
from kvalloc.report.terminal import terminal_width


@takes()
def solvers() -> None:
    """List the solvers that are installed, with their options.

    Those of other packages are found too, through the entry-point group kvalloc.solvers.
    """
    from kvalloc.problem.solver import Solver

    hint = "use one: kvalloc solve ... --solver NAME --solver-option KEY=VALUE"
    _list(SOLVERS, Solver, hint)


@takes()
def scorers() -> None:
    """List the scorers that are installed, with their parameters.

    Those of other packages are found too, through the entry-point group kvalloc.scorers.
    """
    from kvalloc.scorers import Scorer

    hint = "use one: kvalloc profile ... --scorer NAME --window N --pool N"
    _list(SCORERS, Scorer, hint)


@takes()
def policies() -> None:
    """List the policies that are installed, with their parameters.

    Each goes with any budget profile. Those of other packages are found too, through the
    entry-point group kvalloc.policies.
    """
    from kvalloc.models.loading import require_run_packages

    require_run_packages()
    from kvalloc.runtime.policies import EvictionPolicy

    hint = (
        "use one: kvalloc generate ... --policy NAME --policy-option KEY=VALUE; a scorer's name "
        "stands for score with that scorer"
    )
    _list(POLICIES, EvictionPolicy, hint)


def _list(group: str, base: type[Any], hint: str) -> None:
    """Print every plug-in of a group: what it is, or why it cannot be used; then the hint."""
    rows = [_describe(group, name, base) for name in names(group)]
    if wants_json():
        print_json(rows)
        return
    width = terminal_width()
    indent = max([len(row["name"]) for row in rows], default=0) + 2
    for row in rows:
        lines = [f"cannot be used: {row['error']}"]
        if row["error"] is None:
            options = ", ".join(f"{key}={value}" for key, value in row["options"].items())
            lines = [row["summary"], row["reference"], f"options: {options}" if options else ""]
        wrapped = [part for line in lines for part in textwrap.wrap(plain(line), width - indent)]
        for name, line in zip([row["name"], *[""] * len(wrapped)], wrapped or [""], strict=False):
            print(f"{name:<{indent}}{line}".rstrip())
    if not rows:
        print("none is registered: kvalloc is on the path, but not installed")
    elif not is_quiet():
        print(f"\n{hint}")


def _describe(group: str, name: str, base: type[Any]) -> dict[str, Any]:
    empty = {"name": name, "summary": "", "reference": "", "options": None}
    try:
        cls = load(group, name, base)
    except KVAllocError as error:
        return {**empty, "error": " ".join(str(error).split())}
    return {
        "name": name,
        "summary": str(getattr(cls, "summary", "")),
        "reference": str(getattr(cls, "reference", "")),
        # A policy is given the profile's scorer, which nobody types.
        "options": {
            key: _plain(option) for key, option in plugin_options(cls).items() if key != "scorer"
        },
        "error": None,
    }


def _plain(option: inspect.Parameter) -> bool | int | float | str | None:
    default = option.default
    if default is inspect.Parameter.empty:
        return "(required)"
    if isinstance(default, float) and not math.isfinite(default):
        return str(default)  # JSON has no infinity
    if default is None or isinstance(default, bool | int | float | str):
        return default
    return repr(default)
