"""``kvalloc scorers``: how the importance of an entry can be measured."""

from __future__ import annotations

from kvalloc.cli.options import Json, Quiet

EXAMPLES = """\
  kvalloc scorers
  kvalloc scorers --json
"""


def scorers(json: Json = False, quiet: Quiet = False) -> None:
    """List the scorers that are installed, with their parameters.

    Those of other packages are found too, through the entry-point group kvalloc.scorers.
    """
    from kvalloc.cli.solvers import list_plugins
    from kvalloc.problem.registry import SCORERS
    from kvalloc.scorers import Scorer

    hint = "use one: kvalloc profile ... --scorer NAME --window N --pool N"
    list_plugins(SCORERS, Scorer, json=json, hint="" if quiet else hint)
