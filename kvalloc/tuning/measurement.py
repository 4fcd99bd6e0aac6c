"""Losses of whole choices: all units at their budgets at once, and one unit changed around that."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.errors import InputError
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.measure.checkpoint import Checkpoint
from kvalloc.measure.loss_curves import budget_of_prompt, kept_entries
from kvalloc.measure.loss_probe import LossProbe, Settled
from kvalloc.measure.sampling import SampleSet
from kvalloc.problem import AllocationProblem
from kvalloc.runtime.policies import policy_of
from kvalloc.scorers import get_scorer
from kvalloc.tuning.correction import Figures, kinds_of, policies_at

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
    kept : Checkpoint, optional
        Where finished measurements are kept.
    """

    def __init__(
        self,
        model: Any,
        scores: ScoreProfile,
        samples: SampleSet,
        *,
        continuation_tokens: int = 24,
        kept: Checkpoint | None = None,
    ) -> None:
        self._model, self._scores, self._samples = model, scores, samples
        self._continuation_tokens, self._kept = continuation_tokens, kept
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
        name = f"measured_{_digest(index, problem, choice, figures)}"
        found = None if self._kept is None else self._kept.load(name)
        if found is not None:
            return Measured(loss=found[1]["loss"], changes=found[0]["changes"])
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
        if self._kept is not None:
            self._kept.save(name, {"changes": changes}, {"loss": loss})
        return Measured(loss=loss, changes=changes)

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
            tokens = int(problem.tokens[unit, option])
            budget = budget_of_prompt(
                probe, tokens, problem.context_tokens, problem.protected_tokens
            )
            of = wanted.setdefault((int(problem.layers[unit]), int(places[unit, option])), {})
            of.setdefault(budget, []).append((unit, option))
        masks: _Masks = {}
        room = {"sinks": self._scores.sinks, "window": self._scores.window}
        for (layer, place), by_budget in sorted(wanted.items()):
            budgets = sorted(by_budget)
            each = kept_entries(probe, layer, place, budgets, **room)
            for budget, kept in zip(budgets, each, strict=True):
                for unit, option in by_budget[budget]:
                    masks[unit, option] = kept[_heads(problem, unit)]
        return masks

    def _keep(
        self, masks: _Masks, problem: AllocationProblem, layer: int, choice: IntArray
    ) -> Tensor:
        """What a layer keeps at a choice, ``(n_kv_heads, n_tokens)``."""
        units = np.flatnonzero(problem.layers == layer)
        order = units[np.argsort(problem.heads[units])].tolist()
        return torch.cat([masks[unit, int(choice[unit])] for unit in order])

    def _probe(self, index: int) -> LossProbe:
        if index in self._probes:
            self._probes.move_to_end(index)
            return self._probes[index]
        try:
            probe = LossProbe.of_sample(
                self._model,
                self._samples,
                index,
                self._scorer,
                sinks=self._scores.sinks,
                shape=self._scores.shape,
                continuation_tokens=self._continuation_tokens,
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
