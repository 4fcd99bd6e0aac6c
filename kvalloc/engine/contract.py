"""Interface of an engine, which runs a model's work on items.

Results come in any order, by number; the caller sorts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from kvalloc.errors import (
    InputError,
    KVAllocError,
    SampleError,
    UnsupportedModelError,
    one_line,
    option,
)
from kvalloc.files import provenance

if TYPE_CHECKING:
    from kvalloc.shape import ModelShape

MEASURED_WITH = ("numpy", "torch", "transformers")
"""Packages with versions in a measurement."""

_BROKEN_DEVICE = "CUDA error"
"""Part of torch's message if a device is lost to this process."""

Advance = Callable[[int], None]
"""Called with the number of further finished steps of a job."""

Work = Callable[[Any, Any, Advance], Any]
"""The work for one item, by the model. It is sent to every worker once, so it can be pickled, and
may store state for several items."""


@dataclass(frozen=True, kw_only=True)
class Failed:
    """Result of a failed item: a `SampleError`, or no `KVAllocError`; others end the job."""

    error: Exception

    @property
    def reason(self) -> str:
        """The reason, on one line."""
        known = isinstance(self.error, KVAllocError) or not str(self.error).strip()
        kind = "" if known else f"{type(self.error).__name__}: "
        return one_line(f"{kind}{one_line(self.error)}")

    def of_every_sample(self, model_id: str) -> KVAllocError:
        """Return the error of a job if all samples fail."""
        if isinstance(self.error, KVAllocError):
            return self.error
        error = InputError(
            f"{model_id} cannot be measured, since every sample fails, the first by {self.reason}; "
            f"{option('budget', '20%')} alone needs no measurement"
        )
        error.__cause__ = self.error
        return error

    @classmethod
    def of(cls, error: Exception) -> Failed:
        """Return an item's failure; raise again an error of job, model or device."""
        of_job = isinstance(error, KVAllocError) and not isinstance(error, SampleError)
        if of_job or _BROKEN_DEVICE in str(error):
            raise error
        return cls(error=error)


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts that decide a job's numbers: the model, and its device.

    `weights` is a digest, `versions` are kvalloc's and `MEASURED_WITH`'s.
    """

    shape: ModelShape
    weights: str
    dtype: str
    device: str
    attention: str
    versions: dict[str, str]

    @classmethod
    def of(cls, model: Any, model_id: str | None = None) -> ModelFacts:
        """Return a loaded model's facts.

        Raises
        ------
        UnsupportedModelError
            If its attention is unknown, or this process has only a part of each layer.
        """
        if (n_parts := getattr(model, "tp_size", None) or 1) > 1:
            raise UnsupportedModelError(
                f"{type(model).__name__} is split over {n_parts} processes by tensor parallelism, "
                "each with some heads of a layer; load it with device_map='auto' "
                f"({option('device', 'auto')})"
            )
        from kvalloc.models.loading import shape_of
        from kvalloc.models.names import base_implementation
        from kvalloc.models.structure import input_device
        from kvalloc.models.weights import weights_digest

        return cls(
            shape=shape_of(model, model_id=model_id),
            weights=weights_digest(model),
            dtype=str(model.dtype),
            device=input_device(model).type,
            attention=base_implementation(model.config),
            versions=provenance(*MEASURED_WITH)["versions"],
        )

    def record(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint's manifest."""
        # the digests are apart from the sizes, so that a message can say which of the two differ
        sizes = replace(self.shape, weights_digests=None)
        fields = {name: value for name, value in vars(self).items() if name != "shape"}
        return {**fields, "model": sizes.to_dict()}


class Engine(Protocol):
    """A loaded model, here or elsewhere."""

    def facts(self, model_id: str | None = None) -> ModelFacts:
        """Return the model's facts; `model_id` replaces the name in its config."""

    def run(
        self, work: Work, items: Mapping[int, Any], advance: Advance
    ) -> Iterator[tuple[int, Any]]:
        """Do some work for each item, by number.

        Parameters
        ----------
        items : mapping of int to object
        advance : callable
            See `Advance`.

        Yields
        ------
        result : tuple of int and object
            Number and result or `Failed`, in order of finishing.
        """


class LocalEngine:
    """A model in this process."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def facts(self, model_id: str | None = None) -> ModelFacts:
        """See `Engine.facts`."""
        return ModelFacts.of(self._model, model_id)

    def run(
        self, work: Work, items: Mapping[int, Any], advance: Advance
    ) -> Iterator[tuple[int, Any]]:
        """See `Engine.run`."""
        for number, item in items.items():
            result: Any
            try:
                result = work(self._model, item, advance)
            except Exception as error:
                result = Failed.of(error)
            yield number, result


def engine_of(model: Any) -> Engine:
    """Return an engine unchanged, or a model's `LocalEngine`."""
    engine: Engine = model if callable(getattr(model, "run", None)) else LocalEngine(model)
    return engine


def result_of(engine: Engine, work: Work) -> Any:
    """Return the result of work without an item, or raise its error."""
    ((_, result),) = engine.run(work, {0: None}, lambda steps: None)
    if isinstance(result, Failed):
        raise result.error
    return result
