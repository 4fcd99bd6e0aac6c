"""Losses of whole choices: all units at their budgets at once, and one unit changed around that."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvalloc.errors import InputError
from kvalloc.files import atomic_write
from kvalloc.measure.checkpoint import Checkpoint
from kvalloc.measure.loss_probe import LossProbe, Settled
from kvalloc.measure.sampling import SampleSet
from kvalloc.problem import AllocationProblem
from kvalloc.refining.neighbours import Figures, kinds_of
from kvalloc.runtime.selection import keep_best
from kvalloc.score_profile import ScoreProfile
from kvalloc.scorers import get_scorer

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

HELD_BYTES = 4 * 2**30
"""Prompts whose keys and values fit in so much are kept; others are read again when needed."""

BATCH = 8
"""Variants that run together."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one prompt says of a choice.

    Attributes
    ----------
    loss : float
        KL(full cache || reduced cache), mean over the continuation, nats per token, with every
        unit at its budget.
    changes : ndarray of float64, (n_figures,)
        What changing one unit to another option adds to that.
    """

    loss: float
    changes: FloatArray


class Store(Checkpoint):
    """Finished measurements on disk, each under the digest of what was measured."""

    def fetch(self, digest: str) -> Measured | None:
        """A finished measurement, or None when there is none that can be trusted."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            arrays = load_file(self._measured(digest))
            return Measured(loss=float(arrays["loss"][0]), changes=arrays["changes"])
        except (OSError, SafetensorError, KeyError, IndexError):
            return None

    def put(self, digest: str, measured: Measured) -> None:
        """Keep one: whole or not at all."""
        from safetensors.numpy import save_file

        with atomic_write(self._measured(digest)) as temporary:
            save_file({"loss": np.array([measured.loss]), "changes": measured.changes}, temporary)

    def _measured(self, digest: str) -> Path:
        return self._folder / f"measured_{digest}.safetensors"


class JointProbes:
    """The prompts of a refinement, each read once with the full cache.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    scores : ScoreProfile
        Names scorer, sinks and model.
    samples : SampleSet
    continuation_tokens : int
        Predictions that are compared, at most.
    store : Store, optional
        Where finished measurements are kept.
    """

    def __init__(
        self,
        model: Any,
        scores: ScoreProfile,
        samples: SampleSet,
        *,
        continuation_tokens: int = 24,
        store: Store | None = None,
    ) -> None:
        self._model, self._scores, self._samples = model, scores, samples
        self._continuation_tokens, self._store = continuation_tokens, store
        self._scorer = get_scorer(scores.scorer, **scores.scorer_parameters)
        self._probes: OrderedDict[int, LossProbe] = OrderedDict()

    @property
    def n_prompts(self) -> int:
        """Number of prompts."""
        return len(self._samples.token_ids)

    def measure(
        self, index: int, problem: AllocationProblem, choice: IntArray, figures: Figures
    ) -> Measured:
        """The loss of a choice on one prompt, and what changing single units adds to it.

        Parameters
        ----------
        index : int
            Which prompt.
        problem : AllocationProblem
        choice : ndarray of int64, (n_units,)
        figures : Figures
            Which units and options.

        Returns
        -------
        Measured

        Raises
        ------
        InputError
            If a loss is not finite.
        """
        digest = _digest(index, problem, choice, figures)
        found = None if self._store is None else self._store.fetch(digest)
        if found is not None and found.changes.size == figures.size:
            return found
        probe = self._probe(index)
        kept = {
            layer: self._keep(probe, layer, problem, choice)
            for layer in sorted(set(problem.layers.tolist()))
        }
        settled = probe.settle(kept)
        loss = float(settled.losses.mean())
        changes = self._changes(probe, problem, figures, settled, loss)
        if not (np.isfinite(loss) and np.isfinite(changes).all()):
            raise InputError(
                f"the losses of {self._scores.shape.model_id} on prompt {index} are not finite; "
                "load the model in float32 or bfloat16, or check its weights"
            )
        measured = Measured(loss=loss, changes=changes)
        if self._store is not None:
            self._store.put(digest, measured)
        return measured

    def _changes(
        self,
        probe: LossProbe,
        problem: AllocationProblem,
        figures: Figures,
        settled: Settled,
        loss: float,
    ) -> FloatArray:
        changes = np.zeros(figures.size)
        layers = problem.layers[figures.units]
        for layer in sorted(set(layers.tolist())):
            mine = np.flatnonzero(layers == layer)
            for begin in range(0, mine.size, BATCH):
                some = mine[begin : begin + BATCH]
                variants = torch.stack(
                    [
                        self._changed(probe, problem, settled, int(figures.units[f]), option)
                        for f, option in zip(some, figures.options[some].tolist(), strict=True)
                    ]
                )
                found = probe.losses(layer, variants, around=settled).mean(dim=1)
                changes[some] = found.cpu().numpy() - loss
        return changes

    def _keep(
        self, probe: LossProbe, layer: int, problem: AllocationProblem, choice: IntArray
    ) -> Tensor:
        """What a layer keeps at a choice, ``(n_kv_heads, n_tokens)``."""
        keep = torch.ones_like(probe.scores[layer], dtype=torch.bool)
        for unit in np.flatnonzero(problem.layers == layer):
            heads = self._heads(problem, int(unit))
            keep[heads] = self._best(probe, problem, int(unit), int(choice[unit]))
        return keep

    def _changed(
        self,
        probe: LossProbe,
        problem: AllocationProblem,
        settled: Settled,
        unit: int,
        option: int,
    ) -> Tensor:
        """What a unit's layer keeps with that unit at another option."""
        keep = settled.keep[int(problem.layers[unit])][0].clone()
        keep[self._heads(problem, unit)] = self._best(probe, problem, unit, option)
        return keep

    def _best(self, probe: LossProbe, problem: AllocationProblem, unit: int, option: int) -> Tensor:
        """What the heads of a unit keep at an option: the same share of a prompt's entries."""
        protected = problem.protected_tokens
        evictable = max(0, probe.n_tokens - protected)
        share = (int(problem.tokens[unit, option]) - protected) / (
            problem.context_tokens - protected
        )
        budget = min(probe.n_tokens, protected + round(share * evictable))
        ranking = probe.scores[int(problem.layers[unit])][self._heads(problem, unit)]
        budgets = torch.full((1, ranking.shape[0]), budget, device=ranking.device)
        sinks, window = self._scores.sinks, self._scores.window
        return keep_best(ranking[None], budgets, sinks=sinks, window=window)[0]

    def _heads(self, problem: AllocationProblem, unit: int) -> slice:
        head = int(problem.heads[unit])
        return slice(None) if head < 0 else slice(head, head + 1)

    def _probe(self, index: int) -> LossProbe:
        if index in self._probes:
            self._probes.move_to_end(index)
            return self._probes[index]
        device = self._model.get_input_embeddings().weight.device
        answer = self._samples.answer_ids[index]
        try:
            probe = LossProbe(
                self._model,
                torch.from_numpy(self._samples.token_ids[index]).to(device),
                self._scorer,
                sinks=self._scores.sinks,
                shape=self._scores.shape,
                answer_ids=None if answer is None else torch.from_numpy(answer).to(device),
                continuation_tokens=self._continuation_tokens,
            )
        except InputError as error:
            raise InputError(f"prompt {index}: {error}") from error
        self._probes[index] = probe
        while len(self._probes) > 1 and self._held_bytes() > HELD_BYTES:
            self._probes.popitem(last=False)
        return probe

    def _held_bytes(self) -> int:
        return sum(probe.stored_bytes for probe in self._probes.values())


def _digest(index: int, problem: AllocationProblem, choice: IntArray, figures: Figures) -> str:
    """Names a measurement: which prompt, what every unit keeps, and what is changed."""
    kinds, units = kinds_of(problem), np.arange(problem.n_units)
    hasher = hashlib.sha256(f"{index} {problem.context_tokens}".encode())
    for rows, options in ((units, choice), (figures.units, figures.options)):
        for table in (rows, problem.tokens[rows, options], kinds[rows, options]):
            hasher.update(np.ascontiguousarray(table, dtype="<i8").tobytes() + b";")
    return hasher.hexdigest()
