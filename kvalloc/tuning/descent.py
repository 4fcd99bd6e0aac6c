"""Descent on the loss of the whole reduced cache, in the budgets and policies of all heads.

How much of each entry is kept is made a smooth function of its head's budget and policy; the
gradient of the loss then says at once which heads are starved and which have entries to spare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.accounting.rounding import apportion
from kvalloc.errors import InputError
from kvalloc.formats.policy import Policy
from kvalloc.measure.loss_probe import LossProbe
from kvalloc.runtime.policies import policy_of
from kvalloc.scorers import get_scorer
from kvalloc.tuning.descent_settings import DescentSettings, between
from kvalloc.tuning.descent_state import StateFile, adam_tensors, restore_adam

if TYPE_CHECKING:
    from kvalloc.measure.sampling import SampleSet
    from kvalloc.shape import ModelShape


_LEAST_PART = 1e-6
_SCALE_FLOOR = 0.02


@dataclass(frozen=True, kw_only=True)
class Descent(DescentSettings):
    """How the descent goes.

    The learning rate is that of the logits of shares and policies, and the softness a share of the
    prompt's entries, over which a head's rank threshold is smeared.

    Attributes
    ----------
    temperature : tuple of float
        At the beginning and at the end: of each head's softmax over the policies.

    Raises
    ------
    InputError
        If a value is out of range.
    """

    steps: int = 60
    batch: int = 5
    continuation_tokens: int = 16
    learning_rate: float = 0.25
    softness: tuple[float, float] = (0.04, 0.004)
    temperature: tuple[float, float] = (1.0, 0.05)
    checks: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.temperature) <= 0:
            raise InputError("temperatures must be above 0")


@dataclass(frozen=True, kw_only=True)
class DescentJob:
    """What is decided, and how."""

    shape: ModelShape
    share: float
    context: int
    protected: int
    descent: Descent

    @property
    def evictable_share(self) -> float:
        """Share of the evictable entries that all heads keep in the mean."""
        wanted = self.share * self.context - self.protected
        return wanted / (self.context - self.protected)

    def budgets(self, shares: FloatArray, n_tokens: int) -> IntArray:
        """Whole numbers of entries at a length, sinks and window included, `(n_full, n_heads)`."""
        room = n_tokens - self.protected
        total = int(self.evictable_share * room * shares.size)
        kept = apportion(shares.ravel() * room, total, maximum=np.full(shares.size, room))
        return kept.reshape(shares.shape) + self.protected


@dataclass(frozen=True, kw_only=True)
class ReadPrompt:
    """A prompt with its full cache, and every policy's ranking.

    Attributes
    ----------
    probe : LossProbe
    ranks : Tensor of int32, (n_policies, n_full_layers, n_kv_heads, n_tokens)
        Place of each entry, from 0; sinks and window come first.
    """

    probe: LossProbe
    ranks: Tensor

    @classmethod
    def read(
        cls,
        model: Any,
        found: SampleSet,
        index: int,
        policies: Sequence[Policy],
        shape: ModelShape,
        descent: Descent,
    ) -> ReadPrompt:
        """Read one of the samples with the full cache, and let every policy rank its entries."""
        device = model.get_input_embeddings().weight.device
        built = [policy_of(policy) for policy in policies]
        own = policies[0]
        answer, question = found.answer_ids[index], found.question_ids[index]
        probe = LossProbe(
            model,
            torch.from_numpy(found.token_ids[index]).to(device),
            get_scorer(own.scorer, **own.scorer_parameters),
            sinks=own.sinks,
            shape=shape,
            answer_ids=None if answer is None else torch.from_numpy(answer).to(device),
            continuation_tokens=descent.continuation_tokens,
            question_ids=None if question is None else torch.from_numpy(question),
            policies=built,
        )
        layers = [
            torch.stack(
                [_ranks(policy.scorer.score(states, sinks=own.sinks)[0], own) for policy in built]
            )
            for _, states in sorted(probe.prompt_states.items())
        ]
        probe.prompt_states.clear()  # their queries are not needed again
        return cls(probe=probe, ranks=torch.stack(layers, dim=1))

    def soft_loss(
        self, job: DescentJob, shares: Tensor, mixture: Tensor, softness: float
    ) -> Tensor:
        """Loss with the policies' soft masks mixed, differentiable in shares and mixture."""
        n_tokens = self.probe.n_tokens
        room = n_tokens - job.protected
        threshold = shares * room + (job.protected - 0.5)
        parts = torch.sigmoid((threshold[None, ..., None] - self.ranks) / (softness * room))
        mixed = torch.einsum("lhp,plht->lht", mixture, parts)
        mixed = mixed.clamp(min=_LEAST_PART).masked_fill(self.ranks[0] < job.protected, 1.0)
        return self.probe.soft_loss(dict(zip(job.shape.full_layers, mixed, strict=True)))

    def hard_loss(self, job: DescentJob, shares: FloatArray, places: IntArray) -> float:
        """Loss of the budgets themselves, with one policy a head."""
        budgets = torch.from_numpy(job.budgets(shares, self.probe.n_tokens))
        index = torch.from_numpy(places)[None, ..., None].expand(1, *self.ranks.shape[1:])
        ranks = self.ranks.gather(0, index.to(self.ranks.device))[0]
        keep = ranks < budgets.to(ranks.device)[..., None]
        settled = self.probe.settle(dict(zip(job.shape.full_layers, keep, strict=True)))
        return float(settled.losses.mean())


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The best stage of a descent on the held-out prompts."""

    shares: FloatArray
    places: IntArray
    held_out_losses: FloatArray
    uniform_losses: FloatArray
    stages: tuple[tuple[int, float], ...]


def descend(
    job: DescentJob,
    train: Sequence[ReadPrompt],
    held_out: Sequence[ReadPrompt],
    n_policies: int,
    seed: int,
    done: Callable[[int], None],
    state: StateFile | None = None,
) -> Stage:
    """Adam on the logits of shares and policies; the best stage, equal budgets among them."""
    descent = job.descent
    size = (len(job.shape.full_layers), job.shape.n_kv_heads)
    device = train[0].ranks.device
    theta = torch.zeros(size, device=device, requires_grad=True)
    mixing = torch.zeros(*size, n_policies, device=device, requires_grad=True)
    variables = {"theta": theta, "mixing": mixing}
    adam = torch.optim.Adam([theta, mixing], lr=descent.learning_rate)
    course = _resumed(state, adam, variables)
    if course is None:
        course = _begun(job, train, held_out)
    else:
        done(course.steps_done)
    order = np.random.default_rng(seed).permutation(len(train))
    for step in range(course.steps_done, descent.steps):
        softness = descent.softness_at(step)
        temperature = between(descent.temperature, 1 - step / descent.steps)
        adam.zero_grad()
        for place in range(descent.batch):
            which = int(order[(step * descent.batch + place) % len(train)])
            shares = _shares(theta, job.evictable_share)
            mixture = (mixing / temperature).softmax(dim=-1)
            loss = train[which].soft_loss(job, shares, mixture, softness) / course.scales[which]
            slopes = torch.autograd.grad(loss / descent.batch, [theta, mixing])
            for variable, slope in zip((theta, mixing), slopes, strict=True):
                variable.grad = slope if variable.grad is None else variable.grad + slope
        adam.step()
        course = replace(course, steps_done=step + 1)
        if step + 1 in descent.check_steps:
            with torch.no_grad():
                now = _shares(theta, job.evictable_share).double().cpu().numpy()
                places = mixing.argmax(dim=-1).cpu().numpy()
            course = course.checked(now, places, _losses(job, held_out, now, places))
        if state is not None:
            state.save({**adam_tensors(adam, variables), **course.tensors()}, course.values())
        done(step + 1)
    return course.stage()


@dataclass(frozen=True, kw_only=True)
class Course:
    """How far a descent has come, and the best that it has seen.

    Attributes
    ----------
    steps_done : int
    scales : tuple of float
        What each prompt's loss is divided by.
    uniform : ndarray of float64, (n_held_out,)
        Held-out losses of equal budgets.
    shares, places : ndarray, (n_full_layers, n_kv_heads)
        The best so far: shares of the evictable entries, and policies.
    losses : ndarray of float64, (n_held_out,)
        Its held-out losses.
    stages : tuple of (int, float)
        Mean held-out loss after so many steps.
    """

    steps_done: int
    scales: tuple[float, ...]
    uniform: FloatArray
    shares: FloatArray
    places: IntArray
    losses: FloatArray
    stages: tuple[tuple[int, float], ...]

    def checked(self, shares: FloatArray, places: IntArray, losses: FloatArray) -> Course:
        """With the held-out losses of what the descent has come to."""
        known = replace(self, stages=(*self.stages, (self.steps_done, float(losses.mean()))))
        if _score(losses, self.uniform) < _score(self.losses, self.uniform):
            return replace(known, shares=shares, places=places, losses=losses)
        return known

    def stage(self) -> Stage:
        """The best that was seen."""
        return Stage(
            shares=self.shares,
            places=self.places,
            held_out_losses=self.losses,
            uniform_losses=self.uniform,
            stages=self.stages,
        )

    def tensors(self) -> dict[str, Tensor]:
        """For a `StateFile`."""
        return {name: torch.from_numpy(getattr(self, name)) for name in _COURSE_ARRAYS}

    def values(self) -> dict[str, Any]:
        """For a `StateFile`."""
        return {"steps_done": self.steps_done, "scales": self.scales, "stages": self.stages}


_COURSE_ARRAYS = ("uniform", "shares", "places", "losses")


def _begun(job: DescentJob, train: Sequence[ReadPrompt], held_out: Sequence[ReadPrompt]) -> Course:
    """Equal budgets with the first policy, and what they lose."""
    size = (len(job.shape.full_layers), job.shape.n_kv_heads)
    equal, first = np.full(size, job.evictable_share), np.zeros(size, dtype=np.int64)
    uniform = _losses(job, held_out, equal, first)
    return Course(
        steps_done=0,
        scales=tuple(sample.hard_loss(job, equal, first) + _SCALE_FLOOR for sample in train),
        uniform=uniform,
        shares=equal,
        places=first,
        losses=uniform,
        stages=((0, float(uniform.mean())),),
    )


def _resumed(
    state: StateFile | None, adam: torch.optim.Adam, variables: dict[str, Tensor]
) -> Course | None:
    """Where a killed descent stood, its variables put back; None where there is none."""
    found = None if state is None else state.load()
    if found is None:
        return None
    tensors, values = found
    restore_adam(adam, variables, tensors)
    return Course(
        steps_done=int(values["steps_done"]),
        scales=tuple(values["scales"]),
        stages=tuple((int(step), float(loss)) for step, loss in values["stages"]),
        **{name: tensors[name].numpy() for name in _COURSE_ARRAYS},
    )


def _shares(theta: Tensor, mean: float) -> Tensor:
    """``sigmoid(theta + lambda)`` with the given mean, lambda's own derivative included."""
    with torch.no_grad():
        low, high = -40.0 - theta.max(), 40.0 - theta.min()
        for _ in range(60):
            middle = (low + high) / 2
            below = torch.sigmoid(theta + middle).mean() < mean
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        slope = torch.sigmoid(theta + low) * torch.sigmoid(-theta - low)
        weights = slope / slope.sum()
    # the mean stays what it is: what one head's theta brings, lambda takes from all
    shift = (weights * theta).sum()
    return torch.sigmoid(theta + low - (shift - shift.detach()))


def _score(losses: FloatArray, uniform: FloatArray) -> float:
    """What stages are compared by: each prompt's loss over that of equal budgets."""
    return float((losses / (uniform + _SCALE_FLOOR)).mean())


def _losses(
    job: DescentJob, samples: Sequence[ReadPrompt], shares: FloatArray, places: IntArray
) -> FloatArray:
    return np.array([sample.hard_loss(job, shares, places) for sample in samples])


def held_out(n_samples: int, share: float, seed: int) -> set[int]:
    """Which prompts no step sees: spread evenly over the file, so that each kind is among them."""
    count = min(max(1, round(share * n_samples)), n_samples - 1)
    edges = [number * n_samples // count for number in range(count + 1)]
    draw = np.random.default_rng(seed)
    return {int(draw.integers(low, high)) for low, high in zip(edges, edges[1:], strict=False)}


def _ranks(scores: Tensor, policy: Policy) -> Tensor:
    """Place of each entry in the order in which it is kept, `(n_kv_heads, n_tokens)`."""
    n_tokens = scores.shape[-1]
    place = torch.arange(n_tokens, device=scores.device)
    always = (place < policy.sinks) | (place >= n_tokens - policy.window)
    order = scores.float().masked_fill(always, float("inf"))
    # stable: among equal scores the earlier position wins, as at run time
    best = torch.argsort(order, dim=-1, descending=True, stable=True)
    ranks = torch.empty_like(best)
    ranks.scatter_(-1, best, place.expand_as(best))
    return ranks.int()
