"""``kvalloc solvers``: who can decide budgets."""

from __future__ import annotations

from kvalloc.cli.options import Json, Quiet

EXAMPLES = """\
  kvalloc solvers
  kvalloc solvers --json
"""


def solvers(json: Json = False, quiet: Quiet = False) -> None:
    """List the solvers that are installed, with their options.

    Those of other packages are found too, through the entry-point group kvalloc.solvers.
    """
    from kvalloc.cli.plugins import describe_plugins, show_plugins
    from kvalloc.problem import Solver
    from kvalloc.problem.registry import SOLVERS

    hint = "" if quiet else "use one: kvalloc solve ... --solver NAME --solver-option KEY=VALUE"
    show_plugins(describe_plugins(SOLVERS, Solver), json=json, hint=hint)
