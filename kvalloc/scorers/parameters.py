"""Parameters of scorers and policies: the fields of a dataclass, checked by their annotations."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cache
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from kvalloc.errors import InputError


@dataclass(frozen=True)
class Range:
    """Which numbers a field takes: ``Annotated[int, Range(1)]``, ``Annotated[float, Range(0, 1)]``.

    Attributes
    ----------
    minimum, maximum : float
        Both included; infinity itself is never taken.
    above : bool
        Whether the minimum is left out.
    odd : bool
        Whether only odd numbers are taken.
    """

    minimum: float
    maximum: float = math.inf
    above: bool = False
    odd: bool = False

    def holds(self, value: float) -> bool:
        """Whether a number lies in the range; NaN never does."""
        inside = self.minimum <= value <= self.maximum and value < math.inf
        left_out = (self.above and value == self.minimum) or (self.odd and value % 2 == 0)
        return inside and not left_out

    def __str__(self) -> str:
        start = "an odd number" if self.odd else "a number"
        if self.maximum == math.inf:
            return f"{start} {'above' if self.above else '>='} {self.minimum:g}"
        if self.above:
            return f"{start} above {self.minimum:g} and at most {self.maximum:g}"
        return f"{start} from {self.minimum:g} to {self.maximum:g}"


Count = Annotated[int, Range(0)]
Positive = Annotated[int, Range(1)]
OddWidth = Annotated[int, Range(1, odd=True)]
"""An even pooling width has no middle, so it would shift every score by half a token."""
NonNegative = Annotated[float, Range(0)]
Above0 = Annotated[float, Range(0, above=True)]
Share = Annotated[float, Range(0, 1)]
ShareAbove0 = Annotated[float, Range(0, 1, above=True)]


class Parameterized:
    """A plug-in whose parameters are the fields of a frozen, keyword-only dataclass.

    A field is checked by its annotation: numbers by a `Range`, choices by a `Literal`, switches
    as ``bool``. Fields of other types are left to the class.

    Attributes
    ----------
    kind : str
        What it is in messages: a scorer, or a policy.
    name : str
        Name in the registry.
    """

    kind: ClassVar[str]
    name: ClassVar[str]

    def __post_init__(self) -> None:
        """Check every field, and store numbers and switches as their types.

        Raises
        ------
        InputError
            If a value is out of range; names the plug-in and the parameter.
        """
        cls: Any = type(self)
        for name, hint in _field_types(cls).items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, _checked(value, hint))
            except ValueError as error:
                raise InputError(f"{self.kind} {self.name}: {name} is {value!r}, {error}") from None

    def parameters(self) -> dict[str, Any]:
        """Return the fields by name, which build this plug-in again."""
        plugin: Any = self
        return {field.name: getattr(self, field.name) for field in fields(plugin)}


@cache
def _field_types(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in fields(cls)}


def _checked(value: Any, hint: Any) -> Any:
    """Return the value of a field, checked against its annotation.

    Raises
    ------
    ValueError
        If it does not fit; says what is expected.
    """
    if get_origin(hint) is Literal and value not in get_args(hint):
        raise ValueError(f"choose from: {', '.join(get_args(hint))}")
    if hint is bool:
        if value not in (True, False):
            raise ValueError("expected true or false")
        return bool(value)
    if get_origin(hint) is not Annotated:
        return value
    annotated, limits = get_args(hint)
    kinds = get_args(annotated) or (annotated,)
    if value is None and NoneType in kinds:
        return None
    numbers = (int, float) if float in kinds else int
    if isinstance(value, bool) or not isinstance(value, numbers) or not limits.holds(value):
        raise ValueError(f"expected {limits}")
    return float(value) if float in kinds else value
