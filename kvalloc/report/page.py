"""One interactive HTML page about files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from kvalloc.accounting.costs import full_bytes
from kvalloc.errors import InputError
from kvalloc.files import check_writable, provenance, write_text
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.report import charts
from kvalloc.report.material import Material, Row, UnitCurves
from kvalloc.report.wording import (
    cap_lines,
    decision_cells,
    decision_fields,
    evaluation_tables,
    model_text,
    proof_text,
    record_fields,
    score_fields,
)

MAX_TOKENS = 2**17
"""Longest prompt of the memory calculator where the model does not say one."""

Table = tuple[Sequence[str], list[list[str]]]
"""Headings and cells."""


def write_report(files: Sequence[str | Path], output: str | Path) -> None:
    """Write one HTML page from any mix of score profiles, budget profiles and evaluations.

    It loads nothing from a network.

    Parameters
    ----------
    files : sequence of str or Path
        Files of one model, or names of shipped budget profiles.
    output : str or Path
        The page, ``.html`` or ``.htm``, written atomically.

    Raises
    ------
    InputError
        If there is no file, one is missing, models differ, or the page has another ending or cannot
        be written.
    ProfileFileError
        If a file is damaged, of another schema version or of another kind.

    Examples
    --------
    >>> write_report(["s.safetensors", "p.json"], "report.html")  # doctest: +SKIP
    """
    if Path(output).suffix.lower() not in (".html", ".htm"):
        raise InputError(f"{output} has another ending than .html; the page is one")
    check_writable(output, stream=True)
    write_text(output, page(Material.read(files)))


def page(material: Material) -> str:
    """Return the page as HTML."""
    from jinja2 import Environment

    def part(ending: str) -> str:
        return (resources.files("kvalloc.report") / f"page.{ending}").read_text("utf-8")

    facts = _facts(material)
    drawn = {"vega": charts.javascript()} if facts["charts"] else {}
    environment = Environment(autoescape=True)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    template = environment.from_string(part("html"))
    return template.render(style=part("css"), script=part("js"), **drawn, **facts)


def _facts(material: Material) -> dict[str, Any]:
    shape, profiles = material.shape, material.profiles
    budgets, measured = material.budget_rows(), material.measured_rows()
    plotted = [row for row in measured if row["kl"] is not None and row["share"] is not None]
    tasks = Counter(row["task"] for row in plotted)
    task = max(tasks, key=lambda one: (tasks[one], list(tasks).index(one)), default="")
    specs: dict[str, charts.Spec] = {}
    if budgets:
        first = next(iter(profiles))
        drawn = charts.budget_map(budgets, heads=shape.n_kv_heads)
        specs["budgets"] = charts.selectable(drawn, "profile", first)
        if any(one.bits is not None and np.ptp(one.bits) for one in profiles.values()):
            drawn = charts.bits_map(budgets, heads=shape.n_kv_heads)
            specs["bits"] = charts.selectable(drawn, "profile", first)
    frontiers = _frontiers(material, specs)
    if plotted:
        specs["measured"] = charts.selectable(charts.measured_chart(plotted), "task", task)
    curves = _curves(material, specs)
    memory = _memory(material)
    return {
        "shape": shape,
        "model": model_text(shape),
        **provenance(),
        "summary": _summary(material),
        "material": material,
        "charts": specs,
        "layers": _layer_table(material),
        "frontiers": frontiers,
        "measured": bool(measured),
        "evaluated": _evaluated_tables(material),
        "tasks": list(tasks),
        "chosen_task": task,
        "curves": curves,
        "memory": memory,
        "proofs": [(name, proof_text(one), cap_lines(one)) for name, one in profiles.items()],
        "decisions": _decision_table(material),
        "sources": _sources(material),
        "document": {
            "charts": specs,
            "themes": charts.themes(),
            "memory": memory,
            "layers": shape.n_layers,
            "heads": shape.n_kv_heads,
        },
    }


def _frontiers(material: Material, specs: dict[str, charts.Spec]) -> list[tuple[str, str, bool]]:
    shown = []
    for by, what, best, reached in material.frontiers():
        if best or len(reached) > 1:
            name = f"frontier-{by}"
            specs[name] = charts.frontier_chart(best, reached, by=by, what=what)
            shown.append((name, by, bool(best)))
    return shown


def _curves(material: Material, specs: dict[str, charts.Spec]) -> list[dict[str, str]]:
    shown = []
    for place, (name, scores) in enumerate(material.scores.items()):
        for curves in UnitCurves.all_of(scores, material.profiles):
            chart = f"curves-{place}-{curves.what[:4]}"
            specs[chart] = charts.curve_chart(curves)
            value, _, _ = curves.what.partition(",")
            shown.append({"name": chart, "file": name, "value": value, "scorer": scores.scorer})
    return shown


def _memory(material: Material) -> dict[str, Any]:
    shape = material.shape
    longest = shape.max_context_tokens or MAX_TOKENS
    decided = {one.context_tokens for one in material.profiles.values()}
    steps = {step * 2**power for step in (2, 3) for power in range(6, 20)}
    contexts = sorted(length for length in {*steps, *decided, longest} if 256 <= length <= longest)
    contexts = contexts or [longest]

    def of(profile: BudgetProfile) -> list[int]:
        sized = profile.replace(shape=replace(profile.shape, dtype_bytes=2))
        return [sized.retained_bytes_at(length) for length in contexts]

    start = min(decided, default=contexts[len(contexts) // 2])
    return {
        "contexts": contexts,
        "start": contexts.index(start) if start in contexts else 0,
        "full": [full_bytes(replace(shape, dtype_bytes=2), length) for length in contexts],
        "kept": [of(profile) for profile in material.profiles.values()],
    }


def _summary(material: Material) -> list[dict[str, str]]:
    lines = []
    stated = ("bytes", "peak", "bits", "retention", "answers", "predicted loss", "model error")
    for name, profile in material.profiles.items():
        fields = decision_fields(profile)
        facts = "; ".join(f"{label} {fields[label]}" for label in stated if fields[label])
        lines.append({"name": name, "text": f"{facts}. {proof_text(profile)}"})
    for name, evaluation in material.evaluations.items():
        methods = {row["name"] for row in evaluation.rows} - {"full"}
        tasks = {row["task"] for row in evaluation.rows}
        text = f"measured {len(methods)} caches beside the full one on {', '.join(sorted(tasks))}."
        lines.append({"name": name, "text": text if evaluation.rows else "holds no rows."})
    for name, scores in material.scores.items():
        fields = score_fields(scores)
        text = f"measured {fields['samples']} by {fields['scorer']}: {fields['text']}."
        lines.append({"name": name, "text": text})
    return lines


def _layer_table(material: Material) -> Table:
    means = [one.budgets.mean(axis=1) for one in material.profiles.values()]
    rows = [
        [str(layer), *(f"{mean[layer]:,.0f}" for mean in means)]
        for layer in material.shape.full_layers
    ]
    return ("layer", *material.profiles), rows


def _evaluated_tables(material: Material) -> list[Table]:
    rows: list[Row] = [
        {"from": source, **row}
        for source, evaluation in material.evaluations.items()
        for row in evaluation.rows
    ]
    return [*evaluation_tables(rows)] if rows else []


def _decision_table(material: Material) -> Table:
    decisions = [
        {"profile": name, **decision_cells(one)} for name, one in material.profiles.items()
    ]
    headings = [*dict.fromkeys(heading for one in decisions for heading in one)]
    rows = [[one.get(heading, "-") for heading in headings] for one in decisions]
    return headings, rows


def _sources(material: Material) -> list[dict[str, Any]]:
    sources = []
    for name, record in material.records.items():
        stated = record_fields(record)
        fields = {"file": material.files[name], **stated, "digest": record.digest}
        shown = [(label, text) for label, text in fields.items() if text]
        sources.append({"name": name, "kind": record.NAME, "fields": shown})
    return sources
