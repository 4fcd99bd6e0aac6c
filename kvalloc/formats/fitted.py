"""A fitted file: all that the default needs of one model, measured once by `kvalloc.fit`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from kvalloc.accounting import FloatArray
from kvalloc.accounting.costs import bits_fault
from kvalloc.formats.record import (
    ArrayOf,
    ArrayRecord,
    FileRecord,
    FloatArray3D,
    MeasuredHeader,
    require_shape,
)
from kvalloc.formats.score_profile import ScoreProfile, ShareError, interpolate_curves


class SurrogateHeader(MeasuredHeader):
    """All of a surrogate but its arrays."""

    NAME: ClassVar[str] = "surrogate"
    MADE_BY: ClassVar[str] = "kvalloc fit"

    kind: Literal["kvalloc.surrogate"] = "kvalloc.surrogate"
    """Kind of the file."""

    schema_version: Literal[1] = 1
    """Version of the file's schema."""

    target: str
    """Name of the scorer of the fitted log scores."""

    target_parameters: dict[str, Any]
    """Parameters that rebuild it."""

    samples: int = Field(ge=2)
    """Number of prompts that it was fitted on."""

    sinks: int = Field(ge=0)
    """First tokens of each, left out."""

    ridge: float = Field(gt=0)
    """Added to the diagonal of the features' correlation matrix."""

    votes_weight: float = Field(ge=0)
    """Weight of the largest attention of a prompt's last queries beside the prediction; 0 if they
    do not help."""

    votes_ratio: float = Field(gt=0)
    """Loss of the samples' caches with these queries over the loss without, geometric mean; 1
    without."""


class FittedSurrogate(ArrayRecord, SurrogateHeader):
    """Linear maps of KV heads from an entry to the log of its score, which ``surrogate`` reads."""

    HEADER: ClassVar[type[FileRecord]] = SurrogateHeader

    weights: FloatArray3D
    """Weights of each full-attention layer and KV head, the constant last, ``(n_full_layers,
    n_kv_heads, n_features + 1)``; `kvalloc.scorers.surrogate.entry_features` has the features."""

    r_squared: Annotated[FloatArray, ArrayOf(np.float64, 1, high=1)]
    """Share of the target's variance that a fit on one half of the samples explains on the other,
    mean over both ways and the KV heads, ``(n_full_layers,)``."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        layers, heads = len(self.shape.full_layers), self.shape.n_kv_heads
        require_shape("weights", self.weights, (layers, heads, self.weights.shape[-1]))
        require_shape("r_squared", self.r_squared, (layers,))
        return self


DENSE, POINTS = 8, 32
"""Ranks of the retention curves that are stored without gaps, and all of them."""

_PARTS: dict[str, type[ArrayRecord]] = {"surrogate": FittedSurrogate, "scores": ScoreProfile}


class FittedHeader(MeasuredHeader):
    """All of a fitted file but the arrays of its parts."""

    NAME: ClassVar[str] = "fitted file"
    MADE_BY: ClassVar[str] = "kvalloc fit"

    kind: Literal["kvalloc.fitted_file"] = "kvalloc.fitted_file"
    """Kind of the file."""

    schema_version: Literal[1] = 1
    """Version of the file's schema."""

    parts: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Headers of the parts by name, as in their own files."""


class FittedModel(ArrayRecord, FittedHeader):
    """The result of `kvalloc.fit`: a surrogate, loss curves, and their error, of one model."""

    HEADER: ClassVar[type[FileRecord]] = FittedHeader

    surrogate: FittedSurrogate
    """Predicts the attention of a second read."""

    scores: ScoreProfile
    """Loss curves of every head over entries and widths, by the surrogate's ranking, as the mean
    over the prompts in one sample."""

    @classmethod
    def of(cls, surrogate: FittedSurrogate, scores: ScoreProfile) -> Self:
        """Return the file of a surrogate and of losses by its ranking."""
        scores = mean_scores(scores)
        described = {name: getattr(scores, name) for name in MeasuredHeader.model_fields}
        parts = {"surrogate": surrogate.header(), "scores": scores.header()}
        return cls(surrogate=surrogate, scores=scores, parts=parts, **described)

    @property
    def widths(self) -> tuple[int, ...]:
        """Measured widths, and mixes of them, that its heads can have."""
        value_dim = self.shape.dims[1]
        return tuple(one for one in self.scores.loss_widths[1:] if not bits_fault(one, value_dim))

    def with_errors(self, errors: tuple[ShareError, ...]) -> Self:
        """Return the same with losses of whole caches."""
        scores = self.scores.replace(errors=errors)
        return self.replace(scores=scores, parts={**self.parts, "scores": scores.header()})

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of the parts, named ``part.name``."""
        return {
            f"{part}.{name}": array
            for part in _PARTS
            for name, array in getattr(self, part).arrays().items()
        }

    @classmethod
    def of_arrays(
        cls, path: str | Path, stated: Any, arrays: Mapping[str, npt.NDArray[Any]]
    ) -> Self:
        """Return the record of a header and arrays."""
        header, of_part = FittedHeader.parsed(path, stated), defaultdict[str, dict[str, Any]](dict)
        for name, array in arrays.items():
            part, _, of_record = name.partition(".")
            of_part[part][of_record] = array
        for names in (header.parts, of_part):
            if names.keys() != _PARTS.keys():
                raise cls.file_error(path, "parts", ", ".join(names) or "none", ", ".join(_PARTS))
        parts: dict[str, Any] = {}
        for part, kind in _PARTS.items():
            parts[part] = kind.of_arrays(path, header.parts[part], of_part[part])
            if parts[part].shape != header.shape:
                raise cls.file_error(path, f"{part}.shape", "another model's", "that of the file")
        values = {name: getattr(header, name) for name in FittedHeader.model_fields}
        return cls(**values, **parts)


def mean_scores(scores: ScoreProfile) -> ScoreProfile:
    """Return a score profile with only the mean over its samples, and fewer ranks."""
    last = scores.evictable_tokens
    spaced = np.rint(np.geomspace(DENSE, last, POINTS - DENSE)) if last > POINTS else scores.ranks
    chosen = np.unique(np.concatenate([np.arange(min(DENSE, last)), spaced])).astype(np.int64)
    places = np.unique(np.searchsorted(scores.ranks, chosen))
    ranks, curves = scores.ranks[places], np.ascontiguousarray(scores.curves[..., places])
    between = interpolate_curves(curves, ranks, scores.ranks.astype(np.float64))
    changes: dict[str, Any] = {
        "ranks": ranks,
        "curves": curves,
        "interpolation_error": scores.interpolation_error
        + float(np.abs(between - scores.curves).max()),
        "sample_tokens": np.array([scores.context_tokens]),
    }
    for name in ("curves", "masses", "losses"):
        if (array := changes.get(name, getattr(scores, name))) is not None:
            changes[name] = array.mean(axis=0, keepdims=True)
    return scores.replace(**changes)
