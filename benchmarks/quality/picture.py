"""The quality benchmark as pictures: loss over kept share, and every method's loss by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from quality.tables import LEAST_KL, OURS, OURS_FIXED, Grid

OUR_COLOUR, FIXED_COLOUR = "#b8432f", "#dd9a8c"
LABEL_HEIGHT = 0.035
"""Of the axis."""
PEER_COLOUR, BEST_COLOUR = "#b9bdc4", "#31517a"


def draw_shares(grids: Sequence[Grid], path: Path, *, title: str) -> None:
    """Mean loss over the tasks against the kept share, a line a method."""
    figure, axes = plt.subplots(figsize=(7.2, 4.4), layout="constrained")
    shares = [grid.share for grid in grids]
    means = {
        method: [float(grid.means().mean(axis=1)[grid.methods.index(method)]) for grid in grids]
        for method in grids[0].methods
    }
    peers = {method: values for method, values in means.items() if method not in (OURS, OURS_FIXED)}
    strongest = min(peers, key=lambda method: float(np.mean(np.log(np.array(peers[method])))))
    decades = np.ptp(np.log10(np.maximum(np.array([*means.values()]), LEAST_KL)))
    firsts = {method: values[0] for method, values in means.items()}
    heights = spread(firsts, gap=LABEL_HEIGHT * float(decades))
    for method, values in means.items():
        special = {OURS: OUR_COLOUR, OURS_FIXED: FIXED_COLOUR, strongest: BEST_COLOUR}
        colour = special.get(method, PEER_COLOUR)
        named = colour != PEER_COLOUR
        axes.plot(
            shares,
            np.maximum(values, LEAST_KL),
            color=colour,
            marker="o",
            linewidth=2.4 if named else 1.2,
            markersize=5 if named else 3,
            zorder=3 if named else 1,
        )
        axes.annotate(
            method,
            (shares[0] * 1.03, heights[method]),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5 if named else 6.5,
            color=colour if named else "#777b82",
            fontweight="bold" if named else "normal",
        )
    axes.set_yscale("log")
    axes.set_xlim(0, max(shares) * 1.45)
    axes.set_ylim(top=max(axes.get_ylim()[1], max(heights.values()) * 1.3))
    axes.set_xticks(shares, [f"{share:.0%}" for share in shares])
    axes.set_xlabel("share of the entries that is kept")
    axes.set_ylabel("KL to the full cache, nats per token")
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e7ea", linewidth=0.7)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def spread(values: Mapping[str, float], *, gap: float) -> dict[str, float]:
    """Where labels stand on a logarithmic axis: at their values, but none upon another."""
    placed: dict[str, float] = {}
    lowest = -np.inf
    for name in sorted(values, key=lambda name: values[name]):
        lowest = max(float(np.log10(max(values[name], LEAST_KL))), lowest + gap)
        placed[name] = 10**lowest
    return placed


def draw_tasks(grid: Grid, path: Path, *, title: str) -> None:
    """Every method's loss in each task at one share, kvalloc marked."""
    tasks = list(grid.values)
    n_presses = sum(method not in (OURS, OURS_FIXED) for method in grid.methods)
    figure, axes = plt.subplots(figsize=(7.2, 3.6), layout="constrained")
    for column, means in enumerate(grid.means().T):
        for method, value in zip(grid.methods, means, strict=True):
            ours = method in (OURS, OURS_FIXED)
            own = OUR_COLOUR if method == OURS else FIXED_COLOUR
            axes.plot(
                column,
                max(value, LEAST_KL),
                marker="D" if ours else "_",
                color=own if ours else BEST_COLOUR,
                markersize=8 if ours else 14,
                zorder=3 if ours else 1,
            )
    axes.set_yscale("log")
    axes.set_xticks(range(len(tasks)), tasks)
    axes.set_ylabel("KL to the full cache, nats per token")
    axes.set_title(
        f"{title}: kvalloc (red; pale with fixed budgets) among {n_presses} presses of kvpress",
        loc="left",
        fontsize=10,
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e7ea", linewidth=0.7)
    figure.savefig(path, dpi=150)
    plt.close(figure)
