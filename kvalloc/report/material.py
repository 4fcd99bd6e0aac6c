"""Material of reports and pictures."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvalloc.accounting import FloatArray
from kvalloc.allocation.formulation import evictable_rank, loss_curves
from kvalloc.allocation.frontier import FrontierPoint, frontier
from kvalloc.errors import InputError, KVAllocError, ModelMismatchError, plain
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.evaluation import Evaluation
from kvalloc.formats.score_profile import ScoreProfile, interpolate_curves
from kvalloc.formats.shipped_profiles import load_file
from kvalloc.report.wording import model_text
from kvalloc.shape import ModelShape

WHOLE = -1
"""In place of a head: all heads of the layer together."""

CURVE_POINTS = 33
"""Budgets at which a retention curve is drawn, closer together where it bends."""

FRONTIER_POINTS = 24

RETENTION, LOSS = "retention", "loss, nats per token"

FRONTIERS = (
    ("retention", "mean", "retention (share of the attention mass)"),
    ("loss", "loss", "predicted loss, nats per token"),
)
"""What the bytes buy: a row's field, the objective of its best, and the title of its axis."""

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Material:
    """Profiles and evaluations of one model by short names; ``files`` has their sources."""

    files: dict[str, str]
    profiles: dict[str, BudgetProfile]
    scores: dict[str, ScoreProfile]
    evaluations: dict[str, Evaluation]

    @classmethod
    def read(cls, files: Sequence[str | Path]) -> Material:
        """Read files, or names of shipped profiles; errors are as of `kvalloc.write_report`."""
        if not files:
            raise InputError("there is nothing to report on; name at least one file")
        named: dict[str, str] = {}
        records: dict[str, Any] = {}
        for file in dict.fromkeys(map(str, files)):
            record = load_file(file)
            shown = plain(file)  # a name may hold bytes that are no text
            name = plain(Path(file).stem) if os.path.exists(file) else shown
            name = name if name not in records else shown
            for other, first in records.items():
                try:
                    first.shape.require_same_model(record.shape)
                except ModelMismatchError as error:
                    raise InputError(
                        f"{named[other]} and {shown} do not belong together: the first is of "
                        f"{model_text(first.shape)}; the second of {model_text(record.shape)}"
                    ) from error
            named[name], records[name] = shown, record

        def of(kind: type[Any]) -> dict[str, Any]:
            return {name: one for name, one in records.items() if isinstance(one, kind)}

        return cls(
            files=named,
            scores=of(ScoreProfile),
            profiles=of(BudgetProfile),
            evaluations=of(Evaluation),
        )

    @property
    def records(self) -> dict[str, Any]:
        """Return all files' content by name."""
        return {**self.profiles, **self.scores, **self.evaluations}

    @property
    def shape(self) -> ModelShape:
        """Return the model's sizes."""
        shape: ModelShape = next(iter(self.records.values())).shape
        return shape

    @property
    def decided_elsewhere(self) -> list[str]:
        """Return the names of profiles that other curves decided."""
        digests = {scores.digest for scores in self.scores.values()}
        elsewhere = (name for name, one in self.profiles.items() if one.score_digest not in digests)
        return [*elsewhere] if digests else []

    def budget_rows(self) -> list[Row]:
        """Return tokens and bits of each KV head, a row a profile and layer."""
        return [
            {
                "profile": name,
                "context": profile.context_tokens,
                "layer": layer,
                "tokens": profile.budgets[layer].tolist(),
                "bits": profile.widths[layer].tolist(),
            }
            for name, profile in self.profiles.items()
            for layer in profile.shape.full_layers
        ]

    def frontiers(self) -> Iterator[tuple[str, str, list[Row], list[Row]]]:
        """Yield name, axis title, best points, and the profiles that these curves decided."""
        elsewhere = self.decided_elsewhere
        points = [
            {
                "name": name,
                "solver": profile.decided_by or profile.solver or "no solver",
                "share": profile.share,
                "retention": profile.retention,
                "loss": profile.predicted_loss,
            }
            for name, profile in self.profiles.items()
            if name not in elsewhere
        ]
        for by, objective, what in FRONTIERS:
            best = [
                {"curve": f"best {level} budgets by {name}", **_facts(point)}
                for name, scores in self.scores.items()
                for level in ("layer", "head")
                for point in _traced(scores, level, objective)
            ]
            yield by, what, best, [row for row in points if row[by] is not None]

    def measured_rows(self) -> list[Row]:
        """Return evaluations' rows without full caches."""
        return [
            _measured(row, source)
            for source, evaluation in self.evaluations.items()
            for row in evaluation.rows
            if row["name"] != "full"
        ]


def _traced(scores: ScoreProfile, level: Any, objective: Any) -> list[FrontierPoint]:
    if objective == "loss" and not scores.has_losses:
        return []
    try:
        return frontier(scores, points=FRONTIER_POINTS, level=level, objective=objective)
    except KVAllocError:
        return []


def _facts(point: FrontierPoint) -> Row:
    return {
        "share": point.share,
        "retention": point.retention,
        "loss": point.predicted_loss,
    }


def _measured(row: Mapping[str, Any], source: str) -> Row:
    ends = row["ci95"]
    low, high = ends if ends and len(ends) == 2 else (None, None)
    return {
        "source": source,
        "task": f"{row['task']}, {row['context']:,} tokens",
        "share": row["share_of_16_bits"],
        "low": low,
        "high": high,
        **{key: row[key] for key in ("name", "kl", "score", "n")},
    }


@dataclass(frozen=True, kw_only=True)
class UnitCurves:
    """Curves of a score profile's units, and budget profiles' marks on them.

    Units are whole layers, first, and their KV heads; NaN if unmeasured.

    Attributes
    ----------
    shares : ndarray of float64, (n_points,)
        Kept shares of the context, 0..1.
    values : ndarray of float64, (n_layers, 1 + n_kv_heads, n_points)
        Retention, or loss in nats per token; ``what`` says which.
    marks : dict of tuple of ndarray, each (n_layers, 1 + n_kv_heads)
        The share that each budget profile keeps, and the curve's value there.
    layers : tuple of int
        Layers that get budgets.
    """

    layers: tuple[int, ...]
    what: str
    shares: FloatArray
    values: FloatArray
    marks: dict[str, tuple[FloatArray, FloatArray]]

    @property
    def of_loss(self) -> bool:
        """Return whether these are loss curves."""
        return self.what != RETENTION

    @classmethod
    def all_of(
        cls, scores: ScoreProfile, profiles: Mapping[str, BudgetProfile] | None = None
    ) -> list[UnitCurves]:
        """Return retention curves, and loss curves if measured."""
        marked = profiles or {}
        losses = [cls.losses(scores, marked)] if scores.has_losses else []
        return [cls.retention(scores, marked), *losses]

    @classmethod
    def retention(cls, scores: ScoreProfile, profiles: Mapping[str, BudgetProfile]) -> UnitCurves:
        """Return retention curves of layers and heads, means over samples."""

        def with_layers(heads: FloatArray) -> FloatArray:
            of_layers = np.einsum("slh,slhp->lp", scores.head_shares, heads) / scores.n_samples
            return np.concatenate([of_layers[:, None], heads.mean(axis=0)], axis=1)

        steps = np.linspace(0, 1, CURVE_POINTS) ** 2  # closer where curves bend
        ranks = np.unique(np.rint(steps * scores.evictable_tokens)).astype(np.float64)
        marks = {}
        for name, kept in _kept_ranks(scores, profiles):
            heads = _curve_values(kept[:, 1:], scores.ranks, scores.curves)
            marks[name] = (_shares(scores, kept), with_layers(heads[..., None])[..., 0])
        drawn = with_layers(interpolate_curves(scores.curves, scores.ranks, ranks))
        layers, shares = scores.shape.full_layers, _shares(scores, ranks)
        return cls(layers=layers, what=RETENTION, shares=shares, values=drawn, marks=marks)

    @classmethod
    def losses(cls, scores: ScoreProfile, profiles: Mapping[str, BudgetProfile]) -> UnitCurves:
        """Return loss curves of layers or heads, or raise InputError without measurements."""
        curves = loss_curves(scores)
        assert scores.loss_tokens is not None  # loss_curves has given the curves
        levels = scores.loss_tokens.astype(np.float64)
        places = slice(0, 1) if curves.shape[1] == 1 else slice(1, None)
        values = np.full((len(curves), 1 + scores.shape.n_kv_heads, levels.size), np.nan)
        values[:, places] = curves
        marks = {}
        for name, ranks in _kept_ranks(scores, profiles):
            kept = ranks + scores.protected_tokens
            losses = np.full(kept.shape, np.nan)
            # where whole layers were measured, their heads had one budget
            if places.stop is None or profiles[name].level == "layer":
                losses[:, places] = _curve_values(kept[:, places], levels, curves, left=np.nan)
            marks[name] = (_shares(scores, ranks), losses)
        layers, shares = scores.shape.full_layers, levels / scores.context_tokens
        return cls(layers=layers, what=LOSS, shares=shares, values=values, marks=marks)

    def lines(self) -> list[Row]:
        """Return ``layer``, ``head`` (or `WHOLE`) and ``values`` of each curve."""
        known = np.argwhere(np.isfinite(self.values[..., 0])).tolist()
        return [
            {"layer": layer, "head": place - 1, "values": _rounded(self.values[layer, place])}
            for layer, place in known
            if layer in self.layers
        ]

    def points(self) -> list[Row]:
        """Return shares and values by budget profile and layer, all heads first."""
        return [
            {
                "profile": name,
                "layer": layer,
                "share": _rounded(kept[layer]),
                "value": _rounded(values[layer]),
            }
            for name, (kept, values) in self.marks.items()
            for layer in self.layers
        ]


def _kept_ranks(
    scores: ScoreProfile, profiles: Mapping[str, BudgetProfile]
) -> Iterator[tuple[str, FloatArray]]:
    """Yield profiles' kept evictable entries, (n_layers, 1 + n_kv_heads), layer means first."""
    for name, profile in profiles.items():
        if profile.context_tokens > scores.protected_tokens:
            heads = evictable_rank(scores, profile.budgets, profile.context_tokens)
            yield name, np.column_stack([heads.mean(axis=1), heads])


_curve_values = np.vectorize(np.interp, excluded=("left",), signature="(),(points),(points)->()")
"""Values of curves, each at a budget of its own."""


def _shares(scores: ScoreProfile, ranks: FloatArray) -> FloatArray:
    shares: FloatArray = (ranks + scores.protected_tokens) / scores.context_tokens
    return shares


def _rounded(values: FloatArray) -> list[float | None]:
    return [float(f"{value:.4g}") if value == value else None for value in values.tolist()]
