"""What a user asks for: one target, where it holds, and what must hold beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from kvalloc.accounting.costs import Cost, check_cost
from kvalloc.accounting.stored_bytes import BIT_WIDTHS
from kvalloc.allocation.limits import Limits
from kvalloc.allocation.weights import Weights, checked_weights
from kvalloc.errors import InputError, option
from kvalloc.formats.budget_profile import LengthRule, Level
from kvalloc.formats.sharing_groups import Groups, parse_groups
from kvalloc.units import parse_bytes, parse_share

Objective = Literal["mean", "worst", "loss"]
Workloads = Literal["mean", "worst", "cvar"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for: exactly one target, and where it holds.

    Attributes
    ----------
    target_retention : float or None
        Least mean retention over layers, 0..1.
    target_loss : float or None
        Most predicted loss, nats per token; the objective is then ``"loss"``.
    budget : str or float or None
        Share of all entries, such as ``"20%"`` or ``0.2``.
    budget_tokens : int or None
        Mean entries per KV head.
    memory : str or int or None
        Bytes for the whole cache, such as ``"512MiB"``.
    level : {"layer", "head"}
        What gets a budget.
    context_tokens : int or None
        Prompt length that the target holds for; the score profile's own by default.
    batch : int
        Rows that share the memory.
    min_tokens : int or None
        Least budget of any unit; sinks and window by default.
    max_tokens : int or None
        Largest budget of any unit; the whole context by default.
    page_tokens : int
        Budgets are whole pages of so many tokens.
    objective : {"mean", "worst", "loss"}
        Retention as the mean over layers, or that of the worst unit; or the least predicted loss,
        summed over units.
    weights : sequence of float or of sequences of float, or None
        How much each layer, or each KV head of each layer, counts in the objective; all the same
        by default. Only their ratios matter.
    bits : sequence of int or None
        Bit widths to choose from beside the budgets, of 16, 8 and 4; 16, the model's own dtype,
        by default.
    cost : {"bytes", "decode-bytes", "communication"}
        What an option costs; see `kvalloc.accounting.costs`.
    limits : Limits
        Caps, ranks and what else must hold.
    workloads : {"mean", "worst", "cvar"}
        What counts of the samples, each a workload: their mean, the worst one, or the mean of the
        worst share `tail` of them.
    tail : float or None
        That share, above 0 and up to 1; only with "cvar".
    share_groups : tuple of tuple of int, int, str or None
        Groups of adjacent layers that keep the same entries; or how many groups of layers there
        may be, which `kvalloc.allocation.grouping` turns into groups first.
    loss_policies : sequence of str, str or None
        Names of the policies that units choose from by their loss, which the objective then is;
        all whose losses the score profile holds by default. A text has commas between them.

    Raises
    ------
    InputError
        If none or several targets are given, or a value is out of range.
    """

    target_retention: float | None = None
    target_loss: float | None = None
    budget: str | float | None = None
    budget_tokens: int | None = None
    memory: str | int | None = None
    level: Level = "layer"
    context_tokens: int | None = None
    batch: int = 1
    min_tokens: int | None = None
    max_tokens: int | None = None
    page_tokens: int = 1
    objective: Objective = "mean"
    weights: Weights | None = None
    bits: Sequence[int] | None = None
    cost: Cost = "bytes"
    limits: Limits = Limits()
    workloads: Workloads = "mean"
    tail: float | None = None
    share_groups: Groups | int | str | None = None
    loss_policies: Sequence[str] | str | None = None

    @classmethod
    def of(cls, **asked: Any) -> Request:
        """The request made of keywords as `kvalloc.solve` takes them.

        Parameters
        ----------
        **asked
            Any of `REQUEST_OPTIONS`.

        Returns
        -------
        Request

        Raises
        ------
        InputError
            As the class itself, and for the limits.
        """
        if asked.get("loss_policies") is not None and asked.get("objective") == "mean":
            raise InputError(
                "policies are chosen by what they lose, and the objective is 'mean', retention; "
                "take the objective 'loss', or leave the policies out"
            )
        limits = {name: asked.pop(name) for name in LIMIT_OPTIONS if name in asked}
        cap = limits.pop("cap", None) or ()
        for ours, theirs in _RENAMED.items():
            if theirs in asked:
                asked[ours] = asked.pop(theirs)
        whole = Limits(cap=(cap,) if isinstance(cap, str) else tuple(cap), **limits)
        return cls(limits=whole, **asked)

    def __post_init__(self) -> None:
        given = [name for name in _TARGETS if getattr(self, name) is not None]
        options = ", ".join(map(option, _TARGETS))
        if not given:
            raise InputError(f"no target: say what to reach with one of {options}")
        if len(given) > 1:
            both = " and ".join(map(option, given))
            raise InputError(f"{both} are two targets at once; give one of {options}")
        if self.level not in ("layer", "head"):
            raise InputError(f"the level is {self.level!r}, expected 'layer' or 'head'")
        _check_policies(self)
        self._check_objective()
        if self.batch < 1 or self.page_tokens < 1:
            raise InputError("batch and page must be at least 1")
        if self.min_tokens is not None and self.min_tokens < 0:
            raise InputError(f"the least budget is {self.min_tokens} tokens, expected >= 0")
        if self.max_tokens is not None and self.max_tokens < max(1, self.min_tokens or 0):
            raise InputError(
                f"a largest budget of {self.max_tokens} tokens is below the least of "
                f"{max(1, self.min_tokens or 0)}; raise {option('max_tokens')} or lower "
                f"{option('min_tokens')}"
            )
        self.limits.check_level(self.level)
        self._check_bits()
        self._check_cost()
        if self.target_retention is not None and not 0 < self.target_retention <= 1:
            raise InputError(
                f"a target retention of {self.target_retention:g} is not a share of the score "
                "mass; give a number above 0 and up to 1, such as 0.9"
            )
        if self.budget_tokens is not None and self.budget_tokens < 1:
            raise InputError(f"a budget of {self.budget_tokens} tokens keeps nothing; give >= 1")
        _check_workloads(self)
        _check_sharing(self)
        self.describe()  # parses, so that a bad share or size is refused here

    def _check_objective(self) -> None:
        if self.objective not in get_args(Objective):
            known = ", ".join(map(repr, get_args(Objective)))
            raise InputError(f"the objective is {self.objective!r}, expected one of {known}")
        if self.target_loss is not None:
            if not 0 <= self.target_loss < math.inf:
                raise InputError(
                    f"a target loss of {self.target_loss:g} nats per token cannot be asked for; "
                    "give a number from 0 up, such as 0.02"
                )
            if self.objective == "worst":
                raise InputError(
                    "a target loss is about the loss summed over all units, not the worst one; "
                    "leave the objective out"
                )
            object.__setattr__(self, "objective", "loss")
        if self.weights is not None:
            self._check_weights()
        if self.objective == "loss" and self.target_retention is not None:
            raise InputError(
                "a target retention does not go with the objective 'loss'; give "
                f"{option('target_loss')}, or leave the objective out"
            )

    def _check_weights(self) -> None:
        assert self.weights is not None  # only called then
        object.__setattr__(self, "weights", checked_weights(self.weights))
        if self.objective == "worst":
            raise InputError(
                "weights are for a sum over units; the worst unit is the worst whatever it weighs: "
                "leave the weights out, or take the objective 'mean'"
            )
        if self.target_loss is not None:
            raise InputError(
                "a target loss is in nats per token, and a weighted sum of losses is not: leave "
                "the weights out, or give a size and the objective 'loss'"
            )

    def _check_bits(self) -> None:
        if self.bits is None:
            return
        widths = tuple(sorted(set(self.bits), reverse=True))
        if not widths or any(width not in BIT_WIDTHS for width in widths):
            raise InputError(
                f"the bits are {list(self.bits)}, expected some of "
                f"{', '.join(map(str, BIT_WIDTHS))}, such as {option('bits', (16, 8, 4))}"
            )
        object.__setattr__(self, "bits", None if widths == (16,) else widths)
        if widths == (16,):
            return
        if self.objective == "loss":
            raise InputError(
                "loss curves are measured at full precision and know no bits; leave out "
                f"{option('bits')}, or ask for retention"
            )
        if self.limits.max_distinct is not None or self.limits.equal_heads:
            raise InputError(
                f"with {option('bits')} two budgets differ in tokens or in bits, and "
                f"{option('max_distinct')} and {option('equal_heads')} count tokens alone; leave "
                f"them out ({option('level', 'layer')} gives all heads of a layer the same)"
            )

    def _check_cost(self) -> None:
        check_cost(self.cost)
        if self.cost == "bytes":
            return
        if self.memory is not None:
            raise InputError(
                f"{option('memory')} is a size of stored bytes and the cost is {self.cost}; give a "
                f"share of the whole cost with {option('budget')}, or {option('cost', 'bytes')}"
            )
        if self.limits.caps or self.limits.ranks is not None:
            raise InputError(
                f"caps and ranks are about stored bytes and the cost is {self.cost}; leave them "
                f"out, or take {option('cost', 'bytes')}"
            )
        if self.cost == "communication" and self.bits is not None:
            raise InputError(
                f"secret shares have one width, so {option('bits')} does not go with "
                f"{option('cost', 'communication')}"
            )

    @property
    def target_value(self) -> float | None:
        """What the problem's value has to reach: a retention, or a loss below 0; else None."""
        return self.target_retention if self.target_loss is None else -self.target_loss

    @property
    def length_rule(self) -> LengthRule:
        """Relative targets scale with the prompt, absolute ones do not."""
        absolute = self.budget_tokens is not None or self.memory is not None
        return "fixed" if absolute else "proportional"

    def describe(self) -> dict[str, Any]:
        """The target as asked, for the budget profile."""
        if self.target_retention is not None:
            return {"target": "retention", "value": self.target_retention}
        if self.target_loss is not None:
            return {"target": "loss", "value": self.target_loss}
        if self.budget is not None:
            return {"target": "budget", "value": parse_share(self.budget)}
        if self.budget_tokens is not None:
            return {"target": "budget_tokens", "value": self.budget_tokens}
        assert self.memory is not None  # exactly one target is given
        return {"target": "memory", "value": parse_bytes(self.memory)}

    def describe_workloads(self) -> dict[str, Any]:
        """What counts of the samples, for the budget profile; nothing where it is their mean."""
        if self.workloads == "mean":
            return {}
        return {"workloads": self.workloads, "tail": self.tail}

    def describe_policies(self) -> dict[str, Any]:
        """The policies to choose from, where they were named."""
        if self.loss_policies is None:
            return {}
        return {"loss_policies": list(self.loss_policies)}


def _check_sharing(request: Request) -> None:
    if request.share_groups is None:
        return
    object.__setattr__(request, "share_groups", parse_groups(request.share_groups))
    if request.objective != "mean" or request.weights is not None or request.bits is not None:
        raise InputError(
            "layers that share entries are decided by their mean retention at the model's own "
            "precision; leave out the objective, weights and bits, or the groups"
        )


def _check_policies(request: Request) -> None:
    if request.loss_policies is None:
        return
    names = request.loss_policies
    names = names.split(",") if isinstance(names, str) else names
    object.__setattr__(request, "loss_policies", tuple(name.strip() for name in names))
    if request.objective == "worst" or request.target_retention is not None:
        raise InputError(
            "policies are chosen by what they lose, and retention is asked for; give "
            f"{option('target_loss')} or {option('objective', 'loss')}, or leave the policies out"
        )
    object.__setattr__(request, "objective", "loss")


def _check_workloads(request: Request) -> None:
    if request.workloads not in ("mean", "worst", "cvar"):
        raise InputError(f"workloads is {request.workloads!r}, expected 'mean', 'worst' or 'cvar'")
    if (request.tail is not None) != (request.workloads == "cvar"):
        raise InputError(
            "the worst share of the samples needs both: workloads cvar and a tail, such as 0.25"
        )
    if request.tail is not None and not 0 < request.tail <= 1:
        raise InputError(
            f"a tail of {request.tail:g} is not a share of the samples; give a number above 0 and "
            "up to 1, such as 0.25"
        )
    if request.workloads != "mean" and request.objective != "mean":
        raise InputError(
            "the worst samples are told by their mean retention over layers; leave the objective "
            "out, or ask for the mean of the workloads"
        )


_TARGETS = ("target_retention", "target_loss", "budget", "budget_tokens", "memory")

_RENAMED = {"context_tokens": "context", "page_tokens": "page"}
LIMIT_OPTIONS = tuple(field.name for field in fields(Limits))
"""Keywords of `kvalloc.solve` that go into `Limits`."""
REQUEST_OPTIONS = (
    *(_RENAMED.get(field.name, field.name) for field in fields(Request) if field.name != "limits"),
    *LIMIT_OPTIONS,
)
"""Keywords of `kvalloc.solve` that make a request: all but who solves it, and how long."""


def request_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of some keywords that make a request.

    Parameters
    ----------
    given : mapping
        Keywords of `kvalloc.solve`, and any others.

    Returns
    -------
    dict
    """
    return {name: given[name] for name in REQUEST_OPTIONS if name in given}
