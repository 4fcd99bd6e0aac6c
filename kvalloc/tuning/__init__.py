"""Refining: measure around a solution, correct the loss curves there, and solve again."""

from __future__ import annotations

from kvalloc.tuning.refine_prompts import refinement_prompts
from kvalloc.tuning.refinement import refine

__all__ = ["refine", "refinement_prompts"]
