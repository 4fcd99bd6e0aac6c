"""Formulation: from a score profile and a request to a problem, and to predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.accounting.costs import CacheCosts
from kvalloc.allocation.request import Request
from kvalloc.errors import InfeasibleError, InputError, command, option
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.score_profile import ScoreProfile, interpolate_curves
from kvalloc.problem import Aggregate, AllocationProblem, GroupCap, SideConstraint, Solver
from kvalloc.problem.arrays import MaxDistinct, undominated
from kvalloc.prompts.intervals import interval

EVEN_OPTIONS = 256
"""Largest number of budgets of a unit with values that are not concave (a loss, or several bit
widths), because exact solvers take time for each option. If there are more pages, every second,
third, ... one is an option."""

MAX_OPTIONS = 2**22
"""Largest number of options of a unit: thirty times a context of 131,072 tokens."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PosedRequest:
    """A score profile at the context and level of a request.

    Attributes
    ----------
    sample : int or None
        Index of a sample; None for the mean.
    columns : int or None
        Length of the longest prompt of a batch.
    """

    scores: ScoreProfile
    request: Request
    sample: int | None = None
    columns: int | None = None

    @cached_property
    def context_tokens(self) -> int:
        """Prompt length of the budgets."""
        return self.request.context or self.scores.context_tokens

    @cached_property
    def costs(self) -> CacheCosts:
        """Return the cost of the request's whole cache.

        Raises
        ------
        InputError
        """
        return CacheCosts(
            shape=self.scores.shape,
            context_tokens=self.context_tokens,
            batch=self.request.batch,
            page_tokens=self.request.page,
            columns=self.columns,
        )

    @cached_property
    def problem(self) -> AllocationProblem:
        """Return the multiple-choice problem of the request.

        Each page (token without ``page``) from the floor to the context is an option: its value is
        the retention it adds, its cost its bytes. At layer level each KV head has its entries, by
        the head's order. With several bit widths, each budget is an option at each; options that
        cost no less than a better one are left out.

        With the objective ``"loss"``, a value is minus a loss, linear between the measured levels,
        and options are `EVEN_OPTIONS` at most, from the lowest level up.

        Raises
        ------
        InputError
            If the context is impossible, or losses were not measured.
        InfeasibleError
            If a size is below the floors.
        """
        request, shape = self.request, self.scores.shape
        _check_context(self)
        options = _options(self)
        layers = np.asarray(shape.full_layers, dtype=np.int64)
        heads = np.full(layers.size, -1)
        if request.level == "head":
            heads = np.tile(np.arange(shape.n_kv_heads, dtype=np.int64), layers.size)
            layers = np.repeat(layers, shape.n_kv_heads)
        floors = int(options["costs"][:, 0].sum())
        return AllocationProblem(
            **options,
            layers=layers,
            heads=heads,
            aggregate=Aggregate.WORST if request.objective == "worst" else Aggregate.SUM,
            capacity_bytes=request.target.capacity(self.costs, floors),
            target=request.target.needed_value,
            context_tokens=self.context_tokens,
            protected_tokens=self.scores.protected_tokens,
            constraints=_constraints(self, layers),
        )

    def values(self, tokens: IntArray, bits: int) -> tuple[FloatArray, FloatArray]:
        """Return the value of budgets to each unit, (n_units, n_options), and weights, (n_units,).

        It is the retention that the unit adds to its layer; its own for the worst unit; minus its
        loss for ``"loss"``.

        Raises
        ------
        InputError
            If its losses were not measured.
        """
        scores, request = self.scores, self.request
        full, is_worst = list(scores.shape.full_layers), request.objective == "worst"
        if request.objective == "loss":
            curves = loss_curves(scores, self.sample, bits=bits)[full]
            if request.level == "layer":
                curves = curves.sum(axis=1)
            elif curves.shape[1] != scores.shape.n_kv_heads:
                raise InputError(
                    "the loss curves of this score profile were measured on whole layers, so they "
                    f"cannot tell KV heads apart; ask for {option('level', 'layer')}, or measure "
                    "every head"
                )
            curves = curves.reshape(-1, curves.shape[-1])
            return -self._curves_at(curves, self._loss_ranks, tokens), np.ones(len(curves))
        measured = slice(None) if len(full) == scores.shape.n_layers else full  # of all, a view
        single = 0 if scores.n_samples == 1 else self.sample
        if request.level == "head" and single is not None:
            # The measured curves with the heads' shares as weights: their product, what a head adds
            # to its layer, would be a second copy, which is gigabytes with a long context.
            shares = scores.head_shares[single, full].ravel()
            curves = scores.curves[single][measured].reshape(-1, scores.ranks.size)
            weights = np.ones_like(shares) if is_worst else shares / len(full)
            return self._curves_at(curves, scores.ranks, tokens), weights
        curves = scores.contributions(self.sample)[measured]
        if request.level == "layer":
            curves = curves.sum(axis=1)
        curves = curves.reshape(-1, scores.ranks.size)
        values = self._curves_at(curves, scores.ranks, tokens)
        if is_worst:  # the unit's retention, not its part of the layer's
            return values / curves[:, -1:], np.ones(len(values))
        return values, np.full(len(values), 1.0 / len(full))

    def _curves_at(self, curves: FloatArray, ranks: IntArray, tokens: IntArray) -> FloatArray:
        places = evictable_rank(self.scores, tokens, self.context_tokens)
        return interpolate_curves(curves, ranks, places)

    @property
    def _loss_ranks(self) -> IntArray:
        """Evictable entries kept at each measured level of loss."""
        assert self.scores.loss_tokens is not None  # loss_curves has returned the curves
        return self.scores.loss_tokens - self.scores.protected_tokens

    @property
    def min_loss_tokens(self) -> int:
        """Smallest budget with a known loss, at this context."""
        protected = self.scores.protected_tokens
        stretch = (self.context_tokens - protected) / self.scores.evictable_tokens
        return protected + math.ceil(int(self._loss_ranks[0]) * stretch - 1e-9)

    def retention(self, budgets: IntArray) -> float:
        """Return the mean over full-attention layers of the kept share of score mass, 0..1.

        ``budgets`` (n_layers, n_kv_heads) include sinks and window.
        """
        kept = self._sum_at(self.scores.contributions(self.sample), self.scores.ranks, budgets)
        return kept / len(self.scores.shape.full_layers)

    def predicted_loss(self, budgets: IntArray, bits: IntArray | None = None) -> float | None:
        """Return the sum of the units' measured losses at their budgets, nats per token.

        ``budgets`` (n_layers, n_kv_heads) include sinks and window. It is None for losses not
        measured, below the lowest level, or for different heads of layers measured whole.
        """
        scores, full = self.scores, list(self.scores.shape.full_layers)
        widths = np.full_like(budgets, 16) if bits is None else bits
        used = np.unique(widths[full]).tolist()
        if not {*used} <= {*scores.loss_widths} or budgets[full].min() < self.min_loss_tokens:
            return None
        curves = np.zeros(())
        for width in used:
            measured = loss_curves(scores, self.sample, bits=width)
            columns = measured.shape[1]
            curves = np.where((widths == width)[:, :columns, None], measured, curves)
        decided = np.stack([budgets, widths])[:, full]
        if columns == 1 and np.any(decided != decided[..., :1]):
            return None
        return self._sum_at(curves, self._loss_ranks, budgets)

    def _sum_at(self, curves: FloatArray, ranks: IntArray, budgets: IntArray) -> float:
        """Return the sum of curves (n_layers, n_kv_heads or 1, n_points) at budgets."""
        at_budgets = [
            self._curves_at(curves[layer, head], ranks, budgets[layer, [head]])
            for layer in self.scores.shape.full_layers
            for head in range(curves.shape[1])
        ]
        return math.fsum(np.concatenate(at_budgets))

    def model_error(self, bits: IntArray | None, share: float) -> float | None:
        """Return measured over summed loss of whole caches of a share; None if not measured."""
        by_head = bits is not None and self.request.level == "head"
        return self.scores.error_at(share) if by_head else None

    def predicted_loss_interval(self, profile: BudgetProfile) -> tuple[float, float] | None:
        """Return the 95% bootstrap interval of a predicted loss over the samples, nats per token.

        It leaves the model error out. None without a known loss, or with one sample.
        """
        samples = (replace(self, sample=one) for one in range(self.scores.n_samples))
        each = [one.predicted_loss(profile.budgets, profile.bits) for one in samples]
        ends = interval([np.array([loss for loss in each if loss is not None])], seed=0)
        return None if ends is None else (ends[0], ends[1])


def formulate(scores: ScoreProfile, request: Request) -> AllocationProblem:
    """Return the problem of a request on the mean of measured curves."""
    return PosedRequest(scores=scores, request=request).problem


def choose_objective(scores: ScoreProfile, request: Request, solver: Solver) -> tuple[Request, str]:
    """Choose the objective of a request that names none, and a line on the reason or "".

    Losses, which tell harm better than retention, decide for a size if they were measured for such
    units and bits and the solver takes them.
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


def _check_context(posed: PosedRequest) -> None:
    scores, request, context = posed.scores, posed.request, posed.context_tokens
    protected = scores.protected_tokens
    scores.shape.check_context(context)
    if context <= protected:
        raise InputError(
            f"a context of {context} tokens leaves nothing to decide: sinks and window alone are "
            f"{protected} tokens; ask for a longer one"
        )
    if request.min_tokens is not None and request.min_tokens > context:
        raise InputError(
            f"a least budget of {request.min_tokens} tokens is above the context of {context}"
        )
    if request.max_tokens is not None and request.max_tokens < protected:
        raise InputError(
            f"a largest budget of {request.max_tokens} tokens is below the {protected} of sinks "
            f"and window, which are never evicted; give {option('max_tokens', protected)} or more"
        )


def _option_tokens(posed: PosedRequest) -> IntArray:
    """Return rising budgets: whole pages, or all of the context."""
    scores, request, context = posed.scores, posed.request, posed.context_tokens
    page, floor = request.page, max(scores.protected_tokens, request.min_tokens or 0)
    if request.objective == "loss":
        check_losses(scores, request.bits or (16,))
        floor = max(floor, posed.min_loss_tokens)
    largest = min(context, request.max_tokens or context)
    # The last page may be a partial one: it costs a whole page but ends with the context.
    first, last = -(-floor // page), -(-context // page) if largest == context else largest // page
    if last < first:
        smallest = option("max_tokens", min(first * page, context))
        raise InputError(
            f"no budget of whole pages of {page} tokens is from {floor}, the smallest that can be "
            f"offered, to {largest}; give {smallest} or more, or smaller pages"
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


def _options(posed: PosedRequest) -> dict[str, Any]:
    request, tokens = posed.request, _option_tokens(posed)
    widths = request.bits or (16,)
    valued = [posed.values(tokens, width) for width in widths]
    values, weights = valued[0]
    costs = np.concatenate([posed.costs.of_head(tokens, width, request.page) for width in widths])
    heads = posed.scores.shape.n_kv_heads if request.level == "layer" else 1
    columns = {
        "tokens": np.tile(tokens, len(widths)),
        "bits": np.repeat(np.asarray(widths), tokens.size),
        "costs": costs * heads * request.batch,
    }
    if len(widths) > 1:
        values = np.concatenate([values for values, _ in valued], axis=1)
        kept, counts = undominated(values, columns["costs"])
        values = np.take_along_axis(values, kept, axis=1)
        options = {name: column[kept] for name, column in columns.items()}
    else:
        counts = np.full(len(values), tokens.size, dtype=np.int64)
        options = {name: np.broadcast_to(one, values.shape) for name, one in columns.items()}
    if request.bits is None:
        del options["bits"]
    return {**options, "values": values, "option_counts": counts, "weights": weights}


def _constraints(posed: PosedRequest, layers: IntArray) -> tuple[SideConstraint, ...]:
    request, shape = posed.request, posed.scores.shape
    constraints: list[SideConstraint] = []
    for cap in request.cap:
        if max(cap.layers) >= shape.n_layers:
            unknown = next(layer for layer in cap.layers if layer >= shape.n_layers)
            raise InputError(
                f"{option('cap', cap.text)} names layer {unknown}, and {shape.model_id} has layers "
                f"0-{shape.n_layers - 1}; name some of those"
            )
        # No budget changes the bytes of other layers, which count towards the cap.
        constant_bytes = int(posed.costs.constant[[*{*cap.layers}]].sum())
        if not {*cap.layers} & {*shape.full_layers}:
            raise InputError(
                f"{option('cap', cap.text)} names only layers without budgets, which store "
                f"{constant_bytes:,} bytes whatever is decided; leave it out"
            )
        units = tuple(np.flatnonzero(np.isin(layers, cap.layers)).tolist())
        size = cap.capacity_bytes - constant_bytes
        constraints.append(GroupCap(name=cap.name, units=units, capacity_bytes=size))
    if request.max_distinct is not None:
        constraints.append(MaxDistinct(maximum=request.max_distinct))
    return tuple(constraints)


def evictable_rank(scores: ScoreProfile, tokens: IntArray, context_tokens: int) -> FloatArray:
    """Return the place of budgets on a curve: evictable entries kept of the reference context."""
    stretch = scores.evictable_tokens / (context_tokens - scores.protected_tokens)
    ranks = (tokens - scores.protected_tokens) * stretch
    within: FloatArray = np.clip(ranks, 0.0, float(scores.evictable_tokens)).astype(np.float64)
    return within


def check_losses(scores: ScoreProfile, bits: tuple[int, ...] = (16,)) -> None:
    """Refuse bit widths without measured losses.

    Raises
    ------
    InputError
    """
    missing = [width for width in bits if width not in scores.loss_widths]
    if not missing:
        return
    known = scores.loss_widths
    to_measure = tuple(sorted({16, *known, *bits}, reverse=True))
    widths = {} if to_measure == (16,) else {"bits": to_measure}
    way_out = command("profile", loss=scores.loss_method or "measured", **widths)
    if scores.losses is None:
        raise InputError(
            "this score profile holds no loss curves, so no loss can be predicted; measure them "
            f"with {way_out}, or ask for retention"
        )
    raise InputError(
        f"what {' and '.join(map(str, missing))} bits lose was not measured in this score profile "
        f"(of {' and '.join(map(str, known))} bits it was); measure it with {way_out}, or leave it "
        f"out of {option('bits')}"
    )


def loss_curves(scores: ScoreProfile, sample: int | None = None, *, bits: int = 16) -> FloatArray:
    """Return the loss curves of a sample or the mean, nats per token.

    They are (n_layers, n_kv_heads or 1, n_levels).

    Raises
    ------
    InputError
        As `check_losses`.
    """
    check_losses(scores, (bits,))
    assert scores.losses is not None  # checked above
    at_width = scores.losses[:, :, :, scores.loss_widths.index(bits)]
    chosen: FloatArray = at_width.mean(axis=0) if sample is None else at_width[sample]
    return chosen
