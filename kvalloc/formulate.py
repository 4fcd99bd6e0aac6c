"""From a score profile and a request to an allocation problem."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from kvalloc.budget_profile import LengthRule, Level
from kvalloc.capacity import capacity_of, sliding_layer_bytes
from kvalloc.costs import Cost, check_cost, check_size, head_cost
from kvalloc.dominated import Undominated, undominated
from kvalloc.errors import InputError
from kvalloc.layer_groups import Groups, parse_groups
from kvalloc.limits import Limits
from kvalloc.predicting import even_options, least_loss_tokens, loss_curves
from kvalloc.problem import Aggregate, AllocationProblem, FloatArray, Sense
from kvalloc.quantities import parse_bytes, parse_share
from kvalloc.score_profile import ScoreProfile
from kvalloc.sharing import grouped
from kvalloc.stored_bytes import BIT_WIDTHS
from kvalloc.valuing import unit_values, workload_values
from kvalloc.weighting import Weights, checked_weights

Objective = Literal["mean", "worst", "loss"]
Workloads = Literal["mean", "worst", "cvar"]

MOST_OPTIONS = 2**22
"""Most options of a unit: thirty times a context of 131,072 tokens, one by one."""


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
        What an option costs; see `kvalloc.costs`.
    limits : Limits
        Caps, ranks and what else must hold.
    workloads : {"mean", "worst", "cvar"}
        What counts of the samples, each a workload: their mean, the worst one, or the mean of the
        worst share `tail` of them.
    tail : float or None
        That share, above 0 and up to 1; only with "cvar".
    share_groups : tuple of tuple of int, int, str or None
        Groups of adjacent layers that keep the same entries; or how many groups of layers there
        may be, which `kvalloc.grouping` turns into groups first.

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

    def __post_init__(self) -> None:
        given = [name for name in _TARGETS if getattr(self, name) is not None]
        options = ", ".join(_TARGETS.values())
        if not given:
            raise InputError(f"no target: say what to reach with one of {options}")
        if len(given) > 1:
            both = " and ".join(_TARGETS[name] for name in given)
            raise InputError(f"{both} are two targets at once; give one of {options}")
        if self.level not in ("layer", "head"):
            raise InputError(f"the level is {self.level!r}, expected 'layer' or 'head'")
        self._check_objective()
        if self.batch < 1 or self.page_tokens < 1:
            raise InputError("batch and page must be at least 1")
        if self.min_tokens is not None and self.min_tokens < 0:
            raise InputError(f"the least budget is {self.min_tokens} tokens, expected >= 0")
        if self.max_tokens is not None and self.max_tokens < max(1, self.min_tokens or 0):
            raise InputError(
                f"a largest budget of {self.max_tokens} tokens is below the least of "
                f"{max(1, self.min_tokens or 0)}; raise --max-tokens or lower --min-tokens"
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
                "a target retention does not go with the objective 'loss'; give --target-loss, or "
                "leave the objective out"
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
                f"{', '.join(map(str, BIT_WIDTHS))}, such as --bits 16,8,4"
            )
        object.__setattr__(self, "bits", None if widths == (16,) else widths)
        if widths == (16,):
            return
        if self.objective == "loss":
            raise InputError(
                "loss curves are measured at full precision and know no bits; leave out --bits, "
                "or ask for retention"
            )
        if self.limits.max_distinct is not None or self.limits.equal_heads:
            raise InputError(
                "with --bits two budgets differ in tokens or in bits, and --max-distinct and "
                "--equal-heads count tokens alone; leave them out (--level layer gives all heads "
                "of a layer the same)"
            )

    def _check_cost(self) -> None:
        check_cost(self.cost)
        if self.cost == "bytes":
            return
        if self.memory is not None:
            raise InputError(
                f"--memory is a size of stored bytes and the cost is {self.cost}; give a share of "
                "the whole cost with --budget, or --cost bytes"
            )
        if self.limits.caps or self.limits.ranks is not None:
            raise InputError(
                f"caps and ranks are about stored bytes and the cost is {self.cost}; leave them "
                "out, or take --cost bytes"
            )
        if self.cost == "communication" and self.bits is not None:
            raise InputError(
                "secret shares have one width, so --bits does not go with --cost communication"
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


def _check_sharing(request: Request) -> None:
    if request.share_groups is None:
        return
    object.__setattr__(request, "share_groups", parse_groups(request.share_groups))
    if request.objective != "mean" or request.weights is not None or request.bits is not None:
        raise InputError(
            "layers that share entries are decided by their mean retention at the model's own "
            "precision; leave out the objective, weights and bits, or the groups"
        )


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


_TARGETS = {
    "target_retention": "--target-retention",
    "target_loss": "--target-loss",
    "budget": "--budget",
    "budget_tokens": "--budget-tokens",
    "memory": "--memory",
}


def formulate(
    scores: ScoreProfile, request: Request, *, sample: int | None = None
) -> AllocationProblem:
    """The multiple-choice problem that a request poses on measured curves.

    Every number of tokens from the floor to the context is an option (every page with
    ``page_tokens``); its value is the retention it adds, its cost the bytes it stores. At layer
    level an option keeps that many entries in each KV head of the layer, each head its own best.

    With weights the retention is the weighted mean, scaled so that keeping everything is 1.

    With several bit widths every budget is an option at each of them, worth the retention times
    the fidelity that was measured; options that cost as much as another or more for no more value
    are left out, unit by unit.

    With the objective ``"loss"`` an option's value is less the loss that was measured there, linear
    between the measured levels, and the value of a choice the sum over units. Options are the
    pages down from the context, every n-th one where there are more than
    `kvalloc.predicting.LOSS_OPTIONS`, down to the floor or the lowest measured level, whichever is
    higher.

    Parameters
    ----------
    scores : ScoreProfile
        Measured curves.
    request : Request
        Target and limits.
    sample : int, optional
        Pose it on one sample instead of the mean curves.

    Returns
    -------
    AllocationProblem

    Raises
    ------
    InputError
        If the context is beyond the model's limit or too short for sinks and window, or loss is
        asked for and was not measured for such units.
    InfeasibleError
        If memory is below what floors and sliding layers alone store.
    """
    asked = request.context_tokens
    context = scores.context_tokens if asked is None else asked
    _check_context(scores, context, request)
    shape = scores.shape
    check_size(shape, request.cost, context, request.page_tokens, request.batch)
    tokens = _option_tokens(scores, request, context)
    options, weights = _options(scores, request, context, tokens, sample)
    heads_per_unit = shape.n_kv_heads if request.level == "layer" else 1
    full_layers = np.asarray(shape.full_layers, dtype=np.int64)
    layers = np.repeat(full_layers, shape.n_kv_heads // heads_per_unit)
    heads = np.tile(np.arange(shape.n_kv_heads), len(shape.full_layers))
    target = request.target_value
    capacity = None
    if target is None:
        capacity = capacity_of(scores, request, context, floor_cost=int(options.costs[:, 0].sum()))
    values, scenarios = options.values, None
    tail = _tail_share(scores, request) if sample is None else 1.0
    if tail < 1.0:
        scenarios = workload_values(scores, request, context, tokens, shape_as=options.values)
        values, weights = scenarios.mean(axis=0), np.ones(layers.size)
    problem = AllocationProblem(
        tokens=options.tokens,
        bits=None if request.bits is None else options.bits,
        values=values,
        costs=options.costs,
        option_counts=options.counts,
        scenarios=scenarios,
        tail_share=tail,
        weights=weights,
        layers=layers,
        heads=heads.astype(np.int64) if request.level == "head" else np.full(layers.size, -1),
        sense=Sense.MAX_VALUE if target is None else Sense.MIN_COST,
        aggregate=_aggregate(request, tail),
        capacity_bytes=capacity,
        target=target,
        context_tokens=context,
        protected_tokens=scores.protected_tokens,
        constraints=request.limits.constraints(
            shape=shape,
            layers=layers,
            sliding_layer_bytes=sliding_layer_bytes(shape, context, request),
        ),
    )
    if request.share_groups is None:
        return problem
    if not isinstance(request.share_groups, tuple):
        raise InputError(
            "which layers share entries has to be chosen first; call kvalloc.grouping.settle"
        )
    return grouped(problem, scores, request.share_groups, sample=sample)


def _aggregate(request: Request, tail: float) -> Aggregate:
    if request.objective == "worst":
        return Aggregate.WORST
    return Aggregate.TAIL if tail < 1.0 else Aggregate.SUM


def _tail_share(scores: ScoreProfile, request: Request) -> float:
    """Share of the samples that counts; 1 where that is their mean, as it is of a single one."""
    if request.workloads == "mean" or scores.n_samples == 1:
        return 1.0
    return 1.0 / scores.n_samples if request.tail is None else request.tail


def _options(
    scores: ScoreProfile,
    request: Request,
    context: int,
    tokens: np.ndarray[Any, np.dtype[np.int64]],
    sample: int | None,
) -> tuple[Undominated, FloatArray]:
    """Options of all units, and the units' weights."""
    shape, widths = scores.shape, tuple(request.bits or (16,))
    valued = [unit_values(scores, request, context, tokens, sample, bits) for bits in widths]
    heads = (shape.n_kv_heads if request.level == "layer" else 1) * request.batch
    costs = heads * np.concatenate(
        [head_cost(request.cost, tokens, bits, shape, request.page_tokens) for bits in widths]
    )
    values, weights = valued[0]
    every = (np.tile(tokens, len(widths)), np.repeat(np.asarray(widths), tokens.size))
    if len(widths) == 1 and bool(np.all(np.diff(costs) > 0)):
        all_tokens, all_bits, all_costs = (
            np.broadcast_to(row, values.shape) for row in (*every, costs)
        )
        counts = np.full(values.shape[0], tokens.size, dtype=np.int64)
        options = Undominated(
            tokens=all_tokens, bits=all_bits, values=values, costs=all_costs, counts=counts
        )
    else:
        table = np.concatenate([values for values, _ in valued], axis=1)
        options = undominated(*every, table, costs)
    return options, weights


def _check_context(scores: ScoreProfile, context: int, request: Request) -> None:
    limit = scores.shape.max_context_tokens
    if limit is not None and context > limit:
        raise InputError(
            f"a context of {context} tokens is beyond the {limit} tokens of "
            f"{scores.shape.model_id}; ask for a shorter one"
        )
    if context <= scores.protected_tokens:
        raise InputError(
            f"a context of {context} tokens leaves nothing to decide: sinks and window alone are "
            f"{scores.protected_tokens} tokens; ask for a longer one"
        )
    if request.min_tokens is not None and request.min_tokens > context:
        raise InputError(
            f"a least budget of {request.min_tokens} tokens is above the context of {context}"
        )
    if request.max_tokens is not None and request.max_tokens < scores.protected_tokens:
        raise InputError(
            f"a largest budget of {request.max_tokens} tokens is below the "
            f"{scores.protected_tokens} of sinks and window, which are never evicted; give "
            f"--max-tokens {scores.protected_tokens} or more"
        )


def _option_tokens(
    scores: ScoreProfile, request: Request, context: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    floor = max(scores.protected_tokens, request.min_tokens or 0)
    most = context if request.max_tokens is None else min(context, request.max_tokens)
    page = request.page_tokens
    if request.objective == "loss":
        loss_curves(scores)  # refuses where there are none
        return even_options(max(floor, least_loss_tokens(scores, context)), most, context, page)
    if request.bits is not None:
        return even_options(floor, most, context, page)
    if (most - floor) // page > MOST_OPTIONS:
        raise InputError(
            f"{(most - floor) // page:,} budgets for each unit are more than fit in memory; ask "
            f"for larger pages, such as --page {-(-(most - floor) // MOST_OPTIONS)}"
        )
    if page == 1:
        return np.arange(floor, most + 1, dtype=np.int64)
    # The last page may be a partial one: it costs a whole page but holds the rest of the context.
    first = -(-floor // page) * page
    pages = np.arange(first, context + page, page, dtype=np.int64)
    options = np.unique(np.minimum(pages, context))
    if int(options[0]) > most:
        raise InputError(
            f"no budget of whole pages of {page} tokens is between the least of {floor} and the "
            f"largest of {most}; give --max-tokens {options[0]} or more, or smaller pages"
        )
    return options[options <= most]
