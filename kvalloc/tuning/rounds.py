"""The rounds of a refinement: solve, measure around the solution, correct, solve again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.allocation.verification import CheckedSolution, solve_problem
from kvalloc.errors import InfeasibleError, InputError
from kvalloc.measure.job import Steps
from kvalloc.problem import AllocationProblem, Solver
from kvalloc.prompts.intervals import CONFIDENCE
from kvalloc.tuning.correction import (
    Figures,
    Region,
    corrected,
    expected_changes,
    most_undecided,
    moved,
    neighbours,
    region,
)
from kvalloc.tuning.measurement import JointProbes
from kvalloc.tuning.shrinking import Shrunk, shrink_by_folds
from kvalloc.tuning.tasks import HELD_OUT_SHARE, comparable_scales, interval, split_prompts

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
        Measured, nats per token; not a number where it was not measured.
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
    training, choosing : float
        Measured on the prompts that the curves were corrected on, and on those that choose.
    judged : float
        Loss on the prompts that choose with the tasks on comparable scales, by which rounds are
        told apart; the plain one where a loss is the target.
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
    choosing: float
    judged: float
    spread: float | None = None
    reach: float = 1.0
    kept: bool


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to refine.

    Attributes
    ----------
    rounds : int
        Solve and measure at most so often after the first solution.
    probes : int or None
        Measure at most so many single changes a round and prompt, those that are decided least;
        all neighbours by default.
    held_out_share : float
        Share of each task's prompts that only choose the round, and of those whose loss is only
        reported.
    continuation_tokens : int
        Predictions compared on each prompt, at most.
    seed : int
        Of the choice of held-out prompts.
    time_limit : float or None
        Seconds for each solve.

    Raises
    ------
    InputError
        If there is no round or probe.
    """

    rounds: int = 3
    probes: int | None = None
    held_out_share: float = HELD_OUT_SHARE
    continuation_tokens: int = 24
    seed: int = 0
    time_limit: float | None = None

    def __post_init__(self) -> None:
        if self.rounds < 1 or (self.probes is not None and self.probes < 1):
            raise InputError("a refinement needs at least 1 round and 1 probe")


@dataclass(kw_only=True)
class Search:
    """One refinement under way.

    Attributes
    ----------
    prompts : JointProbes
    tasks : list of str
        Task of each prompt.
    settings : Settings
    solver : Solver
    target_loss : float or None
        Most loss on the prompts that choose, nats per token; None where a size is given.
    progress : callable or None
        Called with (prompts measured, prompts to measure at most).
    """

    prompts: JointProbes
    tasks: list[str]
    settings: Settings
    solver: Solver
    target_loss: float | None
    progress: Callable[[int, int], None] | None
    told: list[Round] = field(default_factory=list, init=False)
    _scales: dict[str, float] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._part(None)
        rounds = self.settings.rounds * (self._used.size + self._split.learn.prompts.size)
        self._steps = Steps(len(self.tasks) * 2 + int(rounds), self.progress)

    def _part(self, losses: FloatArray | None) -> None:
        """Who learns, who chooses and who reports."""
        share, seed = self.settings.held_out_share, self.settings.seed
        self._split = split_prompts(self.tasks, losses, held_out_share=share, seed=seed)
        report = self._split.report.prompts
        self._used = np.setdiff1d(np.arange(len(self.tasks), dtype=np.int64), report)

    def search(self, problem: AllocationProblem) -> Point:
        """The best point, measured on every prompt; what was told of each round is in `told`."""
        best = self._start(problem)
        curves, reach = problem, 1.0
        around: tuple[Figures, Shrunk] | None = None
        for number in range(1, self.settings.rounds + 1):
            if around is None:
                around = self._around(curves, best)
            figures, shrunk = around
            point, predicted = self._step(
                curves, best, region(curves, best.choice, figures, reach), shrunk
            )
            if point is None:
                break
            better = self._better(point, best)
            self._tell(number, point, predicted, shrunk.spread, reach, kept=better)
            if better:
                whole = region(curves, best.choice, figures)
                curves = moved(curves, whole, best.choice, self._weighted(shrunk.changes))
                best, around = point, None
                if self._is_settled():
                    break
            else:
                reach /= 2
                if reach < LEAST_REACH:
                    break
        self._check_target(best)
        report = self._split.report.prompts  # which nothing else has looked at
        return self._measured(best, report[np.isnan(best.losses[report])])

    def summary(self, best: Point) -> dict[str, Any]:
        """What the budget profile states."""
        learn, report = self._split.learn, self._split.report
        predicted, measured = learn.mean(best.losses), report.mean(best.losses)
        of_predicted, of_measured = (
            interval(side.tasks, best.losses[side.prompts]) for side in (learn, report)
        )
        within = (
            of_predicted[0] <= measured <= of_predicted[1]
            or of_measured[0] <= predicted <= of_measured[1]
        )
        names = np.asarray(report.tasks)
        beyond = [
            one.cost_bytes
            for one in self.told
            if self.target_loss is not None
            and one.choosing > self.target_loss
            and one.cost_bytes < best.checked.cost_bytes
        ]
        return {
            "predicted_loss": predicted,
            "predicted_interval": of_predicted,
            "choosing_loss": self._split.choose.mean(best.losses),
            "measured_loss": measured,
            "measured_interval": of_measured,
            "confidence": CONFIDENCE,
            "agrees": within or abs(predicted - measured) <= WITHIN * measured,
            "measured_by_task": {
                task: float(best.losses[report.prompts[names == task]].mean())
                for task in sorted(set(report.tasks))
            },
            "training_prompts": learn.prompts.tolist(),
            "choosing_prompts": self._split.choose.prompts.tolist(),
            "held_out_prompts": report.prompts.tolist(),
            "tasks": self.tasks,
            "rounds": [asdict(one) for one in self.told],
            "largest_size_beyond_target": max(beyond, default=None),
        }

    def _start(self, problem: AllocationProblem) -> Point:
        """Where the rounds begin: with a target, the first solution that meets it when measured.

        What single units lose adds up to less than all of them do together, the more so on other
        texts than it was measured on. As much less is then asked of the same curves: that takes one
        forward a prompt, where a round of neighbours takes many.
        """
        first = self._first(problem)
        best = self._point(problem, first, first.choice, np.arange(len(self.tasks)))
        self._part(best.losses)
        if self.target_loss is None:  # the first solution says how the tasks compare
            learn = self._split.learn
            self._scales = comparable_scales(learn.tasks, best.losses[learn.prompts])
        self._tell(0, best, -first.value, kept=True)
        if self.target_loss is None:
            return best
        aim, found = self.target_loss, self.told[0].choosing
        for _ in range(TIGHTENED):
            if found <= self.target_loss:
                break
            aim *= min(max(self.target_loss / found, LEAST_STEP), MOST_STEP)
            tighter = problem.with_target(-aim)
            try:
                solved = self._solved(tighter)
            except InfeasibleError:
                break
            self._steps.total += self._used.size
            point = self._point(tighter, solved, solved.choice, self._used)
            better = self._better(point, best)
            self._tell(0, point, -solved.value, kept=better)
            found = self.told[-1].choosing
            best = point if better else best
        return best

    def _first(self, problem: AllocationProblem) -> CheckedSolution:
        """The solution on the score profile's own curves."""
        try:
            return self._solved(problem)
        except InfeasibleError as error:
            if self.target_loss is None or error.nearest is None:
                raise
            least = -float(error.nearest)
            raise InfeasibleError(
                f"a loss of {self.target_loss:g} nats per token is not possible with the budgets "
                f"that are allowed, whose curves end at {least:g}; ask for at least that, or allow "
                "more",
                nearest=least,
            ) from error

    def _solved(self, problem: AllocationProblem) -> CheckedSolution:
        return solve_problem(problem, self.solver, time_limit_seconds=self.settings.time_limit)

    def _step(
        self, curves: AllocationProblem, best: Point, allowed: Region, shrunk: Shrunk
    ) -> tuple[Point | None, float]:
        """Solve on corrected curves and measure; None where nothing changes."""
        learn = self._split.learn
        changes = self._weighted(shrunk.changes)
        loss = learn.mean(best.losses, self._scales)
        problem, options = corrected(curves, allowed, loss, changes)
        if self.target_loss is not None:
            problem = problem.with_target(-self._training_target(best))
        try:
            checked = self._solved(problem)
        except InfeasibleError:
            if self.target_loss is None:
                raise
            # As far as this round can go: the least loss whatever it costs.
            problem = problem.with_capacity(problem.max_cost_bytes)
            checked = self._solved(problem)
        choice = options[np.arange(problem.n_units), checked.choice]
        if np.array_equal(choice, best.choice):
            return None, 0.0
        taken = allowed.options == choice[allowed.units]
        shares = allowed.shares[taken].sum(axis=0)
        each = best.losses[learn.prompts] + shrunk.changes @ shares
        return self._point(problem, checked, choice, self._used), float(learn.weights() @ each)

    def _training_target(self, best: Point) -> float:
        """The loss on training prompts that stands for the target on those that choose."""
        assert self.target_loss is not None  # asked only where a loss is the target
        train, found = (side.mean(best.losses) for side in (self._split.learn, self._split.choose))
        ratio = train / found if found > 0 and train > 0 else 1.0
        return self.target_loss * min(max(ratio, 0.25), 4.0)

    def _around(self, curves: AllocationProblem, best: Point) -> tuple[Figures, Shrunk]:
        """Measure the neighbours of a point on the training prompts."""
        figures = neighbours(curves, best.choice)
        if self.settings.probes is not None:
            price = best.checked.multiplier or 0.0
            figures = most_undecided(curves, best.choice, figures, price, self.settings.probes)
        rows = []
        for index in self._split.learn.prompts.tolist():
            rows.append(self.prompts.measure(index, curves, best.choice, figures).changes)
            self._steps.advance()
        expected = expected_changes(curves, best.choice, figures)
        return figures, shrink_by_folds(np.stack(rows), expected, self._split.learn.tasks)

    def _point(
        self,
        problem: AllocationProblem,
        checked: CheckedSolution,
        choice: IntArray,
        prompts: IntArray,
    ) -> Point:
        losses = np.full(len(self.tasks), np.nan)
        point = Point(problem=problem, checked=checked, choice=choice, losses=losses)
        return self._measured(point, prompts)

    def _measured(self, point: Point, prompts: IntArray) -> Point:
        """Measure a choice on some prompts, all units at once."""
        losses = point.losses.copy()
        for index in prompts.tolist():
            found = self.prompts.measure(index, point.problem, point.checked.choice, NONE)
            losses[index] = found.loss
            self._steps.advance()
        return replace(point, losses=losses)

    def _weighted(self, changes: FloatArray) -> FloatArray:
        weighted: FloatArray = self._split.learn.weights(self._scales) @ changes
        return weighted

    def _judged(self, point: Point) -> float:
        return self._split.choose.mean(point.losses, self._scales)

    def _better(self, point: Point, best: Point) -> bool:
        new, old = self._judged(point), self._judged(best)
        if self.target_loss is None or old > self.target_loss:
            return new < old
        return new <= self.target_loss and point.checked.cost_bytes < best.checked.cost_bytes

    def _is_settled(self) -> bool:
        """Whether predicted and measured agree and there is next to nothing left to gain."""
        one = self.told[-1]
        agrees = abs(one.predicted - one.choosing) <= WITHIN * one.choosing
        before = [told for told in self.told[:-1] if told.kept][-1]
        if self.target_loss is not None:
            return agrees and one.choosing <= self.target_loss <= 1.02 * one.choosing
        return agrees and one.judged > 0.98 * before.judged

    def _tell(
        self,
        number: int,
        point: Point,
        predicted: float,
        spread: float | None = None,
        reach: float = 1.0,
        *,
        kept: bool,
    ) -> None:
        self.told.append(
            Round(
                round=number,
                cost_bytes=point.checked.cost_bytes,
                predicted=float(predicted),
                training=self._split.learn.mean(point.losses),
                choosing=self._split.choose.mean(point.losses),
                judged=self._judged(point),
                spread=None if spread is None or np.isinf(spread) else spread,
                reach=reach,
                kept=kept,
            )
        )

    def _check_target(self, best: Point) -> None:
        found = self._split.choose.mean(best.losses)
        if self.target_loss is not None and found > self.target_loss:
            raise InfeasibleError(
                f"no round came within {self.target_loss:g} nats per token on the prompts that "
                f"choose the round; the nearest lost {found:.4g} in "
                f"{best.checked.cost_bytes:,} bytes: ask for that, or allow more rounds and "
                "resume, which measures nothing twice",
                nearest=found,
            )
