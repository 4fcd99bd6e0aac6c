"""Parameters of scorers and policies: the fields of a dataclass, checked by their annotations."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Annotated, Any, ClassVar, get_type_hints

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from kvalloc.errors import InputError


def _odd(width: int) -> int:
    """Refuse an even pooling width: it has no middle, and shifts every score by half a token."""
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

    pydantic checks each field by its annotation, without converting texts.

    Attributes
    ----------
    kind : str
        Its kind in messages: a scorer, or a policy.
    name : str
        Name in the registry.
    """

    kind: ClassVar[str]
    name: ClassVar[str]

    def __post_init__(self) -> None:
        """Check every field.

        Raises
        ------
        InputError
            If a value does not fit; names the plug-in and the parameter.
        """
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
