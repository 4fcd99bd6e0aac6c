"""Measuring: from model and text to a score profile."""

from __future__ import annotations

from kvalloc.measure.profiling import profile
from kvalloc.prompts.texts import Document, Prompt, default_texts, read_prompts, read_texts

__all__ = [
    "Document",
    "Prompt",
    "default_texts",
    "profile",
    "read_prompts",
    "read_texts",
]
