"""The quality benchmark as a picture: loss against bytes of a 16-bit cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

STYLES: dict[str, tuple[str, str, float]] = {
    "kvalloc, default": ("#b8432f", "o", 2.6),
    "KVzip": ("#31517a", "s", 1.8),
    "KVzip at 4 bits": ("#7d9cc4", "s", 1.8),
    "SnapKV": ("#6f7680", "s", 1.4),
    "plain 8 and 4 bits": ("#2f7d5b", "^", 1.8),
}
"""Colour, mark and width of each line."""
LABEL_HEIGHT = 0.05
"""Of the axis."""
LEAST_KL = 1e-4

Points = Sequence[tuple[float, float]]
"""Bytes as a share of a 16-bit cache's, and a score, or KL in nats per token."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One plot: a line a method, and what the vertical axis shows."""

    lines: Mapping[str, Points]
    label: str
    is_score: bool = False


def draw_bytes(panels: Sequence[Panel], path: Path, *, title: str, note: str) -> None:
    """Draw panels side by side against the bytes."""
    size = (7.6 * len(panels), 4.6)
    figure, plots = plt.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for panel, axes in zip(panels, plots[0], strict=True):
        draw_panel(panel, axes)
        axes.set_xlabel(f"bytes, as a share of a 16-bit cache's\n{note}")
    plots[0, 0].set_title(title, loc="left", fontsize=10)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_panel(panel: Panel, axes: Axes) -> None:
    """Draw the lines of a panel, each with its name at the left."""
    lines, least = panel.lines, 0.0 if panel.is_score else LEAST_KL
    first = {name: min(points) for name, points in lines.items()}
    heights = label_heights(panel, {name: value for name, (_, value) in first.items()})
    for name, points in lines.items():
        colour, mark, width = STYLES.get(name, ("#b9bdc4", ".", 1.0))
        shares, values = zip(*sorted(points), strict=True)
        axes.plot(
            shares, np.maximum(values, least), color=colour, marker=mark, linewidth=width,
            markersize=6,
        )  # fmt: skip
        axes.annotate(
            name,
            (first[name][0], max(first[name][1], least)),
            xytext=(0.035, heights[name]),
            textcoords=("axes fraction", "data"),
            va="center",
            fontsize=9,
            color=colour,
            fontweight="bold" if width > 2 else "normal",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkB": 4},
        )
    if panel.is_score:
        axes.set_ylim(-0.05, 1.05)
    else:
        axes.set_yscale("log")
    right = max(share for points in lines.values() for share, _ in points)
    axes.set_xlim(-0.14 * right / 0.5, right * 1.06)
    ticks = [share for share in (0.1, 0.2, 0.3, 0.4, 0.5) if share <= right + 0.03]
    axes.set_xticks(ticks, [f"{share:.0%}" for share in ticks])
    axes.set_ylabel(panel.label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e7ea", linewidth=0.7)


def label_heights(panel: Panel, first: Mapping[str, float]) -> dict[str, float]:
    """Return positions of labels on the vertical axis: at their first values, without overlap."""
    values = [value for points in panel.lines.values() for _, value in points]
    if panel.is_score:
        return spread(first, gap=LABEL_HEIGHT)
    decades = np.log10(max(values) / max(min(values), LEAST_KL))
    logs = {name: float(np.log10(max(value, LEAST_KL))) for name, value in first.items()}
    return {name: 10**log for name, log in spread(logs, gap=LABEL_HEIGHT * decades).items()}


def spread(values: Mapping[str, float], *, gap: float) -> dict[str, float]:
    """Return values moved up until each has a gap to the one below."""
    placed: dict[str, float] = {}
    lowest = -np.inf
    for name in sorted(values, key=lambda name: values[name]):
        lowest = placed[name] = max(values[name], lowest + gap)
    return placed
