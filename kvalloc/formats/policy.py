"""Which entries are kept within a budget: the record of it that both kinds of profile hold."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

from pydantic import Field

from kvalloc.formats.record import Record

BY_SCORE = ("score", "attention_matching")
"""Policies that keep the best by score, whatever they do with the rest."""


class Policy(Record):
    """How the runtime picks which entries to keep within a budget."""

    NAME: ClassVar[str] = "policy"

    scorer: str
    """Name of the scorer."""

    scorer_parameters: dict[str, Any]
    """What rebuilds the scorer."""

    sinks: int = Field(ge=0)
    """First tokens of the prompt, never evicted and part of every budget."""

    window: int = Field(ge=0)
    """Last tokens of the prompt, likewise."""

    name: str = "score"
    """Name of the policy; ``score`` keeps the scorer's best entries."""

    parameters: dict[str, Any] = Field(default_factory=dict)
    """What rebuilds the policy, apart from the scorer."""

    @cached_property
    def protected_tokens(self) -> int:
        """Sinks plus window."""
        return self.sinks + self.window

    @property
    def title(self) -> str:
        """Its name in tables: its own, or that of its scorer."""
        return self.scorer if self.name == "score" else self.name
