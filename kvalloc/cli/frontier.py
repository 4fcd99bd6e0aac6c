"""``kvalloc frontier``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Unpack

from kvalloc.allocation.frontier import Frontier, FrontierPoint
from kvalloc.allocation.frontier import frontier as trace
from kvalloc.allocation.request import TARGETS, Request, RequestOptions
from kvalloc.cli.options import ScoresArgument, SolverOptions, takes
from kvalloc.cli.output import ProgressBar, note, print_result
from kvalloc.report.terminal import bar, can_print_bars, number_text, table_text
from kvalloc.report.wording import LOSS_NOTE, small_amount, value_heading
from kvalloc.units import Option, duration, gap_text, size

BESIDE_TARGET = [name for name in RequestOptions.__annotations__ if name not in TARGETS]


@dataclass(frozen=True, kw_only=True)
class FrontierOptions(ScoresArgument):
    """Number of traced sizes."""

    points: Annotated[int, Option("N", minimum=2)] = 16
    """Sizes between the floors and everything."""


@takes(only={RequestOptions: BESIDE_TARGET, SolverOptions: ["solver", "time_limit"]})
def frontier(
    options: FrontierOptions, solving: SolverOptions, **request_options: Unpack[RequestOptions]
) -> None:
    """Trace the best retention, or the least loss, at every size.

    Each point has its bound, and the value of a little more memory.

    Examples
    --------
    kvalloc frontier s.safetensors
    kvalloc frontier s.safetensors --points 100 --level head
    kvalloc frontier s.safetensors --objective loss
    kvalloc frontier s.safetensors --page 16 --max-distinct 4 --time-limit 10 --json
    """
    request_options["budget"] = 1.0
    request = Request.parse(**request_options)  # refuses before the scores are read
    start = time.perf_counter()
    with ProgressBar(f"tracing with {solving.solver}", unit="sizes") as progress:
        traced = trace(
            options.scores,
            points=options.points,
            solver=solving.solver,
            time_limit=solving.time_limit,
            request=request,
            notify=note,
            progress=progress,
        )
    seconds, request = time.perf_counter() - start, traced.request
    facts: dict[str, Any] = {"solver": solving.solver, "seconds": seconds, "level": request.level}
    facts |= {"objective": request.objective, "points": [_plain(point) for point in traced]}
    notes = [f"{len(traced)} sizes in {duration(seconds)}"]
    if words := {point.bound_source for point in traced} - {"dual"}:
        sources = ", ".join(sorted(words))
        notes.append(f"some gaps stand on the word of {sources}, not proven again")
    if any(point.predicted_loss is not None for point in traced):
        notes.append(f"note: {LOSS_NOTE}")
    print_result(facts, lines=_lines(traced), notes=notes)


def _plain(point: FrontierPoint) -> dict[str, Any]:
    names = "share value bound bound_source value_per_mib retention predicted_loss"
    return {"bytes": point.cost_bytes, **{name: getattr(point, name) for name in names.split()}}


def _lines(traced: Frontier) -> Iterator[str]:
    value_name = value_heading(traced.request)
    by_loss, unicode = traced.request.objective == "loss", can_print_bars()
    lossy = any(point.predicted_loss is not None for point in traced)
    more = small_amount(traced[len(traced) // 2].cost_bytes)

    def bought(point: FrontierPoint) -> str:
        if point.value_per_mib is None:
            return "-"
        value = point.value_per_mib * more / 2**20
        return f"{value:.3g}" if by_loss else f"{100 * value:+.3g}%"

    rows = [
        {
            "kept": f"{point.share:.2%}",
            "bytes": size(point.cost_bytes),
            "retention": number_text(point.retention, ".4f"),
            **({value_name: f"{abs(point.value):.4f}"} if value_name else {}),
            **({"loss": number_text(point.predicted_loss, ".4f")} if lossy else {}),
            "gap": gap_text(point.gap),
            f"+{size(more)} {'saves' if by_loss else 'buys'}": bought(point),
            "": bar(point.retention or 0.0, 12 if lossy or value_name else 24, unicode=unicode),
        }
        for point in traced
    ]
    yield table_text(list(rows[0]), [list(row.values()) for row in rows])
