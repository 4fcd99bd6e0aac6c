"""Budgets, retention curves and measured harm in one PNG."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvalloc.accounting import FloatArray
from kvalloc.errors import InputError, MissingDependencyError
from kvalloc.files import atomic_write
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.score_profile import ScoreProfile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (
    "#000000",
    "#D55E00",
    "#0072B2",
    "#E69F00",
    "#CC79A7",
    "#009E73",
    "#56B4E9",
    "#777777",
    "#AA4499",
    "#332288",
)
"""Okabe and Ito's palette, a grey and two of Tol's: told apart with any kind of colour vision."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "p", "h")

NEAR = 0.02
"""Budgets that differ by less than this share of the context in every layer are one line."""

DPI = 100
INCHES = (10.0, 8.6)


@dataclass(frozen=True, kw_only=True)
class HarmPoint:
    """Measured harm at one share of the entries.

    Attributes
    ----------
    share : float
        Share of all entries kept, 0..1.
    kl : float
        Mean KL to the full cache, nats per token.
    all_found : bool
        Whether every needle was found.
    """

    share: float
    kl: float
    all_found: bool


def save_budget_figure(
    path: str | Path,
    scores: ScoreProfile,
    profiles: Mapping[str, BudgetProfile],
    *,
    harm: Mapping[str, Sequence[HarmPoint]] | None = None,
    title: str = "",
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
    harm : mapping of str to sequence of HarmPoint, optional
        Measurements by the same names; a third panel shows them.
    title : str
        Stands above everything.

    Raises
    ------
    InputError
        If there is no profile, or the path cannot be written.
    MissingDependencyError
        If matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError(
            "drawing a picture needs matplotlib, which is not installed: pip install matplotlib"
        )
    if not profiles:
        raise InputError("there is no budget profile to draw; give at least one")
    # Figure instead of pyplot: no display is looked for, and no global state stays behind.
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, dpi=DPI, layout="constrained")
    # Two sub-figures, so that the legend beside the upper panel takes no width from the lower two.
    upper, lower = figure.subfigures(2, 1, squeeze=False)[:, 0]
    groups = _near_groups(profiles)
    styles = _styles(groups)
    _draw_budgets(upper.add_subplot(), groups, profiles, styles)
    panels = lower.subplots(1, 2 if harm else 1, squeeze=False)[0]
    _draw_curves(panels[0], scores)
    if harm:
        _draw_harm(panels[1], harm, styles)
    if title:
        figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": "kvalloc"})


def _near_groups(profiles: Mapping[str, BudgetProfile]) -> list[list[str]]:
    """Names whose lines could not be told apart, together."""
    groups: list[list[str]] = []
    for name, profile in profiles.items():
        for group in groups:
            other = profiles[group[0]]
            same_kind = (other.level, other.context_tokens) == (
                profile.level,
                profile.context_tokens,
            )
            if same_kind and np.all(np.abs(_layer_shares(other) - _layer_shares(profile)) < NEAR):
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
        heads = profile.level == "head"
        kind = ", mean of heads" if heads else ""
        axes.plot(
            100 * _layer_shares(profile),
            label=textwrap.fill(f"{', '.join(group)}: {kept:.1%}{kind}", 26),
            linestyle=":" if heads else "-",
            linewidth=1.6,
            markersize=4,
            **styles[group[0]],
        )
    axes.set_title(
        f"Budget of each layer (lines closer than {NEAR:.0%} drawn once)", loc="left", fontsize=11
    )
    axes.set_xlabel("layer")
    axes.set_ylabel("kept entries, % of the prompt")
    axes.set_ylim(0, None)
    axes.margins(x=0.01)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(
        title="kept bytes",
        title_fontsize=8.5,
        alignment="left",
        fontsize=8.5,
        frameon=False,
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        labelspacing=0.7,
    )
    _tidy(axes)


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
    axes.set_title("Retention: share of the score mass kept", loc="left", fontsize=11)
    axes.set_xlabel("kept entries, % of the prompt")
    axes.set_ylabel("retention")
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 1.01)
    axes.legend(fontsize=9, frameon=False, loc="lower right")
    legend = ScalarMappable(Normalize(0, deepest), cmap=colour_map)
    axes.figure.colorbar(legend, ax=axes, label="layer", pad=0.02)
    _tidy(axes)


def _draw_harm(
    axes: Axes,
    harm: Mapping[str, Sequence[HarmPoint]],
    styles: Mapping[str, dict[str, Any]],
) -> None:
    for label, points in harm.items():
        style = styles[label.split(" = ")[0]]
        ordered = sorted(points, key=lambda point: point.share)
        shares = [100 * point.share for point in ordered]
        axes.plot(
            shares,
            [point.kl for point in ordered],
            color=style["color"],
            linewidth=1.5,
        )
        axes.plot([], [], label=_short(label), markersize=6, linewidth=1.5, **style)
        for found in (True, False):
            some = [point for point in ordered if point.all_found is found]
            axes.plot(
                [100 * point.share for point in some],
                [point.kl for point in some],
                linestyle="none",
                marker=style["marker"],
                markersize=7,
                markerfacecolor=style["color"] if found else "white",
                markeredgecolor=style["color"],
            )
    axes.set_title("Measured harm (filled: every needle found)", loc="left", fontsize=11)
    axes.set_xlabel("kept entries, % of the prompt")
    axes.set_ylabel("KL to the full cache, nats per token")
    axes.set_xlim(0, 100)
    axes.set_ylim(0, None)
    # Below the panel, where no line can run through it.
    axes.legend(
        fontsize=8.5, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3
    )
    _tidy(axes)


def _short(label: str, width: int = 20) -> str:
    """The first of several names and how many more, where all are too long for a panel."""
    first, *others = label.split(" = ")
    return label if len(label) <= width else f"{first} = {len(others)} more"


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
