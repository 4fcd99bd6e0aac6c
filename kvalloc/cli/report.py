"""``kvalloc report``: what files hold, as one page for a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from kvalloc.cli.options import takes
from kvalloc.cli.output import print_result
from kvalloc.units import Option, size


@takes()
def report(
    files: list[str], *, output: Annotated[Path, Option("OUT.html")] = Path("report.html")
) -> None:
    """Write one page for a browser: budgets, curves, what was measured.

    It shows what the bytes buy, needs no network, can be sent by mail, and has a calculator for the
    memory of any prompt.

    Parameters
    ----------
    files : list of str
        Score profiles, budget profiles or names of shipped ones, results of 'kvalloc eval'; all of
        one model.
    output : Path
        The page to write.

    Examples
    --------
    kvalloc report s.safetensors p.json -o report.html
    kvalloc report p.json q.json result.json -o report.html
    kvalloc report smollm2-135m-instruct-retention-90 -o report.html
    """
    from kvalloc.cli.progress import slow
    from kvalloc.report.page import write_report

    with slow("writing the report"):
        write_report(files, output)
    count = output.stat().st_size
    print_result(
        {"output": output, "file_bytes": count},
        lambda: print(f"written {output} ({size(count)}); open it in a browser"),
    )
