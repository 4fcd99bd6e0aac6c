"""``kvalloc verify``: recompute what a budget profile states, from the files alone."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from kvalloc.cli import targets
from kvalloc.cli.options import Json, Quiet
from kvalloc.cli.output import hanging, print_json

EXAMPLES = """\
  kvalloc verify p.json s.safetensors
  kvalloc verify p.json s.safetensors --json
"""

NOT_TRUE = 1


def verify(
    profile: Annotated[
        str, typer.Argument(metavar="PROFILE", help="A budget profile, or a shipped one's name.")
    ],
    scores: targets.Scores,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Recompute what a budget profile states.

    Objective, bytes, target, constraints and bound, from the two files alone: nothing that the
    solver said is used. Exit code 1 if a statement is not true.
    """
    from kvalloc.allocation.audit import verify as recompute
    from kvalloc.formats.shipped_profiles import load_profile

    checks = recompute(load_profile(profile), targets.load_scores(scores))
    if json:
        print_json({"passed": all(c.passed for c in checks), "checks": [asdict(c) for c in checks]})
    elif not quiet:
        width = max(len(check.name) for check in checks)
        for check in checks:
            mark = "ok   " if check.passed else "WRONG"
            both = f"stated {check.stated}, found {check.found}"
            said = check.stated if check.stated == check.found else both
            print(f"{mark}  {check.name:<{width}}  {hanging(said, width + 9)}")
    if not all(check.passed for check in checks):
        raise typer.Exit(NOT_TRUE)
