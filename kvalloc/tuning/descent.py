"""Descent on the loss of the whole reduced cache, whatever it is that moves.

Loss curves add up what each unit does alone. Harm is not additive at small budgets, so here all
units are reduced together. How much of each entry is kept is made a smooth function of what moves
(`Moves`); the gradient of the loss then says at once which heads are starved and which have
entries to spare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.accounting.rounding import apportion
from kvalloc.engine.contract import Advance, Engine, none_failed
from kvalloc.errors import InputError
from kvalloc.formats.policy import Policy
from kvalloc.measure.loss_probe import LossProbe
from kvalloc.measure.sampling import spread
from kvalloc.runtime import make_cache
from kvalloc.runtime.policies import policy_of
from kvalloc.scorers import get_scorer

if TYPE_CHECKING:
    from kvalloc.formats.budget_profile import BudgetProfile
    from kvalloc.measure.checkpoint import Checkpoint
    from kvalloc.measure.job import Steps
    from kvalloc.measure.sampling import Sample
    from kvalloc.shape import ModelShape

Decision = Mapping[str, npt.NDArray[Any]]
"""What a descent has come to, by name."""

_PIECE = "descent"
_LEAST_PART = 1e-6


@dataclass(frozen=True, kw_only=True)
class Descent:
    """How long a descent goes, on how much, and what it is judged by.

    Attributes
    ----------
    steps : int
        Steps of Adam.
    batch : int
        Prompts a step, in turn.
    continuation_tokens : int
        Tokens after each prompt on which the distributions are compared, at most.
    learning_rate : float
        Of the variables.
    softness : tuple of float
        At the beginning and at the end: how far the threshold between kept and evicted entries is
        smeared.
    held_out : float
        Share of the prompts that no step sees; they choose among the stages of the descent.
    checks : int
        How often the held-out prompts are asked.
    temperature : tuple of float
        At the beginning and at the end: of each head's softmax over the policies. Of fixed budgets.
    other_weight : float
        What every scorer but the first counts at the beginning. Of mixed scores.

    Raises
    ------
    InputError
        If a value is out of range.
    """

    steps: int
    batch: int
    continuation_tokens: int
    learning_rate: float
    softness: tuple[float, float]
    held_out: float = 0.2
    checks: int
    temperature: tuple[float, float] = (1.0, 0.05)
    other_weight: float = 0.1

    def __post_init__(self) -> None:
        least = min(self.steps, self.batch, self.continuation_tokens, self.checks)
        if least < 1 or not 0 < self.held_out < 1:
            raise InputError(
                "a descent needs at least one step, prompt, token and check, and a share of held "
                "out prompts between 0 and 1"
            )
        if min(*self.softness, *self.temperature, self.learning_rate, self.other_weight) <= 0:
            raise InputError(
                "softness, temperature, learning rate and the weight of other scorers must be "
                "above 0"
            )

    @property
    def check_steps(self) -> set[int]:
        """After how many steps the held-out prompts are asked."""
        return {self.steps * number // self.checks for number in range(1, self.checks + 1)}


@dataclass(frozen=True, kw_only=True)
class DescentJob:
    """What is decided, and how.

    Attributes
    ----------
    shape : ModelShape
    share : float
        Of all entries at the reference context, sinks and window included, 0..1.
    context : int
        Reference context, tokens.
    policies : tuple of Policy
        On offer, all with the same sinks and window.
    own : Policy
        The first of them, with what its caches do with evicted entries; the descent does not see
        that.
    descent : Descent
    moves : type of Moves
    seed : int
        Of what is held out, and of the prompts' order.

    Raises
    ------
    InputError
        If the share leaves no room beside sinks and window, or is all.
    """

    shape: ModelShape
    share: float
    context: int
    policies: tuple[Policy, ...]
    own: Policy
    descent: Descent
    moves: type[Moves]
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.protected / self.context < self.share < 1:
            raise InputError(
                f"{self.share:.1%} of {self.context:,} tokens is not more than the "
                f"{self.protected} of sinks and window and less than all; ask for another budget"
            )

    @property
    def protected(self) -> int:
        """Sinks and window, tokens."""
        return self.policies[0].protected_tokens

    @property
    def size(self) -> tuple[int, int]:
        """``(n_full_layers, n_kv_heads)``."""
        return len(self.shape.full_layers), self.shape.n_kv_heads

    @property
    def evictable_share(self) -> float:
        """Share of the evictable entries that all heads keep in the mean."""
        return (self.share * self.context - self.protected) / (self.context - self.protected)

    def evictable_total(self, n_tokens: int) -> int:
        """Evictable entries that all heads keep together of a prompt of that length."""
        room, (layers, heads) = n_tokens - self.protected, self.size
        # what is whole but for a rounding error is whole
        return int(self.evictable_share * room * layers * heads + 1e-6)

    def budgets(self, shares: FloatArray, n_tokens: int) -> IntArray:
        """Whole numbers of entries at a length, sinks and window included.

        Parameters
        ----------
        shares : ndarray of float64, (n_full_layers, n_kv_heads)
            Of the evictable entries.
        n_tokens : int
        """
        room = n_tokens - self.protected
        total, most = self.evictable_total(n_tokens), np.full(shares.size, room)
        kept = apportion(shares.ravel() * room, total, maximum=most)
        return kept.reshape(shares.shape) + self.protected

    def by_layer(self, evictable: Tensor, always: float) -> dict[int, Tensor]:
        """How much of the evictable entries stays, with sinks and window beside them.

        Parameters
        ----------
        evictable : Tensor, (n_full_layers, n_kv_heads, n_evictable)
        always : float
            Of sinks and window.
        """
        own = self.policies[0]
        whole = torch.nn.functional.pad(evictable, (own.sinks, own.window), value=always)
        return dict(zip(self.shape.full_layers, whole, strict=True))


@dataclass(frozen=True, kw_only=True)
class ReadPrompt:
    """A prompt with its full cache, and what every policy makes of its entries.

    Attributes
    ----------
    probe : LossProbe
    table : Tensor, (n_policies, n_full_layers, n_kv_heads, n_evictable)
        See `Moves.table`.
    """

    probe: LossProbe
    table: Tensor


class Moves(Protocol):
    """What a descent moves, and which entries stay for it.

    Attributes
    ----------
    own_scorer, other_scorers, settings
        What is on offer, and how the descent goes, unless the user says otherwise.
    loss_floor : float
        Nats per token: what is lost below it counts little beside what is lost elsewhere.
    variables : mapping of str to Tensor
        What Adam moves.
    start, equal : mapping of str to ndarray
        Decisions: where the descent begins, and equal budgets with the first policy.
    """

    own_scorer: ClassVar[str]
    other_scorers: ClassVar[tuple[str, ...]]
    settings: ClassVar[Descent]
    loss_floor: ClassVar[float]
    variables: Mapping[str, Tensor]
    start: Decision
    equal: Decision

    def __init__(self, job: DescentJob, device: torch.device) -> None: ...

    @staticmethod
    def table(scores: Tensor, protected: int) -> Tensor:
        """What is kept in memory of scores, `(n_policies, n_layers, n_kv_heads, n_evictable)`."""

    def soft_parts(self, prompt: ReadPrompt, left: float) -> Tensor:
        """Which part of each evictable entry stays, 0..1, differentiable in the variables.

        Parameters
        ----------
        prompt : ReadPrompt
        left : float
            Share of the steps that are still to come: 1 at the beginning.
        """

    def decision(self) -> Decision:
        """What the variables stand for now."""

    def kept(self, prompt: ReadPrompt, decision: Decision) -> Tensor:
        """Which evictable entries stay, bool, `(n_full_layers, n_kv_heads, n_evictable)`."""

    def part_kept(self, prompt: ReadPrompt, decision: Decision) -> FloatArray:
        """Share of a prompt's evictable entries that each head keeps, by layer."""

    def budgets(self, decision: Decision, parts: Sequence[FloatArray]) -> IntArray:
        """At the reference context, `(n_full_layers, n_kv_heads)`, protected entries included.

        Parameters
        ----------
        decision : mapping of str to ndarray
        parts : sequence of ndarray
            `part_kept` of the prompts that were learnt from.
        """

    def profile_fields(self, decision: Decision) -> dict[str, Any]:
        """What else of a `kvalloc.BudgetProfile` says what was decided."""

    def detail(self, losses: FloatArray, uniform: FloatArray) -> str:
        """One sentence on what came of it."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """How far a descent has come, and the best that it has seen.

    Attributes
    ----------
    steps_done : int
    scales : tuple of float
        What each prompt's loss is divided by, so that no kind of prompt drowns another.
    uniform_losses : ndarray of float64, (n_held_out,)
        Of the whole reduced cache on each held-out prompt, with equal budgets, nats per token.
    decision : mapping of str to ndarray
        The best so far.
    held_out_losses : ndarray of float64, (n_held_out,)
        The same with the decision.
    stages : tuple of (int, float)
        Mean held-out loss after so many steps.
    """

    steps_done: int
    scales: tuple[float, ...]
    uniform_losses: FloatArray
    decision: Decision
    held_out_losses: FloatArray
    stages: tuple[tuple[int, float], ...]

    def checked(self, decision: Decision, losses: FloatArray, floor: float) -> Course:
        """With the held-out losses of what the descent has come to."""
        known = replace(self, stages=(*self.stages, (self.steps_done, float(losses.mean()))))
        over = self.uniform_losses + floor  # each over that of equal budgets
        if (losses / over).mean() < (self.held_out_losses / over).mean():
            return replace(known, decision=decision, held_out_losses=losses)
        return known


def read_prompt(model: Any, sample: Sample, job: DescentJob) -> ReadPrompt:
    """Read a sample with the full cache, and let every policy score its entries."""
    own, built = job.policies[0], [policy_of(policy) for policy in job.policies]
    probe = LossProbe.of_sample(
        model,
        sample,
        get_scorer(own.scorer, **own.scorer_parameters),
        sinks=own.sinks,
        shape=job.shape,
        continuation_tokens=job.descent.continuation_tokens,
        policies=built,
    )
    evictable = slice(own.sinks, probe.n_tokens - own.window)
    layers = [
        torch.stack(
            [one.scorer.score(states, sinks=own.sinks)[0][:, evictable] for one in built]
        ).float()
        for _, states in sorted(probe.prompt_states.items())
    ]
    probe.prompt_states.clear()  # their queries are not needed again
    table = job.moves.table(torch.stack(layers, dim=1), job.protected)
    return ReadPrompt(probe=probe, table=table)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of one prompt.

    Attributes
    ----------
    what : {"nothing", "loss", "slope", "part", "cache_loss"}
        Nothing: it is only read. The loss with exactly the entries that stay; what the variables'
        gradient of a soft loss is; `Moves.part_kept`; the loss of a profile's own cache.
    prompt : int
        Index of the sample.
    job : int
        Which of the jobs.
    decision : mapping of str to ndarray
        Of the loss and the part; of the slope the variables.
    left : float
        For the slope: share of the steps that are still to come.
    scale : float
        For the slope: what the loss is divided by.
    profile : BudgetProfile or None
        For the cache's loss.
    """

    what: str
    prompt: int
    job: int = 0
    decision: Decision = field(default_factory=dict)
    left: float = 0.0
    scale: float = 1.0
    profile: BudgetProfile | None = None


class PromptWork:
    """Answers questions about prompts; each is read where it is first asked about, and held there.

    Parameters
    ----------
    jobs : sequence of DescentJob
        Which differ in their share only.
    samples : sequence of Sample
    """

    def __init__(self, jobs: Sequence[DescentJob], samples: Sequence[Sample]) -> None:
        self._jobs, self._samples = jobs, samples
        self._prompts: dict[int, ReadPrompt] = {}
        self._moves: dict[int, Moves] = {}

    def __call__(self, model: Any, asked: Question, advance: Advance) -> Any:
        """The answer: None, a float, or arrays."""
        if (one := self._prompts.get(asked.prompt)) is None:
            one = read_prompt(model, self._samples[asked.prompt], self._jobs[0])
            self._prompts[asked.prompt] = one
            if asked.what == "nothing":
                advance(1)
        if asked.what == "nothing":
            return None
        job = self._jobs[asked.job]
        if asked.profile is not None:
            size = one.probe.n_tokens  # what follows is no part of the prompt
            cache = make_cache(asked.profile, model, allow_other_model=True, prompt_tokens=size)
            return one.probe.cache_loss(cache)
        if asked.job not in self._moves:
            self._moves[asked.job] = job.moves(job, one.table.device)
        moves = self._moves[asked.job]
        if asked.what == "part":
            return moves.part_kept(one, asked.decision)
        if asked.what == "slope":
            return _slope(job, moves, one, asked)
        settled = one.probe.settle(job.by_layer(moves.kept(one, asked.decision), True))
        return float(settled.losses.mean())


def _slope(
    job: DescentJob, moves: Moves, prompt: ReadPrompt, asked: Question
) -> dict[str, npt.NDArray[Any]]:
    """Gradients of the soft loss in the variables, by name."""
    with torch.no_grad():
        for name, variable in moves.variables.items():
            variable.grad = None
            variable.copy_(torch.from_numpy(asked.decision[name]))
    parts = moves.soft_parts(prompt, asked.left)
    soft = prompt.probe.soft_loss(job.by_layer(parts.clamp(min=_LEAST_PART), 1.0))
    loss = soft / asked.scale / job.descent.batch
    loss.backward(inputs=list(moves.variables.values()))  # type: ignore[no-untyped-call]
    return {
        name: variable.grad.cpu().numpy()
        for name, variable in moves.variables.items()
        if variable.grad is not None
    }


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The prompts of a descent, wherever they are read.

    Attributes
    ----------
    engine : Engine
    work : PromptWork
    train, held_out : tuple of int
        Samples to learn from, in the order in which they are, and those that are held out.
    """

    engine: Engine
    work: PromptWork
    train: tuple[int, ...]
    held_out: tuple[int, ...]

    def ask(
        self, questions: Sequence[Question], advance: Advance = lambda steps: None
    ) -> list[Any]:
        """The answers, in the order of the questions.

        A prompt stays with its worker. Neighbours in the order go to different ones, so that those
        of one step are spread evenly.
        """
        homes = {prompt: place for place, prompt in enumerate((*self.train, *self.held_out))}
        found = none_failed(
            self.engine.run(
                self.work,
                dict(enumerate(questions)),
                advance,
                homes={place: homes[one.prompt] for place, one in enumerate(questions)},
            )
        )
        return [found[place] for place in range(len(questions))]

    def losses(self, prompts: Sequence[int], job: int, decision: Decision) -> FloatArray:
        """Losses with exactly the entries that a cache would keep, nats per token."""
        asked = [Question(what="loss", prompt=p, job=job, decision=decision) for p in prompts]
        return np.array(self.ask(asked))


def descend(
    job: DescentJob,
    place: int,
    prompts: Prompts,
    *,
    steps: Steps,
    kept: Checkpoint | None = None,
) -> Course:
    """Adam on what moves; the best stage on the held-out prompts, the beginning among them.

    Gradients of the prompts of a step are added in the order of the prompts, whoever computed them.

    Parameters
    ----------
    job : DescentJob
    place : int
        Which it is of the jobs that the prompts know.
    prompts : Prompts
    steps : Steps
        Where what is done is counted.
    kept : Checkpoint, optional
        Where the descent goes on from, and where each step is kept.

    Returns
    -------
    Course

    Raises
    ------
    InputError
        If what the checkpoint holds cannot be read, or a step cannot be written.
    """
    descent, moves = job.descent, job.moves(job, torch.device("cpu"))
    variables, train = moves.variables, prompts.train
    adam = torch.optim.Adam(list(variables.values()), lr=descent.learning_rate)
    course = None if kept is None else _resumed(kept, adam, moves, len(prompts.held_out))
    if course is None:
        course = _begun(moves, place, prompts)
    else:
        steps.advance(course.steps_done)
    for step in range(course.steps_done, descent.steps):
        values = {name: one.detach().numpy().copy() for name, one in variables.items()}
        chosen = [(step * descent.batch + one) % len(train) for one in range(descent.batch)]
        asked = [
            Question(
                what="slope",
                prompt=train[which],
                job=place,
                decision=values,
                left=1 - step / descent.steps,
                scale=course.scales[which],
            )
            for which in chosen
        ]
        adam.zero_grad()
        for slope in prompts.ask(asked):
            for name, own in slope.items():
                grad, more = variables[name].grad, torch.from_numpy(own)
                variables[name].grad = more if grad is None else grad + more
        adam.step()
        course = replace(course, steps_done=step + 1)
        if step + 1 in descent.check_steps:
            with torch.no_grad():
                now = moves.decision()
            losses = prompts.losses(prompts.held_out, place, now)
            course = course.checked(now, losses, moves.loss_floor)
        if kept is not None:
            _keep(kept, course, adam, variables)
        steps.advance()
    return course


def between(ends: tuple[float, float], left: float) -> float:
    """Between a value at the beginning, with all the way left (1), and one at the end (0)."""
    return ends[1] + (ends[0] - ends[1]) * left


def threshold(places: Tensor, part: float, softness: float = 1.0) -> Tensor:
    """Where ``sigmoid((places - lambda) / softness)`` has that mean, with lambda's derivative."""
    with torch.no_grad():
        low, high = places.min() - 50 * softness, places.max() + 50 * softness
        for _ in range(60):
            middle = (low + high) / 2
            below = torch.sigmoid((places - middle) / softness).mean() > part
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        inner = torch.sigmoid((places - low) / softness)
        slope = inner * (1 - inner)
        shares = slope / slope.sum()
    # the part stays what it is: where places rise, lambda rises with their weighted mean
    moved = (shares * places).sum()
    return low + moved - moved.detach()


def ranks_of(scores: Tensor) -> Tensor:
    """Place of each entry in the order in which it is kept, from 0, along the last axis."""
    # stable: among equal scores the earlier position wins, as at run time
    best = torch.argsort(scores, dim=-1, descending=True, stable=True)
    place = torch.arange(best.shape[-1], device=best.device)
    return torch.empty_like(best).scatter_(-1, best, place.expand_as(best))


def held_out(n_samples: int, share: float, seed: int) -> set[int]:
    """Which prompts no step sees: spread evenly over the file, so that each kind is among them."""
    return {*spread(n_samples, min(max(1, round(share * n_samples)), n_samples - 1), seed)}


def _begun(moves: Moves, job: int, prompts: Prompts) -> Course:
    """Where nothing has moved yet, and what that loses."""
    uniform = losses = prompts.losses(prompts.held_out, job, moves.equal)
    if moves.start is not moves.equal:
        losses = prompts.losses(prompts.held_out, job, moves.start)
    scales = prompts.losses(prompts.train, job, moves.start) + moves.loss_floor
    return Course(
        steps_done=0,
        scales=tuple(scales.tolist()),
        uniform_losses=uniform,
        decision=moves.start,
        held_out_losses=losses,
        stages=((0, float(losses.mean())),),
    )


def _keep(
    kept: Checkpoint, course: Course, adam: torch.optim.Adam, variables: Mapping[str, Tensor]
) -> None:
    arrays = {f"decision.{name}": array for name, array in course.decision.items()}
    arrays |= {name: getattr(course, name) for name in ("uniform_losses", "held_out_losses")}
    for name, variable in variables.items():
        state = {"value": variable.detach(), **adam.state[variable]}
        arrays |= {f"{name}.{key}": value.cpu().numpy() for key, value in state.items()}
    values = {name: getattr(course, name) for name in ("steps_done", "scales", "stages")}
    kept.save(_PIECE, arrays, values)


def _resumed(
    kept: Checkpoint, adam: torch.optim.Adam, moves: Moves, n_held_out: int
) -> Course | None:
    """Where a killed descent stood, its variables put back; None where there is none."""
    moments, prefix = ("exp_avg", "exp_avg_sq"), "decision."
    with torch.no_grad():
        decided = {f"{prefix}{name}": array.shape for name, array in moves.decision().items()}
    shapes = decided | {f"{which}_losses": (n_held_out,) for which in ("uniform", "held_out")}
    for name, variable in moves.variables.items():
        own = {key: tuple(variable.shape) for key in ("value", *moments)}
        shapes |= {f"{name}.{key}": shape for key, shape in {**own, "step": ()}.items()}
    found = kept.load(_PIECE, shapes)
    if found is None and not kept.holds(_PIECE):
        return None
    try:
        if found is None:
            raise ValueError("it is damaged, or of another shape")
        arrays, values = found
        course = Course(
            steps_done=int(values["steps_done"]),
            scales=tuple(map(float, values["scales"])),
            stages=tuple((int(step), float(loss)) for step, loss in values["stages"]),
            uniform_losses=arrays["uniform_losses"],
            held_out_losses=arrays["held_out_losses"],
            decision={name.removeprefix(prefix): arrays[name] for name in decided},
        )
    except (LookupError, TypeError, ValueError) as error:
        raise InputError(
            f"{kept.folder} cannot be read as the state of a descent; delete it to start over"
        ) from error
    with torch.no_grad():
        for name, variable in moves.variables.items():
            variable.copy_(torch.from_numpy(arrays[f"{name}.value"]))
            mean, square = (
                torch.from_numpy(arrays[f"{name}.{key}"]).to(variable.device) for key in moments
            )
            step = torch.from_numpy(arrays[f"{name}.step"])
            adam.state[variable] = {"step": step, "exp_avg": mean, "exp_avg_sq": square}
    return course
