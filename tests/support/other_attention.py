"""Flash and flex attention on the CPU, as far as what they are asked for goes.

Flex attention runs as it is, without its compiler. Flash attention has no CPU kernels; what stands
in for it here takes what it takes: no mask, or the padding alone, which is cut out before anything
is computed, and causal attention aligned at the end of what is left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

STAND_IN = "padding_only"  # transformers would look for a kernel whose name says flash


@contextlib.contextmanager
def attention_on_cpu(name: str) -> Iterator[None]:
    """Makes an implementation of this name run on the CPU while the ``with`` is open."""
    AttentionInterface.register(STAND_IN, stand_in)
    AttentionMaskInterface.register(STAND_IN, flash_attention_mask)
    if name != "flex_attention":
        yield
        return
    stance = torch.compiler.set_stance("force_eager")
    try:
        yield
    finally:
        stance.__exit__(None, None, None)


def stand_in(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """What `flash_attention_forward` computes, row by row."""
    batch, n_heads, n_new, width = query.shape
    n_tokens = key.shape[2]
    if attention_mask is None:
        attention_mask = torch.ones(batch, n_tokens, dtype=torch.bool)
    assert attention_mask.shape == (batch, n_tokens), "flash attention takes the padding alone"
    output = torch.zeros(batch, n_new, n_heads, value.shape[-1], dtype=query.dtype)
    group = n_heads // key.shape[1]
    scaling = width**-0.5 if scaling is None else scaling
    for row in range(batch):
        shown = attention_mask[row].bool()
        asks = shown[-n_new:] if n_new > 1 else torch.ones(1, dtype=torch.bool)
        if not asks.any() or not shown.any():
            continue
        keys, values = (
            states[row][:, shown].repeat_interleave(group, dim=0).float() for states in (key, value)
        )
        rows = query[row][:, asks].float()
        logits = rows @ keys.transpose(1, 2) * scaling
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        first = keys.shape[1] - rows.shape[1]
        own = torch.arange(first, keys.shape[1])[:, None]
        column = torch.arange(keys.shape[1])
        seen = column <= own
        if sliding_window is not None:
            seen &= column > own - sliding_window
        weights = logits.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        output[row, asks] = (weights @ values).transpose(0, 1).to(query.dtype)
    return output, None
