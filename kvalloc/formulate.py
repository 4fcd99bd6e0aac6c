"""From a score profile and a request to an allocation problem."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from kvalloc.budget_profile import LengthRule, Level
from kvalloc.errors import InfeasibleError, InputError
from kvalloc.limits import Limits
from kvalloc.predicting import (
    evictable_rank,
    least_loss_tokens,
    loss_at,
    loss_curves,
    loss_options,
)
from kvalloc.problem import Aggregate, AllocationProblem, FloatArray, Sense
from kvalloc.quantities import parse_bytes, parse_share
from kvalloc.score_profile import ScoreProfile, interpolate_curves
from kvalloc.shape import ModelShape
from kvalloc.weighting import Weights, checked_weights, head_weights

Objective = Literal["mean", "worst", "loss"]


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
    limits : Limits
        Caps, ranks and what else must hold.

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
    limits: Limits = Limits()

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
        if self.target_retention is not None and not 0 < self.target_retention <= 1:
            raise InputError(
                f"a target retention of {self.target_retention:g} is not a share of the score "
                "mass; give a number above 0 and up to 1, such as 0.9"
            )
        if self.budget_tokens is not None and self.budget_tokens < 1:
            raise InputError(f"a budget of {self.budget_tokens} tokens keeps nothing; give >= 1")
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
    tokens = _option_tokens(scores, request, context)
    shape = scores.shape
    if request.objective == "loss":
        values = -_unit_losses(scores, request, sample, context, tokens)
        weights = np.ones(values.shape[0])
    elif request.weights is not None:
        values, weights = _weighted(scores, request, context, tokens, sample)
    else:
        curves = _unit_curves(scores, request, sample)
        values = _option_values(scores, curves, context, tokens)
        weights = np.full(values.shape[0], 1.0 / len(shape.full_layers))
    heads_per_unit = shape.n_kv_heads if request.level == "layer" else 1
    pages = -(-tokens // request.page_tokens) * request.page_tokens
    unit_entry_bytes = heads_per_unit * shape.bytes_per_entry * request.batch
    _check_size(shape.full_bytes(int(pages[-1]), request.batch))
    row = pages * unit_entry_bytes
    full_layers = np.asarray(shape.full_layers, dtype=np.int64)
    layers = np.repeat(full_layers, shape.n_kv_heads // heads_per_unit)
    heads = np.tile(np.arange(shape.n_kv_heads), len(shape.full_layers))
    n_units = values.shape[0]
    target = request.target_value
    if target is None:
        capacity = _capacity(scores, request, context, floor_bytes=n_units * int(row[0]))
    worst = request.objective == "worst"
    if worst:  # without weights: a unit's own retention, not what it adds to its layer's
        values = values / curves[:, -1:]
        weights = np.ones(n_units)
    return AllocationProblem(
        tokens=np.broadcast_to(tokens, values.shape),
        values=values,
        costs=np.broadcast_to(row, values.shape),
        option_counts=np.full(n_units, tokens.size, dtype=np.int64),
        weights=weights,
        layers=layers,
        heads=heads.astype(np.int64) if request.level == "head" else np.full(n_units, -1),
        sense=Sense.MAX_VALUE if target is None else Sense.MIN_COST,
        aggregate=Aggregate.WORST if worst else Aggregate.SUM,
        capacity_bytes=capacity if target is None else None,
        target=target,
        context_tokens=context,
        protected_tokens=scores.protected_tokens,
        constraints=request.limits.constraints(
            shape=shape,
            layers=layers,
            sliding_layer_bytes=_sliding_layer_bytes(shape, context, request),
        ),
    )


def fixed_bytes(scores: ScoreProfile, context_tokens: int, batch: int, page_tokens: int = 1) -> int:
    """Bytes of the sliding layers in whole pages, which no budget changes."""
    shape = scores.shape
    n_sliding = shape.n_layers - len(shape.full_layers)
    entries = -(-shape.sliding_entries(context_tokens) // page_tokens) * page_tokens
    return n_sliding * shape.n_kv_heads * entries * shape.bytes_per_entry * batch


def _sliding_layer_bytes(shape: ModelShape, context: int, request: Request) -> int:
    entries = -(-shape.sliding_entries(context) // request.page_tokens) * request.page_tokens
    return shape.n_kv_heads * entries * shape.bytes_per_entry * request.batch


def _check_size(whole_bytes: int) -> None:
    if whole_bytes >= 2**62:
        raise InputError(
            f"a cache of {whole_bytes:,} bytes is more than can be counted; ask for a "
            "smaller batch, a shorter context or smaller pages"
        )


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
        return loss_options(max(floor, least_loss_tokens(scores, context)), most, context, page)
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


def _unit_curves(scores: ScoreProfile, request: Request, sample: int | None) -> FloatArray:
    """What each unit adds to the retention of its layer at every rank, `(n_units, n_points)`."""
    layers = list(scores.shape.full_layers)
    contributions = scores.contributions(sample)
    if len(layers) < scores.shape.n_layers:
        contributions = contributions[layers]
    if request.level == "layer":
        curves: FloatArray = contributions.sum(axis=1)
        return curves
    return contributions.reshape(-1, scores.ranks.size)


def _option_values(
    scores: ScoreProfile,
    curves: FloatArray,
    context: int,
    tokens: np.ndarray[Any, np.dtype[np.int64]],
) -> FloatArray:
    return interpolate_curves(curves, scores.ranks, evictable_rank(scores, tokens, context))


def _unit_losses(
    scores: ScoreProfile,
    request: Request,
    sample: int | None,
    context: int,
    tokens: np.ndarray[Any, np.dtype[np.int64]],
) -> FloatArray:
    """Loss of each unit at each option, ``(n_units, n_options)``, nats per token."""
    curves = loss_curves(scores, sample=sample)[list(scores.shape.full_layers)]
    if request.weights is not None:
        weights = head_weights(scores.shape, request.weights)
        if curves.shape[1] == 1 and np.any(weights != weights[:, :1]):
            raise InputError(
                "the loss curves of this score profile were measured on whole layers, so heads of "
                "a layer cannot weigh differently; give one weight a layer"
            )
        curves = curves * weights[:, : curves.shape[1], None]
    if request.level == "layer":
        curves = curves.sum(axis=1)
    elif curves.shape[1] == scores.shape.n_kv_heads:
        curves = curves.reshape(-1, curves.shape[-1])
    else:
        raise InputError(
            "the loss curves of this score profile were measured on whole layers, so they cannot "
            "tell KV heads apart; ask for --level layer, or measure every head"
        )
    return loss_at(scores, curves, tokens, context)


def _weighted(
    scores: ScoreProfile,
    request: Request,
    context: int,
    tokens: np.ndarray[Any, np.dtype[np.int64]],
    sample: int | None,
) -> tuple[FloatArray, FloatArray]:
    """Values and weights of units, such that keeping everything is worth 1."""
    assert request.weights is not None  # only called then
    weights = head_weights(scores.shape, request.weights)
    curves = scores.contributions(sample)[list(scores.shape.full_layers)]
    worth = weights * curves[..., -1]
    at = evictable_rank(scores, tokens, context)
    if request.level == "head":
        values = interpolate_curves(curves.reshape(-1, curves.shape[2]), scores.ranks, at)
        return values, weights.ravel() / worth.sum()
    # A layer's curve, its heads as they weigh; one that weighs nothing keeps its plain one.
    total = worth.sum(axis=1)
    shares = np.where(total[:, None] > 0, weights, 1.0)
    layers = (shares[..., None] * curves).sum(axis=1)
    values = interpolate_curves(layers / layers[:, -1:], scores.ranks, at)
    return values, total / total.sum()


def _capacity(scores: ScoreProfile, request: Request, context: int, floor_bytes: int) -> int:
    shape = scores.shape
    heads = len(shape.full_layers) * shape.n_kv_heads
    if request.memory is not None:
        constant = fixed_bytes(scores, context, request.batch, request.page_tokens)
        asked = parse_bytes(request.memory)
        if asked < constant + floor_bytes:
            sliding = f", and the sliding layers {constant:,}" if constant else ""
            raise InfeasibleError(
                f"a memory of {asked:,} bytes is too little: sinks, window and minimum budgets "
                f"take {floor_bytes:,} bytes{sliding}; ask for at least "
                f"--memory {constant + floor_bytes}",
                nearest=constant + floor_bytes,
            )
        return asked - constant
    entry_bytes = heads * shape.bytes_per_entry * request.batch
    # The share of what keeping everything costs, the partial last page included.
    whole = -(-context // request.page_tokens) * request.page_tokens
    if request.budget_tokens is not None:
        capacity = request.budget_tokens * entry_bytes
        asked_text = f"a budget of {request.budget_tokens} tokens"
        nearest: float = math.ceil(floor_bytes / entry_bytes)
        nearest_text = f"--budget-tokens {nearest}"
    else:
        assert request.budget is not None  # a request has exactly one target
        share = parse_share(request.budget)
        capacity = int(share * len(shape.full_layers) * shape.n_kv_heads * whole + 1e-9)
        capacity *= shape.bytes_per_entry * request.batch
        asked_text = f"a budget of {100 * share:g}%"
        nearest = math.ceil(1e4 * floor_bytes / (whole * entry_bytes)) / 1e4
        nearest_text = f"--budget {100 * nearest:g}%"
    if capacity < floor_bytes:
        raise InfeasibleError(
            f"{asked_text} is below the floors: sinks, window and minimum budgets take "
            f"{floor_bytes:,} bytes; ask for at least {nearest_text}",
            nearest=nearest,
        )
    return capacity
