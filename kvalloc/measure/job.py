"""Profiling jobs: all settings that decide the numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.engine.contract import Advance, Engine, Failed, ModelFacts
from kvalloc.errors import InputError
from kvalloc.measure.checkpoint import Checkpoint
from kvalloc.measure.curves import EXACT_CONTEXT_TOKENS, rank_grid
from kvalloc.measure.sampling import SampleSet
from kvalloc.scorers import Scorer
from kvalloc.shape import ModelShape

if TYPE_CHECKING:
    from kvalloc.runtime.policies.score import Score

LossLevel = Literal["layer", "head"]
LossMethod = Literal["measured", "fast"]

DEFAULT_SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7)
"""Shares of the evictable entries that a unit is reduced to, besides all."""


@dataclass(frozen=True, kw_only=True)
class LossPlan:
    """Settings for measuring losses.

    Attributes
    ----------
    method : {"measured", "fast"}
        A forward for every unit and level, or the second-order estimate.
    level : {"layer", "head"}
        Unit that is reduced alone.
    continuation_tokens : int
        Largest number of compared predictions.
    matched, interval : int
        `attention_matching` fits values to ``matched`` last queries, at this interval; 0 changes
        none.

    Raises
    ------
    InputError
        If a value is out of range.
    """

    method: LossMethod = "measured"
    level: LossLevel = "layer"
    shares: tuple[float, ...] = DEFAULT_SHARES
    continuation_tokens: int = 24
    matched: int = 0
    interval: int = 1

    def __post_init__(self) -> None:
        for name, choices in (("method", LossMethod), ("level", LossLevel)):
            if getattr(self, name) not in get_args(choices):
                raise InputError(
                    f"the loss {name} is {getattr(self, name)!r}, expected "
                    f"{' or '.join(get_args(choices))}"
                )
        if self.continuation_tokens < 1:
            raise InputError("a loss needs a continuation of at least 1 token")
        if not self.shares or not all(0 <= share <= 1 for share in self.shares):
            raise InputError(
                f"the loss levels {self.shares} are not shares within 0..1; give some such"
            )

    def policy(self, scorer: Scorer) -> Score:
        """Return the policy that keeps entries."""
        from kvalloc.runtime.policies.attention_matching import AttentionMatching
        from kvalloc.runtime.policies.score import Score

        if not self.matched:
            return Score(scorer=scorer)
        return AttentionMatching(scorer=scorer, rows=self.matched, interval=self.interval)

    def levels(self, context_tokens: int, protected_tokens: int) -> IntArray:
        """Return the budgets of losses, rising up to the context, (n_levels,)."""
        evictable = context_tokens - protected_tokens
        tokens = [protected_tokens + round(share * evictable) for share in self.shares]
        return np.unique([*tokens, context_tokens]).astype(np.int64)


CHUNK_TOKENS = 1024
"""Tokens of a long sample that run at once."""

MEASURED_LAYERS = 20
"""About what measuring a layer's losses takes, in layers of a mini-prefill; for the time left."""


Measured = dict[str, FloatArray]
"""Arrays of one sample by name; see `Job.sizes`."""


class Steps:
    """Count of finished steps; `progress` is called with (steps done, steps in all)."""

    def __init__(self, total: int, progress: Callable[[int, int], None] | None) -> None:
        self.done, self.total, self._progress = 0, total, progress

    def advance(self, steps: int = 1) -> None:
        """Count steps, never beyond the total."""
        self.done = min(self.done + steps, self.total)
        if self._progress is not None:
            self._progress(self.done, self.total)


def measured_samples(
    engine: Engine,
    measure: Callable[[Any, int, Advance], Mapping[str, Any]],
    places: Sequence[int],
    kept: Checkpoint | None,
    steps: Steps,
    *,
    sample_steps: int,
    sizes: Mapping[str, tuple[int, ...]] | None = None,
) -> tuple[dict[int, Measured], dict[int, Failed]]:
    """Return samples and failures by place; measure samples that the checkpoint does not have.

    `measure` is as for `Engine.run`; stored arrays need the shapes `sizes`.
    """
    measured, failed, left = dict[int, Measured](), dict[int, Failed](), dict[int, int]()
    for place in places:
        arrays = None if kept is None else kept.load(_name(place), sizes)
        if arrays is None:
            left[place] = place
        else:
            steps.advance(sample_steps)
            measured[place] = arrays
    for place, result in engine.run(measure, left, steps.advance):
        if isinstance(result, Failed):
            failed[place] = result
            continue
        if kept is not None:
            kept.save(_name(place), result)
        measured[place] = dict(result)
    return dict(sorted(measured.items())), failed


def _name(place: int) -> str:
    return f"sample_{place:05d}"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One measurement, fully decided.

    A shard, number from 1 and count, has every n-th sample; `bits` are widths of losses beside 16.
    """

    shape: ModelShape
    scorer: Scorer
    sinks: int
    context_tokens: int
    samples: SampleSet
    losses: LossPlan | None = None
    bits: tuple[int, ...] = ()
    shard: tuple[int, int] | None = None
    chunk: int | None = None

    @cached_property
    def ranks(self) -> IntArray:
        """Ranks of curves, (n_points,)."""
        return rank_grid(self.context_tokens - self.protected_tokens, self.context_tokens)

    @property
    def protected_tokens(self) -> int:
        """Sinks and window, in every budget."""
        return self.sinks + self.scorer.window

    @property
    def loss_levels(self) -> IntArray:
        """Budgets of losses; may be empty."""
        if self.losses is None:
            return np.empty(0, dtype=np.int64)
        return self.losses.levels(self.context_tokens, self.protected_tokens)

    @property
    def loss_layers(self) -> int:
        """Work for a layer's losses, in layers of a mini-prefill."""
        if self.losses is None:
            return 0
        layers = MEASURED_LAYERS if self.losses.method == "measured" else 1
        return layers * len(self.loss_bits)

    @property
    def sample_steps(self) -> int:
        """Work for a sample, as `loss_layers`."""
        return len(self.shape.full_layers) * (1 + self.loss_layers)

    @property
    def loss_bits(self) -> tuple[int, ...]:
        """Widths of losses, 16 first."""
        return (16, *self.bits)

    @cached_property
    def places(self) -> Sequence[int]:
        """Rising places of the measured samples.

        Raises
        ------
        InputError
            If there are fewer samples than shards.
        """
        n_samples, (number, of) = len(self.samples.samples), self.shard or (1, 1)
        if n_samples < of:
            raise InputError(
                f"{of} shards of {n_samples} samples are not possible; use at most {n_samples} "
                "shards, or more samples"
            )
        return range(number - 1, n_samples, of)

    def chunk_of(self, n_tokens: int) -> int:
        """Return a sample's tokens in one forward, at least the scorer's queries."""
        chunk = self.chunk or (n_tokens if n_tokens <= EXACT_CONTEXT_TOKENS else CHUNK_TOKENS)
        return max(chunk, self.scorer.query_rows(n_tokens), self.scorer.window)

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a sample's arrays, by name; losses if measured."""
        layers, heads, points = self.shape.n_layers, self.shape.n_kv_heads, self.ranks.size
        sizes: dict[str, tuple[int, ...]] = {
            "curves": (layers, heads, points),
            "masses": (layers, heads),
            "interpolation_error": (1,),
        }
        if self.losses is not None:
            units = heads if self.losses.level == "head" else 1
            sizes["losses"] = (layers, units, len(self.loss_bits), self.loss_levels.size)
        return sizes

    def record(self, facts: ModelFacts) -> dict[str, Any]:
        """Return the settings that decide the numbers, for a checkpoint."""
        return {
            **facts.record(),
            "scorer": self.scorer.name,
            "scorer_parameters": self.scorer.parameters(),
            "context_tokens": self.context_tokens,
            "sinks": self.sinks,
            "samples": len(self.samples.samples),
            "text_digest": self.samples.digest(),
            "answers": self.samples.answers_digest(),
            "losses": None if self.losses is None else asdict(self.losses),
            "bits": self.bits,
            "chunk": self.chunk,
            "shard": self.shard,
        }
