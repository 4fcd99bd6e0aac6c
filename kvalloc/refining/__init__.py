"""Refining: measure around a solution, correct the loss curves there, and solve again."""

from __future__ import annotations

from kvalloc.refining.loop import refine
from kvalloc.refining.reading import refinement_prompts

__all__ = ["refine", "refinement_prompts"]
