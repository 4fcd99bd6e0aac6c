"""Seeded problems, tiny or larger."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.errors import InputError
from kvalloc.problem import Aggregate, AllocationProblem, GroupCap, Sense, SideConstraint
from kvalloc.problem.arrays import MaxDistinct

CURVES = (
    *("concave", "paged", "tied", "weighted"),
    *("non_concave", "losses", "unequal_costs", "unequal_options"),
)
"""Kinds of options, by name.

Concave curves have one cost per entry, ``paged`` ones whole pages, ``tied`` ones few different
gains, ``weighted`` ones units of unequal weight. ``losses`` are values below zero of any shape;
units with ``unequal_options`` have different numbers of them, some one.
"""

BIT_CURVES = ("bits",)
"""Options of tokens and bits; a higher cost may keep fewer tokens. No side constraint on tokens
goes with them."""

SIDES = ("plain", "nested_caps", "crossing_caps", "max_distinct", "mixed")
"""Side constraints, by name: caps on layers inside a cap on several layers, caps that share units,
few different budgets, or a cap and few different budgets."""

KINDS: tuple[str, ...] = (
    *CURVES,
    *(f"{curves}+{side}" for side in SIDES if side != "plain" for curves in ("concave", "losses")),
    *(f"unequal_costs+{side}" for side in ("nested_caps", "crossing_caps")),
    *(f"worst:{curves}" for curves in ("concave", "non_concave", "unequal_costs")),
    *("worst:unequal_options", "worst:losses+nested_caps", "worst:concave+max_distinct"),
    *BIT_CURVES,
    *(f"bits+{side}" for side in ("nested_caps", "crossing_caps")),
    "worst:bits",
)
"""Kinds of tiny problems: curves, curves+side, or worst:curves+side for the worst unit."""


def tiny_problem(
    kind: str, *, seed: int, sense: Sense = Sense.MAX_VALUE, level: str = "head"
) -> AllocationProblem:
    """Return a problem small enough for `brute_force`.

    With side constraints it may have no solution; without them floors fit, and the target can be
    reached.

    Parameters
    ----------
    kind : str
        One of `KINDS`, or any ``[worst:]curves[+side]`` of `CURVES` and `SIDES`, or of `BIT_CURVES`
        and a side that compares no tokens.
    seed : int
        The same on any machine.
    sense : Sense
        Most value within a capacity, or least cost for a target.
    level : {"head", "layer"}
        Units: two or three KV heads to a layer, or layers.

    Raises
    ------
    InputError
        If there is no such kind.

    Examples
    --------
    >>> tiny_problem("non_concave", seed=3).digest() == tiny_problem("non_concave", seed=3).digest()
    True
    """
    random = np.random.default_rng([seed, zlib.crc32(kind.encode()), int(sense is Sense.MIN_COST)])
    per_layer = 1 if level == "layer" else int(random.integers(2, 4))
    n_layers = int(random.integers(3, 6)) if level == "layer" else int(random.integers(1, 3))
    n_options = int(random.integers(2, 5 if n_layers * per_layer > 4 else 6))
    heads = np.full(per_layer, -1) if level == "layer" else np.arange(per_layer)
    return _made(random, kind, sense, n_layers, heads, n_options)


def tiny_problems(
    count: int, *, seed: int = 0, kinds: Sequence[str] = KINDS
) -> Iterator[tuple[str, AllocationProblem]]:
    """Yield tiny problems of all kinds, both senses and levels, with names that remake them.

    ``seed`` is of the first one.
    """
    for number in range(count):
        turn, place = divmod(number, len(kinds))
        sense, level = list(Sense)[turn % 2], ("head", "layer")[turn // 2 % 2]
        kind, one = kinds[place], seed + number
        name = f"tiny_problem({kind!r}, seed={one}, sense={sense}, level={level!r})"
        yield name, tiny_problem(kind, seed=one, sense=sense, level=level)


def larger_problem(
    kind: str, *, seed: int = 0, n_layers: int = 24, n_heads: int = 4, n_options: int = 64
) -> AllocationProblem:
    """Return a problem that takes time, with ``n_heads`` KV heads a layer; see `tiny_problem`."""
    random = np.random.default_rng([seed, zlib.crc32(kind.encode()), 2])
    return _made(random, kind, Sense.MAX_VALUE, n_layers, np.arange(n_heads), n_options)


def _made(
    random: np.random.Generator,
    kind: str,
    sense: Sense,
    n_layers: int,
    heads: IntArray,
    n_options: int,
) -> AllocationProblem:
    scope, _, rest = kind.rpartition(":")
    curves, _, side = rest.partition("+")
    if scope not in ("", "worst") or curves not in CURVES + BIT_CURVES or side not in ("", *SIDES):
        raise InputError(
            f"there is no kind of problem {kind!r}; write [worst:]CURVES[+SIDE] with CURVES "
            f"of {', '.join(CURVES + BIT_CURVES)} and SIDE of {', '.join(SIDES)}"
        )
    n_units = n_layers * heads.size
    tokens, values, costs, counts = _options(random, curves, n_units, n_options)
    weights = np.full(n_units, 1.0 / n_layers)
    if curves == "weighted":
        weights = random.uniform(0.1, 1.0, n_units)
        weights[random.integers(n_units)] = 0.0
    problem = AllocationProblem(
        tokens=tokens,
        bits=random.choice([16, 8, 4], tokens.shape) if curves in BIT_CURVES else None,
        values=values,
        costs=costs,
        option_counts=counts,
        weights=weights,
        layers=np.repeat(np.arange(n_layers), heads.size),
        heads=np.tile(heads, n_layers),
        aggregate=Aggregate.WORST if scope else Aggregate.SUM,
        capacity_bytes=int(np.iinfo(np.int32).max),
        context_tokens=int(tokens.max()),
        protected_tokens=int(tokens.min()),
    )
    problem = problem.replace(constraints=_sides(random, side, problem))
    return _with_goal(random, problem, sense)


def _options(
    random: np.random.Generator, curves: str, n_units: int, n_options: int
) -> tuple[IntArray, FloatArray, IntArray, IntArray]:
    shape = (n_units, n_options)
    page = 16 if curves == "paged" else 1
    tokens = np.broadcast_to(4 * page + page * np.arange(n_options, dtype=np.int64), shape)
    costs = tokens * 8
    counts = np.full(n_units, n_options)
    gains = np.sort(random.exponential(1.0, shape), axis=1)[:, ::-1]
    if curves == "tied":
        gains = np.sort(random.integers(0, 3, shape), axis=1)[:, ::-1] / 4.0
    values = np.cumsum(gains, axis=1)
    values = (values - values[:, :1]) / np.maximum(values[:, -1:] - values[:, :1], 1e-12)
    if curves in ("non_concave", "unequal_costs", "bits"):
        values = random.uniform(0.0, 1.0, shape)
    elif curves == "losses":
        values = -np.sort(random.exponential(1.0, shape), axis=1)[:, ::-1]
        values[:, -1] = 0.0
        values -= 0.1 * random.uniform(0.0, 1.0, shape)
    if curves in BIT_CURVES:
        tokens = random.integers(4, 12, shape)
    if curves in ("unequal_costs", "bits"):
        costs = np.cumsum(random.integers(1, 40, shape), axis=1)
    if curves == "unequal_options":
        counts = random.integers(1, n_options + 1, n_units)
    return tokens, values, costs.astype(np.int64), counts.astype(np.int64)


def _sides(
    random: np.random.Generator, side: str, problem: AllocationProblem
) -> tuple[SideConstraint, ...]:
    units = list(range(problem.n_units))
    half, third = units[: max(2, len(units) // 2 + 1)], max(1, len(units) // 3)
    capped = {
        "nested_caps": {"device 0": half, "layer 0": half[: max(1, len(half) // 2)]},
        "crossing_caps": {"device 0": units[: 2 * third], "device 1": units[third:]},
        "mixed": {"device 0": units[1:]},
    }
    sides: list[SideConstraint] = [
        _cap(random, problem, name, inside) for name, inside in capped.get(side, {}).items()
    ]
    if side in ("max_distinct", "mixed"):
        sides.append(MaxDistinct(maximum=2 if side == "mixed" else int(random.integers(1, 3))))
    return tuple(sides)


def _cap(
    random: np.random.Generator, problem: AllocationProblem, name: str, units: list[int]
) -> GroupCap:
    low = int(problem.costs[units, 0].sum())
    high = int(problem.costs[units, problem.last_options[units]].sum())
    capacity = low + int(random.uniform(0.3, 0.9) * (high - low))
    return GroupCap(name=name, units=tuple(units), capacity_bytes=capacity)


def _with_goal(
    random: np.random.Generator, problem: AllocationProblem, sense: Sense
) -> AllocationProblem:
    share = float(random.choice([0.0, *random.uniform(0.1, 0.9, 8), 1.0]))
    if sense is Sense.MAX_VALUE:
        room = problem.max_cost_bytes - problem.min_cost_bytes
        return problem.with_capacity(problem.min_cost_bytes + int(share * room))
    floor = problem.objective_value(np.zeros(problem.n_units, dtype=np.int64))
    # side constraints can put the best value out of reach
    best = (0.7 * problem.max_value + 0.3 * floor) if problem.constraints else problem.max_value
    return problem.with_target(floor + share * (best - floor))
