"""Prompts whose budgets are decided for themselves: what tests of it run, and how long they are."""

from __future__ import annotations

from typing import Any

import torch

CONTEXT, SINKS, NEW = 70, 2, 6
WINDOW = {"window": 4}
TARGET: dict[str, Any] = {"sinks": SINKS, "scorer_options": WINDOW}


def run(model: Any, ids: torch.Tensor, cache: Any, mask: Any = None) -> torch.Tensor:
    with torch.no_grad():
        out = model(ids, attention_mask=mask, past_key_values=cache)
    logits: torch.Tensor = out.logits
    return logits


def generate(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    settings = {"max_new_tokens": NEW, "do_sample": False, **options}
    mask = settings.pop("attention_mask", torch.ones_like(ids))
    with torch.no_grad():
        out: torch.Tensor = model.generate(ids, attention_mask=mask, **settings)
    return out
