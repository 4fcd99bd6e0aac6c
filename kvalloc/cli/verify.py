"""``kvalloc verify``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from kvalloc.allocation.audit import SCORES, Check, is_proven
from kvalloc.allocation.audit import verify as recompute
from kvalloc.allocation.pool import verify_pool
from kvalloc.cli.options import takes
from kvalloc.cli.output import note, print_result
from kvalloc.errors import InputError
from kvalloc.formats.record import kind_of
from kvalloc.report.terminal import hanging
from kvalloc.units import Option

NOT_TRUE, NOT_PROVEN = 1, 3
"""Exit codes."""


@dataclass(frozen=True)
class VerifyOptions:
    """Budget profiles, and their score profiles."""

    profile: Annotated[str, Option()]
    """A budget profile, or the folder of several that share a memory."""

    scores: Annotated[list[str], Option()]
    """The score profile that it was decided from, or all of them."""


@takes()
def verify(options: VerifyOptions) -> None:
    """Recompute what a budget profile states.

    Objective, bytes, target, constraints and bound, from the two files alone. Exit code 1 if a
    statement is false, 3 if none is false but only a solver claims the bound. For several that
    share a memory: the folder of all, and all their score profiles.

    Examples
    --------
    kvalloc verify p.json s.safetensors
    kvalloc verify p.json s.safetensors --json
    kvalloc verify folder a.safetensors b.safetensors
    """
    profile, scores = options.profile, options.scores
    profiles = [profile]
    if scores[1:] or Path(profile).is_dir():
        profiles = [str(Path(profile) / f"{Path(one).stem}.json") for one in scores]
    elif (kind_of(profile), kind_of(scores[0])) == ("score profile", "budget profile"):
        raise InputError(f"the two files are swapped; write: kvalloc verify {scores[0]} {profile}")
    pairs = [*zip(profiles, scores, strict=True)]
    groups = [(Path(its).stem, recompute(one, its)) for one, its in pairs]
    if several := len(profiles) > 1:
        groups.append(("together", verify_pool(profiles, scores)))
    checks = [
        replace(check, name=f"{name}: {check.name}") if several else check
        for name, checked in groups
        for check in checked
    ]
    passed = all(check.passed for check in checks)
    proven = passed and all(is_proven(checked) for _, checked in groups)
    facts = {"passed": passed, "proven": proven, "checks": checks}
    print_result(facts, lines=_lines(checks))
    for (one, its), (_, checked) in zip(pairs, groups, strict=False):
        if not next(check.passed for check in checked if check.name == SCORES):
            note(f"{one} was not decided from {its}, so this is the wrong pair of files")
    if not passed:
        raise typer.Exit(NOT_TRUE)
    if not proven:
        note("nothing is false, but the bound is not proven again: it stands on a solver's word")
        raise typer.Exit(NOT_PROVEN)


def _lines(checks: list[Check]) -> Iterator[str]:
    width = max(len(check.name) for check in checks)
    for check in checks:
        mark = ("ok   " if check.proven else "word ") if check.passed else "WRONG"
        statement = f"stated {check.stated}, found {check.recomputed}"
        if check.stated == check.recomputed:
            statement = "not stated" if check.stated == "None" else check.stated
        yield f"{mark}  {check.name:<{width}}  {hanging(statement, width + 9)}"
