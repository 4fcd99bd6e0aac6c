"""From a target in the user's unit to a capacity in the unit of the costs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from kvalloc.accounting.costs import head_cost
from kvalloc.errors import InfeasibleError, option
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.shape import ModelShape
from kvalloc.units import parse_bytes, parse_share

if TYPE_CHECKING:
    from kvalloc.allocation.request import Request


def capacity_of(scores: ScoreProfile, request: Request, context: int, floor_cost: int) -> int:
    """What the layers that get budgets may cost together.

    Parameters
    ----------
    scores : ScoreProfile
    request : Request
        With a share, a number of tokens or a size as its target.
    context : int
        Prompt length, tokens.
    floor_cost : int
        Cost of the smallest choice.

    Returns
    -------
    int
        In the unit of the request's cost.

    Raises
    ------
    InfeasibleError
        If the floors alone cost more; with the least that can be asked for.
    """
    if request.memory is not None:
        constant = fixed_bytes(scores, context, request.batch, request.page_tokens)
        asked = parse_bytes(request.memory)
        if asked < constant + floor_cost:
            sliding = f", and the sliding layers {constant:,}" if constant else ""
            raise InfeasibleError(
                f"a memory of {asked:,} bytes is too little: sinks, window and minimum budgets "
                f"take {floor_cost:,} bytes{sliding}; ask for at least "
                f"{option('memory', constant + floor_cost)}",
                nearest=constant + floor_cost,
            )
        return asked - constant
    # The share of what keeping everything costs, the partial last page included.
    whole = full_cost(scores, request, context)
    if request.budget_tokens is not None:
        capacity = _cost_of_all(scores, request, request.budget_tokens, page=1)
        asked_text = f"a budget of {request.budget_tokens} tokens"
        nearest: float = fewest_tokens(scores, request, context, floor_cost)
        nearest_text = option("budget_tokens", nearest)
    else:
        assert request.budget is not None  # a request has exactly one target
        # Whole entries; where a cost is no multiple of them, whole bytes.
        grain = scores.shape.bytes_per_entry * request.batch
        grain = grain if whole % grain == 0 else 1
        capacity = int(parse_share(request.budget) * (whole // grain) + 1e-9) * grain
        asked_text = f"a budget of {100 * parse_share(request.budget):g}%"
        nearest = math.ceil(1e4 * floor_cost / whole) / 1e4
        nearest_text = option("budget", f"{100 * nearest:g}%")
    if capacity < floor_cost:
        raise InfeasibleError(
            f"{asked_text} is below the floors: sinks, window and minimum budgets take "
            f"{floor_cost:,} bytes; ask for at least {nearest_text}",
            nearest=nearest,
        )
    return capacity


def full_cost(scores: ScoreProfile, request: Request, context_tokens: int) -> int:
    """Cost of keeping everything in the full-attention layers, at the model's own precision."""
    return _cost_of_all(scores, request, context_tokens, request.page_tokens)


def fewest_tokens(scores: ScoreProfile, request: Request, context_tokens: int, cost: int) -> int:
    """Smallest budget that, given to every KV head, makes up a cost."""
    shape = scores.shape
    every = np.arange(context_tokens + 1)
    heads = len(shape.full_layers) * shape.n_kv_heads * request.batch
    return int(np.searchsorted(head_cost(request.cost, every, 16, shape) * heads, cost))


def _cost_of_all(scores: ScoreProfile, request: Request, tokens: int, page: int) -> int:
    shape = scores.shape
    heads = len(shape.full_layers) * shape.n_kv_heads * request.batch
    return int(head_cost(request.cost, tokens, 16, shape, page)) * heads


def fixed_bytes(scores: ScoreProfile, context_tokens: int, batch: int, page_tokens: int = 1) -> int:
    """Bytes of the sliding layers in whole pages, which no budget changes."""
    shape = scores.shape
    n_sliding = shape.n_layers - len(shape.full_layers)
    entries = -(-shape.sliding_entries(context_tokens) // page_tokens) * page_tokens
    return n_sliding * shape.n_kv_heads * entries * shape.bytes_per_entry * batch


def sliding_layer_bytes(shape: ModelShape, context: int, request: Request) -> int:
    """Bytes of one sliding layer in whole pages, for all rows."""
    entries = -(-shape.sliding_entries(context) // request.page_tokens) * request.page_tokens
    return shape.n_kv_heads * entries * shape.bytes_per_entry * request.batch
