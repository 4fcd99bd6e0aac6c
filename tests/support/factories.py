"""Random score profiles and problems for tests, and what is true about them by brute force."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import numpy.typing as npt

from kvalloc.accounting.engine_formats import FORMATS
from kvalloc.allocation.formulation import PosedRequest
from kvalloc.allocation.request import Request
from kvalloc.formats.budget_profile import BudgetProfile, Policy
from kvalloc.formats.evaluation import Evaluation
from kvalloc.formats.format_losses import FormatLosses
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.problem import AllocationProblem, GroupCap
from kvalloc.shape import ModelShape

Array = npt.NDArray[Any]


def make_shape(
    *, n_layers: int = 3, n_kv_heads: int = 2, group: int = 2, **changes: Any
) -> ModelShape:
    sizes = {"n_layers": n_layers, "n_kv_heads": n_kv_heads, "n_query_heads": n_kv_heads * group}
    values = {"model_id": "tests/tiny", "head_dim": 4, "dtype_bytes": 2, **sizes, **changes}
    return ModelShape(**{"layer_types": ("full",) * n_layers, **values})


def make_format_losses(
    shape: ModelShape, formats: tuple[str, ...], *, seed: int = 0, **changes: Any
) -> FormatLosses:
    """Losses that fall with the bits of a format, and mixtures that lose a little less together."""
    rng = np.random.default_rng(seed)
    rows, n_formats = (shape.n_layers, 2), len(formats)
    bits = np.array([FORMATS[name].bits(shape.head_dim) for name in formats])
    stored = np.array([layer.kv_heads > 0 for layer in shape.by_layer])[:, None, None]
    single = (
        rng.random((*rows, n_formats)) * np.array([[[5.0], [1.0]]]) * np.exp2(-2 * bits) * stored
    )
    choices = np.repeat(np.arange(n_formats), 2 * shape.n_layers).reshape(n_formats, *rows)
    sums = single.sum(axis=(0, 1))
    values = {
        "context_tokens": 64,
        "n_tokens": 60,
        "losses": single,
        "choices": choices,
        "mean": 0.9 * sums,
        "p99": 7 * sums,
        "p999": 20 * sums,
        "top1": 1 - np.minimum(sums, 1),
    }
    return FormatLosses(shape=shape, formats=formats, **values | changes)


def curves_of(scores: Array) -> Array:
    """Retention curves of score vectors: best first, summed up, over the whole mass."""
    best_first = -np.sort(-scores, axis=-1)
    total = best_first.sum(axis=-1, keepdims=True)
    sums = np.cumsum(best_first, axis=-1) / np.where(total > 0, total, 1.0)
    curves = np.concatenate([np.zeros((*sums.shape[:-1], 1)), np.minimum(sums, 1.0)], axis=-1)
    curves[..., -1] = 1.0
    return curves


def random_scores(rng: np.random.Generator, size: tuple[int, ...]) -> Array:
    """Attention-like scores: a few large, many small."""
    return rng.random(size) ** (1 + 10 * rng.random((*size[:-1], 1))) + 1e-4


def make_scores(
    seed: int = 0,
    *,
    shape: ModelShape | None = None,
    context_tokens: int = 40,
    sinks: int = 2,
    window: int = 3,
    n_samples: int = 2,
    curves: Array | None = None,
    masses: Array | None = None,
    ranks: Array | None = None,
    **changes: Any,
) -> ScoreProfile:
    """A score profile of random scores, or of the curves given."""
    rng = np.random.default_rng(seed)
    shape = shape or make_shape()
    evictable = context_tokens - sinks - window
    size = (n_samples, shape.n_layers, shape.n_kv_heads)
    if curves is None:
        curves = curves_of(random_scores(rng, (*size, evictable)))
    if masses is None:
        masses = rng.random(size) + 0.1
        without = [i for i, kind in enumerate(shape.layer_types) if kind in ("sliding", "state")]
        masses[:, without] = 0.0
    values: dict[str, Any] = {
        "shape": shape,
        "scorer": "xkv",
        "scorer_parameters": {"window": window, "pool": 7},
        "context_tokens": context_tokens,
        "sinks": sinks,
        "window": window,
        "ranks": np.arange(evictable + 1, dtype=np.int64) if ranks is None else ranks,
        "curves": curves,
        "masses": masses,
        "sample_tokens": np.full(curves.shape[0], context_tokens, dtype=np.int64),
        "text_digest": "0" * 64,
        "text_description": "made up",
        "versions": {"numpy": "test"},
        "created": "2024-01-01",
    }
    return ScoreProfile(**{**values, **changes})


def part_of(scores: ScoreProfile, number: int, of: int) -> ScoreProfile:
    """One shard of a profile."""
    arrays = {
        name: getattr(scores, name)[number - 1 :: of]
        for name in ScoreProfile.PER_SAMPLE
        if getattr(scores, name) is not None
    }
    return scores.replace(**arrays, shard=(number, of))


def make_posed(scores: ScoreProfile, sample: int | None = None, **request: Any) -> PosedRequest:
    """A score profile as a request reads it; of everything by default."""
    parsed = Request.parse(**(request or {"budget": 1.0}))
    return PosedRequest(scores=scores, request=parsed, sample=sample)


def make_losses(
    seed: int = 0,
    *,
    levels: list[int] | None = None,
    per: str = "head",
    noise: float = 0.002,
    **changes: Any,
) -> ScoreProfile:
    """A score profile with measured-looking loss curves: falling, with steps, and noise on top."""
    scores = make_scores(seed, **changes)
    rng = np.random.default_rng([seed, 1])
    shape, least = scores.shape, max(1, scores.protected_tokens)
    if levels is None:
        levels = sorted({least, least + 2, least + 7, least + 15, scores.context_tokens})
    columns = shape.n_kv_heads if per == "head" else 1
    size = (scores.n_samples, shape.n_layers, columns, len(levels))
    losses = -np.sort(-rng.exponential(0.05, size) * rng.random((*size[:3], 1)), axis=-1)
    losses += noise * rng.standard_normal(size)
    losses[..., -1] = 0.0
    return scores.replace(
        loss_tokens=np.array(levels, dtype=np.int64),
        loss_bits=np.array([16]),
        losses=losses[:, :, :, None],
    )


def make_bits(seed: int = 0, **changes: Any) -> ScoreProfile:
    """A score profile with loss curves of budgets and widths together."""
    scores = make_losses(seed, **changes)
    rng = np.random.default_rng([seed, 4])
    at_16 = scores.losses
    added = [rng.exponential(scale, at_16.shape) for scale in (0.004, 0.03)]  # 8 and 4 bits
    losses = np.concatenate([at_16, *(at_16 + more for more in added)], axis=3)
    return scores.replace(loss_bits=np.array([16, 8, 4]), losses=losses)


def make_budget_profile(budgets: Array, **changes: Any) -> BudgetProfile:
    budgets = np.asarray(budgets, dtype=np.int64)
    values: dict[str, Any] = {
        "shape": make_shape(n_layers=budgets.shape[0], n_kv_heads=budgets.shape[1]),
        "level": "head",
        "context_tokens": 40,
        "budgets": budgets,
        "policy": Policy(scorer="xkv", scorer_parameters={"window": 3}, sinks=2, window=3),
        "solver": "greedy",
        "created": "2024-01-01",
    }
    return BudgetProfile(**{**values, **changes})


def make_problem(
    values: Array | list[list[float]],
    *,
    counts: list[int] | Array | None = None,
    capacity: int | None = None,
    target: float | None = None,
    protected_tokens: int = 0,
    step: int = 1,
    **given: Any,
) -> AllocationProblem:
    """Return a problem from bare arrays or lists; by default equal cost steps, one head a layer."""
    worth = np.array(values, dtype=np.float64)
    n_units, n_options = worth.shape
    tokens = given.get("tokens")
    if tokens is None:
        ladder = np.arange(protected_tokens, protected_tokens + n_options, dtype=np.int64)
        tokens = np.broadcast_to(ladder, worth.shape)
    fields: dict[str, Any] = {
        "tokens": tokens,
        "values": worth,
        "costs": tokens * step,
        "option_counts": [n_options] * n_units if counts is None else counts,
        "weights": [1.0] * n_units,
        "layers": range(n_units),
        "heads": [-1] * n_units,
        "capacity_bytes": capacity,
        "target": target,
        "context_tokens": int(tokens.max()),
        "protected_tokens": protected_tokens,
        **{name: one for name, one in given.items() if one is not None},
    }
    for name in ("costs", "option_counts", "weights", "layers", "heads"):
        dtype = np.float64 if name == "weights" else np.int64
        if name != "costs" or not isinstance(fields[name], np.ndarray):
            fields[name] = np.array(fields[name], dtype=dtype)
    return AllocationProblem(**fields)


def with_crossing_caps(
    problem: AllocationProblem,
    shares: tuple[float, float],
    *,
    parts: int,
    room: float,
    sides: Any = (),
) -> AllocationProblem:
    """A problem with caps on all but the last and all but the first of its parts.

    Each cap leaves a share of what its units take at most; the capacity leaves `room` of all.
    """
    n, caps = problem.n_units, []
    groups = {"a": range((parts - 1) * n // parts), "b": range(n // parts, n)}
    for (name, units), share in zip(groups.items(), shares, strict=True):
        low, high = (int(problem.costs[list(units), at].sum()) for at in (0, -1))
        size = int(low + share * (high - low))
        caps.append(GroupCap(name=name, units=tuple(units), capacity_bytes=size))
    free = problem.max_cost_bytes - problem.min_cost_bytes
    capped = problem.replace(constraints=(*caps, *sides))
    return capped.with_capacity(int(problem.min_cost_bytes + room * free))


def concave_values(rng: np.random.Generator, n_units: int, n_options: int, kind: int = 0) -> Array:
    """Rising concave rows of several characters: random, tied, flat, linear, all equal."""
    gains = rng.random((n_units, n_options - 1))
    if kind == 1:  # many ties, some zeros
        gains = rng.integers(0, 4, gains.shape) / 8
    elif kind == 2:  # flat
        gains = np.zeros_like(gains)
    elif kind == 3:  # linear, one slope each
        gains = np.broadcast_to(rng.integers(0, 3, (n_units, 1)) / 4, gains.shape)
    elif kind == 4:  # all equal
        gains = np.broadcast_to(rng.random((1, n_options - 1)), gains.shape)
    elif kind == 5:  # many orders of magnitude
        gains = 10.0 ** rng.uniform(-9, 0, gains.shape)
    gains = -np.sort(-gains, axis=1)
    start = rng.random((n_units, 1)) * rng.integers(0, 2)
    return np.concatenate([start, start + np.cumsum(gains, axis=1)], axis=1)


def algorithm_1(problem: AllocationProblem) -> Array:
    """XKV's Algorithm 1 to the letter: a heap of marginal gains, one entry at a time.

    Eq. 17 (a capacity) stops when the next step does not fit; Eq. 18 (a target) when the value is
    reached. Ties go to the lower unit.
    """
    choice = np.zeros(problem.n_units, dtype=np.int64)
    heap: list[tuple[float, int]] = []

    def offer(unit: int) -> None:
        k = int(choice[unit])
        if k + 1 < problem.option_counts[unit]:
            gain = problem.weights[unit] * (problem.values[unit, k + 1] - problem.values[unit, k])
            heapq.heappush(heap, (-float(gain), unit))

    for unit in range(problem.n_units):
        offer(unit)
    while heap:
        if problem.target is not None and problem.meets_target(problem.objective_value(choice)):
            break
        _, unit = heapq.heappop(heap)
        after = choice.copy()
        after[unit] += 1
        if problem.capacity_bytes is not None and problem.cost(after) > problem.capacity_bytes:
            break
        choice = after
        offer(unit)
    return choice


def make_row(name: str = "greedy", **changes: Any) -> dict[str, Any]:
    """A row of an evaluation."""
    distance = {"kl": 0.031, "p99": 0.25, "p999": None, "n_tokens": 600, "top1_agreement": 0.9}
    early = {"0-15": {**distance, "kl": 0.03, "p99": None, "n_tokens": 96}}
    return {
        **{"name": name, "task": "needle", "context": 40, "retained_bytes": 20},
        **{
            "full_bytes": 100,
            "kept_bytes": 20,
            "bytes_at_16_bits": 10,
            "share_of_16_bits": 0.2,
        },
        **distance,
        **{"ci95": [0.01, 0.05], "by_position": early, "exact_tokens": 1.0},
        **{"exact_match": 1.0, "score": 1.0, "score_ci95": None},
        **{"perplexity": None, "n": 6, "prefill_seconds": 0.1},
        **{"decode_tokens_per_second": 20.0, "paired": []},
        **changes,
    }


def make_evaluation(*rows: Any) -> Evaluation:
    """An evaluation of these rows."""
    settings = {"tasks": ["needle"], "split": "development", "seed": 0}
    return Evaluation(shape=make_shape(), settings=settings, profiles={}, rows=rows)
