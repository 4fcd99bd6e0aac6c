"""The frontier as a picture: retention and loss against the share of bytes kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvalloc.errors import MissingDependencyError
from kvalloc.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kvalloc.allocation.frontier import FrontierPoint


def draw_frontier(points: Sequence[FrontierPoint], path: Path, *, title: str) -> None:
    """Draw a frontier as a PNG: retention and, where it is known, predicted loss, over bytes.

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
    losses = [point.predicted_loss for point in points if point.predicted_loss is not None]
    panels = 2 if losses else 1
    figure = Figure(figsize=(8, 1.2 + 3.6 * panels), dpi=125, layout="constrained")
    grid = figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0]
    kept = [100 * point.share for point in points]
    retention = [point.value if point.retention is None else point.retention for point in points]
    _draw(grid[0], kept, retention, label="retention (share of score mass)")
    grid[0].set(title=title, ylim=(0, 1.02))
    _draw_price(grid[0], kept, points)
    if losses:
        known = [100 * point.share for point in points if point.predicted_loss is not None]
        _draw(grid[1], known, losses, label="predicted loss, nats per token")
        grid[1].set_ylim(bottom=0)
    grid[-1].set(xlabel="bytes kept, % of the full cache", xscale="log")
    grid[-1].xaxis.set_major_formatter(lambda value, _: f"{value:g}%")
    grid[-1].xaxis.set_minor_formatter(lambda value, _: f"{value:g}%")
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png")


def _draw(axes: Axes, kept: list[float], values: list[float], *, label: str) -> None:
    axes.plot(kept, values, color="#0072B2", marker="o", markersize=3)
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)


def _draw_price(axes: Axes, kept: list[float], points: Sequence[FrontierPoint]) -> None:
    """The price of a byte on an axis of its own; nothing where it is unknown or zero throughout."""
    priced = [
        (share, point.value_per_mib)
        for share, point in zip(kept, points, strict=True)
        if point.value_per_mib
    ]
    if not priced:
        return
    price = axes.twinx()
    price.plot(*zip(*priced, strict=True), color="#D55E00", linestyle="--", linewidth=1)
    price.set_yscale("log")
    price.set_ylabel("what one more MiB buys (dashed)", color="#D55E00")
