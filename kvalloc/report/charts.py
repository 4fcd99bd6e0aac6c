"""The pictures as Vega-Lite specifications: a page draws them itself, files come from vl-convert.

None relies on colour alone: what colour says, length, shape or a label says too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import vl_convert

from kvalloc.errors import InputError
from kvalloc.files import atomic_write
from kvalloc.report.material import WHOLE, Row, UnitCurves
from kvalloc.report.terminal import bar_scale

Spec = dict[str, Any]

_PERCENT_TICKS = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1]


FRONTIERS = (
    ("retention", "mean", "retention (share of the attention mass)"),
    ("loss", "loss", "predicted loss, nats per token"),
)
"""What the bytes buy: a row's field, the objective of its best, and the title of its axis."""


def theme(*, ink: str, faint: str, empty: str, ramp: Sequence[str], names: Sequence[str]) -> Spec:
    """Colours and type of a picture, as Vega-Lite's configuration."""
    axis = {
        "labelColor": ink,
        "titleColor": ink,
        "gridColor": faint,
        "domainColor": faint,
        "tickColor": faint,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
    }
    return {
        "font": "system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif",
        "background": None,
        "aria": False,  # the page names each figure; a thousand marks are no text to listen to
        "axis": axis,
        "legend": {
            **axis,
            **{"orient": "bottom", "direction": "vertical", "columns": 2},
            **{"symbolSize": 90, "labelLimit": 260},
        },
        "title": {"color": ink, "anchor": "start", "fontSize": 14, "fontWeight": 600},
        "header": {"labelColor": ink, "titleColor": ink},
        "view": {"stroke": None},
        "text": {"fill": ink},
        "rule": {"stroke": ink},
        "range": {"category": list(names), "heatmap": list(ramp), "ramp": list(ramp)},
        "style": {"empty": {"color": empty}, "context": {"color": faint}, "mean": {"color": ink}},
    }


THEMES = {
    "light": theme(
        ink="#1b1f24",
        faint="#c9d1d9",
        empty="#eef1f4",
        ramp=("#9ecae1", "#08306b"),
        names=("#0072b2", "#d55e00", "#009e73", "#aa4499", "#e69f00", "#56b4e9", "#000000"),
    ),
    "dark": theme(
        ink="#e6edf3",
        faint="#3d444d",
        empty="#21262d",
        ramp=("#2f6f9f", "#d6ecff"),
        names=("#56b4e9", "#ff9e5e", "#3ddc97", "#e78ac3", "#f5d547", "#9ecbff", "#ffffff"),
    ),
}
"""Okabe and Ito's palette and a colour of Tol's: told apart with any kind of colour vision."""


def budget_map(rows: Sequence[Row], *, heads: int) -> Spec:
    """One cell a layer and KV head, filled and coloured by the share that is kept.

    Parameters
    ----------
    rows : sequence of dict
        As `Material.budget_rows` gives them.
    heads : int
        KV heads of a layer.
    """
    full = bar_scale(max(max(row["tokens"]) / row["context"] for row in rows))
    return {
        "data": {"values": list(rows)},
        "transform": [
            *_cells(heads),
            {"calculate": f"datum.low + 0.88 * min(1, datum.share / {full})", "as": "high"},
        ],
        "encoding": {
            "x": _layers_axis(),
            "y": _heads_axis("low", heads),
            "tooltip": _tooltip("layer", "head", "tokens", share=".1%", bits=""),
        },
        "layer": [
            {"mark": {"type": "rect", "style": "empty"}, "encoding": {"y2": {"field": "top"}}},
            {
                "mark": "rect",
                "encoding": {
                    "y2": {"field": "high"},
                    "color": {
                        "field": "share",
                        "type": "quantitative",
                        "scale": {"domain": [0, full]},
                        "legend": {
                            **{"title": f"kept; a full cell is {full:.0%}", "format": "%"},
                            **{"orient": "top", "direction": "horizontal"},
                            "gradientLength": 160,
                        },
                    },
                },
            },
        ],
    }


def bits_map(rows: Sequence[Row], *, heads: int) -> Spec:
    """One cell a layer and KV head with the bits of what it keeps.

    Parameters
    ----------
    rows, heads
        As in `budget_map`.
    """
    return {
        "data": {"values": list(rows)},
        "transform": [
            *_cells(heads),
            {"calculate": "datum.head + 0.5", "as": "middle"},
        ],
        "encoding": {
            "x": _layers_axis(),
            "tooltip": _tooltip("layer", "head", "bits", "tokens", share=".1%"),
        },
        "layer": [
            {
                "mark": {"type": "rect", "opacity": 0.45},
                "encoding": {
                    "y": _heads_axis("low", heads),
                    "y2": {"field": "top"},
                    "color": {"field": "bits", "type": "ordinal", "legend": None},
                },
            },
            {
                "mark": {"type": "text", "fontSize": 10},
                "encoding": {
                    "y": _heads_axis("middle", heads),
                    "text": {"field": "bits", "type": "quantitative"},
                },
            },
        ],
    }


def _cells(heads: int) -> list[Spec]:
    """A row for each head of a row for a layer, and the lower and upper end of its cell."""
    return [
        {"calculate": f"sequence({heads})", "as": "head"},
        {"flatten": ["head", "tokens", "bits"]},
        {"calculate": "datum.tokens / datum.context", "as": "share"},
        {"calculate": "datum.head + 0.06", "as": "low"},
        {"calculate": "datum.head + 0.94", "as": "top"},
    ]


def _layers_axis() -> Spec:
    axis = {"labelAngle": 0, "labelOverlap": "parity", "ticks": False, "domain": False}
    return {"field": "layer", "type": "ordinal", "title": "layer", "axis": axis}


def _heads_axis(name: str, heads: int) -> Spec:
    axis = {
        "values": [head + 0.5 for head in range(heads)],
        "labelExpr": "floor(datum.value)",
        **{"grid": False, "ticks": False, "domain": False},
    }
    scale = {"domain": [0, heads], "nice": False}
    return {"field": name, "type": "quantitative", "title": "KV head", "axis": axis, "scale": scale}


def curve_chart(curves: UnitCurves, *, what: str, of_loss: bool) -> Spec:
    """Curves of all units, one of them brought out, and where budget profiles stand on it.

    Parameters
    ----------
    curves : UnitCurves
    what : str
        Title of the vertical axis.
    of_loss : bool
        Losses are drawn on a scale that is linear near 0 and logarithmic above.

    Returns
    -------
    dict
        With the parameters ``layer`` and ``head``, which choose the unit.
    """
    lines = curves.lines()
    there = {line["head"] for line in lines}
    # a choice that was not measured shows what was: whole layers only, or every head
    instead = {frozenset({WHOLE}): "true"}.get(frozenset(there), f"head == {WHOLE}")
    if len(there) > 1 and WHOLE in there:
        instead = "false"
    chosen = {"filter": f"datum.layer == layer && (datum.head == head || {instead})"}
    context = f"datum.head == {WHOLE}" if WHOLE in there else "true"
    place, spread = _curve_place(what, of_loss), _spread(curves)
    first = lines[0]
    return {
        "params": [
            {"name": "layer", "value": first["layer"]},
            {"name": "head", "value": first["head"]},
        ],
        "data": {"values": lines},
        "encoding": place,
        "layer": [
            {
                "transform": [{"filter": context}, *spread],
                "mark": {"type": "line", "style": "context", "strokeWidth": 1},
                "encoding": {"detail": [{"field": "layer"}, {"field": "head"}]},
            },
            {
                "transform": [chosen, *spread],
                "mark": {"type": "line", "strokeWidth": 3},
                "encoding": {"detail": {"field": "head"}},
            },
            {
                "data": {"values": curves.points()},
                "transform": [
                    {"filter": "datum.layer == layer"},
                    {"calculate": f"sequence({WHOLE}, {curves.values.shape[1] - 1})", "as": "head"},
                    {"flatten": ["head", "share", "value"]},
                    chosen,
                    {"filter": "isValid(datum.value)"},
                ],
                "layer": [
                    {"mark": {"type": "rule", "strokeDash": [3, 3]}, "encoding": {"y": None}},
                    {
                        "mark": {"type": "point", "filled": True, "size": 130, "opacity": 1},
                        "encoding": {
                            **_named("profile"),
                            "tooltip": _tooltip("profile", "layer", share=".1%", value=".4f"),
                        },
                    },
                ],
            },
        ],
    }


def _curve_place(what: str, of_loss: bool) -> Spec:
    """Axes of a curve."""
    scale: Spec = {"type": "symlog", "constant": 0.01} if of_loss else {"domain": [0, 1]}
    axis = {"format": "%", "tickCount": 10, "labelOverlap": "parity"}
    kept = {"field": "share", "type": "quantitative", "title": "kept of the context", "axis": axis}
    return {
        "x": {**kept, "scale": {"domain": [0, 1]}},
        "y": {"field": "value", "type": "quantitative", "title": what, "scale": scale},
    }


def _spread(curves: UnitCurves) -> list[Spec]:
    """A row for each point of a row for a curve."""
    shares = [float(f"{share:.4g}") for share in curves.shares]
    return [
        {"calculate": json.dumps(shares), "as": "share"},
        {"flatten": ["share", "values"], "as": ["share", "value"]},
    ]


def layers_chart(curves: UnitCurves, *, what: str, of_loss: bool = False) -> Spec:
    """Curves of all layers, or of the heads that were measured, coloured by depth; and their mean.

    Parameters
    ----------
    curves, what, of_loss
        As in `curve_chart`.
    """
    lines = curves.lines()
    whole = [line for line in lines if line["head"] == WHOLE] or lines
    place = _curve_place(what, of_loss)
    return {
        "data": {"values": whole},
        "transform": _spread(curves),
        "encoding": place,
        "layer": [
            {
                "mark": {"type": "line", "strokeWidth": 1, "opacity": 0.8},
                "encoding": {
                    "detail": [{"field": "layer"}, {"field": "head"}],
                    "color": {
                        "field": "layer",
                        "type": "quantitative",
                        "legend": {
                            **{"orient": "bottom-right", "direction": "horizontal"},
                            **{"gradientLength": 120, "offset": 12},
                        },
                    },
                },
            },
            {
                "mark": {"type": "line", "strokeWidth": 3, "style": "mean"},
                "encoding": {"y": {**place["y"], "aggregate": "mean"}},
            },
        ],
    }


def strips_chart(rows: Sequence[Row], *, width: int) -> Spec:
    """A strip of bars a name, one bar a layer: the share that it keeps.

    Parameters
    ----------
    rows : sequence of dict
        ``who``, lines of text; ``layer``, ``share``, and ``order``, that of the strips.
    width : int
        Pixels of a strip.
    """
    header = {"labelAngle": 0, "labelAlign": "left", "labelFontSize": 12, "labelPadding": 8}
    axis = {"format": "%", "values": [0, 1], "title": None, "labelFontSize": 10}
    order = {"field": "order", "op": "min"}
    return {
        "title": "What each solver lets a layer keep of the prompt",
        "data": {"values": list(rows)},
        "facet": {"row": {"field": "who", "title": None, "sort": order, "header": header}},
        "spacing": 14,
        "spec": {
            **{"width": width, "height": 44, "mark": "bar"},
            "encoding": {
                "x": _layers_axis(),
                "y": {
                    **{"field": "share", "type": "quantitative", "axis": axis},
                    "scale": {"domain": [0, 1]},
                },
            },
        },
    }


def harm_chart(rows: Sequence[Row]) -> Spec:
    """Measured KL of each name, the least first; filled where every needle was found.

    Parameters
    ----------
    rows : sequence of dict
        ``who``, ``kl``, ``found`` of ``of``.
    """
    x = {
        "field": "kl",
        "type": "quantitative",
        "title": "KL to the full cache, nats per token",
        "scale": {"type": "log"},
        "axis": _decades(),
    }
    text = "format(datum.kl, '.2~g') + '; ' + datum.found + '/' + datum.of"
    return {
        "data": {"values": list(rows)},
        "transform": [{"calculate": text, "as": "said"}],
        "encoding": {
            "x": x,
            "y": {"field": "who", "type": "nominal", "title": None, "sort": "x"},
        },
        "layer": [
            {
                "transform": [{"filter": "datum.found == datum.of"}],
                "mark": {"type": "point", "filled": True, "size": 110, "opacity": 1},
            },
            {
                "transform": [{"filter": "datum.found < datum.of"}],
                "mark": {"type": "point", "size": 90},
            },
            {
                "mark": {"type": "text", "align": "left", "dx": 9},
                "encoding": {"text": {"field": "said"}},
            },
        ],
    }


def frontier_chart(traced: Sequence[Row], points: Sequence[Row], *, by: str, what: str) -> Spec:
    """The best possible at every size as lines, and where budget profiles stand.

    Parameters
    ----------
    traced : sequence of dict
        As `Material.frontier_rows` gives them.
    points : sequence of dict
        As `Material.point_rows` gives them.
    by : str
        Which of their values is drawn: ``retention``, ``loss`` or ``price``.
    what : str
        Title of the vertical axis.
    """
    y: Spec = {"field": by, "type": "quantitative", "title": what}
    if by == "price":
        y |= {"scale": {"type": "log"}, "axis": _decades()}
    layers: list[Spec] = []
    if traced:
        line = {
            "data": {"values": list(traced)},
            "mark": {"type": "line", "strokeWidth": 2},
            "encoding": {
                "strokeDash": {"field": "curve", "type": "nominal", "title": None},
                "tooltip": _tooltip("curve", share=".1%", retention=".4f", loss=".4f"),
            },
        }
        layers.append(line)
    if points:
        mark = {
            "data": {"values": list(points)},
            "mark": {"type": "point", "filled": True, "size": 150, "opacity": 1},
            "encoding": {
                **_named("name"),
                "tooltip": _tooltip("name", "solver", share=".1%", retention=".4f", loss=".4f"),
            },
        }
        layers.append(mark)
    return {"encoding": {"x": _bytes_axis([*traced, *points]), "y": y}, "layer": layers}


def measured_chart(rows: Sequence[Row]) -> Spec:
    """Measured KL of every method over its bytes, with its interval.

    Parameters
    ----------
    rows : sequence of dict
        As `Material.measured_rows` gives them, those with a KL and a share.
    """
    y = {
        "field": "kl",
        "type": "quantitative",
        "title": "KL to the full cache, nats per token",
        "scale": {"type": "symlog", "constant": 0.001},
    }
    return {
        "data": {"values": list(rows)},
        "encoding": {"x": _bytes_axis(rows, "of a cache at 16 bits"), "y": y},
        "layer": [
            {
                "transform": [{"filter": "isValid(datum.low)"}],
                "mark": {"type": "rule", "strokeWidth": 1.5},
                "encoding": {
                    "y": {"field": "low", "type": "quantitative"},
                    "y2": {"field": "high"},
                },
            },
            {
                "mark": {"type": "point", "filled": True, "size": 150, "opacity": 1},
                "encoding": {
                    **_named("name"),
                    "tooltip": _tooltip("name", "source", "n", share=".1%", kl=".4f", score=".0%"),
                },
            },
        ],
    }


def _bytes_axis(rows: Sequence[Row], of: str = "of the full cache") -> Spec:
    least = min((row["share"] for row in rows), default=1.0)
    below = max((tick for tick in _PERCENT_TICKS if tick <= least), default=least)
    ticks = [tick for tick in _PERCENT_TICKS if tick >= below]
    return {
        "field": "share",
        "type": "quantitative",
        "title": f"bytes kept, {of}",
        "scale": {"type": "log", "nice": False, "domain": [below, 1], "clamp": True},
        "axis": {"format": "~%", "values": ticks, "labelOverlap": "parity"},
    }


def _decades() -> Spec:
    return {"values": [10.0**power for power in range(-12, 12)], "format": "~g"}


def _named(name: str) -> Spec:
    """Colour and shape by a name, in one legend."""
    named = {"field": name, "type": "nominal", "title": None}
    return {"color": named, "shape": named}


def _tooltip(*names: str, **formats: str) -> list[Spec]:
    plain = [{"field": name} for name in names]
    return plain + [
        {"field": name, **({"format": form} if form else {})} for name, form in formats.items()
    ]


def selectable(spec: Spec, field: str, value: str) -> Spec:
    """Let a parameter of a field's name choose whose rows a chart shows.

    Parameters
    ----------
    spec : dict
    field : str
    value : str
        What is shown at first.
    """
    chosen = {"filter": f"datum.{field} == {field}"}
    params, transform = [{"name": field, "value": value}], spec.get("transform", [])
    return {**spec, "params": params, "transform": [chosen, *transform]}


def save_chart(spec: Mapping[str, Any], path: str | Path) -> None:
    """Write a picture as PNG or SVG, by the file's ending, atomically.

    Raises
    ------
    InputError
        If it is another ending, or the path cannot be written.
    """
    ending = Path(path).suffix.lower()
    background = {"background": "white", "padding": 12}
    whole = {**spec, "config": THEMES["light"], **background}
    if ending == ".png":
        drawn = vl_convert.vegalite_to_png(whole, scale=1.5)
    elif ending == ".svg":
        drawn = vl_convert.vegalite_to_svg(whole).encode()
    else:
        raise InputError(f"{path} has another ending than .png and .svg; a picture is one of them")
    with atomic_write(path, stream=True) as temporary:
        temporary.write_bytes(drawn)


@cache
def javascript() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script that asks for nothing from a network."""
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
