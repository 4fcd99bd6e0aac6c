"""Rows of a cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from kvalloc.accounting import IntArray
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.runtime.options import CacheOptions
from kvalloc.runtime.policies.base import EvictionPolicy

Within: TypeAlias = Callable[[float, int], BudgetProfile]
"""Return the budgets of a conversation, from a share and a number of tokens."""

Widths: TypeAlias = Mapping[int, IntArray]
"""Bits of each KV head, (n_kv_heads,), by rounded layer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Way:
    """Profile and options by which rows of a batch are kept.

    Attributes
    ----------
    longer_profile : BudgetProfile or None
        Budgets of longer text, used once their share holds.
    within : callable or None
        Returns budgets of a conversation that outgrows memory; by default the first shrink.
    once : bool
        Whether budgets hold for one prompt only.
    """

    profile: BudgetProfile
    options: CacheOptions = CacheOptions()
    longer_profile: BudgetProfile | None = None
    within: Within | None = None
    once: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Method(Way):
    """A `Way` checked for a model; its profile has the policy of its options.

    `policy` ranks a prompt, `after` kept and new entries. `wide` numbers take more than 16 bits.
    """

    policy: EvictionPolicy
    after: EvictionPolicy
    wide: bool = False

    def holds(self, *, in_chunks: bool) -> bool:
        """Return whether all layers evict at the end of the prompt, not as they read it."""
        across_layers = self.profile.by_prompt and not self.options.by_layer
        return (
            self.policy.scorer.later is not None
            or (self.policy.holds and in_chunks)
            or across_layers
        )

    @cached_property
    def goes_on(self) -> bool:
        """Whether rows evict after their prompt."""
        return self.profile.reduces or self.options.memory is not None

    @cached_property
    def after_in_place(self) -> EvictionPolicy:
        """Policy `after` for scattered rows, which moves no query."""
        return self.policy.turn_policy(rotates=False)

    def widths(self, profile: BudgetProfile) -> Widths:
        """Return the widths of rounded layers."""
        all_layers = self.wide and self.profile.reduces
        widths = profile.widths
        full = profile.shape.full_layers
        return {layer: widths[layer] for layer in full if all_layers or (widths[layer] != 16).any()}

    def halves(self) -> Widths:
        """Return the widths while a prompt is read: 16 bits for wide numbers."""
        return {
            layer: np.full_like(widths, 16)
            for layer, widths in (self.widths(self.profile) if self.wide else {}).items()
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One text of a batch; `repeats` are `repeat_counts` of its prompt, (n_tokens,), if any."""

    method: Method
    profile: BudgetProfile
    holds: bool = False
    prompt: int = 0
    seen: int = 0
    evicted_at: int = 0
    ranked_at: int = 0
    scattered: bool = False
    repeats: Tensor | None = None

    @property
    def after(self) -> EvictionPolicy:
        """Policy for kept and new entries."""
        return self.method.after_in_place if self.scattered else self.method.after

    @property
    def goes_on_observing(self) -> bool:
        """Whether notes of a prompt go on after it."""
        return self.method.goes_on and self.after.observes

    def budgets(self, tokens: int) -> IntArray:
        """Return a text's budgets."""
        if not tokens:
            return np.zeros_like(self.profile.budgets)
        return self.profile.budgets_for(tokens)

    @property
    def widths(self) -> Widths:
        """Widths of rounded layers."""
        return self.method.widths(self.profile)


def repeats_of(rows: Sequence[Row], among: Sequence[int]) -> dict[int, Tensor]:
    """Return known repeats of some rows."""
    return {number: known for number in among if (known := rows[number].repeats) is not None}


def scattered_rows(arguments: Mapping[str, Any], n_rows: int) -> list[bool]:
    """Return in which rows a token's position differs between axes.

    Image tokens do with M-RoPE; later text does not continue from its number.
    """
    positions = arguments.get("position_ids")
    if not isinstance(positions, Tensor) or positions.ndim < 3 or positions.shape[-1] < 2:
        return [False] * n_rows
    axes = positions[-3:]  # of four, the first one is of text
    return (axes != axes[-1:]).any(dim=0).any(dim=-1).expand(n_rows).tolist()


def with_scattered(rows: Sequence[Row], arguments: Mapping[str, Any]) -> list[Row]:
    """Return rows that know whether they are `scattered_rows`."""
    scattered = scattered_rows(arguments, len(rows))
    return [
        replace(row, scattered=row.scattered or one)
        for row, one in zip(rows, scattered, strict=True)
    ]


def alike(rows: Sequence[Row], among: Sequence[int]) -> list[list[int]]:
    """Return groups of rows that evict together."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for row in among:
        one = rows[row]
        groups.setdefault((id(one.method), id(one.profile.bits), one.scattered), []).append(row)
    return [*groups.values()]
