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
from kvalloc.measure.loss_probe import LossProbe
from kvalloc.measure.sampling import SampleSet
from kvalloc.problem import AllocationProblem
from kvalloc.runtime.policies import policy_of
from kvalloc.scorers import get_scorer
from kvalloc.tuning.correction import Figures, bits_at, kinds_of, policies_at

HELD_BYTES = 4 * 2**30
"""Prompts whose keys and values fit in so much are kept; others are read again when needed."""

BATCH = 8
"""Variants that run together."""

_Pair = tuple[int, int]
"""A unit, and one of its options."""


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
        shapes = {"changes": (figures.size,), "loss": ()}
        found = None if self._kept is None else self._kept.load(name, shapes)
        if found is not None:
            return Measured(loss=float(found[0]["loss"]), changes=found[0]["changes"])
        probe = self._probe(index)
        masks = _masks(probe, problem, choice, figures)
        keep = {
            layer: torch.ones_like(probe.scores[layer], dtype=torch.bool)
            for layer in set(problem.layers.tolist())
        }
        bits, widths = {layer: np.full(len(keep[layer]), 16) for layer in keep}, bits_at(problem)
        for unit, option in enumerate(choice.tolist()):
            layer, heads = int(problem.layers[unit]), _heads(problem, unit)
            keep[layer][heads], bits[layer][heads] = masks[unit, option], widths[unit, option]
        settled = probe.settle(keep, bits)
        loss = float(settled.losses.mean())
        changes, layers = np.zeros(figures.size), problem.layers[figures.units]
        for layer in sorted(set(layers.tolist())):
            mine = np.flatnonzero(layers == layer)
            for begin in range(0, mine.size, BATCH):
                some = mine[begin : begin + BATCH]
                variants = keep[layer].repeat(some.size, 1, 1)
                stored = np.tile(bits[layer], (some.size, 1))
                for variant, width, figure in zip(variants, stored, some, strict=True):
                    unit, option = int(figures.units[figure]), int(figures.options[figure])
                    heads = _heads(problem, unit)
                    variant[heads], width[heads] = masks[unit, option], widths[unit, option]
                losses = probe.losses(layer, variants, bits=stored, around=settled).mean(dim=1)
                changes[some] = losses.cpu().numpy() - loss
        if not (np.isfinite(loss) and np.isfinite(changes).all()):
            raise InputError(
                f"the losses of {self._scores.shape.model_id} on prompt {index} are not finite; "
                "load the model in float32 or bfloat16, or check its weights"
            )
        if self._kept is not None:
            self._kept.save(name, {"changes": changes, "loss": np.array(loss)})
        return Measured(loss=loss, changes=changes)

    def _probe(self, index: int) -> LossProbe:
        if index in self._probes:
            self._probes.move_to_end(index)
            return self._probes[index]
        try:
            probe = LossProbe.of_sample(
                self._model,
                self._samples.samples[index],
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


def _masks(
    probe: LossProbe, problem: AllocationProblem, choice: IntArray, figures: Figures
) -> dict[_Pair, Tensor]:
    """What a unit's heads keep, ``(n_heads, n_tokens)``, where it is chosen or measured."""
    places, context = policies_at(problem), problem.context_tokens
    pairs: set[_Pair] = {*enumerate(choice.tolist())}
    pairs |= {*zip(figures.units.tolist(), figures.options.tolist(), strict=True)}
    wanted = {
        (unit, option): (
            int(problem.layers[unit]),
            int(places[unit, option]),
            probe.budget(int(problem.tokens[unit, option]), context),
        )
        for unit, option in pairs
    }
    budgets: dict[tuple[int, int], set[int]] = {}  # of a layer and policy, asked for at once
    for layer, place, budget in wanted.values():
        budgets.setdefault((layer, place), set()).add(budget)
    kept = {
        (layer, place, budget): keep
        for (layer, place), some in sorted(budgets.items())
        for budget, keep in zip(sorted(some), probe.kept(layer, place, sorted(some)), strict=True)
    }
    return {pair: kept[key][_heads(problem, pair[0])] for pair, key in wanted.items()}


def _heads(problem: AllocationProblem, unit: int) -> slice:
    head = int(problem.heads[unit])
    return slice(None) if head < 0 else slice(head, head + 1)


def _digest(index: int, problem: AllocationProblem, choice: IntArray, figures: Figures) -> str:
    """Names a measurement: which prompt, what every unit keeps, and what is changed."""
    kinds, units = kinds_of(problem), np.arange(problem.n_units)
    hasher = hashlib.sha256(f"{index} {problem.context_tokens}".encode())
    for rows, options in ((units, choice), (figures.units, figures.options)):
        for table in (rows, problem.tokens[rows, options], kinds[rows, options]):
            hasher.update(np.ascontiguousarray(table, dtype="<i8").tobytes() + b";")
    return hasher.hexdigest()
