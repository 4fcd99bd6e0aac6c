"""Each head's mixture of scorers, by descent on the loss of caches that share entries by prompt.

Where each prompt hands out its entries among the heads by score (`kvalloc.runtime.handing_out`),
what is to be decided beforehand is how the scores of different heads compare, and which scorer
knows best in which head. Both are weights of scores, and the loss is made smooth in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.errors import InputError
from kvalloc.measure.loss_probe import LossProbe
from kvalloc.runtime.handing_out import handed_out
from kvalloc.runtime.policies.score import Score
from kvalloc.scorers import Scorer
from kvalloc.tuning.descent_settings import DescentSettings
from kvalloc.tuning.descent_state import StateFile, adam_tensors, restore_adam

if TYPE_CHECKING:
    from kvalloc.measure.sampling import SampleSet
    from kvalloc.shape import ModelShape

__all__ = ["WeighedPrompt", "Weighing", "WeighingJob", "WeighingStage", "weigh_scores"]


_LEAST_PART = 1e-6
_LEAST_SCORE = 1e-9
_LOSS_FLOOR = 0.002
"""Nats a token: what is lost below it counts little beside what is lost elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Weighing(DescentSettings):
    """How the descent goes.

    The learning rate is that of the logarithms of the weights, and the softness a range of log
    scores, over which the threshold is smeared.

    Attributes
    ----------
    other_weight : float
        What every scorer but the first counts at the beginning.

    Raises
    ------
    InputError
        If a value is out of range.
    """

    steps: int = 100
    batch: int = 6
    continuation_tokens: int = 32
    learning_rate: float = 0.15
    other_weight: float = 0.1
    softness: tuple[float, float] = (1.0, 0.1)
    checks: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.other_weight <= 0:
            raise InputError("the weight of other scorers must be above 0")


@dataclass(frozen=True, kw_only=True)
class WeighingJob:
    """What is decided, and how."""

    shape: ModelShape
    share: float
    context: int
    sinks: int
    window: int
    weighing: Weighing

    @property
    def protected(self) -> int:
        """Sinks and window, tokens."""
        return self.sinks + self.window

    def total(self, n_tokens: int) -> int:
        """Entries that all heads keep together of a prompt of that length."""
        units = len(self.shape.full_layers) * self.shape.n_kv_heads
        part = (self.share * self.context - self.protected) / (self.context - self.protected)
        room = n_tokens - self.protected
        return units * self.protected + int(part * room * units + 1e-6)


@dataclass(frozen=True, kw_only=True)
class WeighedPrompt:
    """A prompt with its full cache, and every scorer's scores.

    Attributes
    ----------
    token_ids : Tensor of int64, (n_tokens,)
    probe : LossProbe
    scores : Tensor of float32, (n_scorers, n_full_layers, n_kv_heads, n_evictable)
    """

    token_ids: Tensor
    probe: LossProbe
    scores: Tensor

    @classmethod
    def read(
        cls,
        model: Any,
        found: SampleSet,
        index: int,
        scorers: Sequence[Scorer],
        job: WeighingJob,
    ) -> WeighedPrompt:
        """Read one of the samples with the full cache, and let every scorer see it."""
        device = model.get_input_embeddings().weight.device
        answer, question = found.answer_ids[index], found.question_ids[index]
        token_ids = torch.from_numpy(found.token_ids[index]).to(device)
        probe = LossProbe(
            model,
            token_ids,
            scorers[0],
            sinks=job.sinks,
            shape=job.shape,
            answer_ids=None if answer is None else torch.from_numpy(answer).to(device),
            continuation_tokens=job.weighing.continuation_tokens,
            question_ids=None if question is None else torch.from_numpy(question),
            policies=[Score(scorer=scorer) for scorer in scorers],
        )
        evictable = slice(job.sinks, probe.n_tokens - job.window)
        layers = [
            torch.stack(
                [scorer.score(states, sinks=job.sinks)[0][:, evictable] for scorer in scorers]
            ).float()
            for _, states in sorted(probe.prompt_states.items())
        ]
        probe.prompt_states.clear()  # their queries are not needed again
        return cls(token_ids=token_ids, probe=probe, scores=torch.stack(layers, dim=1))

    def weighed(self, weights: Tensor) -> Tensor:
        """Sums of scores, (n_full_layers, n_kv_heads, n_evictable); weights (..., n_scorers)."""
        return torch.einsum("klht,lhk->lht", self.scores, weights)

    def soft_loss(self, job: WeighingJob, logarithms: Tensor, softness: float) -> Tensor:
        """Loss with a soft threshold, differentiable in the logarithms of the weights.

        An entry of weighed score s is kept to the part ``sigmoid((log s - lambda) / softness)``,
        with the one lambda for the whole model that keeps as much as is wanted.
        """
        places = (self.weighed(logarithms.exp()) + _LEAST_SCORE).log()
        wanted = job.total(self.probe.n_tokens) - job.protected * places.shape[0] * places.shape[1]
        threshold = _threshold(places, wanted / places.numel(), softness)
        parts = torch.sigmoid((places - threshold) / softness).clamp(min=_LEAST_PART)
        kept = torch.nn.functional.pad(parts, (job.sinks, job.window), value=1.0)
        return self.probe.soft_loss(dict(zip(job.shape.full_layers, kept, strict=True)))

    def budgets(self, job: WeighingJob, weights: Tensor) -> IntArray:
        """What each head keeps of this prompt, (n_full_layers, n_kv_heads)."""
        total = job.total(self.probe.n_tokens)
        return handed_out(list(self.weighed(weights)), total, protected=job.protected)

    def hard_loss(
        self, job: WeighingJob, weights: Tensor, budgets: IntArray | None = None
    ) -> float:
        """Loss with exactly the entries that a cache would keep, nats per token.

        Parameters
        ----------
        job : WeighingJob
        weights : Tensor, (n_full_layers, n_kv_heads, n_scorers)
        budgets : ndarray of int64, (n_full_layers, n_kv_heads), optional
            Instead of those that the prompt hands out.
        """
        scores = self.weighed(weights)
        given = self.budgets(job, weights) if budgets is None else budgets
        counts = torch.from_numpy(given - job.protected).to(scores.device)
        order = torch.argsort(scores, dim=-1, descending=True, stable=True)
        ranks = torch.empty_like(order)
        ranks.scatter_(
            -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
        )
        kept = torch.nn.functional.pad(
            ranks < counts[..., None], (job.sinks, job.window), value=True
        )
        settled = self.probe.settle(dict(zip(job.shape.full_layers, kept, strict=True)))
        return float(settled.losses.mean())


@dataclass(frozen=True, kw_only=True)
class WeighingStage:
    """The best stage of a descent on the held-out prompts.

    Attributes
    ----------
    weights : Tensor of float32, (n_full_layers, n_kv_heads, n_scorers)
    held_out_losses : ndarray of float64, (n_held_out,)
    uniform_losses : ndarray of float64, (n_held_out,)
        With equal budgets and the first scorer.
    stages : tuple of (int, float)
        Mean held-out loss after so many steps.
    """

    weights: Tensor
    held_out_losses: FloatArray
    uniform_losses: FloatArray
    stages: tuple[tuple[int, float], ...]


def weigh_scores(
    job: WeighingJob,
    train: Sequence[WeighedPrompt],
    held_out: Sequence[WeighedPrompt],
    seed: int,
    done: Callable[[int], None],
    state: StateFile | None = None,
) -> WeighingStage:
    """Adam on the logarithms of the weights; the best stage on the held-out prompts.

    Parameters
    ----------
    job : WeighingJob
    train, held_out : sequence of WeighedPrompt
    seed : int
        Of the prompts' order.
    done : callable
        Called with the number of steps done.
    state : StateFile, optional
        Where the descent goes on from, and where each step is kept.
    """
    weighing, scores = job.weighing, train[0].scores
    size = (*scores.shape[1:3], scores.shape[0])
    first = torch.full(size, np.log(weighing.other_weight), device=scores.device)
    first[..., 0] = 0.0
    logarithms = first.requires_grad_(True)
    variables = {"logarithms": logarithms}
    adam = torch.optim.Adam([logarithms], lr=weighing.learning_rate)
    course = _resumed(state, adam, variables)
    if course is None:
        course = _begun(job, train, held_out, logarithms)
    else:
        done(course.steps_done)
    order = np.random.default_rng(seed).permutation(len(train))
    for step in range(course.steps_done, weighing.steps):
        softness = weighing.softness_at(step)
        adam.zero_grad()
        for place in range(weighing.batch):
            which = int(order[(step * weighing.batch + place) % len(train)])
            loss = train[which].soft_loss(job, logarithms, softness) / course.scales[which]
            (slope,) = torch.autograd.grad(loss / weighing.batch, [logarithms])
            logarithms.grad = slope if logarithms.grad is None else logarithms.grad + slope
        adam.step()
        course = replace(course, steps_done=step + 1)
        if step + 1 in weighing.check_steps:
            course = course.checked(*_checked(job, held_out, logarithms))
        if state is not None:
            state.save({**adam_tensors(adam, variables), **course.tensors()}, course.values())
        done(step + 1)
    return course.best


@dataclass(frozen=True, kw_only=True)
class _Course:
    """How far a descent has come, and the best that it has seen.

    Attributes
    ----------
    steps_done : int
    scales : tuple of float
        What each prompt's loss is divided by.
    best : WeighingStage
    """

    steps_done: int
    scales: tuple[float, ...]
    best: WeighingStage

    def checked(self, weights: Tensor, losses: FloatArray) -> _Course:
        """With the held-out losses of what the descent has come to."""
        best = self.best
        stages = (*best.stages, (self.steps_done, float(losses.mean())))
        least, now = (
            (found / (best.uniform_losses + _LOSS_FLOOR)).mean()  # each over that of equal budgets
            for found in (best.held_out_losses, losses)
        )
        if now < least:
            best = replace(best, weights=weights, held_out_losses=losses)
        return replace(self, best=replace(best, stages=stages))

    def tensors(self) -> dict[str, Tensor]:
        """For a `StateFile`."""
        best = self.best
        arrays = {"held_out": best.held_out_losses, "uniform": best.uniform_losses}
        return {name: torch.from_numpy(array) for name, array in arrays.items()} | {
            "weights": best.weights
        }

    def values(self) -> dict[str, Any]:
        """For a `StateFile`."""
        return {"steps_done": self.steps_done, "scales": self.scales, "stages": self.best.stages}


def _begun(
    job: WeighingJob,
    train: Sequence[WeighedPrompt],
    held_out: Sequence[WeighedPrompt],
    logarithms: Tensor,
) -> _Course:
    uniform = _uniform_losses(job, held_out, tuple(logarithms.shape))
    weights, losses = _checked(job, held_out, logarithms)
    return _Course(
        steps_done=0,
        scales=tuple(one.hard_loss(job, weights) + _LOSS_FLOOR for one in train),
        best=WeighingStage(
            weights=weights,
            held_out_losses=losses,
            uniform_losses=uniform,
            stages=((0, float(losses.mean())),),
        ),
    )


def _resumed(
    state: StateFile | None, adam: torch.optim.Adam, variables: dict[str, Tensor]
) -> _Course | None:
    """Where a killed descent stood, its variables put back; None where there is none."""
    found = None if state is None else state.load()
    if found is None:
        return None
    tensors, values = found
    restore_adam(adam, variables, tensors)
    return _Course(
        steps_done=int(values["steps_done"]),
        scales=tuple(values["scales"]),
        best=WeighingStage(
            weights=tensors["weights"].to(variables["logarithms"].device),
            held_out_losses=tensors["held_out"].numpy(),
            uniform_losses=tensors["uniform"].numpy(),
            stages=tuple((int(step), float(loss)) for step, loss in values["stages"]),
        ),
    )


def _checked(
    job: WeighingJob, held_out: Sequence[WeighedPrompt], logarithms: Tensor
) -> tuple[Tensor, FloatArray]:
    """Weights, and what they lose on each held-out prompt."""
    weights = logarithms.detach().exp()
    weights = weights / weights.amax()  # only their proportions count
    return weights, np.array([one.hard_loss(job, weights) for one in held_out])


def _uniform_losses(
    job: WeighingJob, held_out: Sequence[WeighedPrompt], size: tuple[int, ...]
) -> FloatArray:
    weights = torch.zeros(size, device=held_out[0].scores.device)
    weights[..., 0] = 1.0
    units = size[0] * size[1]
    found = []
    for one in held_out:
        total = job.total(one.probe.n_tokens)
        equal = np.full(units, total // units) + (np.arange(units) < total % units)
        found.append(one.hard_loss(job, weights, equal.reshape(size[:2])))
    return np.array(found)


def _threshold(places: Tensor, part: float, softness: float) -> Tensor:
    """Where ``sigmoid((places - lambda) / softness)`` has that mean, with lambda's derivative."""
    with torch.no_grad():
        low, high = places.min() - 50 * softness, places.max() + 50 * softness
        for _ in range(50):
            middle = (low + high) / 2
            above = torch.sigmoid((places - middle) / softness).mean() > part
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        inner = torch.sigmoid((places - low) / softness)
        slope = inner * (1 - inner)
        shares = slope / slope.sum()
    # the part stays what it is: where scores rise, lambda rises with their weighted mean
    shift = (shares * places).sum()
    found: Tensor = low + shift - shift.detach()
    return found
