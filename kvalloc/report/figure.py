"""Pictures of files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvalloc.errors import InputError, one_of
from kvalloc.files import check_writable
from kvalloc.report import charts
from kvalloc.report.charts import Spec
from kvalloc.report.material import Material, UnitCurves
from kvalloc.report.terminal import merged_names, short_name

WIDTH = 740
"""Pixels of a whole picture before it is scaled: about what a page of text is wide."""

NAMES = 30
"""Longest list of solvers in a label, characters."""


def plot(files: Sequence[str | Path], output: str | Path, what: str | None = None) -> str:
    """Draw the content of files of one model; return the picture's name.

    Parameters
    ----------
    files : sequence of str or Path
    output : str or Path
        A ``.png`` or ``.svg``, written atomically.
    what : str, optional
        ``budgets``, ``curves``, ``frontier``, ``measured``, or ``overview`` of all but the
        frontier; by default the first in the files.

    Raises
    ------
    InputError
        If files do not hold it, the path cannot be written, or as in `Material.read`.
    """
    check_writable(output, stream=True)
    material = Material.read(files)
    drawers = {
        "budgets": _budgets,
        "curves": _curves,
        "frontier": _frontier,
        "measured": _measured,
        "overview": _overview,
    }
    chosen = drawers if what is None else {what: one_of("picture", what, drawers)}
    for name, draw in chosen.items():
        if panels := draw(material):
            title = f"{material.shape.model_id}: {name}"
            charts.save_chart(_stacked(panels, title), output)
            return name
    raise InputError(
        f"these files have no data for {what}: budgets need a budget profile, curves and frontier "
        "a score profile, measured figures an evaluation with rows"
    )


def _budgets(material: Material) -> list[Spec]:
    heads, panels = material.shape.n_kv_heads, []
    for name, profile in material.profiles.items():
        rows = [row for row in material.budget_rows() if row["profile"] == name]
        kept = f"{name}: {profile.share:.1%} of the bytes"
        size = {"title": kept, "width": WIDTH, "height": max(60, 34 * heads)}
        panels.append({**charts.budget_map(rows, heads=heads), **size})
    return panels


def _curves(material: Material) -> list[Spec]:
    panels = []
    for name, scores in material.scores.items():
        for curves in UnitCurves.all_of(scores):
            what = "loss of each unit reduced alone," if curves.of_loss else "retention by"
            title = f"{name}: {what} scorer {scores.scorer}"
            panels.append({**charts.layers_chart(curves), "title": title})
    return panels


def _frontier(material: Material) -> list[Spec]:
    return [
        charts.frontier_chart(best, reached, by=by, what=what)
        for by, what, best, reached in material.frontiers()
        if best
    ]


def _measured(material: Material) -> list[Spec]:
    rows = [row for row in material.measured_rows() if None not in (row["kl"], row["share"])]
    return [
        {**charts.measured_chart([row for row in rows if row["task"] == task]), "title": task}
        for task in dict.fromkeys(row["task"] for row in rows)
    ]


def _overview(material: Material) -> list[Spec]:
    strips = [
        {
            "who": [short_name(name, NAMES), f"{profile.share:.1%} of the bytes"],
            **{"order": order, "layer": layer, "share": share},
        }
        for order, (name, profile) in enumerate(merged_names(material.profiles).items())
        for layer, share in enumerate(profile.budgets.mean(axis=1) / profile.context_tokens)
    ]
    below = [
        {
            **charts.layers_chart(UnitCurves.retention(scores, {})),
            "title": {"text": "Layers differ in what they need", "subtitle": "thick: their mean"},
        }
        for scores in material.scores.values()
    ]
    rows = [row for row in material.measured_rows() if row["kl"] is not None]
    scored = [row for row in rows if row["score"] is not None] or rows
    if harm := [row for row in scored if row["task"] == scored[0]["task"]]:
        note = "KL and score; filled: every answer right"
        heading = {"text": "Measured harm", "subtitle": [harm[0]["task"], note]}
        below.append({**charts.chart("harm", rows=harm), "title": heading})
    half = {"width": WIDTH // 2 - 40, "height": 300}
    lower = charts.chart("beside", panels=[{**half, **panel} for panel in below])
    upper = [charts.chart("strips", rows=strips, width=WIDTH)] if strips else []
    return [*upper, *([lower] if below else [])]


def _stacked(panels: Sequence[Spec], title: str) -> Spec:
    size = {"width": WIDTH, "height": 260}
    sized = [{**size, **panel} if "layer" in panel else panel for panel in panels]
    return charts.chart("stacked", panels=sized, title=title)
