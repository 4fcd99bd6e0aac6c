"""Vega-Lite specifications of pictures; none relies on colour alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import vl_convert

from kvalloc.errors import InputError
from kvalloc.files import atomic_write
from kvalloc.report.material import WHOLE, Row, UnitCurves
from kvalloc.report.terminal import bar_scale

Spec = dict[str, Any]

_PERCENT_TICKS = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1]


@cache
def _specs(file: str) -> dict[str, Spec]:
    specs: dict[str, Spec] = json.loads((resources.files(__package__) / file).read_text("utf-8"))
    return specs


def themes() -> dict[str, Spec]:
    """Return Vega-Lite's configurations ``light`` and ``dark``.

    The colours, Okabe and Ito's and Tol's, are distinct for any colour vision.
    """
    return _specs("themes.json")


def chart(name: str, **values: Any) -> Spec:
    """Return a specification of ``charts.json`` with values for its ``$names``."""

    def filled(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: filled(value) for key, value in part.items()}
        if isinstance(part, list):
            return [filled(value) for value in part]
        is_name = isinstance(part, str) and part.startswith("$")
        return values[part[1:]] if is_name else part

    spec: Spec = filled(_specs("charts.json")[name])
    return spec


def budget_map(rows: Sequence[Row], *, heads: int) -> Spec:
    """Return a map of kept shares, a cell a layer and KV head, of `Material.budget_rows`."""
    full = bar_scale(max(max(row["tokens"]) / row["context"] for row in rows))
    high = f"datum.low + 0.88 * min(1, datum.share / {full})"
    legend = f"kept; a full cell is {full:.0%}"
    return chart("budgets", rows=rows, full=full, high=high, legend=legend, **_head_axis(heads))


def bits_map(rows: Sequence[Row], *, heads: int) -> Spec:
    """Return a map of the entries' bits; see `budget_map`."""
    return chart("bits", rows=rows, **_head_axis(heads))


def _head_axis(heads: int) -> dict[str, Any]:
    return {"heads": heads, "middles": [head + 0.5 for head in range(heads)]}


def curve_chart(curves: UnitCurves) -> Spec:
    """Return the curves of all units, with budget profiles' marks on the thick one.

    Its parameters ``layer`` and ``head`` choose that unit.
    """
    lines = curves.lines()
    heads = {line["head"] for line in lines}
    # a choice without measurements shows the measured ones: whole layers only, or every head
    instead = {frozenset({WHOLE}): "true"}.get(frozenset(heads), f"head == {WHOLE}")
    if len(heads) > 1 and WHOLE in heads:
        instead = "false"
    return chart(
        "curve",
        lines=lines,
        points=curves.points(),
        layer=lines[0]["layer"],
        head=lines[0]["head"],
        chosen=f"datum.layer == layer && (datum.head == head || {instead})",
        context=f"datum.head == {WHOLE}" if WHOLE in heads else "true",
        **_curve_axes(curves),
    )


def layers_chart(curves: UnitCurves) -> Spec:
    """Return curves of layers or measured heads, coloured by depth, and their mean."""
    lines = curves.lines()
    whole = [line for line in lines if line["head"] == WHOLE] or lines
    return chart("layers", lines=whole, **_curve_axes(curves))


def _curve_axes(curves: UnitCurves) -> dict[str, Any]:
    shares = json.dumps([float(f"{share:.4g}") for share in curves.shares])
    scale: Spec = {"type": "symlog", "constant": 0.01} if curves.of_loss else {"domain": [0, 1]}
    return {"what": curves.what, "scale": scale, "shares": shares}


def frontier_chart(traced: Sequence[Row], points: Sequence[Row], *, by: str, what: str) -> Spec:
    """Return the best possible at every size as lines, with the marks of budget profiles.

    Data are of `Material.frontiers`; ``by`` is ``retention`` or ``loss``, ``what`` an axis title.
    """
    axis = _bytes_axis([*traced, *points], "of the full cache")
    spec = chart("frontier", traced=traced, points=points, bytes=axis, by=by, what=what)
    layers = [layer for layer in spec["layer"] if layer["data"]["values"]]
    return {**spec, "layer": layers}


def measured_chart(rows: Sequence[Row]) -> Spec:
    """Return each method's measured KL over its bytes, with its interval.

    ``rows`` are of `Material.measured_rows`, each with a KL and a share.
    """
    return chart("measured", rows=rows, bytes=_bytes_axis(rows, "of a cache at 16 bits"))


def _bytes_axis(rows: Sequence[Row], of: str) -> Spec:
    smallest = min((row["share"] for row in rows), default=1.0)
    below = max((tick for tick in _PERCENT_TICKS if tick <= smallest), default=smallest)
    ticks = [tick for tick in _PERCENT_TICKS if tick >= below]
    return chart("bytes", title=f"bytes kept, {of}", domain=[below, 1], ticks=ticks)


def selectable(spec: Spec, field: str, value: str) -> Spec:
    """Return a chart with a parameter, named after a field, that selects rows; ``value`` first."""
    chosen = {"filter": f"datum.{field} == {field}"}
    params, transform = [{"name": field, "value": value}], spec.get("transform", [])
    return {**spec, "params": params, "transform": [chosen, *transform]}


def save_chart(spec: Mapping[str, Any], path: str | Path) -> None:
    """Write a picture, ``.png`` or ``.svg``, atomically; raise InputError if that fails."""
    ending = Path(path).suffix.lower()
    background = {"background": "white", "padding": 12}
    whole = {**spec, "config": themes()["light"], **background}
    if ending == ".png":
        drawn = vl_convert.vegalite_to_png(whole, scale=1.5)
    elif ending == ".svg":
        drawn = vl_convert.vegalite_to_svg(whole).encode()
    else:
        raise InputError(
            f"{path} has another ending than .png and .svg; a picture is one of them, "
            "and a page is .html"
        )
    with atomic_write(path, stream=True) as temporary:
        temporary.write_bytes(drawn)


@cache
def javascript() -> str:
    """Return Vega, Vega-Lite and Vega-Embed in one script without requests."""
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
