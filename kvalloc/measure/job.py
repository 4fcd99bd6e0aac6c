"""One profiling job: what decides its numbers, and what is done already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.files import versions
from kvalloc.formats.policy import Policy
from kvalloc.formats.sharing_groups import runs_of
from kvalloc.measure.checkpoint import MeasuredSample
from kvalloc.measure.fingerprint import fingerprint
from kvalloc.measure.loss_plan import LossPlan
from kvalloc.measure.sampling import SampleSet
from kvalloc.scorers import Scorer
from kvalloc.shape import ModelShape

if TYPE_CHECKING:
    from kvalloc.models.attention import AttentionStates


MEASURED_WITH = ("numpy", "torch", "transformers")
"""Whose versions a measurement names."""

MEASURED_LAYERS = 20
"""About what measuring a layer's losses takes, in layers of a mini-prefill; for the time left."""


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
    batch: int
    losses: LossPlan | None
    bits: tuple[int, ...] = ()
    share_length: int
    states: Mapping[int, AttentionStates] | None = None

    @property
    def shared_runs(self) -> IntArray:
        """Runs of layers whose joint curves are measured, ``(n_runs, 2)``: first and length."""
        return runs_of(self.shape.full_layers, self.share_length)

    @property
    def curves_shape(self) -> tuple[int, int, int]:
        """``(n_layers, n_kv_heads, n_points)``."""
        return self.shape.n_layers, self.shape.n_kv_heads, self.ranks.size

    @property
    def loss_levels(self) -> IntArray | None:
        """Budgets at which losses are measured, if they are."""
        if self.losses is None:
            return None
        return self.losses.levels(self.context_tokens, self.sinks + self.scorer.window)

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
        own = Policy(
            scorer=self.scorer.name,
            scorer_parameters=dict(self.scorer.parameters()),
            sinks=self.sinks,
            window=self.scorer.window,
        )
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

    def has_all(self, sample: MeasuredSample) -> bool:
        """Whether a finished sample holds the bits and losses that are wanted."""
        if (sample.fidelity is not None) != bool(self.bits):
            return False
        if self.losses is None:
            return True
        heads = self.shape.n_kv_heads if self.losses.level == "head" else 1
        assert self.loss_levels is not None
        wanted: tuple[int, ...] = (self.shape.n_layers, heads, self.loss_levels.size)
        found = [(sample.losses, wanted), (sample.loss_stderr, wanted)]
        if others := len(self.policies) - 1:
            each = (*wanted[:2], others, wanted[2])
            found += [(sample.other_losses, each), (sample.other_loss_stderr, each)]
        return all(
            array is not None and array.shape == shape and bool(np.isfinite(array).all())
            for array, shape in found
        )

    def record(self) -> dict[str, Any]:
        """Everything that decides the numbers, for the manifest of a checkpoint."""
        from kvalloc.models.attention import base_implementation

        bits = {"bits": list(self.bits)} if self.bits else {}
        return bits | {
            "model": self.shape.to_dict(),
            "weights": fingerprint(self.model),
            "dtype": str(self.model.dtype),
            "attention": base_implementation(self.model.config),
            "device": self.model.get_input_embeddings().weight.device.type,
            "scorer": self.scorer.name,
            "scorer_parameters": self.scorer.parameters(),
            "context_tokens": self.context_tokens,
            "sinks": self.sinks,
            "samples": len(self.samples.token_ids),
            "text_digest": self.samples.digest(),
            "batch": self.batch,
            **({} if self.losses is None else {"losses": self.losses.record()}),
            **({} if self.losses is None else {"answers": self.samples.answers_digest()}),
            **({"share_length": self.share_length} if self.share_length > 1 else {}),
            "versions": versions(*MEASURED_WITH),
        }
