"""Losses of whole choices: all units at their budgets at once, and one unit changed around that."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.errors import InputError
from kvalloc.files import atomic_write
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.measure.checkpoint import Checkpoint
from kvalloc.measure.loss_probe import LossProbe, Settled
from kvalloc.measure.sampling import SampleSet
from kvalloc.problem import AllocationProblem
from kvalloc.runtime.policies import policy_of
from kvalloc.runtime.refusals import check_kept
from kvalloc.runtime.selection import keep_best
from kvalloc.scorers import get_scorer
from kvalloc.tuning.neighbours import Figures, kinds_of, policies_at

HELD_BYTES = 4 * 2**30
"""Prompts whose keys and values fit in so much are kept; others are read again when needed."""

BATCH = 8
"""Variants that run together."""

_Masks = dict[tuple[int, int], Tensor]
"""What the heads of a unit keep at an option, ``(n_heads, n_tokens)``."""


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
        self._policies = [policy_of(policy) for policy in scores.loss_policies]
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
        masks = self._masks(probe, problem, choice, figures)
        settled = probe.settle(
            {
                layer: self._keep(masks, problem, layer, choice)
                for layer in sorted(set(problem.layers.tolist()))
            }
        )
        loss = float(settled.losses.mean())
        changes = self._changes(probe, problem, figures, settled, masks, loss)
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
        masks: _Masks,
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
                        _changed(masks, problem, settled, int(figures.units[f]), option)
                        for f, option in zip(some, figures.options[some].tolist(), strict=True)
                    ]
                )
                found = probe.losses(layer, variants, around=settled).mean(dim=1)
                changes[some] = found.cpu().numpy() - loss
        return changes

    def _masks(
        self, probe: LossProbe, problem: AllocationProblem, choice: IntArray, figures: Figures
    ) -> _Masks:
        """What is kept at every option that is measured, each policy and budget of a layer once."""
        places = policies_at(problem)
        wanted: dict[tuple[int, int], dict[int, list[tuple[int, int]]]] = {}
        units = np.concatenate([np.arange(problem.n_units), figures.units])
        options = np.concatenate([choice, figures.options])
        for unit, option in set(zip(units.tolist(), options.tolist(), strict=True)):
            budget = self._budget(probe, problem, int(problem.tokens[unit, option]))
            of = wanted.setdefault((int(problem.layers[unit]), int(places[unit, option])), {})
            of.setdefault(budget, []).append((unit, option))
        masks: _Masks = {}
        for (layer, place), by_budget in sorted(wanted.items()):
            budgets = sorted(by_budget)
            for budget, kept in zip(budgets, self._kept(probe, layer, place, budgets), strict=True):
                for unit, option in by_budget[budget]:
                    masks[unit, option] = kept[_heads(problem, unit)]
        return masks

    def _kept(self, probe: LossProbe, layer: int, place: int, budgets: list[int]) -> list[Tensor]:
        """What a policy keeps of a layer at some budgets, ``(n_kv_heads, n_tokens)`` each."""
        scores = probe.scores[layer]
        rows = [torch.full((1, scores.shape[0]), one, device=scores.device) for one in budgets]
        sinks, window = self._scores.sinks, self._scores.window
        if place == 0:
            return [keep_best(scores[None], row, sinks=sinks, window=window)[0] for row in rows]
        policy = probe.policies[place - 1]
        with torch.no_grad():
            found = policy.keep_each(probe.prompt_states[layer], rows, sinks=sinks, window=window)
        for one, row in zip(found, rows, strict=True):
            check_kept(policy, one, row)
        return [one[0] for one in found]

    def _keep(
        self, masks: _Masks, problem: AllocationProblem, layer: int, choice: IntArray
    ) -> Tensor:
        """What a layer keeps at a choice, ``(n_kv_heads, n_tokens)``."""
        units = np.flatnonzero(problem.layers == layer)
        order = units[np.argsort(problem.heads[units])].tolist()
        return torch.cat([masks[unit, int(choice[unit])] for unit in order])

    def _budget(self, probe: LossProbe, problem: AllocationProblem, tokens: int) -> int:
        """The same share of a prompt's evictable entries."""
        protected = problem.protected_tokens
        share = (tokens - protected) / (problem.context_tokens - protected)
        evictable = max(0, probe.n_tokens - protected)
        return min(probe.n_tokens, protected + round(share * evictable))

    def _probe(self, index: int) -> LossProbe:
        if index in self._probes:
            self._probes.move_to_end(index)
            return self._probes[index]
        device = self._model.get_input_embeddings().weight.device
        answer = self._samples.answer_ids[index]
        question = self._samples.question_ids[index]
        try:
            probe = LossProbe(
                self._model,
                torch.from_numpy(self._samples.token_ids[index]).to(device),
                self._scorer,
                sinks=self._scores.sinks,
                shape=self._scores.shape,
                answer_ids=None if answer is None else torch.from_numpy(answer).to(device),
                continuation_tokens=self._continuation_tokens,
                question_ids=None if question is None else torch.from_numpy(question),
                policies=self._policies,
            )
        except InputError as error:
            raise InputError(f"prompt {index}: {error}") from error
        self._probes[index] = probe
        while len(self._probes) > 1 and self._held_bytes() > HELD_BYTES:
            self._probes.popitem(last=False)
        return probe

    def _held_bytes(self) -> int:
        return sum(probe.stored_bytes for probe in self._probes.values())


def _heads(problem: AllocationProblem, unit: int) -> slice:
    head = int(problem.heads[unit])
    return slice(None) if head < 0 else slice(head, head + 1)


def _changed(
    masks: _Masks, problem: AllocationProblem, settled: Settled, unit: int, option: int
) -> Tensor:
    """What a unit's layer keeps with that unit at another option."""
    keep = settled.keep[int(problem.layers[unit])][0].clone()
    keep[_heads(problem, unit)] = masks[unit, option]
    return keep


def _digest(index: int, problem: AllocationProblem, choice: IntArray, figures: Figures) -> str:
    """Names a measurement: which prompt, what every unit keeps, and what is changed."""
    kinds, units = kinds_of(problem), np.arange(problem.n_units)
    hasher = hashlib.sha256(f"{index} {problem.context_tokens}".encode())
    for rows, options in ((units, choice), (figures.units, figures.options)):
        for table in (rows, problem.tokens[rows, options], kinds[rows, options]):
            hasher.update(np.ascontiguousarray(table, dtype="<i8").tobytes() + b";")
    return hasher.hexdigest()
