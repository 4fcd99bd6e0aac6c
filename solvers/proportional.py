"""Budgets in proportion to a weight of each unit: CAKE, LAVa, ZigZagKV, CompressKV, HeadKV..."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.accounting.rounding import apportion
from kvalloc.errors import InputError, SolverError, option
from kvalloc.problem import Aggregate, AllocationProblem, GroupCap, SideConstraint
from kvalloc.solvers._rules import (
    Rule,
    SharingRule,
    mean_budget_tokens,
    parse_numbers,
    tokens_per_step,
)

RULES = ("entropy", "normalized_entropy", "threshold", "given", "two_groups")


class Proportional(SharingRule):
    r"""Each unit's share of the budget is its share of all weights.

    With a mean of m entries per unit above the smallest options, unit u gets ``m * (1 - 1/beta) +
    m/beta * w_u / mean(w)``. Here ``w_u`` is its weight to some power. Limits follow, then the one
    rounding rule, so that the sum is the budget exactly. A published rule is a choice of the weight
    and of the limits:

    Parameters
    ----------
    weight : {"entropy", "normalized_entropy", "threshold", "given", "two_groups"}, optional
        Source of the weights; ``"given"`` with ``weights``, else ``"entropy"``.

        ``"entropy"``: ``-sum(p log p)`` of the gains of a unit's entries. All entries of a page
        count with the same gain. ``"normalized_entropy"``: divided by the log of their number.
        ``"threshold"``: entries that the unit needs to retain ``threshold`` of its best value.
        ``"given"``: ``weights`` as they are. ``"two_groups"``: ``weights`` are similarities; each
        unit of the more similar (less important) group gets ``small_share`` of the mean budget, and
        the others share the remaining budget evenly.
    weights : sequence of float or str, optional
        One number for each unit, or for each layer (its heads get the same); a text such as
        ``"0.5,0.2,0.3"`` on the command line.
    power : float
        Exponent of the weights, at least 0.
    beta : float
        The share 1/beta of the budget is handed out by weight, and all else evenly; at least 1.
    threshold : float
        Retention of the entries that ``"threshold"`` counts, 0..1.
    small_share : float
        Share of the mean budget of the less important group of ``"two_groups"``, 0..1.
    floor_tokens : int
        Smallest budget of a unit, tokens; handed out first.
    max_multiple : float
        Largest budget of a unit, in multiples of the mean budget; no limit by default.

    Raises
    ------
    InputError
        If an option is out of range, or weights are missing or superfluous.

    Notes
    -----
    Published rules:

    ========================== =====================================================
    rule                       options
    ========================== =====================================================
    CAKE, spatial part         ``weight="entropy", power=1/tau1``
    LAVa, layer budgets        ``weight="normalized_entropy"``
    ZigZagKV                   ``weight="threshold", threshold=0.9, beta=...``
    CompressKV                 ``weights=errors, floor_tokens=32, max_multiple=3``
    HeadKV                     ``weights=importance, beta=1.005...10, power=temperature``
    SqueezeAttention           ``weight="two_groups", weights=similarity, small_share=p``
    ========================== =====================================================

    CAKE multiplies the entropy by a temporal variance to the power 1/tau2. That needs attention
    rows, not curves, and is left out; pass the product as ``weights`` to have it. CAKE and LAVa sum
    the entropy over all heads. A unit of a layer has one curve here, the sum over its heads of
    their n best, and its entropy is used. ZigZagKV averages the counts of a layer's heads, which a
    layer's curve does not show either. SqueezeAttention finds its groups by k-means; in one
    dimension the best split into two is found exactly.

    References
    ----------
    CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences. LAVa: Layer-wise KV Cache
    Eviction with Dynamic Budget Allocation. ZigZagKV: Dynamic KV Cache Compression for Long-context
    Modeling based on Layer Uncertainty. CompressKV: Semantic Retrieval Heads Know What Tokens are
    Not Important Before Generation. HeadKV: Not All Heads Matter. SqueezeAttention: 2D Management
    of KV-Cache in LLM Inference via Layer-wise Optimal Budget.
    """

    name: ClassVar[str] = "proportional"
    summary: ClassVar[str] = "budgets in proportion to a weight: entropy, threshold, or your own"
    reference: ClassVar[str] = (
        "CAKE, LAVa, ZigZagKV, CompressKV, HeadKV, SqueezeAttention: budget allocation"
    )
    handles: ClassVar[frozenset[type[SideConstraint]]] = frozenset({GroupCap})
    aggregates: ClassVar[frozenset[Aggregate]] = frozenset(Aggregate)

    def __init__(
        self,
        weight: str = "",
        weights: Sequence[float] | str | None = None,
        power: float = 1.0,
        beta: float = 1.0,
        threshold: float = 0.9,
        small_share: float = 0.35,
        floor_tokens: int = 0,
        max_multiple: float = math.inf,
    ) -> None:
        self.weights = (
            None if weights is None else parse_numbers(weights, what="proportional: weights")
        )
        self.weight = weight or ("entropy" if weights is None else "given")
        if self.weight not in RULES:
            raise InputError(
                f"proportional: weight is {weight!r}, expected one of {', '.join(RULES)}"
            )
        needs_weights = self.weight in ("given", "two_groups")
        if needs_weights != (weights is not None):
            what = "needs weights, and none are" if needs_weights else "takes no weights, and some"
            raise InputError(f"proportional: weight {self.weight!r} {what} given")
        for name, number, low, high in (
            ("power", power, 0.0, np.inf),
            ("beta", beta, 1.0, np.inf),
            ("threshold", threshold, 0.0, 1.0),
            ("small_share", small_share, 0.0, 1.0),
            ("floor_tokens", floor_tokens, 0, np.inf),
            ("max_multiple", max_multiple, 1.0, np.inf),
        ):
            if not low <= number <= high:
                raise InputError(f"proportional: {name} is {number:g}, expected {low:g}..{high:g}")
        self.power = power
        self.beta = beta
        self.threshold = threshold
        self.small_share = small_share
        self.floor_tokens = floor_tokens
        self.max_multiple = max_multiple

    def refusal(self, problem: AllocationProblem) -> str:
        """Refuse another number of weights."""
        n_layers = np.unique(problem.layers).size
        if self.weights is not None and self.weights.size not in (problem.n_units, n_layers):
            expected = " or ".join(
                dict.fromkeys((f"{problem.n_units} (units)", f"{n_layers} (layers)"))
            )
            return (
                f"proportional got {self.weights.size} weights, expected {expected}; give as many, "
                "or use greedy, which needs none"
            )
        return ""

    def rule(self, problem: AllocationProblem, deadline: float) -> tuple[Rule, int]:
        """Return the budgets by weight, by their sum in steps."""
        shares = self._shares(problem, deadline)
        return partial(self._share_steps, problem, shares), problem.spendable_steps

    def _shares(self, problem: AllocationProblem, deadline: float) -> FloatArray:
        """Return weights with mean 1, ``(n_units,)``."""
        if self.weight == "threshold":
            raw = _tokens_needed(problem, self.threshold)
        elif self.weights is None:
            normalized, raw = self.weight == "normalized_entropy", np.zeros(problem.n_units)
            for unit in range(problem.n_units):
                raw[unit] = _entropy(problem, unit, normalized=normalized)
                if time.monotonic() > deadline:
                    raise SolverError(
                        f"proportional weighed {unit + 1} of {problem.n_units} units in the time "
                        f"it had; give it more, or larger pages with {option('page')}"
                    )
        else:
            raw = self.weights
            if raw.size != problem.n_units:
                raw = raw[np.unique(problem.layers, return_inverse=True)[1]]
            if self.weight == "two_groups":
                raw = _two_groups(raw, self.small_share)
        # The largest is 1 before the power is taken, so that nothing overflows.
        raw = (raw / max(float(raw.max()), 1e-300)) ** self.power
        mean = float(raw.mean())
        return raw / mean if mean > 0 else np.ones(problem.n_units)

    def _share_steps(self, problem: AllocationProblem, shares: FloatArray, steps: int) -> IntArray:
        """Share ``steps`` steps out among the units; impossible limits are left out."""
        size = tokens_per_step(problem)
        first, last = problem.tokens[:, 0], problem.last_options
        low = np.clip(-(-(self.floor_tokens - first) // size), 0, last)
        if int(low.sum()) > steps:
            low = apportion(low * (steps / int(low.sum())), steps, maximum=low)
        high = last
        if math.isfinite(self.max_multiple):
            mean_tokens = mean_budget_tokens(problem, steps)
            limit = np.floor((self.max_multiple * mean_tokens - first) / size).astype(np.int64)
            high = np.clip(limit, low, last)
            if int(high.sum()) < steps:
                high = last
        mean = (steps - int(low.sum())) / problem.n_units
        targets = low + mean * (1 - 1 / self.beta) + mean / self.beta * shares
        return apportion(targets, steps, minimum=low, maximum=high)


def _entropy(problem: AllocationProblem, unit: int, *, normalized: bool) -> float:
    """Return the entropy of the gains of a unit's entries, nats, or as a share of its maximum."""
    count = int(problem.option_counts[unit])
    share = np.diff(problem.values[unit, :count])
    np.maximum(share, 0.0, out=share)
    entries = np.diff(problem.tokens[unit, :count])
    total = float(share.sum())
    if total <= 0.0:
        return 0.0
    share /= total
    # An option of several entries: each gains an equal part of it.
    each = share / entries
    logs = np.log(each, out=each, where=each > 0.0)
    entropy = -float(share @ logs)
    largest = np.log(float(entries.sum()))
    return entropy / largest if normalized and largest > 0 else entropy


def _tokens_needed(problem: AllocationProblem, threshold: float) -> FloatArray:
    """Return the entries that a unit needs for a share of its best value, ``(n_units,)``.

    They are counted above its smallest option, and are at least one, so that no weight is zero.
    """
    needed = np.ones(problem.n_units)
    for unit, count in enumerate(problem.option_counts.tolist()):
        row = problem.values[unit, :count]
        lowest = min(0.0, float(row.min()))
        reaches = row - lowest >= threshold * (float(row.max()) - lowest) - 1e-12
        first = int(np.argmax(reaches))
        needed[unit] = max(1, int(problem.tokens[unit, first] - problem.tokens[unit, 0]))
    return needed


def _two_groups(similarity: FloatArray, small_share: float) -> FloatArray:
    """Return weights of two groups of units: ``small_share`` for the more similar ones.

    The split has the smallest squared distance to the group means (k-means with k = 2, which in one
    dimension is a cut of the sorted numbers).
    """
    ordered = np.sort(similarity)
    if ordered[0] == ordered[-1]:
        return np.ones(similarity.size)
    cuts = np.flatnonzero(np.diff(ordered) > 0) + 1
    halves = [(ordered[:cut], ordered[cut:]) for cut in cuts]
    spread = [sum(float(np.var(half) * half.size) for half in pair) for pair in halves]
    cut = int(cuts[int(np.argmin(spread))])
    similar = similarity >= ordered[cut]
    n_similar = int(similar.sum())
    large = (similarity.size - n_similar * small_share) / (similarity.size - n_similar)
    weights: FloatArray = np.where(similar, small_share, large)
    return weights
