"""Tuning: budgets by the loss of the whole cache, refined around a solution."""

from __future__ import annotations

from kvalloc.tuning.refinement import refine
from kvalloc.tuning.tasks import refinement_prompts

__all__ = ["refine", "refinement_prompts"]
