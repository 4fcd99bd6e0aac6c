"""Tuning: budgets by the loss of the whole cache, refined around a solution or by descent."""

from __future__ import annotations

from kvalloc.tuning.refinement import refine
from kvalloc.tuning.tasks import refinement_prompts
from kvalloc.tuning.tuned_profile import tune, tune_each

__all__ = ["refine", "refinement_prompts", "tune", "tune_each"]
