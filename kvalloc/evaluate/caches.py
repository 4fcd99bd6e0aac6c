"""Bytes that a cache holds, and feeding tokens to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from kvalloc.accounting.stored import layer_tensors, storages
from kvalloc.models import structure
from kvalloc.models.names import cache_keyword

if TYPE_CHECKING:
    from torch import Tensor, UntypedStorage
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase


MakeCache = Callable[[], "Cache"]


def stored_bytes(cache: Cache) -> int:
    """Return the bytes that a cache stores, read from its tensors' storages.

    Those are K and V, and of a reduced cache the positions of its entries.

    Every storage counts once and in full, so a view that keeps a larger tensor alive costs what it
    keeps alive.
    """
    return sum(storage.nbytes() for storage, _, _ in _storages(cache.layers))


def needed_bytes(cache: Cache) -> int:
    """Return the bytes that later tokens attend to: of each storage what its tensors show.

    After a prompt, a sliding layer of transformers shows the last tokens of its window and keeps
    the whole prompt's storage alive until the next token; what a model needs is what it shows, at
    most `stored_bytes`.
    """
    return sum(min(storage.nbytes(), shown) for storage, shown, _ in _storages(cache.layers))


def _storages(layers: Iterable[object]) -> list[tuple[UntypedStorage, int, int]]:
    return storages(tensor for layer in layers for tensor in layer_tensors(layer))


def next_logits(
    model: PreTrainedModel,
    cache: Cache | None,
    ids: Sequence[int],
    *,
    last: int,
    **arguments: Tensor,
) -> Tensor:
    """Read tokens; return the float32 logits of the last positions, ``(last, vocabulary)``."""
    import torch

    with torch.inference_mode():
        output = model(
            input_ids=torch.tensor([list(ids)], device=model.device),
            use_cache=True,
            logits_to_keep=last,
            **arguments,
            **cache_keyword(model, cache),
        )
    logits: Tensor = output.logits[0].float().cpu()
    return logits


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the tokens that end an answer: those of the model and of its tokenizer."""
    mark = tokenizer.eos_token_id
    return {*structure.end_tokens(model), *(() if mark is None else (mark,))}
