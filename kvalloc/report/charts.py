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
_KL = "KL to the full cache, nats per token"
_UNIT = [{"field": "layer"}, {"field": "head"}]


def theme(*, ink: str, faint: str, empty: str, ramp: Sequence[str], names: Sequence[str]) -> Spec:
    """Return colours and type of a picture as Vega-Lite's configuration."""
    axis = {
        **dict.fromkeys(("labelColor", "titleColor"), ink),
        **dict.fromkeys(("gridColor", "domainColor", "tickColor"), faint),
        **dict.fromkeys(("labelFontSize", "titleFontSize"), 12),
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
"""Okabe and Ito's palette and a colour of Tol's: distinct for any kind of colour vision."""


def budget_map(rows: Sequence[Row], *, heads: int) -> Spec:
    """Return a map with a cell a layer and KV head, filled and coloured by the kept share.

    Parameters
    ----------
    rows : sequence of dict
        As `Material.budget_rows` returns them.
    heads : int
        KV heads of a layer.
    """
    full = bar_scale(max(max(row["tokens"]) / row["context"] for row in rows))
    legend = {
        **{"title": f"kept; a full cell is {full:.0%}", "format": "%"},
        **{"orient": "top", "direction": "horizontal", "gradientLength": 160},
    }
    high = {"calculate": f"datum.low + 0.88 * min(1, datum.share / {full})", "as": "high"}
    color = _number("share", scale={"domain": [0, full]}, legend=legend)
    return {
        "data": {"values": list(rows)},
        "transform": [*_cells(heads), high],
        "encoding": {
            "x": _layers_axis(),
            "y": _heads_axis("low", heads),
            "tooltip": _tooltip("layer", "head", "tokens", share=".1%", bits=""),
        },
        "layer": [
            _marks({"type": "rect", "style": "empty"}, y2={"field": "top"}),
            _marks("rect", y2={"field": "high"}, color=color),
        ],
    }


def bits_map(rows: Sequence[Row], *, heads: int) -> Spec:
    """Return a map with a cell a layer and KV head and the bits of its entries.

    Parameters
    ----------
    rows, heads
        As in `budget_map`.
    """
    low, middle = (_heads_axis(name, heads) for name in ("low", "middle"))
    color = {"field": "bits", "type": "ordinal", "legend": None}
    return {
        "data": {"values": list(rows)},
        "transform": [*_cells(heads), {"calculate": "datum.head + 0.5", "as": "middle"}],
        "encoding": {
            "x": _layers_axis(),
            "tooltip": _tooltip("layer", "head", "bits", "tokens", share=".1%"),
        },
        "layer": [
            _marks({"type": "rect", "opacity": 0.45}, y=low, y2={"field": "top"}, color=color),
            _marks({"type": "text", "fontSize": 10}, y=middle, text=_number("bits")),
        ],
    }


def _marks(mark: str | Spec, *transform: Spec, **encoding: Any) -> Spec:
    """Return a layer of marks, after transforms of its own if there are any."""
    transforms = {"transform": list(transform)} if transform else {}
    return {**transforms, "mark": mark, "encoding": encoding}


def _number(field: str, title: str | None = None, **more: Any) -> Spec:
    """Return the encoding of a quantity."""
    titled = {} if title is None else {"title": title}
    return {"field": field, "type": "quantitative", **titled, **more}


def _cells(heads: int) -> list[Spec]:
    """Return the transforms from a row for a layer to one for each head, with its cell's ends."""
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
    return _number(name, "KV head", axis=axis, scale={"domain": [0, heads], "nice": False})


def curve_chart(curves: UnitCurves) -> Spec:
    """Return the curves of all units, one of them thick, with the marks of budget profiles on it.

    Returns
    -------
    dict
        With the parameters ``layer`` and ``head``, which choose the unit.
    """
    lines = curves.lines()
    heads = {line["head"] for line in lines}
    # a choice that was not measured shows what was: whole layers only, or every head
    instead = {frozenset({WHOLE}): "true"}.get(frozenset(heads), f"head == {WHOLE}")
    if len(heads) > 1 and WHOLE in heads:
        instead = "false"
    chosen = {"filter": f"datum.layer == layer && (datum.head == head || {instead})"}
    context = {"filter": f"datum.head == {WHOLE}" if WHOLE in heads else "true"}
    thin, thick = ({"type": "line", "strokeWidth": width} for width in (1, 3))
    points = [
        {"filter": "datum.layer == layer"},
        {"calculate": f"sequence({WHOLE}, {curves.values.shape[1] - 1})", "as": "head"},
        {"flatten": ["head", "share", "value"]},
        chosen,
        {"filter": "isValid(datum.value)"},
    ]
    tooltip = _tooltip("profile", "layer", share=".1%", value=".4f")
    return {
        "params": [{"name": name, "value": lines[0][name]} for name in ("layer", "head")],
        "data": {"values": lines},
        "encoding": _curve_place(curves),
        "layer": [
            _marks({**thin, "style": "context"}, context, *_spread(curves), detail=_UNIT),
            _marks(thick, chosen, *_spread(curves), detail={"field": "head"}),
            {
                "data": {"values": curves.points()},
                "transform": points,
                "layer": [
                    _marks({"type": "rule", "strokeDash": [3, 3]}, y=None),
                    _marks(_points(130), **_named("profile"), tooltip=tooltip),
                ],
            },
        ],
    }


def _points(size: int) -> Spec:
    return {"type": "point", "filled": True, "size": size, "opacity": 1}


def _curve_place(curves: UnitCurves) -> Spec:
    """Return the axes of curves: that of losses is linear near 0 and logarithmic above."""
    of_loss: Spec = {"type": "symlog", "constant": 0.01}
    scale = of_loss if curves.of_loss else {"domain": [0, 1]}
    axis = {"format": "%", "tickCount": 10, "labelOverlap": "parity"}
    return {
        "x": _number("share", "kept of the context", axis=axis, scale={"domain": [0, 1]}),
        "y": _number("value", curves.what, scale=scale),
    }


def _spread(curves: UnitCurves) -> list[Spec]:
    """Return the transforms from a row for a curve to one for each of its points."""
    shares = [float(f"{share:.4g}") for share in curves.shares]
    return [
        {"calculate": json.dumps(shares), "as": "share"},
        {"flatten": ["share", "values"], "as": ["share", "value"]},
    ]


def layers_chart(curves: UnitCurves) -> Spec:
    """Return the curves of all layers or measured heads, coloured by depth, and their mean."""
    lines = curves.lines()
    whole = [line for line in lines if line["head"] == WHOLE] or lines
    place = _curve_place(curves)
    legend = {
        **{"orient": "bottom-right", "direction": "horizontal"},
        **{"gradientLength": 120, "offset": 12},
    }
    thin = {"type": "line", "strokeWidth": 1, "opacity": 0.8}
    mean = {"type": "line", "strokeWidth": 3, "style": "mean"}
    return {
        "data": {"values": whole},
        "transform": _spread(curves),
        "encoding": place,
        "layer": [
            _marks(thin, detail=_UNIT, color=_number("layer", legend=legend)),
            _marks(mean, y={**place["y"], "aggregate": "mean"}),
        ],
    }


def strips_chart(rows: Sequence[Row], *, width: int) -> Spec:
    """Return a strip of bars a name, one bar a layer: the share that it keeps.

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
    share = _number("share", axis=axis, scale={"domain": [0, 1]})
    return {
        "title": "What each layer keeps of the prompt",
        "data": {"values": list(rows)},
        "facet": {"row": {"field": "who", "title": None, "sort": order, "header": header}},
        "spacing": 14,
        "spec": {"width": width, "height": 44, **_marks("bar", x=_layers_axis(), y=share)},
    }


HARM_NOTE = "KL and score; filled: every answer right"


def harm_chart(rows: Sequence[Row]) -> Spec:
    """Return the measured KL of each name, the lowest first, filled if every answer was right.

    Parameters
    ----------
    rows : sequence of dict
        As `Material.measured_rows` returns them, those of one task with a KL.
    """
    score = "isValid(datum.score) ? '; ' + format(datum.score, '.0%') : ''"
    text = f"format(datum.kl, '.2~g') + ({score})"
    some, whole = ({"filter": f"datum.score {sign} 1"} for sign in ("!=", "=="))
    label = {"type": "text", "align": "left", "dx": 9}
    return {
        "data": {"values": list(rows)},
        # a logarithmic axis has no 0
        "transform": [
            {"calculate": text, "as": "label"},
            {"calculate": "max(datum.kl, 1e-6)", "as": "drawn"},
        ],
        "encoding": {
            "x": _number("drawn", _KL, scale={"type": "log"}, axis=_decades()),
            "y": {"field": "name", "type": "nominal", "title": None, "sort": "x"},
        },
        "layer": [
            _marks(_points(110), whole),
            _marks({"type": "point", "size": 90}, some),
            _marks(label, text={"field": "label"}),
        ],
    }


def frontier_chart(traced: Sequence[Row], points: Sequence[Row], *, by: str, what: str) -> Spec:
    """Return the best possible at every size as lines, with the marks of budget profiles.

    Parameters
    ----------
    traced, points : sequence of dict
        As `Material.frontiers` gives them.
    by : str
        Which of their values is drawn: ``retention`` or ``loss``.
    what : str
        Title of the vertical axis.
    """
    formats = {"share": ".1%", "retention": ".4f", "loss": ".4f"}
    dash = {"field": "curve", "type": "nominal", "title": None}
    line = _marks(
        {"type": "line", "strokeWidth": 2}, strokeDash=dash, tooltip=_tooltip("curve", **formats)
    )
    mark = _marks(_points(150), **_named("name"), tooltip=_tooltip("name", "solver", **formats))
    drawn = [(line, traced), (mark, points)]
    layers = [{"data": {"values": list(rows)}, **layer} for layer, rows in drawn if rows]
    place = {"x": _bytes_axis([*traced, *points]), "y": _number(by, what)}
    return {"encoding": place, "layer": layers}


def measured_chart(rows: Sequence[Row]) -> Spec:
    """Return the measured KL of every method over its bytes, with its interval.

    Parameters
    ----------
    rows : sequence of dict
        As `Material.measured_rows` returns them, those with a KL and a share.
    """
    tooltip = _tooltip("name", "source", "n", share=".1%", kl=".4f", score=".0%")
    known, ends = {"filter": "isValid(datum.low)"}, {"y": _number("low"), "y2": {"field": "high"}}
    return {
        "data": {"values": list(rows)},
        "encoding": {
            "x": _bytes_axis(rows, "of a cache at 16 bits"),
            "y": _number("kl", _KL, scale={"type": "symlog", "constant": 0.001}),
        },
        "layer": [
            _marks({"type": "rule", "strokeWidth": 1.5}, known, **ends),
            _marks(_points(150), **_named("name"), tooltip=tooltip),
        ],
    }


def _bytes_axis(rows: Sequence[Row], of: str = "of the full cache") -> Spec:
    smallest = min((row["share"] for row in rows), default=1.0)
    below = max((tick for tick in _PERCENT_TICKS if tick <= smallest), default=smallest)
    ticks = [tick for tick in _PERCENT_TICKS if tick >= below]
    return _number(
        "share",
        f"bytes kept, {of}",
        scale={"type": "log", "nice": False, "domain": [below, 1], "clamp": True},
        axis={"format": "~%", "values": ticks, "labelOverlap": "parity"},
    )


def _decades() -> Spec:
    return {"values": [10.0**power for power in range(-12, 12)], "format": "~g"}


def _named(name: str) -> Spec:
    """Return colour and shape by a name, in one legend."""
    named = {"field": name, "type": "nominal", "title": None}
    return {"color": named, "shape": named}


def _tooltip(*names: str, **formats: str) -> list[Spec]:
    plain = [{"field": name} for name in names]
    return plain + [
        {"field": name, **({"format": form} if form else {})} for name, form in formats.items()
    ]


def selectable(spec: Spec, field: str, value: str) -> Spec:
    """Return a chart whose rows are chosen by a parameter of a field's name.

    Parameters
    ----------
    spec : dict
    field : str
    value : str
        The first choice.
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
        raise InputError(
            f"{path} has another ending than .png and .svg; a picture is one of them, "
            "and a page is .html"
        )
    with atomic_write(path, stream=True) as temporary:
        temporary.write_bytes(drawn)


@cache
def javascript() -> str:
    """Return Vega, Vega-Lite and Vega-Embed in one script that makes no request."""
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
