"""``kvalloc plot``: what files hold, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from kvalloc.cli.options import takes
from kvalloc.cli.output import print_result
from kvalloc.units import Option


@takes()
def plot(
    files: list[str],
    *,
    output: Annotated[Path, Option("OUT.png|.svg")],
    what: Literal["budgets", "curves", "frontier", "measured", "overview"] | None = None,
) -> None:
    """Draw budgets, curves, the frontier or what was measured, as PNG or SVG.

    Parameters
    ----------
    files : list of str
        Score profiles, budget profiles or names of shipped ones, results of 'kvalloc eval'; all of
        one model.
    output : Path
        The picture to write; its ending says which kind.
    what : str
        What to draw; the first of these that the files hold by default. An overview has budgets,
        curves and what was measured side by side.

    Examples
    --------
    kvalloc plot p.json -o budgets.png
    kvalloc plot s.safetensors --what curves -o curves.svg
    kvalloc plot s.safetensors p.json q.json --what frontier -o frontier.png
    """
    from kvalloc.report.figure import plot as draw

    drawn = draw(files, output, what)
    print_result({"output": output, "what": drawn}, lambda: print(f"written {output}: {drawn}"))
