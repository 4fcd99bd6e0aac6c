"""What scorers ask to see after a prompt, for prompts that are read to measure losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvalloc.models.structure import decoder_of
from kvalloc.runtime.holding import end_tokens
from kvalloc.runtime.later_cache import HeldPrompt
from kvalloc.runtime.later_passes import run_later_passes

if TYPE_CHECKING:
    from kvalloc.models.attention import AttentionStates
    from kvalloc.scorers import Scorer
    from kvalloc.shape import ModelShape

__all__ = ["with_later"]


def with_later(
    states: Mapping[int, AttentionStates],
    wanted: Mapping[int, Sequence[Scorer]],
    *,
    model: Any,
    shape: ModelShape,
    prompt_ids: Tensor,
    first_token: Tensor,
    stored: Mapping[int, tuple[Tensor, Tensor]],
    sinks: int,
) -> dict[int, AttentionStates]:
    """The states of a prompt with what scorers noted of the tokens after it.

    Parameters
    ----------
    states : mapping of int to AttentionStates
        Of the full-attention layers.
    wanted : mapping of int to sequence of Scorer
        For each layer, the scorers that ask for a later pass.
    model : transformers.PreTrainedModel
    shape : ModelShape
        Of the model.
    prompt_ids : Tensor of int64, (n_tokens,)
    first_token : Tensor of int64, (1,)
        What the model would say next.
    stored : mapping of int to (Tensor, Tensor)
        Keys and values of every layer, (1, n_kv_heads, n_tokens, head_dim).
    sinks : int
        First tokens, never evicted.

    Returns
    -------
    dict of int to AttentionStates
    """
    wanted = {layer: each for layer, each in wanted.items() if each}
    if not wanted:
        return dict(states)
    n_tokens = int(prompt_ids.numel())
    prompt = HeldPrompt(
        decoder=decoder_of(model),
        head=model.get_output_embeddings(),
        ends=end_tokens(model),
        stored={layer: stored[layer] for layer in shape.full_layers},
        sliding={
            layer: _slid(stored[layer], shape)
            for layer in range(shape.n_layers)
            if layer not in shape.full_layers
        },
        n_prompt=n_tokens,
        visible=None,
        next_positions=torch.tensor([n_tokens], device=prompt_ids.device),
        first_tokens=first_token,
        ids=prompt_ids[None],
    )
    notes = run_later_passes(prompt, wanted, sinks=sinks)
    return {layer: replace(own, later=notes.get(layer)) for layer, own in states.items()}


def _slid(stored: tuple[Tensor, Tensor], shape: ModelShape) -> Any:
    """A sliding layer of transformers' own after that prompt."""
    from transformers.cache_utils import DynamicSlidingWindowLayer

    assert shape.sliding_window is not None  # a model with sliding layers has one
    layer = DynamicSlidingWindowLayer(shape.sliding_window)
    layer.update(*stored)
    return layer
