"""From a score profile and a request to an allocation problem."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.allocation.curves import RequestCurves, check_losses
from kvalloc.allocation.request import LayerCap, Request
from kvalloc.errors import InfeasibleError, InputError, option
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.problem import Aggregate, AllocationProblem, GroupCap, SideConstraint, Solver
from kvalloc.problem.constraints import MaxDistinct
from kvalloc.problem.dominance import undominated
from kvalloc.shape import ModelShape

EVEN_OPTIONS = 256
"""Largest number of budgets on offer to a unit whose values are not concave (a loss, or several bit
widths), because exact solvers take time for every option there. Where there are more pages than
that, every second, third, ... one is offered."""

MAX_OPTIONS = 2**22
"""Largest number of options of a unit: thirty times a context of 131,072 tokens, one by one."""


@dataclass(frozen=True, kw_only=True)
class PosedRequest:
    """A request with everything that the scores decide about it, and its problem.

    Attributes
    ----------
    curves : RequestCurves
        The scores, and the request with its objective.
    problem : AllocationProblem
    """

    curves: RequestCurves
    problem: AllocationProblem

    @property
    def request(self) -> Request:
        """The request with its objective."""
        return self.curves.request


def choose_objective(scores: ScoreProfile, request: Request, solver: Solver) -> tuple[Request, str]:
    """Choose the objective of a request that names none: the loss, if it was measured.

    Retention is a weak measure of harm. A size is therefore spent by loss curves if the score
    profile has them for such units and bits, and the solver takes them.

    Parameters
    ----------
    scores : ScoreProfile
    request : Request
    solver : Solver
        The solver that gets the problem.

    Returns
    -------
    request : Request
        With an objective.
    note : str
        One line on what was chosen and why; empty where there was nothing to choose.
    """
    plain = replace(request, objective=request.objective or "mean")
    sized = request.target.needed_value is None
    if request.objective is not None or not sized or not scores.has_losses:
        return plain, ""
    refusal = ""
    try:
        by_loss = replace(request, objective="loss")
        able = solver.can_solve(formulate(scores, by_loss))
        refusal = "" if able is True else f"{solver.name}: {able}"
    except InfeasibleError:
        pass  # solving names the limit
    except InputError as error:
        refusal = str(error)
    if refusal:
        return plain, f"retention decides, not the loss curves: {refusal}"
    note = "the score profile holds loss curves, so the least predicted loss decides; "
    return by_loss, f"{note}{option('objective', 'mean')} asks for retention"


def pose(
    scores: ScoreProfile,
    request: Request,
    *,
    columns: int | None = None,
) -> PosedRequest:
    """Formulate the problem of a request.

    Parameters
    ----------
    scores : ScoreProfile
    request : Request
    columns : int, optional
        Length of the longest prompt of the batch, where it is not the context.

    Returns
    -------
    PosedRequest

    Raises
    ------
    InputError, InfeasibleError
        As `formulate`.
    """
    curves = RequestCurves(scores=scores, request=request, columns=columns)
    return PosedRequest(curves=curves, problem=problem_of(curves))


def formulate(scores: ScoreProfile, request: Request) -> AllocationProblem:
    """Return the multiple-choice problem of a request on measured curves; see `problem_of`."""
    return problem_of(RequestCurves(scores=scores, request=request))


def problem_of(curves: RequestCurves) -> AllocationProblem:
    """Return the multiple-choice problem of a request.

    Every number of tokens from the floor to the context is an option (every page with
    ``page_tokens``). Its value is the retention it adds, its cost the bytes it stores. At layer
    level an option keeps that many entries in each KV head of the layer, each head its own best.

    With several bit widths every budget is an option at each of them, worth less the loss that was
    measured at both together. Options that cost no less than another one for no more value are left
    out, unit by unit.

    With the objective ``"loss"`` an option's value is less the loss measured there, linear between
    the measured levels, and the value of a choice is the sum over units. Options are the pages
    down from the context, every n-th one where there are more than `EVEN_OPTIONS`, down to the
    floor or the lowest measured level, whichever is higher.

    Parameters
    ----------
    curves : RequestCurves
        Measured curves, target and limits; of one sample or the mean of all.

    Returns
    -------
    AllocationProblem

    Raises
    ------
    InputError
        If the context is beyond the model's limit or too short for sinks and window, or loss is
        the objective and was not measured for such units.
    InfeasibleError
        If memory is below what floors and sliding layers alone store.
    """
    request, shape = curves.request, curves.scores.shape
    _check_context(curves)
    costs = curves.costs
    tokens = _option_tokens(curves)
    options = _options(curves, tokens)
    heads_per_unit = shape.n_kv_heads if request.level == "layer" else 1
    full_layers = np.asarray(shape.full_layers, dtype=np.int64)
    layers = np.repeat(full_layers, shape.n_kv_heads // heads_per_unit)
    heads = np.tile(np.arange(shape.n_kv_heads), len(shape.full_layers))
    capacity = request.target.capacity(costs, floor_cost=int(options["costs"][:, 0].sum()))
    return AllocationProblem(
        **options,
        layers=layers,
        heads=heads.astype(np.int64) if request.level == "head" else np.full(layers.size, -1),
        aggregate=Aggregate.WORST if request.objective == "worst" else Aggregate.SUM,
        capacity_bytes=capacity,
        target=request.target.needed_value,
        context_tokens=curves.context_tokens,
        protected_tokens=curves.scores.protected_tokens,
        constraints=_constraints(request, shape, layers, costs.sliding_layer_bytes),
    )


def _constraints(
    request: Request, shape: ModelShape, layers: IntArray, sliding_layer_bytes: int
) -> tuple[SideConstraint, ...]:
    """Return caps in the order given, then distinct budgets.

    Parameters
    ----------
    request : Request
    shape : ModelShape
    layers : ndarray of int64, (n_units,)
        Layer of each unit.
    sliding_layer_bytes : int
        Bytes of one sliding layer, which no budget changes; they count towards its caps.
    """
    constraints: list[SideConstraint] = []
    for cap in request.cap:
        constraints.append(_group_cap(cap, shape, layers, sliding_layer_bytes))
    if request.max_distinct is not None:
        constraints.append(MaxDistinct(most=request.max_distinct))
    return tuple(constraints)


def _group_cap(
    cap: LayerCap, shape: ModelShape, layers: IntArray, sliding_layer_bytes: int
) -> GroupCap:
    unknown = [layer for layer in cap.layers if layer >= shape.n_layers]
    if unknown:
        raise InputError(
            f"{option('cap', cap.text)} names layer {unknown[0]}, and {shape.model_id} has layers "
            f"0-{shape.n_layers - 1}; name some of those"
        )
    sliding = sum(shape.layer_types[layer] == "sliding" for layer in cap.layers)
    if sliding == len(cap.layers):
        raise InputError(
            f"{option('cap', cap.text)} names only sliding-window layers, which store "
            f"{sliding * sliding_layer_bytes:,} bytes whatever is decided; leave it out"
        )
    return GroupCap(
        name=cap.name,
        units=tuple(np.flatnonzero(np.isin(layers, cap.layers)).tolist()),
        capacity_bytes=cap.capacity_bytes - sliding * sliding_layer_bytes,
    )


def _options(curves: RequestCurves, tokens: IntArray) -> dict[str, Any]:
    """Return the fields of the problem that describe the options of all units."""
    shape, request = curves.scores.shape, curves.request
    widths = request.bits or (16,)
    valued = [curves.values(tokens, width) for width in widths]
    values, weights = valued[0]
    heads = (shape.n_kv_heads if request.level == "layer" else 1) * request.batch
    costs = heads * np.concatenate(
        [curves.costs.of_head(tokens, width, request.page) for width in widths]
    )
    of_all = {
        "tokens": np.tile(tokens, len(widths)),
        "bits": np.repeat(np.asarray(widths), tokens.size),
        "costs": costs,
    }
    if len(widths) > 1:
        values = np.concatenate([values for values, _ in valued], axis=1)
        kept, counts = undominated(values, costs)
        values = np.take_along_axis(values, kept, axis=1)
        options = {name: array[kept] for name, array in of_all.items()}
    else:
        counts = np.full(len(values), tokens.size, dtype=np.int64)
        options = {name: np.broadcast_to(array, values.shape) for name, array in of_all.items()}
    if request.bits is None:
        del options["bits"]
    return {**options, "values": values, "option_counts": counts, "weights": weights}


def _check_context(curves: RequestCurves) -> None:
    """Raise an `InputError` for a context, or limits of budgets, that leave no options."""
    scores, request, context = curves.scores, curves.request, curves.context_tokens
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
            f"{option('max_tokens', scores.protected_tokens)} or more"
        )


def _option_tokens(curves: RequestCurves) -> IntArray:
    """Return the budgets on offer, rising: whole pages, or all of the context.

    Where values are not concave there are at most `EVEN_OPTIONS`, in equal steps down from the
    largest. That keeps the grain of the costs coarse, which exact solvers need.
    """
    scores, request, context = curves.scores, curves.request, curves.context_tokens
    page, floor = request.page, max(scores.protected_tokens, request.min_tokens or 0)
    if request.objective == "loss":
        check_losses(scores, request.bits or (16,))
        floor = max(floor, curves.min_loss_tokens)
    largest = context if request.max_tokens is None else min(context, request.max_tokens)
    # The last page may be a partial one: it costs a whole page but holds the rest of the context.
    first, last = -(-floor // page), -(-context // page) if largest == context else largest // page
    if last < first:
        smallest = option("max_tokens", min(first * page, context))
        raise InputError(
            f"no budget of whole pages of {page} tokens is between the smallest of {floor} that "
            f"can be offered and the largest of {largest}; give {smallest} or more, or smaller "
            "pages"
        )
    stride = 1
    if request.objective == "loss":
        stride = -(-(last - first + 1) // EVEN_OPTIONS)
    elif last - first > MAX_OPTIONS:
        raise InputError(
            f"{last - first:,} budgets for each unit are more than fit in memory; ask for larger "
            f"pages, such as {option('page', -(-(largest - floor) // MAX_OPTIONS))}"
        )
    pages = np.arange(last, first - 1, -stride, dtype=np.int64)[::-1]
    return np.minimum(pages * page, context)
