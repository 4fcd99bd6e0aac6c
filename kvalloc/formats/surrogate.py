"""A fitted surrogate scorer: one linear map a KV head, from an entry to the log of its score."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from kvalloc.accounting import FloatArray
from kvalloc.formats.record import (
    ArrayOf,
    ArrayRecord,
    FileRecord,
    FloatArray3D,
    MeasuredHeader,
    require_shape,
)


class SurrogateHeader(MeasuredHeader):
    """All of a surrogate but its arrays."""

    NAME: ClassVar[str] = "surrogate"
    MADE_BY: ClassVar[str] = "kvalloc fit"

    kind: Literal["kvalloc.surrogate"] = "kvalloc.surrogate"
    """What the file is."""

    schema_version: Literal[1] = 1
    """How the file is to be read."""

    target: str
    """Name of the scorer whose log is fitted."""

    target_parameters: dict[str, Any]
    """What rebuilds it."""

    samples: int = Field(ge=2)
    """Number of prompts that it was fitted on."""

    sinks: int = Field(ge=0)
    """First tokens of each, left out."""

    ridge: float = Field(gt=0)
    """Added to the diagonal of the features' correlation matrix."""

    votes_weight: float = Field(ge=0)
    """Weight of the largest attention of a prompt's last queries beside the prediction; 0 where
    they are better left out."""

    votes_ratio: float = Field(gt=0)
    """Loss of the samples' caches with these votes over that without, geometric mean; 1 without."""


class FittedSurrogate(ArrayRecord, SurrogateHeader):
    """The result of `kvalloc.fit`, which the scorer ``surrogate`` reads.

    Raises
    ------
    InputError
        If arrays do not fit each other or the model, or are not finite.
    """

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
