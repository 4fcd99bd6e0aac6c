"""The request of a user: one target, its context, and its limits.

`RequestOptions` names, types and documents every keyword once: the library's functions take it
with ``Unpack``, and the command line derives its flags from it. `Request` holds them, checked.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypedDict,
    Unpack,
    get_args,
    get_type_hints,
)

from pydantic import ConfigDict, TypeAdapter, ValidationError

from kvalloc.accounting.costs import BIT_WIDTHS, bytes_in_share
from kvalloc.errors import InfeasibleError, InputError, OptionNames, one_line, option
from kvalloc.units import (
    Option,
    bytes_text,
    parse_bytes,
    parse_fraction,
    parse_indices,
    parse_numbers,
    parse_share,
)

if TYPE_CHECKING:
    from kvalloc.accounting.costs import CacheCosts
    from kvalloc.formats.budget_profile import BudgetProfile

MOST_TOKENS = 2**40
"""Largest whole number of a request: with as many tokens bytes can still be counted."""

Level = Literal["layer", "head"]
Objective = Literal["mean", "worst", "loss"]


@dataclass(frozen=True, kw_only=True)
class Target(ABC):
    """What to reach: the one place that knows the kinds of targets.

    A kind parses, checks, prints and stores itself, and turns itself into what a problem needs: a
    value to reach in the fewest bytes, or a capacity. `TARGETS` holds all kinds.

    Attributes
    ----------
    value : float or int
        In the kind's own unit.
    typed : object
        What the user wrote, which messages repeat; None where nobody wrote it.

    Raises
    ------
    InputError
        If there can be no such target.
    """

    kind: ClassVar[str]
    keyword: ClassVar[str]
    read_value: ClassVar[Any] = staticmethod(lambda given: given)
    """Reads the value from what the user wrote."""
    refusal: ClassVar[str] = ""
    """Message for an impossible value."""
    limit: ClassVar[str] = "the least is"
    """What messages say before the nearest target that can be met."""
    is_fixed: ClassVar[bool] = False
    """Whether budgets stay as they are at another prompt length, instead of growing with it."""
    at_peak: ClassVar[bool] = False
    """Whether it is about all that the cache takes, while the prompts are read, too."""

    value: float
    typed: object = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.is_possible():
            raise InputError(self.refusal.format(self.value))

    def is_possible(self) -> bool:
        """Return whether there can be such a target."""
        return True

    def shown(self) -> object:
        """Return the value as `kvalloc.errors.option` writes it."""
        return self.value

    @abstractmethod
    def describe(self, what: str) -> str:
        """Return the target as half a sentence for people.

        Parameters
        ----------
        what : str
            What is optimised, such as "retention" or "predicted loss".
        """

    @property
    def needed_value(self) -> float | None:
        """Value that the problem has to reach; None where the target is a capacity."""
        return None

    @property
    def max_loss(self) -> float | None:
        """Largest loss, nats per token; None where the target is another one."""
        return None

    def capacity(self, costs: CacheCosts, floor_cost: int) -> int | None:
        """Return what the layers with budgets may cost together; None where a value is needed.

        Parameters
        ----------
        costs : CacheCosts
            What keeping everything costs, and in which unit.
        floor_cost : int
            Cost of the smallest choice.

        Raises
        ------
        InfeasibleError
            If the smallest choice costs more; with the smallest target that can be met.
        """
        return None

    def granted(self, costs: CacheCosts) -> int | None:
        """Return what the layers with budgets may store; None where the target is no size."""
        return None

    @abstractmethod
    def nearest(self, reached: float, costs: CacheCosts) -> tuple[float | int, Target]:
        """Return the target that a value or a cost reaches, exact and rounded to the safe side."""

    def __str__(self) -> str:
        """Return the option of this target."""
        return option(self.keyword, self.shown() if self.typed is None else self.typed)

    def record(self) -> dict[str, Any]:
        """Return plain values for a budget profile, which `read` reads."""
        return {"target": self.kind, "value": self.value}

    def steering(self) -> dict[str, Any]:
        """Return the fields of a budget profile by which the target goes on steering its cache."""
        return {"plain_if_full": self.value == 1, "fits_a_peak": self.at_peak}

    @staticmethod
    def read(record: Mapping[str, Any]) -> Target:
        """Return the target that `record` stored among other fields of a request.

        Raises
        ------
        InputError
            If there is none, or it cannot be.
        """
        name, value = record.get("target"), record.get("value")
        for kind in TARGETS:
            if kind.kind == name:
                return kind(value=kind.read_value(value))
        known = ", ".join(kind.kind for kind in TARGETS)
        raise InputError(f"the target is {one_line(name, 60)}, expected one of {known}")

    @staticmethod
    def of(keywords: Mapping[str, Any]) -> Target:
        """Return the one target among keywords.

        Raises
        ------
        InputError
            If there is none, or several, or it cannot be.

        Examples
        --------
        >>> Target.of({"budget": "20%", "level": "head"})
        _Share(value=0.2)
        """
        given = [kind for kind in TARGETS if keywords.get(kind.keyword) is not None]
        if len(given) == 1:
            (kind,) = given
            typed = keywords[kind.keyword]
            return kind(value=kind.read_value(typed), typed=typed)
        options = ", ".join(option(kind.keyword) for kind in TARGETS)
        if not given:
            raise InputError(f"no target: say what to reach with one of {options}")
        both = " and ".join(option(kind.keyword) for kind in given)
        raise InputError(f"{both} are two targets at once; give one of {options}")


class _Retention(Target):
    """Fewest bytes that keep a share of the score mass (XKV, Eq. 18)."""

    kind = "retention"
    keyword = "target_retention"
    read_value = staticmethod(parse_fraction)
    refusal = (
        "a target retention of {:g} is not a share of the score mass; give a number above 0 and "
        "up to 1, such as 0.9"
    )
    limit = "the most is"

    def is_possible(self) -> bool:
        return 0 < self.value <= 1

    def describe(self, what: str) -> str:
        return f"{what} of {self.value:g} or more in the fewest bytes"

    @property
    def needed_value(self) -> float:
        return self.value

    def nearest(self, reached: float, costs: CacheCosts) -> tuple[float, Target]:
        rounded = math.floor(reached * 1e4 + 1e-9) / 1e4
        return reached, _Retention(value=rounded if rounded > 0 else reached)


class _Loss(Target):
    """Fewest bytes whose predicted loss is at most this, nats per token."""

    kind = "loss"
    keyword = "target_loss"
    read_value = float
    refusal = (
        "a target loss of {:g} nats per token cannot be asked for; give a number from 0 up, such "
        "as 0.02"
    )

    def is_possible(self) -> bool:
        return 0 <= self.value < math.inf

    def describe(self, what: str) -> str:
        return f"predicted loss of {self.value:g} nats per token or less in the fewest bytes"

    @property
    def needed_value(self) -> float:
        return -self.value

    @property
    def max_loss(self) -> float:
        return self.value

    def nearest(self, reached: float, costs: CacheCosts) -> tuple[float, Target]:
        return -reached, _Loss(value=max(0.0, math.ceil(-reached * 1e6 - 1e-7) / 1e6))


class _Size(Target):
    """A size that the kept entries fit in, with the largest value there is (XKV, Eq. 17)."""

    def describe(self, what: str) -> str:
        best = "least" if what.endswith("loss") else "most"
        return f"{best} {what} in {self.amount()}"

    @abstractmethod
    def amount(self) -> str:
        """Return the size for people."""

    @abstractmethod
    def cost(self, costs: CacheCosts) -> int:
        """Return the size in the unit of the costs."""

    def granted(self, costs: CacheCosts) -> int:
        return self.cost(costs) - sum(self.beside(costs).values())

    def capacity(self, costs: CacheCosts, floor_cost: int) -> int:
        capacity, beside = self.granted(costs), self.beside(costs)
        if capacity < floor_cost:
            number, smallest = self.nearest(floor_cost, costs)
            others = "".join(f", and {name} {cost:,}" for name, cost in beside.items() if cost)
            raise InfeasibleError(
                f"{self} is below the floors: sinks, window and minimum budgets take "
                f"{floor_cost:,} bytes{others}; ask for at least {smallest}",
                nearest=number,
            )
        return capacity

    def beside(self, costs: CacheCosts) -> dict[str, int]:
        """Return what the size holds beside the layers with budgets, by name."""
        return {}


class _Share(_Size):
    """A share of what keeping everything costs."""

    kind = "budget"
    keyword = "budget"
    read_value = staticmethod(parse_share)

    def shown(self) -> str:
        return f"{100 * self.value:g}%"

    def steering(self) -> dict[str, Any]:
        return {**super().steering(), "target_share": self.value}

    def amount(self) -> str:
        return f"{self.shown()} of the bytes of a cache at 16 bits"

    def cost(self, costs: CacheCosts) -> int:
        return bytes_in_share(self.value, costs.full)

    def capacity(self, costs: CacheCosts, floor_cost: int) -> int:
        # Of everything nothing has to go or be rounded, in whatever type it is stored.
        return costs.everything if self.value == 1 else super().capacity(costs, floor_cost)

    def nearest(self, reached: float, costs: CacheCosts) -> tuple[float, Target]:
        parts = -(-int(1e4) * int(reached) // costs.full)
        parts += bytes_in_share(parts / 1e4 * (1 - 1e-15), costs.full) < reached  # as it is read
        share = min(parts / 1e4, 1.0)
        return share, _Share(value=share)


def _whole(given: object) -> int:
    """Read a number of tokens."""
    if not isinstance(given, Integral):
        raise InputError(f"a budget of {given!r} tokens is no whole number; give one such as 512")
    return int(given)


class _TokensPerHead(_Size):
    """Entries that a KV head keeps on average."""

    kind = "budget_tokens"
    keyword = "budget_tokens"
    read_value = staticmethod(_whole)
    is_fixed = True

    refusal = f"a budget of {{}} tokens is not possible; give 1 to {MOST_TOKENS}"

    value: int

    def is_possible(self) -> bool:
        return 1 <= self.value <= MOST_TOKENS

    def amount(self) -> str:
        return f"{self.value:,} tokens per KV head on average"

    def cost(self, costs: CacheCosts) -> int:
        return costs.of_budget(self.value)

    def capacity(self, costs: CacheCosts, floor_cost: int) -> int:
        # Of all tokens nothing has to go, whatever a last page that is not full takes.
        if self.value >= costs.context_tokens:
            return costs.everything
        return super().capacity(costs, floor_cost)

    def nearest(self, reached: float, costs: CacheCosts) -> tuple[int, Target]:
        tokens = costs.fewest_tokens(int(reached))
        return tokens, _TokensPerHead(value=tokens)


class _Memory(_Size):
    """Bytes that the cache may take at its peak, while the prompts are read."""

    kind = "memory"
    keyword = "memory"
    read_value = staticmethod(parse_bytes)
    is_fixed = True
    at_peak = True

    value: int

    def shown(self) -> str | int:
        text = bytes_text(self.value)
        return self.value if text.isdigit() else text

    def beside(self, costs: CacheCosts) -> dict[str, int]:
        return {
            "the sliding layers": costs.sliding_bytes,
            "one layer in full while the prompt is read": costs.reading_bytes,
        }

    def amount(self) -> str:
        return bytes_text(self.value)

    def cost(self, costs: CacheCosts) -> int:
        return self.value

    def capacity(self, costs: CacheCosts, floor_cost: int) -> int:
        capacity = super().capacity(costs, floor_cost)
        # What nothing was evicted from stays as the model made it, which may be wider than 16 bits.
        return capacity if self.value >= costs.plain_bytes else min(capacity, costs.everything - 1)

    def nearest(self, reached: float, costs: CacheCosts) -> tuple[int, Target]:
        needed = int(reached) + sum(self.beside(costs).values())
        if reached >= costs.everything:  # less than a plain cache never holds everything
            needed = max(needed, costs.plain_bytes)
        return needed, _Memory(value=needed)


TARGETS: tuple[type[Target], ...] = (_Retention, _Loss, _Share, _TokensPerHead, _Memory)
"""The kinds of targets, in the order in which messages name them."""


class RequestOptions(TypedDict, total=False):
    """The keywords of a request: of `kvalloc.solve`, `frontier`, `apply` and the others.

    Exactly one target is given; everything else has a default, which None stands for.
    """

    target_retention: Annotated[float | str | None, Option("SHARE", "Target")]
    """Fewest bytes that keep this mean share of the score mass, such as 0.9 or 90%."""

    target_loss: Annotated[float | None, Option("NATS", "Target")]
    """Fewest bytes whose predicted loss is at most this, nats per token, such as 0.02. The
    prediction is the sum of losses measured with each unit reduced alone."""

    budget: Annotated[str | float | None, Option("SHARE", "Target")]
    """At most this share of the bytes of a cache at 16 bits a number, such as 20% or 0.2; the
    positions of kept entries count, and at fewer bits their scales."""

    budget_tokens: Annotated[int | None, Option("N", "Target")]
    """At most N entries per KV head on average."""

    memory: Annotated[str | int | None, Option("SIZE", "Target")]
    """What the cache may take at its peak, such as 512MiB: what is kept and one layer in full."""

    context: Annotated[int | None, Option("N", "Prompts")]
    """Prompt length that the target holds for, tokens; that of the score profile by default."""

    batch: Annotated[int | None, Option("N", "Prompts")]
    """Prompts that share the memory; 1 by default."""

    level: Annotated[Level | None, Option("", "Budgets")]
    """What gets a budget: a layer, or each KV head; layer by default."""

    min_tokens: Annotated[int | None, Option("N", "Budgets")]
    """Least budget, tokens; sinks and window are kept in any case."""

    max_tokens: Annotated[int | None, Option("N", "Budgets")]
    """Largest budget, tokens."""

    page: Annotated[int | None, Option("N", "Budgets")]
    """Budgets are whole pages of N tokens; 1 by default."""

    bits: Annotated[str | Sequence[int] | None, Option("16,8,4", "Budgets")]
    """Bit widths to choose from beside the budgets; 16 is half precision. The score profile must
    hold losses that were measured at each."""

    max_distinct: Annotated[int | None, Option("N", "Limits")]
    """At most N different budgets in the whole model."""

    cap: Annotated[Sequence[str] | str | None, Option("LAYERS=SIZE", "Limits")]
    """At most this much for some layers (a device, a pipeline stage), such as 0-15=256MiB; there
    may be several, which may nest."""

    objective: Annotated[Objective | None, Option("", "Objective")]
    """Most retention as the mean over layers, or of the worst unit (PrefixKV), or least predicted
    loss; by default the loss where a size is asked for and loss curves were measured."""


@dataclass(frozen=True, kw_only=True)
class LayerCap:
    """A capacity for some layers.

    Attributes
    ----------
    layers : tuple of int
        Layer indices.
    capacity_bytes : int
        Most bytes they may store together, sliding layers among them included.
    text : str
        As the user wrote it, without spaces.
    """

    layers: tuple[int, ...]
    capacity_bytes: int
    text: str

    @property
    def name(self) -> str:
        """How messages call it, such as ``"layers 0-15"``."""
        which = self.text.partition("=")[0]
        return f"layer{'s' if len(self.layers) > 1 else ''} {which}"

    @classmethod
    def parse(cls, text: str) -> LayerCap:
        """Return a cap from ``"0-15=256MiB"``.

        Raises
        ------
        InputError
            If it is not ``LAYERS=SIZE``.

        Examples
        --------
        >>> LayerCap.parse("0-1=1KiB")
        LayerCap(layers=(0, 1), capacity_bytes=1024, text='0-1=1KiB')
        """
        which, equals, size = str(text).partition("=")
        if not equals or not which.strip() or not size.strip():
            raise InputError(f"the cap {str(text)!r} is not LAYERS=SIZE, such as 0-15=256MiB")
        try:
            layers, capacity = parse_indices(which), parse_bytes(size.strip())
        except InputError as error:
            raise InputError(f"the cap {str(text)!r}: {error}") from None
        return cls(layers=layers, capacity_bytes=capacity, text="".join(str(text).split()))


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request of a user, checked; its fields are those of `RequestOptions`, parsed.

    Attributes
    ----------
    target : Target
        What to reach.
    level, context, batch, min_tokens, max_tokens, page, bits, max_distinct
        See `RequestOptions`; None where it says that there is a default.
    cap : tuple of LayerCap
        Capacities of some layers; they may nest and overlap.
    objective : {"mean", "worst", "loss"} or None
        What is optimised; None for the mean, or the loss where that was measured, which
        `kvalloc.solve` finds out.

    Raises
    ------
    InputError
        If a value is out of range, or two do not go together.
    """

    target: Target
    level: Level = "layer"
    context: int | None = None
    batch: int = 1
    min_tokens: int | None = None
    max_tokens: int | None = None
    page: int = 1
    bits: tuple[int, ...] | None = None
    max_distinct: int | None = None
    cap: tuple[LayerCap, ...] = ()
    objective: Objective | None = None

    @classmethod
    def parse(cls, **keywords: Unpack[RequestOptions]) -> Request:
        """Return the request of some keywords; who takes them from a user knows all names.

        Parameters
        ----------
        **keywords
            See `RequestOptions`.

        Returns
        -------
        Request

        Raises
        ------
        InputError
            If there is no target or several, or a value cannot be.

        Examples
        --------
        >>> Request.parse(budget="20%", level="head", bits="16,8").bits
        (16, 8)
        """
        read: dict[str, Any] = {"target": Target.of(keywords)}
        for one in fields(cls):
            value = keywords.get(one.name)
            if value is not None:
                read[one.name] = _READ[one.name](value) if one.name in _READ else value
        return cls(**read)

    def record(self) -> dict[str, Any]:
        """Return the request as plain values for a budget profile, which `read` reads.

        Defaults are left out, and so are level, context, batch and page, which are fields of the
        profile itself.
        """
        stored = self.target.record()
        for one in fields(self):
            value = getattr(self, one.name)
            if value != one.default and one.name not in _OF_THE_PROFILE:
                stored[one.name] = _plain(value)
        return stored

    @classmethod
    def read(cls, profile: BudgetProfile, name: str | Path = "the budget profile") -> Request:
        """Return the request that a budget profile answers.

        This is the one reader of ``profile.requested``, in which a file may state anything.

        Parameters
        ----------
        profile : BudgetProfile
        name : str or Path
            What messages call it.

        Raises
        ------
        InputError
            If it does not say what was requested, or what 'kvalloc solve' does not write.
        """
        stored, hints = profile.requested, get_type_hints(cls)
        known = {one.name for one in fields(cls)} - {*_OF_THE_PROFILE}
        try:
            values = {}
            for one in sorted(known & stored.keys()):
                value = stored[one]
                if one in _READ:
                    if isinstance(value, str):  # a list in every file
                        raise TypeError(f"{one} is {one_line(value, 60)}, expected a list")
                    value = _READ[one](value)
                strict = ConfigDict(strict=True, arbitrary_types_allowed=True)
                values[one] = TypeAdapter(hints[one], config=strict).validate_python(value)
            return cls(
                target=Target.read(stored),
                level=profile.level,
                context=profile.context_tokens,
                batch=profile.batch,
                page=profile.page_tokens,
                **values,
            )
        except (InputError, TypeError, ValueError, OverflowError) as error:
            fault = "does not say what was requested"
            if {"target", "value"} <= stored.keys():
                typed = isinstance(error, ValidationError)
                reason = f"{one} is {one_line(value, 60)}" if typed else one_line(error, 120)
                fault = f"states a request that is not what 'kvalloc solve' writes ({reason})"
            raise InputError(
                f"{name} {fault}, so it cannot be verified; make it again with 'kvalloc solve'"
            ) from error

    @classmethod
    def stated(cls, profile: BudgetProfile) -> Request | None:
        """Return the request that a budget profile answers; None where none can be read."""
        try:
            return cls.read(profile)
        except InputError:
            return None

    @property
    def is_plain_mean(self) -> bool:
        """Whether the value of the problem is the mean retention over layers."""
        return self.objective in (None, "mean")

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices and not (name == "objective" and value is None):
                *others, last = map(repr, choices)
                raise InputError(f"the {name} is {value!r}, expected {', '.join(others)} or {last}")
        for name, minimum in _MINIMA.items():
            value = getattr(self, name)
            number = int(value) if isinstance(value, Integral) else -1
            if value is None or minimum <= number <= MOST_TOKENS:
                continue
            limit = f"{option(name, minimum)} or more, a whole number"
            if number > MOST_TOKENS:
                limit = f"{option(name, MOST_TOKENS)} or less"
            raise InputError(f"{option(name, value)} is not possible; give {limit}")
        if self.bits is not None:
            widths = tuple(sorted(set(self.bits), reverse=True))
            if not widths or any(width not in BIT_WIDTHS for width in widths):
                raise InputError(
                    f"the bits are {list(self.bits)}, expected some of "
                    f"{', '.join(map(str, BIT_WIDTHS))}, such as {option('bits', (16, 8, 4))}"
                )
            object.__setattr__(self, "bits", None if widths == (16,) else widths)
        kind = self.target.kind
        implied = self.objective is None and self.bits is not None and kind != "retention"
        if implied or (kind == "loss" and self.objective != "worst"):
            object.__setattr__(self, "objective", "loss")
        for message, conflict in _CONFLICTS.items():
            if conflict(self):
                raise InputError(message.format(r=self, option=OptionNames()))


def _read_caps(given: str | Sequence[str]) -> tuple[LayerCap, ...]:
    return tuple(LayerCap.parse(one) for one in ([given] if isinstance(given, str) else given))


def _plain(value: Any) -> Any:
    """Return a value of a field as plain JSON values."""
    if isinstance(value, LayerCap):
        return value.text
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


_CHOICES: dict[str, tuple[str, ...]] = {
    "level": get_args(Level),
    "objective": get_args(Objective),
}
_MINIMA = {"context": 1, "batch": 1, "page": 1, "min_tokens": 0, "max_tokens": 1, "max_distinct": 1}
_CONFLICTS: dict[str, Callable[[Request], object]] = {
    "with {option[bits]} two budgets differ in tokens or in bits, and {option[max_distinct]} "
    "counts tokens alone; leave one of them out": lambda r: r.bits and r.max_distinct,
    "bits are chosen by what they lose, and retention is asked for; give {option[target_loss]}, or "
    "leave them out": lambda r: r.bits and r.target.kind == "retention",
    "bits are chosen by what they lose, and retention is asked for with the objective "
    "{r.objective!r}; give {option[objective=loss]}, or leave them out": lambda r: (
        r.bits and r.objective != "loss"
    ),
    "a target loss is about the loss summed over all units, not the worst one; leave the "
    "objective out": lambda r: r.target.kind == "loss" and r.objective == "worst",
    "a target retention does not go with the objective 'loss'; give {option[target_loss]}, or "
    "leave the objective out": lambda r: r.objective == "loss" and r.target.kind == "retention",
    "a largest budget of {r.max_tokens} tokens is below the smallest of {r.min_tokens}; raise "
    "{option[max_tokens]} or lower {option[min_tokens]}": lambda r: (
        r.max_tokens is not None and r.max_tokens < (r.min_tokens or 0)
    ),
}
"""The line that refuses options of a request, `r`, that exclude each other, and when it does."""

_READ: dict[str, Callable[[Any], Any]] = {
    "bits": parse_numbers,
    "cap": _read_caps,
}
_OF_THE_PROFILE = ("target", "level", "context", "batch", "page")
"""Fields that a record leaves out, because a budget profile has them."""
