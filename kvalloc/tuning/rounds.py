"""The rounds of a refinement: solve, measure around the solution, correct, solve again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.allocation.verification import CheckedSolution, solve_problem
from kvalloc.errors import InfeasibleError
from kvalloc.problem import AllocationProblem, Solver
from kvalloc.tuning.correction import Region, corrected, moved, region
from kvalloc.tuning.measurement import JointProbes
from kvalloc.tuning.neighbours import Figures, most_undecided, neighbours
from kvalloc.tuning.shrinking import Shrunk, shrink_by_folds
from kvalloc.tuning.tasks import comparable_scales, interval, prompt_weights, split_prompts

Progress = Callable[[int, int], None]

TIGHTENED, LEAST_STEP, MOST_STEP = 6, 0.1, 0.7
"""How often a target that was missed is asked for more strictly, and by which factor at once."""
LEAST_REACH = 0.25
"""A step that did more harm is tried again half as far, down to this share of the way."""

WITHIN = 0.25
"""Predicted and measured loss agree when they are this close, relative to the measured one."""

NONE = Figures(units=np.empty(0, np.int64), options=np.empty(0, np.int64))


@dataclass(frozen=True, kw_only=True)
class Point:
    """A solution that was measured with all units at their budgets.

    Attributes
    ----------
    problem : AllocationProblem
        On which curves it was found.
    checked : CheckedSolution
        The solver's answer to that problem.
    choice : ndarray of int64, (n_units,)
        The same as options of the request's own problem.
    losses : ndarray of float64, (n_prompts,)
        Measured, nats per token.
    """

    problem: AllocationProblem
    checked: CheckedSolution
    choice: IntArray
    losses: FloatArray


@dataclass(frozen=True, kw_only=True)
class Round:
    """What is told of one round.

    Attributes
    ----------
    round : int
        0 is the solution on the score profile's own curves, and with a target what else was asked
        of them until it was met.
    cost_bytes : int
        Of the decided layers.
    predicted : float
        What the curves said before it was measured, nats per token.
    training, held_out : float
        Measured on the prompts that the curves were corrected on, and on the others.
    judged : float
        Held-out loss with the tasks on comparable scales, by which rounds are told apart; the
        plain one where a loss is the target.
    spread : float or None
        How far units were believed to differ from their pooled curve; None for no limit, and in
        round 0.
    reach : float
        How far towards the measured neighbours units could move.
    kept : bool
        Whether it is the best so far.
    """

    round: int
    cost_bytes: int
    predicted: float
    training: float
    held_out: float
    judged: float
    spread: float | None = None
    reach: float = 1.0
    kept: bool


class Search:
    """One refinement under way.

    Parameters
    ----------
    probes : JointProbes
        The prompts.
    solver : Solver
    time_limit : float or None
        Seconds for each solve.
    target_loss : float or None
        Most held-out loss, nats per token; None where a size is given.
    tasks : list of str
        Task of each prompt.
    held_out_share : float
        Share of each task's prompts that only judge.
    seed : int
        Of their choice.
    most_probes : int or None
        Single changes measured a round and prompt.
    progress : callable or None
    rounds : int
        At most.
    """

    def __init__(
        self,
        *,
        probes: JointProbes,
        solver: Solver,
        time_limit: float | None,
        target_loss: float | None,
        tasks: list[str],
        held_out_share: float,
        seed: int,
        most_probes: int | None,
        progress: Progress | None,
        rounds: int,
    ) -> None:
        self._probes, self._solver, self._time_limit = probes, solver, time_limit
        self._target = target_loss
        self._tasks, self._most_probes = tasks, most_probes
        self._share, self._seed = held_out_share, seed
        self._part(None)
        self._scales: dict[str, float] | None = None
        self._progress, self._done, self._rounds = progress, 0, rounds
        self._steps = (rounds + 1) * len(tasks) + rounds * int(self._split.training.size)

    def search(self, problem: AllocationProblem) -> tuple[Point, list[Round]]:
        """The best point, and what was told of every round."""
        best, told = self._start(problem)
        curves, reach = problem, 1.0
        around: tuple[Figures, Shrunk] | None = None
        for number in range(1, self._rounds + 1):
            if around is None:
                around = self._around(curves, best)
            figures, shrunk = around
            allowed = region(curves, best.choice, figures, reach)
            point, predicted = self._step(curves, best, allowed, shrunk)
            if point is None:
                break
            better = self._better(point, best)
            one = self._told(number, point, predicted, shrunk, reach, kept=better)
            told.append(one)
            if better:
                whole = region(curves, best.choice, figures)
                curves = moved(curves, whole, best.choice, self._weighted(shrunk.changes))
                small = self._is_settled(one, told)
                best, around = point, None
                if small:
                    break
            else:
                reach /= 2
                if reach < LEAST_REACH:
                    break
        self._check_target(best)
        return best, told

    def _start(self, problem: AllocationProblem) -> tuple[Point, list[Round]]:
        """Where the rounds begin: with a target, the first solution that meets it when measured.

        What single units lose adds up to less than all of them do together, the more so on other
        texts than it was measured on. As much less is then asked of the same curves: that takes one
        forward a prompt, where a round of neighbours takes many.
        """
        first = self._first(problem)
        best = self._point(problem, first, first.choice)
        self._part(best.losses)
        if self._target is None:  # the first solution says how the tasks compare
            losses = best.losses[self._split.training]
            self._scales = comparable_scales(self._train, losses)
            return best, [self._told(0, best, -first.value, kept=True)]
        told = [self._told(0, best, -first.value, kept=True)]
        aim, held = self._target, told[0].held_out
        for _ in range(TIGHTENED):
            if held <= self._target:
                break
            aim *= min(max(self._target / held, LEAST_STEP), MOST_STEP)
            tighter = problem.with_target(-aim)
            try:
                solved = self._solved(tighter)
            except InfeasibleError:
                break
            self._steps += len(self._tasks)
            point = self._point(tighter, solved, solved.choice)
            better = self._better(point, best)
            told.append(self._told(0, point, -solved.value, kept=better))
            held = told[-1].held_out
            best = point if better else best
        return best, told

    def _first(self, problem: AllocationProblem) -> CheckedSolution:
        """The solution on the score profile's own curves."""
        try:
            return self._solved(problem)
        except InfeasibleError as error:
            if self._target is None or error.nearest is None:
                raise
            least = -float(error.nearest)
            raise InfeasibleError(
                f"a loss of {self._target:g} nats per token is not possible with the budgets that "
                f"are allowed, whose curves end at {least:g}; ask for at least that, or allow more",
                nearest=least,
            ) from error

    def _part(self, losses: FloatArray | None) -> None:
        """Settle who learns and who judges."""
        share, seed = self._share, self._seed
        self._split = split_prompts(self._tasks, losses, held_out_share=share, seed=seed)
        self._train = [self._tasks[i] for i in self._split.training]
        self._held = [self._tasks[i] for i in self._split.held_out]

    def summary(self, best: Point, told: list[Round]) -> dict[str, Any]:
        """What the budget profile states."""
        train, held = best.losses[self._split.training], best.losses[self._split.held_out]
        predicted, measured = _mean(self._train, train), _mean(self._held, held)
        of_predicted = interval(self._train, train)
        of_measured = interval(self._held, held)
        within = (
            of_predicted[0] <= measured <= of_predicted[1]
            or of_measured[0] <= predicted <= of_measured[1]
        )
        by_task = {
            task: float(
                np.mean([loss for loss, t in zip(held, self._held, strict=True) if t == task])
            )
            for task in sorted(set(self._held))
        }
        rows = [{**asdict(one), "spread": _finite(one.spread)} for one in told]
        beyond = []
        if self._target is not None:
            most = best.checked.cost_bytes
            over = (one for one in told if one.held_out > self._target)
            beyond = [one.cost_bytes for one in over if one.cost_bytes < most]
        return {
            "predicted_loss": predicted,
            "predicted_interval": of_predicted,
            "measured_loss": measured,
            "measured_interval": of_measured,
            "confidence": 0.95,
            "agrees": within or abs(predicted - measured) <= WITHIN * measured,
            "measured_by_task": by_task,
            "training_prompts": [int(i) for i in self._split.training],
            "held_out_prompts": [int(i) for i in self._split.held_out],
            "tasks": self._tasks,
            "rounds": rows,
            "largest_size_beyond_target": max(beyond, default=None),
        }

    def _solved(self, problem: AllocationProblem) -> CheckedSolution:
        return solve_problem(problem, self._solver, time_limit_seconds=self._time_limit)

    def _step(
        self, curves: AllocationProblem, best: Point, allowed: Region, shrunk: Shrunk
    ) -> tuple[Point | None, float]:
        """Solve on corrected curves and measure; None where nothing changes."""
        losses = best.losses[self._split.training]
        weights = prompt_weights(self._train, self._scales)
        changes = self._weighted(shrunk.changes)
        problem, options = corrected(curves, allowed, float(weights @ losses), changes)
        if self._target is not None:
            problem = problem.with_target(-self._training_target(best))
        try:
            checked = self._solved(problem)
        except InfeasibleError:
            if self._target is None:
                raise
            # As far as this round can go: the least loss whatever it costs.
            problem = problem.with_capacity(problem.max_cost_bytes)
            checked = self._solved(problem)
        choice = options[np.arange(problem.n_units), checked.choice]
        if np.array_equal(choice, best.choice):
            return None, 0.0
        each = losses + shrunk.changes @ self._shares_of(allowed, choice)
        return self._point(problem, checked, choice), _mean(self._train, each)

    def _training_target(self, best: Point) -> float:
        """The loss on training prompts that stands for the target on the held-out ones."""
        assert self._target is not None  # the caller has looked
        train = _mean(self._train, best.losses[self._split.training])
        held = _mean(self._held, best.losses[self._split.held_out])
        ratio = train / held if held > 0 and train > 0 else 1.0
        return self._target * min(max(ratio, 0.25), 4.0)

    def _shares_of(self, allowed: Region, choice: IntArray) -> FloatArray:
        """The sum over units of a choice's shares in the figures, ``(n_figures,)``."""
        taken = allowed.options == choice[allowed.units]
        total: FloatArray = allowed.shares[taken].sum(axis=0)
        return total

    def _around(self, curves: AllocationProblem, best: Point) -> tuple[Figures, Shrunk]:
        """Measure the neighbours of a point on the training prompts."""
        figures = neighbours(curves, best.choice)
        if self._most_probes is not None:
            price = best.checked.multiplier or 0.0
            figures = most_undecided(curves, best.choice, figures, price, self._most_probes)
        rows = []
        for index in self._split.training.tolist():
            found = self._probes.measure(index, curves, best.choice, figures)
            rows.append(found.changes)
            self._advance()
        weights, values = curves.weights[figures.units], curves.values
        chosen = best.choice[figures.units]
        expected = weights * (
            values[figures.units, chosen] - values[figures.units, figures.options]
        )
        changes = np.stack(rows)
        return figures, shrink_by_folds(changes, expected, self._train)

    def _point(
        self, problem: AllocationProblem, checked: CheckedSolution, choice: IntArray
    ) -> Point:
        """Measure a choice on every prompt, all units at once."""
        losses = np.zeros(len(self._tasks))
        for index in range(losses.size):
            losses[index] = self._probes.measure(index, problem, checked.choice, NONE).loss
            self._advance()
        return Point(problem=problem, checked=checked, choice=choice, losses=losses)

    def _weighted(self, changes: FloatArray) -> FloatArray:
        weighted: FloatArray = prompt_weights(self._train, self._scales) @ changes
        return weighted

    def _judged(self, point: Point) -> float:
        losses = point.losses[self._split.held_out]
        return float(prompt_weights(self._held, self._scales) @ losses)

    def _better(self, point: Point, best: Point) -> bool:
        new, old = self._judged(point), self._judged(best)
        if self._target is None:
            return new < old
        if old > self._target:
            return new < old
        return new <= self._target and point.checked.cost_bytes < best.checked.cost_bytes

    def _is_settled(self, one: Round, told: list[Round]) -> bool:
        """Whether predicted and measured agree and there is next to nothing left to gain."""
        agrees = abs(one.predicted - one.held_out) <= WITHIN * one.held_out
        before = [r for r in told[:-1] if r.kept][-1]
        if self._target is not None:
            return agrees and one.held_out <= self._target <= 1.02 * one.held_out
        return agrees and one.judged > 0.98 * before.judged

    def _told(
        self,
        number: int,
        point: Point,
        predicted: float,
        shrunk: Shrunk | None = None,
        reach: float = 1.0,
        *,
        kept: bool,
    ) -> Round:
        return Round(
            round=number,
            cost_bytes=point.checked.cost_bytes,
            predicted=float(predicted),
            training=_mean(self._train, point.losses[self._split.training]),
            held_out=_mean(self._held, point.losses[self._split.held_out]),
            judged=self._judged(point),
            spread=None if shrunk is None else shrunk.spread,
            reach=reach,
            kept=kept,
        )

    def _check_target(self, best: Point) -> None:
        if self._target is None:
            return
        held = _mean(self._held, best.losses[self._split.held_out])
        if held > self._target:
            raise InfeasibleError(
                f"no round came within {self._target:g} nats per token on the held-out prompts; "
                f"the nearest lost {held:.4g} in {best.checked.cost_bytes:,} bytes: ask for that, "
                "or allow more rounds and resume, which measures nothing twice",
                nearest=held,
            )

    def _advance(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(min(self._done, self._steps), self._steps)


def _mean(tasks: list[str], losses: FloatArray) -> float:
    """Mean over tasks of the means over their prompts."""
    return float(prompt_weights(tasks) @ losses)


def _finite(value: float | None) -> float | None:
    return None if value is None or np.isinf(value) else value
