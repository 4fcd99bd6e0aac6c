"""Choice of the engine format of each layer's keys and values.

An option of a unit is a *setting*: the formats of keys and values of some layers.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.accounting.costs import MOST_BYTES, bytes_in_share
from kvalloc.accounting.engine_formats import ENGINES, WHOLE, Engine, Grain, part_bytes
from kvalloc.allocation.request import Request, Target
from kvalloc.allocation.verification import CheckedSolution, solve_problem
from kvalloc.errors import InfeasibleError, InputError, command, one_of, option
from kvalloc.formats.engine_choice import EngineChoice, EngineSetting
from kvalloc.formats.format_losses import FormatLosses, Predicted
from kvalloc.problem import AllocationProblem, Solver
from kvalloc.problem.arrays import padded, undominated
from kvalloc.problem.registry import get_solver
from kvalloc.shape import WINDOWED
from kvalloc.units import bytes_text, parse_fraction, size

SIXTEEN, LEFT = -1, -2
"""Two more values in a setting: 16 bits, and a format that another unit decides."""

ROWS = 8
"""Largest number of settings of a frontier."""

_PARTS = 2**52
"""Number of steps to the largest sum of losses, among which a target's sum is searched."""

TARGETS = ("memory", "budget", "bits", "target_loss")
"""Keywords of targets that an engine's formats can meet."""

Units = list[IntArray]
"""Settings of each unit of a problem, ``(n_settings, n_layers, 2)`` each."""


def _by_layer(pairs: IntArray, n_layers: int) -> Units:
    layers = np.arange(n_layers)
    settings = np.full((layers.size, len(pairs), layers.size, 2), LEFT)
    settings[layers, :, layers] = pairs
    return [*settings]


def _units_of(grain: Grain, pairs: IntArray, tables: FloatArray) -> list[Units]:
    """Return the units of each problem of an engine; see `Engine.grain`."""
    n_layers, whole = tables.shape[1], np.full(2, SIXTEEN)
    match grain:
        case "model":
            return [[np.repeat(pairs[:, None], n_layers, axis=1)]]
        case "layer":
            return [_by_layer(pairs, n_layers)]
        case "skip":
            rounded = pairs[pairs.max(axis=1) > SIXTEEN]
            return [_by_layer(np.stack([whole, pair]), n_layers) for pair in rounded]
    return _with_ends(pairs, tables)


def _with_ends(pairs: IntArray, tables: FloatArray) -> list[Units]:
    """Return problems of two units, keys and values: formats of first, middle and last layers."""
    allowed = {
        key: frozenset(pairs[pairs[:, 0] == key, 1].tolist()) for key in pairs[:, 0].tolist()
    }
    value_sets = {*allowed.values()}
    while more := {one & other for one in value_sets for other in value_sets} - value_sets:
        value_sets |= more
    return [
        [
            _ends_of(0, [key for key, partners in allowed.items() if partners >= values], tables),
            _ends_of(1, sorted(values), tables),
        ]
        for values in value_sets - {frozenset()}
    ]


def _ends_of(part: int, formats: Sequence[int], tables: FloatArray) -> IntArray:
    """Return the settings of keys (0) or values (1), in three runs of layers, worth their bytes."""
    n_layers, codes = tables.shape[1], np.array(formats)
    before = np.zeros((2, n_layers + 1, codes.size))  # loss and bytes of the layers before one
    before[:, 1:] = tables[:, :, part, codes].cumsum(axis=1)
    first, last = np.triu_indices(n_layers + 1)
    parts = (before[:, first], before[:, last] - before[:, first], before[:, -1:] - before[:, last])
    totals = np.zeros((2, first.size, 1, 1, 1))
    for axis, total in enumerate(parts, start=2):
        totals = totals + np.expand_dims(total, tuple({2, 3, 4} - {axis}))
    loss, cost = totals.reshape(2, -1)
    kept = undominated(-loss[None], np.rint(cost).astype(np.int64))[0][0]
    place, *ends = np.unravel_index(kept, totals.shape[1:])
    which = np.add(
        *(np.arange(n_layers) >= one[place][:, None] for one in (first, last)), dtype=int
    )
    settings = np.full((kept.size, n_layers, 2), LEFT)
    settings[..., part] = np.take_along_axis(codes[np.stack(ends, axis=1)], which, axis=1)
    return settings


@dataclass(frozen=True, kw_only=True, eq=False)
class PosedEngine:
    """Problems of an engine's options, for ``batch`` rows; ``time_limit`` is in seconds."""

    losses: FormatLosses
    engine: Engine
    context_tokens: int
    batch: int
    solver: Solver
    time_limit: float | None = None

    @cached_property
    def tables(self) -> FloatArray:
        """Loss and bytes of each layer's keys and values, ``(2, n_layers, 2, n_formats + 2)``.

        The last axis ends with `LEFT`, which takes nothing, and `SIXTEEN`.
        """
        names = dict(enumerate(self.losses.formats)) | {SIXTEEN: WHOLE}
        tables = np.zeros((2, *self.losses.losses.shape[:2], len(names) + 1))
        tables[0, ..., :LEFT] = self.losses.losses
        for index, name in names.items():
            tables[1, ..., index] = [
                [self.batch * part_bytes(layer, part, name, self.context_tokens) for part in (0, 1)]
                for layer in self.losses.shape.by_layer
            ]
        return tables

    def totals(self, settings: IntArray) -> FloatArray:
        """Return loss and bytes, ``(2, n_settings)``, of settings ``(n_settings, n_layers, 2)``.

        The loss sums single layers' losses; with one pair for all layers it is predicted.
        """
        rows, parts = np.ogrid[: settings.shape[1], :2]
        sums = np.asarray(self.tables[:, rows, parts, settings].sum(axis=(-1, -2)))
        if self.engine.grain == "model":
            sums[0] = self.losses.predict(settings).mean
        return sums

    @cached_property
    def problems(self) -> list[tuple[AllocationProblem, Units]]:
        """Return the problems, and the settings of each unit's options.

        Raises
        ------
        InputError
            If no format of the engine was measured.
        """
        losses, engine = self.losses, self.engine
        known = {name: index for index, name in enumerate(losses.formats)} | {WHOLE: SIXTEEN}
        pairs = [(known[k], known[v]) for k, v in engine.pairs if {k, v} <= known.keys()]
        if {*pairs} <= {(SIXTEEN, SIXTEEN)}:
            raise InputError(
                f"no format of {engine.name} was measured on {losses.shape.model_id}; measure them "
                f"with {command('profile', formats=engine.name)}"
            )
        return [*map(self._problem, _units_of(engine.grain, np.array(pairs), self.tables))]

    def _problem(self, units: Units) -> tuple[AllocationProblem, Units]:
        windowed = np.isin(self.losses.shape.layer_types, WINDOWED) & (
            not self.engine.rounds_windows
        )
        kept, losses, costs = [], [], []
        for settings in units:
            settings = settings[(settings[:, windowed] <= SIXTEEN).all(axis=(1, 2))]
            loss, cost = self.totals(settings)
            worth = undominated(-loss[None], cost.astype(np.int64))[0][0]
            kept.append(settings[worth])
            losses.append(loss[worth])
            costs.append(cost[worth])
        values, counts = -padded(losses), np.array([len(one) for one in kept])
        problem = AllocationProblem(
            tokens=np.full(values.shape, self.context_tokens),
            values=values,
            costs=padded(costs).astype(np.int64),
            bits=np.indices(values.shape)[1],  # says that options differ in more than tokens
            option_counts=counts,
            weights=np.ones(counts.size),
            layers=np.arange(counts.size),
            heads=np.full(counts.size, -1),
            capacity_bytes=MOST_BYTES,
            context_tokens=self.context_tokens,
            protected_tokens=0,
        )
        return problem, kept

    def best(
        self, *, room: int | None = None, max_sum: float = 0.0
    ) -> tuple[IntArray, CheckedSolution]:
        """Return the setting, (n_layers, 2), of the smallest sum of losses or the fewest bytes.

        Its solution has the bound of all problems.

        Raises
        ------
        InfeasibleError
        """
        answers = []
        for problem, units in self.problems:
            posed = problem.with_target(-max_sum) if room is None else problem.with_capacity(room)
            try:
                solved = solve_problem(posed, self.solver, time_limit_seconds=self.time_limit)
            except InfeasibleError:
                continue
            rows = [settings[at] for settings, at in zip(units, solved.choice, strict=True)]
            answers.append((np.max(rows, axis=0), solved))  # `LEFT` is the smallest
        if not answers:
            raise InfeasibleError(f"{self.engine.name} has no such setting")
        sign = -1 if room is None else 1
        setting, solved = max(answers, key=lambda one: sign * one[1].objective)
        _, proof = max(answers, key=lambda one: sign * one[1].bound)
        return setting, replace(solved, bound=proof.bound, bound_source=proof.bound_source)

    def largest_sum(self, loss: float) -> float:
        """Return the largest sum of single losses within a predicted loss."""
        if self.engine.grain == "model":
            return loss
        largest = float(self.tables[0].max(axis=-1).sum())

        def is_more(part: int) -> bool:
            return bool(self.losses.predict_sums(np.array(largest * part / _PARTS)).mean > loss)

        return largest * (bisect_left(range(_PARTS + 1), True, key=is_more) - 1) / _PARTS

    def frontier(self) -> list[EngineSetting]:
        """Return settings by rising bytes: all that are worth theirs, or the best at even steps."""
        problems = [problem for problem, _ in self.problems]
        if problems[0].n_units == 1:
            return self.stated(self.problems[0][1][0])
        smallest = min(problem.min_cost_bytes for problem in problems)
        largest = max(problem.max_cost_bytes for problem in problems)
        rooms = np.linspace(smallest, largest, ROWS - 1).astype(np.int64).tolist()
        return self.stated([self.best(room=room)[0] for room in rooms])

    def stated(self, settings: Sequence[IntArray] | IntArray) -> list[EngineSetting]:
        """Return settings ``(n_layers, 2)`` with names, bytes and predicted losses."""
        names = np.array([*self.losses.formats, WHOLE], dtype=object)
        sums, costs = self.totals(np.array(settings))
        costs += self.batch * self.losses.shape.state_bytes
        is_whole = self.engine.grain == "model"
        predicted = self.losses.predict(settings) if is_whole else self.losses.predict_sums(sums)
        return [
            EngineSetting(
                pairs=tuple(map(tuple, names[setting].tolist())),
                cache_bytes=int(cost),
                **dict(zip(Predicted._fields, row, strict=True)),
            )
            for setting, cost, row in zip(settings, costs, np.transpose(predicted), strict=True)
        ]


def choose(
    losses: FormatLosses,
    engine: str,
    *,
    context: int | None = None,
    batch: int = 1,
    solver: str | Solver = "auto",
    time_limit: float | None = None,
    **target: Any,
) -> EngineChoice:
    """Choose an engine's formats with the smallest predicted loss.

    Parameters
    ----------
    context : int, optional
        Tokens of a row; by default the model's limit.
    solver, time_limit
        As of `kvalloc.solve`.
    **target
        One of ``memory`` (bytes of the cache), ``budget`` (share of its bytes at 16 bits), ``bits``
        (an element of K and V, on average) and ``target_loss`` (predicted KL, nats per token, in
        the fewest bytes).

    Raises
    ------
    InputError
    InfeasibleError
        Names the nearest target.
    SolverError
    """
    shape, chosen = losses.shape, one_of("engine", engine, ENGINES)
    goal, name, requested = read_target(target)
    if context is None:
        context = shape.max_context_tokens or losses.context_tokens
    Request.parse(memory=1, context=context, batch=batch)  # whether these can be
    shape.check_context(context)
    posed = PosedEngine(
        losses=losses,
        engine=chosen,
        context_tokens=context,
        batch=batch,
        solver=get_solver(solver),
        time_limit=time_limit,
    )
    [full] = posed.stated([np.full((shape.n_layers, 2), SIXTEEN)])
    is_loss, states = goal.max_loss is not None, batch * shape.state_bytes
    share = goal.kind == "budget"
    granted = bytes_in_share(goal.value, full.cache_bytes) if share else int(goal.value)
    rows = posed.frontier()
    try:
        if is_loss:
            setting, solved = posed.best(max_sum=posed.largest_sum(goal.value))
        else:
            setting, solved = posed.best(room=granted - states)
    except InfeasibleError:
        minimum = rows[-1].mean if is_loss else rows[0].cache_bytes
        part = minimum / full.cache_bytes
        nearest = {
            "memory": bytes_text(int(minimum)),
            "budget": f"{math.ceil(1e4 * part) / 100:g}%",
            "bits": math.ceil(1600 * part) / 100,
            "target_loss": math.ceil(minimum * 1e6) / 1e6,
        }
        raise InfeasibleError(
            f"{requested} is less than {engine} can be told: its least for {context:,} tokens of "
            f"{shape.model_id} is {f'{minimum:.3g} nats' if is_loss else size(minimum)}; give "
            f"{option(name, nearest[name])}",
            nearest=minimum,
        ) from None
    [decided] = posed.stated([setting])
    by_size = {one.cache_bytes: one for one in [*rows, decided]}
    rows = [by_size[key] for key in sorted(by_size)]
    start = max(0, min(rows.index(decided) - ROWS // 2, len(rows) - ROWS))
    return EngineChoice(
        **dict(decided),
        engine=engine,
        shape=shape,
        context_tokens=context,
        batch=batch,
        requested=requested,
        full_bytes=full.cache_bytes,
        model_error=losses.error_among({*chain(*chosen.pairs)}),
        summed_loss=float(posed.totals(setting[None])[0, 0]),
        bound=solved.bound + states if is_loss else max(0.0, -solved.bound),
        bound_source=solved.bound_source,
        gap=solved.gap,
        decided_by=solved.decided_by,
        frontier=tuple(rows[start : start + ROWS]),
        losses_digest=losses.digest,
    )


def read_target(keywords: Mapping[str, Any]) -> tuple[Target, str, str]:
    """Return the one target among keywords, its name and option; bits become a share.

    Raises
    ------
    InputError
    """
    typed = {name: value for name, value in keywords.items() if value is not None}
    known = f"give one of {', '.join(map(option, TARGETS))}"
    if odd := sorted(typed.keys() - {*TARGETS}):
        raise InputError(
            f"{option(odd[0])} is not about engine formats, which keep all entries; {known}"
        )
    if len(typed) != 1:
        raise InputError(f"{len(typed) or 'no'} targets are given; {known}")
    [(name, value)] = typed.items()
    if name == "bits":
        bits = parse_fraction(value)
        if not 0 < bits <= 16:
            raise InputError(f"{option(name, value)} is not possible; give 16 or less, above 0")
        typed = {"budget": bits / 16}
    return Target.of(typed), name, option(name, value)
