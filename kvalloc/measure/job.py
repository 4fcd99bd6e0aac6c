"""One profiling job: what decides its numbers, and what is done already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.formats.policy import Policy
from kvalloc.formats.sharing_groups import runs_of
from kvalloc.measure.checkpoint import Checkpoint, job_record
from kvalloc.measure.loss_plan import LossPlan, own_policy
from kvalloc.measure.sampling import SampleSet
from kvalloc.scorers import Scorer
from kvalloc.shape import ModelShape

if TYPE_CHECKING:
    from kvalloc.models.attention import AttentionStates

MEASURED_LAYERS = 20
"""About what measuring a layer's losses takes, in layers of a mini-prefill; for the time left."""


@dataclass(frozen=True, kw_only=True)
class MeasuredSample:
    """What one sample gave.

    Attributes
    ----------
    curves : ndarray of float64, (n_layers, n_kv_heads, n_points)
        Retention at the profile's ranks.
    masses : ndarray of float64, (n_layers, n_kv_heads)
        Evictable score mass.
    interpolation_error : float
        Largest difference between a curve and its interpolation.
    losses, loss_stderr : ndarray of float64, (n_layers, n_kv_heads or 1, n_policies, n_levels),
            or None
        Loss curves and their standard errors, where those are measured; the scorer's own first.
    fidelity : ndarray of float64, (n_layers, n_kv_heads, n_bits), or None
        What each bit width leaves of the attention output, where that was asked for.
    shared : ndarray of float64, (n_runs, n_kv_heads, n_points), or None
        Joint curves of the runs of layers that share, where those are measured.
    """

    curves: FloatArray
    masses: FloatArray
    interpolation_error: float
    losses: FloatArray | None = None
    loss_stderr: FloatArray | None = None
    fidelity: FloatArray | None = None
    shared: FloatArray | None = None

    def arrays(self) -> dict[str, FloatArray]:
        """Those that were measured, by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: array for name, array in named.items() if isinstance(array, np.ndarray)}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One measurement, fully decided.

    Attributes
    ----------
    model : transformers.PreTrainedModel
    shape : ModelShape
    scorer : Scorer
    sinks, context_tokens : int
        Of the score profile.
    ranks : ndarray of int64, (n_points,)
        Where curves are stored.
    samples : SampleSet
    batch : int
        Samples of equal length that run together.
    losses : LossPlan or None
        How losses are measured, if they are.
    bits : tuple of int
        Bit widths whose fidelity is measured.
    share_length : int
        Longest run of layers whose joint curves are measured; 1 for none.
    states : mapping of int to AttentionStates, or None
        What each full-attention layer saw of the one sample, where that is known; then no
        mini-prefill is run.
    """

    model: Any
    shape: ModelShape
    scorer: Scorer
    sinks: int
    context_tokens: int
    ranks: IntArray
    samples: SampleSet
    batch: int = 1
    losses: LossPlan | None = None
    bits: tuple[int, ...] = ()
    share_length: int = 1
    states: Mapping[int, AttentionStates] | None = None

    @property
    def shared_runs(self) -> IntArray:
        """Runs of layers whose joint curves are measured, ``(n_runs, 2)``: first and length."""
        return runs_of(self.shape.full_layers, self.share_length)

    @property
    def protected_tokens(self) -> int:
        """Sinks and window, which every budget includes."""
        return self.sinks + self.scorer.window

    @property
    def loss_plan(self) -> LossPlan:
        """How losses are measured, of a job that measures them."""
        assert self.losses is not None
        return self.losses

    @property
    def loss_levels(self) -> IntArray:
        """Budgets at which losses are measured; none where they are not."""
        if self.losses is None:
            return np.empty(0, dtype=np.int64)
        return self.losses.levels(self.context_tokens, self.protected_tokens)

    @property
    def loss_layers(self) -> int:
        """What measuring the losses of one layer takes, in layers of a mini-prefill."""
        if self.losses is None:
            return 0
        every = self.losses.method == "measured" and self.losses.probes is None
        return (MEASURED_LAYERS if every else 1) * len(self.policies)

    @cached_property
    def policies(self) -> tuple[Policy, ...]:
        """Whose losses are measured: the scorer's best entries first."""
        own = own_policy(self.scorer, self.sinks)
        if self.losses is None:
            return (own,)
        return (own, *self.losses.named_policies(self.scorer, sinks=self.sinks))

    def groups(self) -> Iterator[list[int]]:
        """Samples that run together: neighbours of equal length, at most `batch`."""
        group: list[int] = []
        for index, ids in enumerate(self.samples.token_ids):
            if group and (
                len(group) == self.batch or ids.size != self.samples.token_ids[group[0]].size
            ):
                yield group
                group = []
            group.append(index)
        if group:
            yield group

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the arrays of one sample, by name, without those that are not wanted."""
        layers, heads, points = self.shape.n_layers, self.shape.n_kv_heads, self.ranks.size
        sizes: dict[str, tuple[int, ...]] = {
            "curves": (layers, heads, points),
            "masses": (layers, heads),
        }
        if self.bits:
            sizes["fidelity"] = (layers, heads, len(self.bits))
        if n_runs := len(self.shared_runs):
            sizes["shared"] = (n_runs, heads, points)
        if self.losses is not None:
            units = heads if self.losses.level == "head" else 1
            losses = (layers, units, len(self.policies), self.loss_levels.size)
            sizes |= {"losses": losses, "loss_stderr": losses}
        return sizes

    def finished(self, kept: Checkpoint | None, place: int) -> MeasuredSample | None:
        """A finished sample, or None when there is none that can be trusted."""
        found = None if kept is None else kept.load(_name(place))
        if found is None:
            return None
        arrays, values = found
        sound = {name: array.shape for name, array in arrays.items()} == self.sizes()
        if not sound or not all(np.isfinite(array).all() for array in arrays.values()):
            return None
        named: dict[str, Any] = {**arrays, **values}
        return MeasuredSample(**named)

    def keep(self, kept: Checkpoint | None, place: int, sample: MeasuredSample) -> None:
        """Keep a finished sample."""
        if kept is not None:
            values = {"interpolation_error": sample.interpolation_error}
            kept.save(_name(place), sample.arrays(), values)

    def record(self) -> dict[str, Any]:
        """Everything that decides the numbers, for the manifest of a checkpoint."""
        from kvalloc.models.attention import base_implementation

        return {
            **job_record(self.model, self.shape),
            "attention": base_implementation(self.model.config),
            "scorer": self.scorer.name,
            "scorer_parameters": self.scorer.parameters(),
            "context_tokens": self.context_tokens,
            "sinks": self.sinks,
            "samples": len(self.samples.token_ids),
            "text_digest": self.samples.digest(),
            "answers": self.samples.answers_digest(),
            "batch": self.batch,
            "losses": None if self.losses is None else self.losses.record(),
            "bits": self.bits,
            "share_length": self.share_length,
        }


def _name(place: int) -> str:
    return f"sample_{place:05d}"
