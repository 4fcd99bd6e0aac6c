"""``kvalloc frontier``: the best retention at every size, and what one more MiB buys."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvalloc.cli import targets
from kvalloc.cli.output import Json, Quiet, duration, note, print_json, size

if TYPE_CHECKING:
    from kvalloc.frontier import FrontierPoint

EXAMPLES = """\
  kvalloc frontier s.safetensors
  kvalloc frontier s.safetensors --points 100 --level head --png frontier.png
  kvalloc frontier s.safetensors --page 16 --solver ilp --json
"""


def frontier(
    scores: targets.Scores,
    points: Annotated[
        int, typer.Option(metavar="N", min=2, help="Sizes between the floors and everything.")
    ] = 16,
    context: targets.Context = None,
    batch: targets.Batch = 1,
    level: targets.Level = "layer",
    min_tokens: targets.MinTokens = None,
    max_tokens: targets.MaxTokens = None,
    page: targets.Page = 1,
    cap: targets.Cap = None,
    max_distinct: targets.MaxDistinct = None,
    ranks: targets.Ranks = None,
    rank_tolerance: targets.RankTolerance = None,
    equal_heads: targets.EqualHeads = False,
    solver: Annotated[
        str, typer.Option(metavar="NAME", help="Who decides; see 'kvalloc solvers'.")
    ] = "auto",
    solver_option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="An option of the solver; can be repeated."),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="OUT.png", help="Draw the frontier as a picture too.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Trace the best retention at every size.

    Each point comes with its bound, and with the retention that one more MiB would buy there.
    """
    from kvalloc.cli.progress import slow
    from kvalloc.files import check_writable
    from kvalloc.frontier import frontier as trace

    if png is not None:
        check_writable(png)
    limits = targets.limits(
        cap=cap,
        max_distinct=max_distinct,
        ranks=ranks,
        rank_tolerance=rank_tolerance,
        equal_heads=equal_heads,
    )
    chosen = targets.solver_options(solver, solver_option or [])
    profile = targets.load_scores(scores)
    start = time.perf_counter()
    with slow(f"tracing {points} sizes with {solver}", quiet=quiet):
        traced = trace(
            profile,
            points=points,
            context=context,
            batch=batch,
            level=level,  # type: ignore[arg-type]  # the request checks it
            min_tokens=min_tokens,
            max_tokens=max_tokens,
            page=page,
            **asdict(limits),
            solver=solver,
            solver_options=chosen,
        )
    seconds = time.perf_counter() - start
    if png is not None:
        from kvalloc.report.frontier_figure import draw_frontier

        draw_frontier(traced, png, title=f"{profile.shape.model_id}, {solver}, {level} level")
    if json:
        rows = [_plain(point) for point in traced]
        print_json({"solver": solver, "level": level, "seconds": seconds, "points": rows})
    elif not quiet:
        _print_table(traced)
        note(f"{len(traced)} sizes in {duration(seconds)}")


def _plain(point: FrontierPoint) -> dict[str, Any]:
    return {
        "share": point.share,
        "bytes": point.cost_bytes,
        "retention": point.value,
        "bound": point.bound,
        "retention_per_mib": point.value_per_mib,
    }


def _price(value_per_mib: float | None) -> str:
    return "unknown" if value_per_mib is None else f"{value_per_mib:+.4f}"


def _print_table(traced: list[FrontierPoint]) -> None:
    from kvalloc.cli.picture import bar, can_print_bars

    unicode = can_print_bars()
    print(f"{'kept':>7}  {'bytes':>10}  {'retention':>9}  {'gap':>7}  {'+1 MiB buys':>11}")
    for point in traced:
        picture = bar(point.value, 24, unicode=unicode)
        print(
            f"{point.share:>7.2%}  {size(point.cost_bytes):>10}  {point.value:>9.4f}  "
            f"{point.bound - point.value:>7.1e}  {_price(point.value_per_mib):>11}  {picture}"
        )
