"""Budgets in proportion to a weight of each unit."""

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

    With a mean of m entries above the smallest options, unit u gets ``m * (1 - 1/beta) + m/beta *
    w_u / mean(w)``; ``power`` applies to ``w_u``. Limits follow, then the one rounding rule, so
    that the sum is exact.

    Parameters
    ----------
    weight : {"entropy", "normalized_entropy", "threshold", "given", "two_groups"}, optional
        ``"given"`` with ``weights``, else ``"entropy"``.

        ``"entropy"``: ``-sum(p log p)`` of the gains of a unit's entries, equal within a page.
        ``"normalized_entropy"``: divided by the log of their number. ``"threshold"``: entries that
        retain ``threshold`` of the unit's best value. ``"two_groups"``: ``weights`` are
        similarities; units of the more similar group get ``small_share`` of the mean budget each.
    weights : sequence of float or str, optional
        One number for each unit or layer; also text, ``"0.5,0.2,0.3"``.
    power : float
        At least 0.
    beta : float
        At least 1; the larger, the more even.
    threshold, small_share : float
        0..1.
    floor_tokens : int
        Smallest budget of a unit.
    max_multiple : float
        Largest budget of a unit, in mean budgets.

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

    CAKE's factor, a temporal variance to the power 1/tau2, needs attention rows; pass the product
    as ``weights``. CAKE and LAVa sum the entropy over all heads, ZigZagKV averages its counts over
    them; here a layer's one curve counts, the sum of its heads' n best. SqueezeAttention's k-means
    is here the best split, found exactly.

    References
    ----------
    CAKE: Cascading and Adaptive KV Cache Eviction. LAVa: Layer-wise KV Cache Eviction. ZigZagKV: KV
    Cache Compression based on Layer Uncertainty. CompressKV: Semantic Retrieval Heads. HeadKV: Not
    All Heads Matter. SqueezeAttention: 2D Management of KV-Cache.
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
        """Return the budgets by their sum in steps."""
        shares = self._shares(problem, deadline)
        return partial(self._share_steps, problem, shares), problem.spendable_steps

    def _shares(self, problem: AllocationProblem, deadline: float) -> FloatArray:
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
        """Share steps out among the units; leave out impossible limits."""
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
    """Return the entropy of a unit's gains, nats or normalized."""
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
    """Return the entries above its first option that a unit needs for the threshold, at least 1."""
    needed = np.ones(problem.n_units)
    for unit, count in enumerate(problem.option_counts.tolist()):
        row = problem.values[unit, :count]
        lowest = min(0.0, float(row.min()))
        reaches = row - lowest >= threshold * (float(row.max()) - lowest) - 1e-12
        first = int(np.argmax(reaches))
        needed[unit] = max(1, int(problem.tokens[unit, first] - problem.tokens[unit, 0]))
    return needed


def _two_groups(similarity: FloatArray, small_share: float) -> FloatArray:
    """Return ``small_share`` for the more similar units, and a larger weight for the others.

    The split is k-means with k = 2, a cut of the sorted numbers.
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
