"""The frontier as a picture: retention against the share of bytes kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvalloc.errors import MissingDependencyError
from kvalloc.files import atomic_write

if TYPE_CHECKING:
    from kvalloc.frontier import FrontierPoint


def draw_frontier(points: Sequence[FrontierPoint], path: Path, *, title: str) -> None:
    """Draw a frontier as a PNG.

    Parameters
    ----------
    points : sequence of FrontierPoint
        By rising size.
    path : Path
        The file to write.
    title : str
        Over the picture.

    Raises
    ------
    MissingDependencyError
        If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "drawing needs matplotlib; install it with: pip install 'kvalloc[demo]'"
        ) from error
    figure = Figure(figsize=(8, 4.8), dpi=125, layout="constrained")
    axes = figure.subplots()
    kept = [100 * point.share for point in points]
    axes.plot(kept, [point.value for point in points], color="#0072B2", marker="o", markersize=3)
    axes.set(
        xlabel="bytes kept, % of the full cache",
        ylabel="retention (share of score mass)",
        title=title,
        xscale="log",
        ylim=(0, 1.02),
    )
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}%")
    price = axes.twinx()
    price.plot(
        kept,
        [max(point.value_per_mib or 0.0, 1e-12) for point in points],
        color="#D55E00",
        linestyle="--",
        linewidth=1,
    )
    price.set_yscale("log")
    price.set_ylabel("retention that one more MiB buys (dashed)", color="#D55E00")
    axes.grid(alpha=0.3)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png")
