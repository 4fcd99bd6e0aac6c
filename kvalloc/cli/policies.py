"""``kvalloc policies``: how entries can be picked within a budget."""

from __future__ import annotations

from kvalloc.cli.options import Json, Quiet

EXAMPLES = """\
  kvalloc policies
  kvalloc policies --json
"""


def policies(json: Json = False, quiet: Quiet = False) -> None:
    """List the policies that are installed, with their parameters.

    Each goes with any budget profile. Those of other packages are found too, through the
    entry-point group kvalloc.policies.
    """
    from kvalloc.models.loading import require_run_packages

    require_run_packages()
    from kvalloc.cli.solvers import list_plugins
    from kvalloc.problem.registry import POLICIES
    from kvalloc.runtime.policies import EvictionPolicy

    hint = (
        "use one: kvalloc generate ... --policy NAME --policy-option KEY=VALUE; a scorer's name "
        "stands for score with that scorer"
    )
    list_plugins(POLICIES, EvictionPolicy, json=json, hint="" if quiet else hint)
