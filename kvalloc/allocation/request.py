"""Request of a user: one target, its context, and its limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, Unpack, get_args

from kvalloc.accounting.costs import bytes_in_share, checked_bits
from kvalloc.errors import InfeasibleError, InputError, OptionNames, one_line, one_of, option
from kvalloc.units import (
    Option,
    bytes_text,
    parse_bytes,
    parse_fraction,
    parse_indices,
    parse_numbers,
    parse_share,
    parse_tokens,
)

if TYPE_CHECKING:
    from kvalloc.accounting.costs import CacheCosts
    from kvalloc.formats.budget_profile import BudgetProfile

MOST_TOKENS = 2**40
"""Largest whole number of a request: bytes of that many tokens can still be counted."""

TARGETS = ("target_retention", "target_loss", "budget", "budget_tokens", "memory")
"""Keywords of targets, in the order of messages."""

Level = Literal["layer", "head"]
Objective = Literal["mean", "worst", "loss"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A value to reach in the fewest bytes, or a size for the best value.

    Attributes
    ----------
    kind : str
        ``"retention"``, ``"loss"``, ``"budget"``, ``"budget_tokens"`` or ``"memory"``.
    value : float or int
        Share of the score mass, nats per token, share of the bytes, entries a KV head, or bytes.
    """

    kind: str
    value: float
    typed: object = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> Target:
        """Return the one target among keywords.

        Raises
        ------
        InputError
            If there is none, or several.
        """
        names = [name for name in TARGETS if keywords.get(name) is not None]
        if len(names) == 1:
            typed = keywords[names[0]]
            value = _READ[names[0]](typed)
            return cls(kind=names[0].removeprefix("target_"), value=value, typed=typed)
        options = ", ".join(map(option, TARGETS))
        if not names:
            raise InputError(f"no target: say what to reach with one of {options}")
        both = " and ".join(map(option, names))
        raise InputError(f"{both} are two targets at once; give one of {options}")

    @property
    def needed_value(self) -> float | None:
        """Value to reach; None if the target is a size."""
        return {"retention": self.value, "loss": -self.value}.get(self.kind)

    @property
    def max_loss(self) -> float | None:
        """Largest loss, nats per token, or None."""
        return self.value if self.kind == "loss" else None

    @property
    def is_fixed(self) -> bool:
        """Whether budgets do not grow with the prompt length."""
        return self.kind in ("budget_tokens", "memory")

    def steering(self) -> dict[str, Any]:
        """Return the fields of a budget profile that steer its cache."""
        return {
            "plain_if_full": self.value == 1,
            "fits_a_peak": self.kind == "memory",
            "target_share": self.value if self.kind == "budget" else None,
        }

    def describe(self, what: str) -> str:
        """Return the target as half a sentence, for "retention" or "predicted loss"."""
        best = "least" if what.endswith("loss") else "most"
        match self.kind:
            case "retention":
                return f"{what} of {self.value:g} or more in the fewest bytes"
            case "loss":
                return (
                    f"predicted loss of {self.value:g} nats per token or less in the fewest bytes"
                )
            case "budget":
                return f"{best} {what} in {100 * self.value:g}% of the bytes of a cache at 16 bits"
            case "budget_tokens":
                return f"{best} {what} in {self.value:,} tokens per KV head on average"
        return f"{best} {what} in {bytes_text(int(self.value))}"

    def granted(self, costs: CacheCosts) -> int | None:
        """Return the bytes of layers with budgets; None without a size."""
        match self.kind:
            case "budget":
                return bytes_in_share(self.value, costs.full)
            case "budget_tokens":
                return costs.of_budget(int(self.value))
            case "memory":
                return int(self.value) - costs.constant_bytes - costs.reading_bytes
        return None

    def capacity(self, costs: CacheCosts, floor_cost: int) -> int | None:
        """Return the largest cost of layers with budgets; None without a size.

        Raises
        ------
        InfeasibleError
            If the floors cost more; names the smallest possible target.
        """
        whole = {"budget": 1, "budget_tokens": costs.context_tokens}.get(self.kind, math.inf)
        if self.value >= whole:  # nothing has to go, though a last page that is not full takes more
            return costs.everything
        granted = self.granted(costs)
        if granted is not None and granted < floor_cost:
            number, smallest = self.nearest(floor_cost, costs)
            extra = ""
            if self.kind == "memory":
                if costs.constant_bytes:
                    extra = f", and the layers without budgets {costs.constant_bytes:,}"
                reading = costs.reading_bytes
                extra += f", and one layer in full while the prompt is read {reading:,}"
            raise InfeasibleError(
                f"{self} is below the floors: sinks, window and minimum budgets take "
                f"{floor_cost:,} bytes{extra}; ask for at least {smallest}",
                nearest=number,
            )
        if granted is not None and self.kind == "memory" and self.value < costs.plain_bytes:
            # What nothing was evicted from stays as the model made it, maybe wider than 16 bits.
            return min(granted, costs.everything - 1)
        return granted

    def nearest(self, reached: float, costs: CacheCosts) -> tuple[float, Target]:
        """Return the target that a value or a cost reaches, exact and rounded to the safe side."""
        number: float
        match self.kind:
            case "retention":
                number, value = reached, math.floor(reached * 1e4 + 1e-9) / 1e4 or reached
            case "loss":
                number, value = -reached, max(0.0, math.ceil(-reached * 1e6 - 1e-7) / 1e6)
            case "budget":
                parts = -(-int(1e4) * int(reached) // costs.full)
                # as it is read
                parts += bytes_in_share(parts / 1e4 * (1 - 1e-15), costs.full) < reached
                number = value = min(parts / 1e4, 1.0)
            case "budget_tokens":
                number = value = costs.fewest_tokens(int(reached))
            case _:
                number = int(reached) + costs.constant_bytes + costs.reading_bytes
                if reached >= costs.everything:  # less than a plain cache never holds everything
                    number = max(number, costs.plain_bytes)
                value = number
        return number, Target(kind=self.kind, value=value)

    def __str__(self) -> str:
        name = self.kind if self.kind in TARGETS else f"target_{self.kind}"
        shown: object = self.value
        if self.kind == "budget":
            shown = f"{100 * self.value:g}%"
        elif self.kind == "memory" and not (text := bytes_text(int(self.value))).isdigit():
            shown = text
        return option(name, shown if self.typed is None else self.typed)


class RequestOptions(TypedDict, total=False):
    """The keywords of a request: of `kvalloc.solve`, `frontier`, `apply` and the others.

    Exactly one target is required; None stands for the default of all others.
    """

    target_retention: Annotated[float | str | None, Option("SHARE", "Target")]
    """Fewest bytes that keep this mean share of the score mass, such as 0.9 or 90%."""

    target_loss: Annotated[str | float | None, Option("NATS", "Target")]
    """Fewest bytes with a predicted loss up to this, in nats per token, such as 0.02. The
    prediction is a sum of losses of units reduced alone. 0.05@99%: of 99% of the tokens, by fit."""

    budget: Annotated[str | float | None, Option("SHARE", "Target")]
    """At most this share of the bytes of a cache at 16 bits a number, such as 20% or 0.2; the
    positions of kept entries count, and at fewer bits their scales."""

    budget_tokens: Annotated[int | None, Option("N", "Target")]
    """At most N entries per KV head on average."""

    memory: Annotated[str | int | None, Option("SIZE", "Target")]
    """Bytes that the cache may take at its peak, such as 512MiB: all kept entries and one full
    layer."""

    context: Annotated[int | str | None, Option("N", "Prompts")]
    """Prompt length of the target in tokens, such as 4096 or 32k; by default the context of the
    score profile."""

    batch: Annotated[int | None, Option("N", "Prompts")]
    """Prompts that share the memory; 1 by default."""

    level: Annotated[Level | None, Option("", "Budgets")]
    """Unit of a budget: a layer, or each KV head; layer by default."""

    min_tokens: Annotated[int | None, Option("N", "Budgets")]
    """Smallest budget in tokens; sinks and window are kept in any case."""

    max_tokens: Annotated[int | None, Option("N", "Budgets")]
    """Largest budget, tokens."""

    page: Annotated[int | None, Option("N", "Budgets")]
    """Budgets are whole pages of N tokens; 1 by default."""

    bits: Annotated[str | Sequence[int] | None, Option("16,8,4", "Budgets")]
    """Bit widths to choose from beside the budgets, at which losses were measured; 16 is half
    precision. For another engine: mean bits, such as 5.5."""

    max_distinct: Annotated[int | None, Option("N", "Limits")]
    """At most N different budgets in the whole model."""

    cap: Annotated[Sequence[str] | str | None, Option("LAYERS=SIZE", "Limits")]
    """Capacity of some layers (a device, a pipeline stage), such as 0-15=256MiB; several may
    be given, and may nest.
    """

    objective: Annotated[Objective | None, Option("", "Objective")]
    """Most retention as the mean over layers, or of the worst unit (PrefixKV), or least predicted
    loss; by default the loss if a size is requested and loss curves were measured.
    """


@dataclass(frozen=True, kw_only=True)
class LayerCap:
    """A capacity for some layers, sliding ones included; ``text`` is the user's, without spaces."""

    layers: tuple[int, ...]
    capacity_bytes: int
    text: str

    @property
    def name(self) -> str:
        """Name in messages, such as ``"layers 0-15"``."""
        which = self.text.partition("=")[0]
        return f"layer{'s' if len(self.layers) > 1 else ''} {which}"

    @classmethod
    def parse(cls, text: str) -> LayerCap:
        """Return a cap from ``"0-15=256MiB"``.

        Raises
        ------
        InputError
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
    """A checked request with the parsed fields of `RequestOptions`.

    The default objective is the mean, or in `kvalloc.solve` the loss if it was measured.

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
        """Return the request of keywords, with all names checked.

        Raises
        ------
        InputError

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
        """Return plain values for `read`, without defaults and the profile's own fields."""
        stored: dict[str, Any] = {name: getattr(self, name) for name in _LIMITS}
        stored["bits"] = None if self.bits is None else [*self.bits]
        stored["cap"] = [cap.text for cap in self.cap] or None
        stored = {name: value for name, value in stored.items() if value is not None}
        return {"target": self.target.kind, "value": self.target.value, **stored}

    @classmethod
    def read(cls, profile: BudgetProfile, name: str | Path = "the budget profile") -> Request:
        """Return the request that a budget profile, named in messages, answers.

        It is the only reader of ``profile.requested``, in which a file may state anything.

        Raises
        ------
        InputError
        """
        stored, targets = (
            profile.requested,
            {name.removeprefix("target_"): name for name in TARGETS},
        )
        keywords: Any = {name: stored[name] for name in _LIMITS if name in stored}
        try:
            keywords[one_of("target", str(stored["target"]), targets)] = stored["value"]
            for limit in ("bits", "cap"):
                if isinstance(keywords.get(limit), str):
                    raise TypeError(f"{limit} is {one_line(keywords[limit], 60)}, expected a list")
            return cls.parse(
                level=profile.level,
                context=profile.context_tokens,
                batch=profile.batch,
                page=profile.page_tokens,
                **keywords,
            )
        except KeyError:
            fault = "does not say what was requested"
        except (InputError, TypeError, ValueError, OverflowError) as error:
            reason = one_line(error, 120)
            fault = f"states a request that is not what 'kvalloc solve' writes ({reason})"
        raise InputError(
            f"{name} {fault}, so it cannot be verified; make it again with 'kvalloc solve'"
        )

    @classmethod
    def stated(cls, profile: BudgetProfile) -> Request | None:
        """Return the result of `read`, or None."""
        try:
            return cls.read(profile)
        except InputError:
            return None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices and not (name == "objective" and value is None):
                *first, last = map(repr, choices)
                raise InputError(f"the {name} is {value!r}, expected {', '.join(first)} or {last}")
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
            widths = checked_bits(self.bits)
            object.__setattr__(self, "bits", None if widths == (16,) else widths)
        kind = self.target.kind
        implied = self.objective is None and self.bits is not None and kind != "retention"
        if implied or (kind == "loss" and self.objective != "worst"):
            object.__setattr__(self, "objective", "loss")
        for message, conflict in _CONFLICTS.items():
            if conflict(self):
                raise InputError(message.format(r=self, option=OptionNames()))


def _retention(typed: str | float) -> float:
    value = parse_fraction(typed)
    if not 0 < value <= 1:
        raise InputError(
            f"a target retention of {value:g} is not a share of the score mass; give a number "
            "above 0 and up to 1, such as 0.9"
        )
    return value


def _loss(typed: str | float) -> float:
    try:
        value = float(typed)
    except ValueError:
        raise InputError(
            f"a target loss of {typed!r} cannot be solved for here; give a mean in nats per token, "
            "such as 0.02"
        ) from None
    if not 0 <= value < math.inf:
        raise InputError(
            f"a target loss of {value:g} nats per token cannot be asked for; give a number from 0 "
            "up, such as 0.02"
        )
    return value


def _tokens(typed: object) -> int:
    if not isinstance(typed, Integral):
        raise InputError(f"a budget of {typed!r} tokens is no whole number; give one such as 512")
    tokens = int(typed)
    if not 1 <= tokens <= MOST_TOKENS:
        raise InputError(f"a budget of {tokens} tokens is not possible; give 1 to {MOST_TOKENS}")
    return tokens


def _context(typed: object) -> object:
    return parse_tokens(typed) if isinstance(typed, str) else typed


def _caps(typed: str | Sequence[str]) -> tuple[LayerCap, ...]:
    return tuple(LayerCap.parse(one) for one in ([typed] if isinstance(typed, str) else typed))


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
"""Refusals of options of a request, `r`, that exclude each other, with their conditions."""

_READ: dict[str, Callable[[Any], Any]] = {
    "target_retention": _retention,
    "target_loss": _loss,
    "budget": parse_share,
    "budget_tokens": _tokens,
    "memory": parse_bytes,
    "context": _context,
    "bits": parse_numbers,
    "cap": _caps,
}
"""Readers of keywords that can be written in several ways."""

_LIMITS = ("min_tokens", "max_tokens", "bits", "max_distinct", "cap", "objective")
"""Fields of a record beside the target; all others are fields of a budget profile."""
