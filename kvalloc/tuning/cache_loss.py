"""What a prompt loses in a cache that is really reduced, whatever its policy does with entries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvalloc.measure.mini_prefill import evaluating

if TYPE_CHECKING:
    from kvalloc.measure.loss_probe import LossProbe

__all__ = ["cache_loss"]


def cache_loss(model: Any, cache: Any, prompt_ids: Tensor, probe: LossProbe) -> float:
    """Mean KL(full cache || this cache) over the predictions of a probe's continuation.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    cache : transformers.Cache
        Empty; holds the prompt and its continuation afterwards.
    prompt_ids : Tensor of int64, (n_tokens,)
        The prompt of the probe.
    probe : LossProbe
        Has the full cache's predictions.

    Returns
    -------
    float
        Nats per token.
    """
    with torch.no_grad(), evaluating(model):
        model(input_ids=prompt_ids[None], past_key_values=cache, logits_to_keep=1)
        logits = model(input_ids=probe.continuation_ids[None], past_key_values=cache).logits
        return float(probe.divergence(logits).mean())
