"""``kvalloc list``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pkgutil import resolve_name
from typing import Annotated, Any, Literal

from kvalloc.cli.options import takes
from kvalloc.cli.output import print_result
from kvalloc.errors import KVAllocError
from kvalloc.formats import shipped_profiles as shipped
from kvalloc.models.loading import require_run_packages
from kvalloc.problem.registry import json_value, load, names, plugin_options
from kvalloc.report.terminal import table_text
from kvalloc.units import Option

PLUGINS = {
    "solvers": ("kvalloc.problem.solver:Solver", "solve ... --solver"),
    "scorers": ("kvalloc.scorers:Scorer", "profile ... --scorer"),
    "policies": ("kvalloc.runtime.policies.base:EvictionPolicy", "generate ... --policy"),
}
"""Class of each kind of plug-in, and the option that takes one."""


NOTES = ("what each is: kvalloc list solvers", "which models are served: kvalloc list models")


@dataclass(frozen=True)
class ListOptions:
    """The kind to list."""

    what: Annotated[
        Literal["solvers", "scorers", "policies", "profiles", "models"] | None, Option()
    ] = None
    """Kind to list; the names of all without it."""


@takes()
def list(options: ListOptions) -> None:
    """List the installed solvers, scorers or policies, budget profiles, or families of models.

    Plug-ins of other packages are listed too, each with its options. Profiles ship with kvalloc,
    and are listed with their share of the bytes of a cache at 16 bits. Below them are the fitted
    files that ship, or that 'kvalloc fit' made here. Models come from transformers' mappings:
    whether kvalloc serves a random model of each name, and whether 'kvalloc fit' takes it.

    Examples
    --------
    kvalloc list
    kvalloc list solvers
    kvalloc list policies --json
    kvalloc list profiles
    kvalloc list models
    """
    if options.what is None:
        _everything()
    elif options.what == "profiles":
        _profiles()
    elif options.what == "models":
        _models()
    else:
        _plugins(options.what)


def _everything() -> None:
    listed = {kind: [*names(f"kvalloc.{kind}")] for kind in PLUGINS}
    fitted = (*shipped.shipped_fitted(), *map(str, shipped.fitted_files()))
    listed |= {"profiles": [*shipped.shipped_profiles()], "fitted files": [*fitted]}
    shown = {kind: ", ".join(one) for kind, one in listed.items()}
    print_result(listed, shown, notes=NOTES, always=True)


def _profiles() -> None:
    rows, cells = [], []
    for name in shipped.shipped_profiles():
        profile = shipped.load_profile(name)
        stated = {"model": profile.shape.model_id, "digest": profile.digest}
        sizes = {"context_tokens": profile.context_tokens, "share_of_16_bits": profile.share}
        rows.append({"name": name, **stated, **sizes})
        cells.append((name, f"{profile.share:.1%}", profile.shape.model_id))
    notes = [f"fitted files that ship: {', '.join(shipped.shipped_fitted())}"]
    notes += [f"fitted here: {file}" for file in shipped.fitted_files()]
    notes += [f"format profiles that ship: {', '.join(shipped.shipped_formats())}"]
    print_result(rows, lines=[table_text(("profile", "share", "model"), cells)], notes=notes)


def _models() -> None:
    text = (resources.files("kvalloc.models") / "families.json").read_text("utf-8")
    record = json.loads(text)
    cells = [
        (name, row["class"], row["layers"], row["outcome"], "yes" if row["fit"] == "yes" else "")
        for key in ("causal", "wrappers")
        for name, row in record[key].items()
    ]
    notes = [f"random models of transformers {record['transformers']}, {record['date']}"]
    notes += ["why one is not served or fitted: --json"]
    titles = ("name", "class", "layers", "outcome", "fit")
    print_result(record, lines=[table_text(titles, cells)], notes=notes)


def _plugins(kind: str) -> None:
    if kind == "policies":
        require_run_packages()
    rows = plugin_rows(kind)
    notes = [f"use one: kvalloc {PLUGINS[kind][1]} NAME:KEY=VALUE"]
    if not rows:
        notes = ["none is registered: kvalloc is on the path, but not installed"]
    shown = {row["name"]: _plugin_text(row) for row in rows}
    print_result(rows, shown, notes=notes, always=True)


def plugin_rows(kind: str) -> Sequence[dict[str, Any]]:
    """Return name, summary, reference, options and error of each plug-in."""
    rows, base = [], resolve_name(PLUGINS[kind][0])
    for name in names(f"kvalloc.{kind}"):
        row: dict[str, Any] = {"name": name, "summary": "", "reference": ""}
        row |= {"options": None, "error": None}
        try:
            cls = load(f"kvalloc.{kind}", name, base)
        except KVAllocError as error:
            row["error"] = str(error)
        else:
            row |= {text: str(getattr(cls, text, "")) for text in ("summary", "reference")}
            row["options"] = {
                key: "(required)" if option.default is option.empty else json_value(option.default)
                for key, option in plugin_options(cls).items()
            }
        rows.append(row)
    return rows


def _plugin_text(row: Mapping[str, Any]) -> str:
    if row["error"]:
        return f"cannot be used: {row['error']}"
    options = ", ".join(f"{key}={value}" for key, value in row["options"].items())
    options = f"options: {options}" if options else ""
    return "; ".join(filter(None, (row["summary"], row["reference"], options)))
