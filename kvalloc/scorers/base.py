"""Contract of a scorer, and parameters of scorers and policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_type_hints

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from kvalloc.errors import InputError, UnsupportedRequestError, option
from kvalloc.formats.budget_profile import Policy
from kvalloc.models.attention import AttentionStates, Observed
from kvalloc.scorers.attention_rows import protected_columns
from kvalloc.scorers.later_pass import Later, LaterStep
from kvalloc.shape import ModelShape

if TYPE_CHECKING:
    from torch import Tensor


def _odd(width: int) -> int:
    """Refuse an even width, which shifts each score by half a token."""
    if width % 2 == 0:
        raise PydanticCustomError("odd", "an odd number")
    return width


Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
OddWidth = Annotated[int, Field(ge=1), AfterValidator(_odd)]
NonNegative = Annotated[float, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
ShareAbove0 = Annotated[float, Field(gt=0, le=1)]

_STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)


class Parameterized:
    """A plug-in with the fields of a frozen, keyword-only dataclass as its parameters.

    Attributes
    ----------
    kind, name : str
        Its kind in messages, such as scorer, and its name in the registry.
    """

    kind: ClassVar[str]
    name: ClassVar[str]

    def __post_init__(self) -> None:
        """Check every field; an invalid one raises `InputError`."""
        cls: Any = type(self)
        for name, adapter in _adapters(cls).items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, adapter.validate_python(value))
            except ValidationError as error:
                expected = error.errors()[0]["msg"].removeprefix("Input should be ")
                raise InputError(
                    f"{self.kind} {self.name}: {name} is {value!r}, expected {expected}"
                ) from None

    def parameters(self) -> dict[str, Any]:
        """Return the fields by name, which build this plug-in again."""
        plugin: Any = self
        return {field.name: getattr(self, field.name) for field in fields(plugin)}


@cache
def _adapters(cls: Any) -> dict[str, TypeAdapter[Any]]:
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: TypeAdapter(hints[field.name], config=_STRICT) for field in fields(cls)}


class Scorer(Parameterized, ABC):
    """Importance of each entry of a layer.

    Attributes
    ----------
    summary, reference : str
        For ``kvalloc list scorers``; the method's source.
    window : int
        Last prompt tokens, never evicted.
    holds_queries : bool
        Whether `score` reads the window's queries: not if it needs none, or `observe` sums them.
    rotates : bool
        Whether `score` rotates queries or keys.
    by_head : bool
        Whether a KV head's scores depend on that head alone, without notes. Heads that keep
        everything are then not scored.
    across_layers : bool
        Whether one call may score heads of several layers; see `AttentionStates.layers`.
    reads_repeats : bool
        Whether `score` reads `AttentionStates.repeats`.
    """

    kind = "scorer"
    summary: ClassVar[str]
    reference: ClassVar[str]
    holds_queries: ClassVar[bool] = True
    rotates: ClassVar[bool] = False
    by_head: ClassVar[bool] = False
    across_layers: ClassVar[bool] = False
    reads_repeats: ClassVar[bool] = False
    window: int

    @abstractmethod
    def score(self, states: AttentionStates, *, sinks: int) -> Tensor:
        """Return each entry's importance for later tokens; higher is kept.

        Parameters
        ----------
        sinks : int
            First prompt tokens, never evicted.

        Returns
        -------
        Tensor of float32, (batch, n_kv_heads, n_tokens)
            Finite and >= 0; 0 in the columns of padding, sinks and the last `window` tokens.
        """

    def without_protected(self, scores: Tensor, states: AttentionStates, *, sinks: int) -> Tensor:
        """Set the columns of padding, sinks and window to 0, in place."""
        scores[..., max(scores.shape[-1] - self.window, 0) :] = 0.0
        return scores.masked_fill_(protected_columns(states, sinks=sinks), 0.0)

    def query_rows(self, n_tokens: int) -> int:
        """Return how many last queries of a prompt `score` reads and the cache stores.

        By default the window, or 0 without `holds_queries`.
        """
        return self.window if self.holds_queries else 0

    def observe(self, states: AttentionStates, *, sinks: int) -> Observed | None:
        """Return notes of a prompt's chunk before the last; None by default.

        Scorers by all queries need them: `score` gets only the last chunk, and ``states.observed``.

        Parameters
        ----------
        states : AttentionStates
            One layer, one chunk; its ``observed`` has the earlier notes.
        """
        return None

    def policy(self, sinks: int, **fields: Any) -> Policy:
        """Return the policy that keeps the best scores; keywords set other fields."""
        return Policy(
            scorer=self.name,
            scorer_parameters=self.parameters(),
            sinks=sinks,
            window=self.window,
            **fields,
        )

    @property
    def observes(self) -> bool:
        """Whether `observe` takes notes."""
        return type(self).observe is not Scorer.observe

    @property
    def later(self) -> Later | None:
        """Second read that `score` needs, with the whole prompt stored; None by default."""
        return None

    @property
    def for_turns(self) -> Scorer | None:
        """Scorer that ranks a prompt's kept entries and new ones together.

        None with a second read: the latest queries' attention ranks instead.
        """
        return self if self.later is None else None

    def observe_later(self, states: AttentionStates, step: LaterStep, *, sinks: int) -> Observed:
        """Return notes of a piece of the second read, if any.

        `score` gets the last piece's as ``states.later``.

        Parameters
        ----------
        states : AttentionStates
            One layer: queries of the piece, all keys up to its last, and earlier notes as
            ``observed``.

        Returns
        -------
        Observed
            Columns are (batch, n_kv_heads or n_query_heads, n_prompt).
        """
        raise NotImplementedError

    def later_notes(self, states: AttentionStates) -> Observed:
        """Return the notes of the second read.

        Raises
        ------
        UnsupportedRequestError
            If there are none.
        """
        if states.later is None:
            raise self._prompt_only()
        return states.later

    def check_model(self, shape: ModelShape, *, allow_other_model: bool = False) -> None:
        """Refuse a model that the scorer was not made for.

        Raises
        ------
        ModelMismatchError
        """

    def check_prompt_only(self) -> None:
        """Refuse a scorer that needs a second read.

        Raises
        ------
        UnsupportedRequestError
        """
        if self.later is not None:
            raise self._prompt_only()

    def _prompt_only(self) -> UnsupportedRequestError:
        return UnsupportedRequestError(
            f"the scorer {self.name} has the model read the prompt again, and here it is read "
            f"once; name it where a cache is made ({option('policy')}), or choose another scorer"
        )
