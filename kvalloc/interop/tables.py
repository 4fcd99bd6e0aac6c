"""Tables as CSV and Parquet."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvalloc.errors import require
from kvalloc.files import atomic_write, write_text
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.interop.target import ExportTarget, imported, reading

Table = Mapping[str, Sequence[Any]]
"""Columns by name, all of one length."""


class CSV(ExportTarget):
    """A table of budgets without model, context and parameters of policies."""

    name = "csv"
    summary = "a table, a row for each KV head, or for each point of a score profile's curves"
    says = "everything that is said of single heads"
    suffix = ".csv"

    def write(self, profile: BudgetProfile, path: Path) -> None:
        """Write the budgets."""
        self.write_table(budget_table(profile), path)

    def write_table(self, table: Table, path: Path) -> None:
        """Write columns."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(table)
        writer.writerows(zip(*table.values(), strict=True))
        write_text(path, text.getvalue())

    def read_table(self, path: Path) -> Table:
        """Read columns of text or numbers."""
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}

    def read(self, path: Path, like: BudgetProfile) -> BudgetProfile:
        """Read budgets, and bits if any; see `ExportTarget.read`."""
        columns: dict[str, Any] = {}
        with reading(path, "is no table of budgets with the columns layer, head and tokens"):
            table = self.read_table(path)
            places = [np.array(table[name], dtype=np.int64) for name in ("layer", "head")]
            order = np.ravel_multi_index(places, like.budgets.shape)
            if sorted(order) != list(range(like.budgets.size)):
                raise ValueError(f"it has not every layer and head of {like.shape.model_id} once")
            for name, column in (("budgets", "tokens"), ("bits", "bits")):
                if column in table or name == "budgets":
                    array = np.empty(like.budgets.size, dtype=np.int64)
                    array[order] = np.array(table[column], dtype=np.int64)
                    columns[name] = array.reshape(like.budgets.shape)
        return imported(like, path, level="head", **columns)


class Parquet(CSV):
    """The same as Parquet; raises MissingDependencyError without pyarrow."""

    name = "parquet"
    summary = "the same table as Parquet; needs pyarrow"
    suffix = ".parquet"

    def write_table(self, table: Table, path: Path) -> None:
        """Write columns."""
        with atomic_write(path) as temporary:
            _pyarrow().parquet.write_table(_pyarrow().table(dict(table)), temporary)

    def read_table(self, path: Path) -> Table:
        """Read columns."""
        table: Table = _pyarrow().parquet.read_table(path).to_pydict()
        return table


def budget_table(profile: BudgetProfile) -> Table:
    """Return layer, head, tokens, bits and policy of each KV head."""
    units: npt.NDArray[Any] = np.indices(profile.budgets.shape)
    columns: dict[str, npt.NDArray[Any]] = {
        "layer": units[0],
        "head": units[1],
        "tokens": profile.budgets,
        "bits": profile.widths,
        "policy": np.full(profile.budgets.shape, profile.policy.title),
    }
    return {name: array.ravel().tolist() for name, array in columns.items()}


def curve_table(scores: ScoreProfile) -> Table:
    """Return layer, head, curve, tokens and value of each point of score curves.

    ``curve`` is "retention" (share of the head's score mass in its best entries) or "loss" (nats
    per token; equal in all heads if layers were measured). Values are means over samples;
    ``tokens`` include sinks and window.
    """
    full = np.array(scores.shape.full_layers)
    curves = [("retention", scores.protected_tokens + scores.ranks, scores.curves.mean(axis=0))]
    if scores.losses is not None and scores.loss_tokens is not None:
        curves.append(("loss", scores.loss_tokens, scores.losses[..., 0, :].mean(axis=0)))
    tables = []
    for name, tokens, values in curves:
        size = (scores.shape.n_layers, scores.shape.n_kv_heads, tokens.size)
        points = np.broadcast_to(values, size)[full]
        layers, heads, places = np.indices(points.shape)
        curve = np.full(points.shape, name)
        tables.append((full[layers], heads, curve, tokens[places], points))
    columns = [[one.ravel() for one in column] for column in zip(*tables, strict=True)]
    names = ("layer", "head", "curve", "tokens", "value")
    return {name: np.concatenate(one).tolist() for name, one in zip(names, columns, strict=True)}


def _pyarrow() -> Any:
    require("Parquet, unlike csv,", "pyarrow", extra="parquet")
    import_module("pyarrow.parquet")
    return import_module("pyarrow")
