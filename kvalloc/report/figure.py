"""Pictures as PNG files: budgets, curves and measured harm; and the frontier."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvalloc.accounting import FloatArray
from kvalloc.errors import InputError, MissingDependencyError
from kvalloc.files import atomic_write
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.report.terminal import short_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvalloc.allocation.frontier import FrontierPoint
    from kvalloc.evaluate.showcase import Asked

COLOURS = (
    "#000000", "#D55E00", "#0072B2", "#E69F00", "#CC79A7",
    "#009E73", "#56B4E9", "#777777", "#AA4499", "#332288",
)  # fmt: skip
"""Okabe and Ito's palette, a grey and two of Tol's: told apart with any kind of colour vision."""

MARKERS = "os^DvPX*ph"

NEAR = 0.02
"""Budgets that differ by less than this share of the context in every layer are one line."""


KEPT = "kept entries, % of the prompt"

NARROW = 20
"""Longest name in the legend of a panel, characters."""


def save_budget_figure(
    path: str | Path,
    scores: ScoreProfile,
    profiles: Mapping[str, BudgetProfile],
    *,
    harm: Mapping[str, Sequence[Asked]],
    title: str,
) -> None:
    """Draw budgets per layer, the curves they were decided from, and what was measured.

    Parameters
    ----------
    path : str or Path
        The PNG to write, 1000 pixels wide, atomically.
    scores : ScoreProfile
        The retention curves.
    profiles : mapping of str to BudgetProfile
        By the name to show; all decided from these curves.
    harm : mapping of str to sequence of Asked
        Measurements by the same names.
    title : str
        Stands above everything.

    Raises
    ------
    InputError
        If there is no profile, or the path cannot be written.
    MissingDependencyError
        If matplotlib is not installed.
    """
    figure = _figure((10.0, 8.6), dpi=100)
    if not profiles:
        raise InputError("there is no budget profile to draw; give at least one")
    # Two sub-figures, so that the legend beside the upper panel takes no width from the lower two.
    upper, lower = figure.subfigures(2, 1, squeeze=False)[:, 0]
    groups = _near_groups(profiles)
    styles = _styles(groups)
    _draw_budgets(upper.add_subplot(), groups, profiles, styles)
    left, right = lower.subplots(1, 2)
    _draw_curves(left, scores)
    _draw_harm(right, harm, styles)
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    _save(figure, path)


def draw_frontier(points: Sequence[FrontierPoint], path: str | Path, *, title: str) -> None:
    """Draw a frontier as a PNG: retention and, where it is known, predicted loss, over bytes.

    Parameters
    ----------
    points : sequence of FrontierPoint
        By rising size.
    path : str or Path
        The file to write, atomically.
    title : str
        Stands above everything.

    Raises
    ------
    InputError
        If the path cannot be written.
    MissingDependencyError
        If matplotlib is not installed.
    """
    losses = [point for point in points if point.predicted_loss is not None]
    panels = 2 if losses else 1
    figure = _figure((8, 1.2 + 3.6 * panels), dpi=125)
    grid = figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0]

    def draw(axes: Axes, shown: Sequence[FrontierPoint], values: Sequence[Any], what: str) -> None:
        kept = [100 * point.share for point in shown]
        axes.plot(kept, values, color=COLOURS[2], marker="o", markersize=3)
        axes.set_ylabel(what)
        axes.grid(alpha=0.3)

    retention = [point.value if point.retention is None else point.retention for point in points]
    draw(grid[0], points, retention, "retention (share of score mass)")
    grid[0].set(title=title, ylim=(0, 1.02))
    priced = [(100 * point.share, point.value_per_mib) for point in points if point.value_per_mib]
    if priced:  # unknown or zero throughout otherwise
        price = grid[0].twinx()
        price.plot(*zip(*priced, strict=True), color=COLOURS[1], linestyle="--", linewidth=1)
        price.set_yscale("log")
        price.set_ylabel("what one more MiB buys (dashed)", color=COLOURS[1])
    if losses:
        found = [point.predicted_loss for point in losses]
        draw(grid[1], losses, found, "predicted loss, nats per token")
        grid[1].set_ylim(bottom=0)
    grid[-1].set(xlabel="bytes kept, % of the full cache", xscale="log")
    grid[-1].xaxis.set_major_formatter(lambda value, _: f"{value:g}%")
    grid[-1].xaxis.set_minor_formatter(lambda value, _: f"{value:g}%")
    _save(figure, path)


def _figure(inches: tuple[float, float], *, dpi: int) -> Figure:
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError(
            "drawing a picture needs matplotlib, which is not installed: pip install matplotlib"
        )
    # Figure instead of pyplot: no display is looked for, and no global state stays behind.
    from matplotlib.figure import Figure

    return Figure(figsize=inches, dpi=dpi, layout="constrained")


def _save(figure: Figure, path: str | Path) -> None:
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": "kvalloc"})


def _near_groups(profiles: Mapping[str, BudgetProfile]) -> list[list[str]]:
    """Names whose lines could not be told apart, together."""
    groups: list[list[str]] = []
    for name, profile in profiles.items():
        for group in groups:
            other = profiles[group[0]]
            apart = np.abs(_layer_shares(other) - _layer_shares(profile))
            same_context = other.context_tokens == profile.context_tokens
            if other.level == profile.level and same_context and np.all(apart < NEAR):
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


def _layer_shares(profile: BudgetProfile) -> FloatArray:
    """Kept share of the context in each layer, mean over heads, ``(n_layers,)``."""
    shares: FloatArray = profile.budgets.mean(axis=1) / profile.context_tokens
    return shares


def _styles(groups: Sequence[Sequence[str]]) -> dict[str, dict[str, Any]]:
    """One look for each name, the same in every panel, and the same for a whole group."""
    return {
        name: {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
        for i, group in enumerate(groups)
        for name in group
    }


def _draw_budgets(
    axes: Axes,
    groups: Sequence[Sequence[str]],
    profiles: Mapping[str, BudgetProfile],
    styles: Mapping[str, dict[str, Any]],
) -> None:
    from matplotlib.ticker import MaxNLocator

    for group in groups:
        profile = profiles[group[0]]
        kept = profile.retained_bytes / profile.full_bytes
        kind, line = (", mean of heads", ":") if profile.level == "head" else ("", "-")
        label = textwrap.fill(f"{', '.join(group)}: {kept:.1%}{kind}", 26)
        shape: dict[str, Any] = {"linestyle": line, "linewidth": 1.6, "markersize": 4}
        axes.plot(100 * _layer_shares(profile), label=label, **shape, **styles[group[0]])
    axes.set(xlabel="layer", ylabel=KEPT, ylim=(0, None))
    axes.margins(x=0.01)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    beside: dict[str, Any] = {
        "loc": "center left",
        "bbox_to_anchor": (1.0, 0.5),
        "labelspacing": 0.7,
    }
    small: dict[str, Any] = {"fontsize": 8.5, "title_fontsize": 8.5}
    axes.legend(title="kept bytes", alignment="left", frameon=False, **beside, **small)
    _tidy(axes, f"Budget of each layer (lines closer than {NEAR:.0%} drawn once)")


def _draw_curves(axes: Axes, scores: ScoreProfile) -> None:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    layers = scores.shape.full_layers
    curves = scores.contributions().sum(axis=1)
    kept = 100 * (scores.ranks + scores.protected_tokens) / scores.context_tokens
    deepest = scores.shape.n_layers - 1
    colour_map = colormaps["cividis"]
    for layer in layers:
        colour = colour_map(layer / max(1, deepest))
        axes.plot(kept, curves[layer], color=colour, linewidth=0.7, alpha=0.8)
    mean = curves[list(layers)].mean(axis=0)
    axes.plot(kept, mean, color="black", linewidth=2.2, label="mean over layers")
    axes.set(xlabel=KEPT, ylabel="retention", xlim=(0, 100), ylim=(0, 1.01))
    axes.legend(fontsize=9, frameon=False, loc="lower right")
    legend = ScalarMappable(Normalize(0, deepest), cmap=colour_map)
    axes.figure.colorbar(legend, ax=axes, label="layer", pad=0.02)
    _tidy(axes, "Retention: share of the score mass kept")


def _draw_harm(
    axes: Axes,
    harm: Mapping[str, Sequence[Asked]],
    styles: Mapping[str, dict[str, Any]],
) -> None:
    for label, asked in harm.items():
        style = styles[label.split(" = ")[0]]
        points = sorted((100 * a.share, a.kl, a.all_found) for a in asked if a.kl is not None)
        axes.plot([p[0] for p in points], [p[1] for p in points], color=style["color"], lw=1.5)
        axes.plot([], [], label=short_name(label, NARROW), markersize=6, linewidth=1.5, **style)
        for share, kl, found in points:
            fill = style["color"] if found else "white"
            axes.plot(share, kl, markersize=7, markerfacecolor=fill, **style)
    axes.set(
        xlabel=KEPT, ylabel="KL to the full cache, nats per token", xlim=(0, 100), ylim=(0, None)
    )
    # Below the panel, where no line can run through it.
    below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncols": 3}
    axes.legend(fontsize=8.5, frameon=False, **below)
    _tidy(axes, "Measured harm (filled: every needle found)")


def _tidy(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
