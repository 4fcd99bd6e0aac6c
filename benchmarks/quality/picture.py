"""The quality benchmark as a picture: loss against bytes of a 16-bit cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

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
"""Bytes as a share of a 16-bit cache's, and mean KL in nats per token."""


def draw_bytes(lines: Mapping[str, Points], path: Path, *, title: str, note: str) -> None:
    """Mean loss over the cells against the bytes, a line a method."""
    figure, axes = plt.subplots(figsize=(7.6, 4.6), layout="constrained")
    first = {name: min(points) for name, points in lines.items()}
    values = [kl for points in lines.values() for _, kl in points]
    decades = np.log10(max(values) / max(min(values), LEAST_KL)) if values else 1.0
    heights = spread({name: kl for name, (_, kl) in first.items()}, gap=LABEL_HEIGHT * decades)
    for name, points in lines.items():
        colour, mark, width = STYLES.get(name, ("#b9bdc4", ".", 1.0))
        shares, kls = zip(*sorted(points), strict=True)
        axes.plot(
            shares, np.maximum(kls, LEAST_KL), color=colour, marker=mark, linewidth=width,
            markersize=6,
        )  # fmt: skip
        axes.annotate(
            name,
            (first[name][0], max(first[name][1], LEAST_KL)),
            xytext=(0.035, heights[name]),
            textcoords=("axes fraction", "data"),
            va="center",
            fontsize=9,
            color=colour,
            fontweight="bold" if width > 2 else "normal",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkB": 4},
        )
    axes.set_yscale("log")
    right = max(share for points in lines.values() for share, _ in points)
    axes.set_xlim(-0.14, right + 0.03)
    ticks = [share for share in (0.1, 0.2, 0.3, 0.4, 0.5) if share <= right + 0.03]
    axes.set_xticks(ticks, [f"{share:.0%}" for share in ticks])
    axes.set_xlabel(f"bytes, as a share of a 16-bit cache's\n{note}")
    axes.set_ylabel("KL to the full cache, nats per token")
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e7ea", linewidth=0.7)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def spread(values: Mapping[str, float], *, gap: float) -> dict[str, float]:
    """Return positions of labels on a logarithmic axis: at their values, without overlap."""
    placed: dict[str, float] = {}
    lowest = -np.inf
    for name in sorted(values, key=lambda name: values[name]):
        lowest = max(float(np.log10(max(values[name], LEAST_KL))), lowest + gap)
        placed[name] = 10**lowest
    return placed
