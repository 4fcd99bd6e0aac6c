"""Measured losses of engine formats: of each layer's K or V in each format."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.accounting.engine_formats import FORMATS
from kvalloc.formats.record import (
    ArrayOf,
    ArrayRecord,
    FileRecord,
    MeasuredHeader,
    require,
    require_shape,
)

Losses1D = Annotated[FloatArray, ArrayOf(np.float64, 1, low=0)]
Losses3D = Annotated[FloatArray, ArrayOf(np.float64, 3, low=0)]
Shares1D = Annotated[FloatArray, ArrayOf(np.float64, 1, low=0, high=1)]
Choices3D = Annotated[IntArray, ArrayOf(np.int64, 3, low=-1)]

WHOLE = -1
"""In choices: K or V stay at 16 bits."""


_SMALLEST = 1e-9
"""Nats, or share of tokens, below which a loss is rounding."""


class Predicted(NamedTuple):
    """Losses of whole caches, arrays shaped ``(...)`` or numbers."""

    mean: FloatArray
    """KL(16 bits || engine formats) of the next-token distribution, nats per token."""

    p99: FloatArray
    """The KL that 99% of the tokens stay below, nats."""

    p999: FloatArray
    """The KL that 99.9% of the tokens stay below, nats."""

    top1: FloatArray
    """Share of the tokens with the same most likely next token."""


class FormatHeader(MeasuredHeader):
    """All of `FormatLosses` but the arrays."""

    NAME: ClassVar[str] = "format profile"
    MADE_BY: ClassVar[str] = "kvalloc profile --formats"

    kind: Literal["kvalloc.format_profile"] = "kvalloc.format_profile"
    """Kind of the file."""

    schema_version: Literal[1] = 1
    """Version of the file's schema."""

    formats: tuple[str, ...] = Field(min_length=1)
    """Names of the measured engine formats, of `FORMATS`, without ``f16``: the last axis of
    `losses`, and the indices in `choices`."""

    n_tokens: int = Field(ge=1)
    """Predictions of each mixture."""


class FormatLosses(ArrayRecord, FormatHeader):
    """Losses of one model with K or V of single layers, and whole caches, in engine formats.

    Attention sees all keys and values of a text as the engine would store them. The loss is the KL
    of the next-token distribution from the unchanged model's.
    """

    HEADER: ClassVar[type[FileRecord]] = FormatHeader

    losses: Losses3D
    """Mean loss of the whole model with only K or V of this layer in this format, nats per token,
    ``(n_layers, 2, n_formats)``; the second axis is keys, values. 0 if a layer stores none."""

    choices: Choices3D
    """Measured whole caches (mixtures): index of the format of each layer's keys and values, -1 for
    16 bits, ``(n_mixtures, n_layers, 2)``."""

    mean: Losses1D
    """Mean loss of each mixture, nats per token, ``(n_mixtures,)``."""

    p99: Losses1D
    """Loss of a mixture that 99% of the tokens stay below, nats, ``(n_mixtures,)``."""

    p999: Losses1D
    """The same for 99.9%, ``(n_mixtures,)``."""

    top1: Shares1D
    """Share of the tokens with the unchanged model's most likely next token, ``(n_mixtures,)``."""

    def sums(self, choices: npt.ArrayLike) -> FloatArray:
        """Return the sum of single losses of `choices`, nats per token, ``(...)``."""
        single = np.pad(self.losses, ((0, 0), (0, 0), (0, 1)))  # 16 bits come last, and lose 0
        layers, parts = np.ogrid[: len(single), :2]
        return np.asarray(single[layers, parts, np.asarray(choices)].sum(axis=(-1, -2)))

    def predict(self, choices: npt.ArrayLike) -> Predicted:
        """Return the predicted losses of `choices`, (..., n_layers, 2).

        A mixture has its measured losses. Else the mean is the corrected sum of single losses.
        Correction, tail and top-1 are power laws of the sum, fitted to the mixtures.
        """
        same = (np.asarray(choices)[..., None, :, :] == self.choices).all(axis=(-2, -1))
        place, known = same.argmax(axis=-1), same.any(axis=-1)
        measured = [getattr(self, name)[place] for name in Predicted._fields]
        pairs = zip(measured, self.predict_sums(self.sums(choices)), strict=True)
        return Predicted(*(np.where(known, *pair) for pair in pairs))

    def predict_sums(self, sums: FloatArray) -> Predicted:
        """Return predicted losses for sums of single losses, nats per token, ``(...)``."""
        first, slopes, largest = self._fits_of_mixtures
        logs = np.minimum(np.log(np.maximum(sums, _SMALLEST)), largest)
        factors = np.exp(first + np.multiply.outer(logs, slopes))
        mean, p99, p999, changed = np.moveaxis(factors, -1, 0) * sums
        return Predicted(mean, p99, p999, 1 - np.minimum(changed, 1))

    @cached_property
    def model_error(self) -> float:
        """Largest factor between measured and fitted mean loss of a mixture."""
        return self.error_among(self.formats)

    def error_among(self, names: Collection[str]) -> float:
        """Return the model error of mixtures of only these formats and 16 bits."""
        known = [-1, *(index for index, name in enumerate(self.formats) if name in names)]
        fitted = np.maximum(self.predict_sums(self.sums(self.choices)).mean, _SMALLEST)
        factors = np.exp(np.abs(np.log(np.maximum(self.mean, _SMALLEST) / fitted)))
        return float(factors[np.isin(self.choices, known).all(axis=(1, 2))].max(initial=1.0))

    @cached_property
    def _fits_of_mixtures(self) -> tuple[FloatArray, FloatArray, float]:
        """Power laws of mean, 99%, 99.9% and changed tokens over the sum, and its maximum, as logs.

        Their values at 1, and their exponents less 1.
        """
        logs = np.log(np.maximum(self.sums(self.choices), _SMALLEST))
        figures = np.stack([self.mean, self.p99, self.p999, 1 - self.top1], axis=-1)
        ratios = np.log(np.maximum(figures, _SMALLEST)) - logs[:, None]
        slopes, first = np.zeros(ratios.shape[1]), ratios.mean(axis=0)
        if np.ptp(logs) > 0:
            slopes, first = np.polyfit(logs, ratios, 1)
        return first, slopes, float(logs.max())

    @model_validator(mode="after")
    def _fits(self) -> Self:
        known = [name for name in FORMATS if name != "f16"]
        odd = [name for name in self.formats if name not in known]
        require(not odd, "formats", ", ".join(odd), f"some of {', '.join(known)}")
        once = len({*self.formats}) == len(self.formats)
        require(once, "formats", ", ".join(self.formats), "each name once")
        sizes, n_mixtures = (self.shape.n_layers, 2), max(1, len(self.choices))
        require_shape("losses", self.losses, (*sizes, len(self.formats)))
        require_shape("choices", self.choices, (n_mixtures, *sizes))
        highest = int(self.choices.max(initial=-1))
        require(highest < len(self.formats), "choices", highest, f"below {len(self.formats)}")
        for name in Predicted._fields:
            require_shape(name, getattr(self, name), (n_mixtures,))
        return self
