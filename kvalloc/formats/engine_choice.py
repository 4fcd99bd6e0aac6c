"""A choice of engine formats for each layer's keys and values, with predicted losses."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, ClassVar, Literal, Self

from pydantic import FailFast, Field, computed_field, model_validator

from kvalloc.accounting.engine_formats import ENGINES, WHOLE
from kvalloc.formats.record import JsonRecord, Record, require
from kvalloc.shape import ModelShape

Pair = tuple[str, str]
"""Formats of a layer's keys and of its values, of `kvalloc.accounting.engine_formats.FORMATS`."""


class EngineSetting(Record):
    """Formats of an engine's layers, their bytes, and predicted losses."""

    NAME: ClassVar[str] = "engine setting"

    pairs: Annotated[tuple[Pair, ...], FailFast()]
    """Formats of each layer's keys and values, ``(n_layers,)``."""

    cache_bytes: int = Field(ge=0)
    """Bytes of K, V and states of all rows at the context."""

    mean: float = Field(ge=0)
    """Predicted KL of the next-token distribution, nats per token."""

    p99: float = Field(ge=0)
    """Predicted KL that 99% of the tokens stay below, nats."""

    p999: float = Field(ge=0)
    """The same for 99.9%."""

    top1: float = Field(ge=0, le=1)
    """Predicted share of the tokens with the same most likely next token."""


class EngineChoice(EngineSetting, JsonRecord):
    """The decided setting of an engine, with a bound and alternatives."""

    NAME: ClassVar[str] = "engine choice"
    MADE_BY: ClassVar[str] = "kvalloc solve --engine"
    PROVENANCE: ClassVar[tuple[str, ...]] = ("losses_digest",)

    kind: Literal["kvalloc.engine_choice"] = "kvalloc.engine_choice"
    """Kind of the file."""

    schema_version: Literal[1] = 1
    """Version of the file's schema."""

    engine: str
    """Name of the engine, of `ENGINES`."""

    shape: ModelShape
    """The model."""

    context_tokens: int = Field(ge=1)
    """Tokens of each row."""

    batch: int = Field(default=1, ge=1)
    """Rows."""

    requested: str = ""
    """The target, as an option."""

    full_bytes: int = Field(ge=0)
    """Bytes of the same cache at 16 bits."""

    model_error: float = Field(default=1.0, ge=1)
    """Largest factor between measured and predicted losses of whole caches."""

    summed_loss: float = Field(ge=0)
    """Losses of single layers, summed, or of one pair for all layers, nats per token."""

    bound: float
    """No setting of the engine has a smaller sum in the requested bytes, or fewer bytes for the
    requested loss."""

    bound_source: str = ""
    """Proof of the bound: ``dual`` (recomputed by kvalloc), or the solver that claims it."""

    gap: float | None = None
    """Relative distance to the bound."""

    decided_by: str = ""
    """The solver."""

    frontier: Annotated[tuple[EngineSetting, ...], FailFast()] = ()
    """Settings by rising bytes and falling loss; the chosen one is among them."""

    losses_digest: str = ""
    """Digest of the measured losses."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def bits(self) -> float:
        """Bits an element of K and V, on average."""
        return 16 * self.cache_bytes / max(self.full_bytes, 1)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        require(self.engine in ENGINES, "engine", self.engine, f"one of {', '.join(ENGINES)}")
        engine, n_layers = ENGINES[self.engine], self.shape.n_layers
        settings: tuple[EngineSetting, ...] = (self, *self.frontier)
        for pairs in (setting.pairs for setting in settings):
            require(len(pairs) == n_layers, "pairs", f"{len(pairs)}", f"{n_layers}, one a layer")
            distinct = {"model": {*pairs}, "skip": {*pairs} - {(WHOLE, WHOLE)}}.get(
                engine.grain, ()
            )
            changes = [sum(a != b for a, b in pairwise(part)) for part in zip(*pairs, strict=True)]
            sound = len(distinct) <= 1 and (engine.grain != "ends" or max(changes) <= 2)
            odd = [*{*pairs} - {*engine.pairs}] or [*pairs]
            require(
                sound and {*pairs} <= {*engine.pairs}, "pairs", odd, f"what {self.engine} takes"
            )
        return self
