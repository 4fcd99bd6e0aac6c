"""``kvalloc report``."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Literal

from kvalloc.cli.options import takes
from kvalloc.cli.output import ProgressBar, print_result
from kvalloc.report.figure import plot
from kvalloc.report.page import write_report
from kvalloc.units import Option, size


@dataclass(frozen=True)
class ReportOptions:
    """Files to draw, and to write."""

    files: Annotated[list[str], Option()]
    """Score profiles, budget profiles or names of shipped ones, results of 'kvalloc eval'; all of
    one model."""

    _: KW_ONLY

    output: Annotated[Path, Option("OUT.html|.png|.svg")] = Path("report.html")
    """The page or picture to write; its ending selects the kind."""

    what: Annotated[
        Literal["budgets", "curves", "frontier", "measured", "overview"] | None, Option()
    ] = None
    """Content of a picture; by default the first of these that the files hold. An overview has
    budgets, curves and measured figures side by side."""


@takes()
def report(options: ReportOptions) -> None:
    """Write a page for a browser, or a picture: budgets, curves, measured losses.

    The page shows what the bytes buy, needs no network, can be sent by mail, and has a calculator
    for the memory of any prompt. With an ending of .png or .svg one picture is drawn.

    Examples
    --------
    kvalloc report s.safetensors p.json -o report.html
    kvalloc report smollm2-135m-instruct-retention-90 -o report.html
    kvalloc report p.json -o budgets.png
    kvalloc report s.safetensors p.json q.json --what frontier -o frontier.svg
    """
    output = options.output
    if options.what is None and output.suffix in ("", ".htm", ".html"):
        with ProgressBar("writing the report"):
            write_report(options.files, output)
        count = output.stat().st_size
        facts: dict[str, object] = {"output": output, "file_bytes": count}
        written = f"written {output} ({size(count)}); open it in a browser"
    else:
        drawn = plot(options.files, output, options.what)
        facts, written = {"output": output, "what": drawn}, f"written {output}: {drawn}"
    print_result(facts, lines=[written])
