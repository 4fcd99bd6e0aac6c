"""Methods under evaluation, and the bytes of their caches."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from kvalloc.accounting.costs import constant_entries
from kvalloc.accounting.stored import bytes_at_16_bits, layer_tensors, storages
from kvalloc.errors import InputError
from kvalloc.models import structure
from kvalloc.models.names import cache_keyword

if TYPE_CHECKING:
    from torch import Tensor, UntypedStorage
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase


MakeCache = Callable[[], "Cache"]


def stored_bytes(cache: Cache) -> int:
    """Return the bytes that a cache stores, each storage once and in full."""
    return sum(storage.nbytes() for storage, _, _ in _storages(cache.layers))


def needed_bytes(cache: Cache) -> int:
    """Return the bytes that later tokens attend to, at most `stored_bytes`.

    After a prompt, a sliding layer shows its window but stores the whole prompt.
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
    """Read tokens; return the last positions' float32 logits, ``(last, vocabulary)``."""
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
    """Return the end tokens of model and tokenizer."""
    mark = tokenizer.eos_token_id
    return {*structure.end_tokens(model), *(() if mark is None else (mark,))}


ANY_CONTEXT = 64
"""Context of a profile that keeps everything, tokens; it then keeps everything of any prompt."""


@dataclass(frozen=True, kw_only=True)
class Compressed:
    """A prompt that was read into a cache.

    Attributes
    ----------
    model : PreTrainedModel
    cache : transformers.Cache
    logits : Tensor of float32, (vocabulary,)
        Prediction after the prompt.
    stored_bytes, kept_bytes, bytes_at_16_bits : int
        See `stored_bytes`, `needed_bytes`, and `kvalloc.accounting.stored.bytes_at_16_bits`.
        Entries that a method only masks are stored, not kept.
    prefill_seconds : float
        Wall time to read and compress.
    """

    model: PreTrainedModel
    cache: Cache
    logits: Tensor
    stored_bytes: int
    kept_bytes: int
    bytes_at_16_bits: int
    prefill_seconds: float

    def fork(self) -> Compressed:
        """Return a copy, to answer without changing this one."""
        # A copy instead of a crop: a sliding-window layer cannot take back what slid out.
        return replace(self, cache=copy.deepcopy(self.cache))

    def feed(
        self, question_ids: Sequence[int], answer_ids: Sequence[int] = (), *, last: int
    ) -> Tensor:
        """Read a question and an answer; return the last logits, float32, (last, vocabulary).

        Parameters
        ----------
        question_ids : sequence of int, (n_question,)
        answer_ids : sequence of int, (n_answer,)
        last : int
        """
        return next_logits(self.model, self.cache, [*question_ids, *answer_ids], last=last)


class Method(Protocol):
    """A way to make a compressed cache of a prompt."""

    def compress(self, model: PreTrainedModel, prompt_ids: Sequence[int]) -> Compressed:
        """Read a prompt into a new, compressed cache.

        Parameters
        ----------
        model : PreTrainedModel
            Must stay unchanged for other methods.
        prompt_ids : sequence of int, (n_tokens,)
        """


@dataclass(frozen=True, kw_only=True)
class CacheMethod:
    """Method of a cache that compresses while the prompt is read.

    Attributes
    ----------
    make_cache : callable
        Returns a new cache, such as ``lambda: kvalloc.make_cache(model, profile)``.
    """

    make_cache: MakeCache

    def compress(self, model: PreTrainedModel, prompt_ids: Sequence[int]) -> Compressed:
        """See `Method.compress`."""
        cache = self.make_cache()
        start = time.perf_counter()
        logits = next_logits(model, cache, prompt_ids, last=1)[-1]
        return _read(model, cache, logits, time.perf_counter() - start)


@dataclass(frozen=True, kw_only=True)
class AppliedMethod:
    """Method of the cache that `kvalloc.apply` makes.

    Attributes
    ----------
    options : mapping
        Keywords of `kvalloc.apply`, such as ``{"budget": "20%"}``.
    """

    options: Mapping[str, Any]

    def compress(self, model: PreTrainedModel, prompt_ids: Sequence[int]) -> Compressed:
        """See `Method.compress`."""
        from kvalloc.online.application import apply

        start = time.perf_counter()
        with apply(model, **self.options) as applied:
            logits = next_logits(model, None, prompt_ids, last=1)[-1]
        assert applied.last_cache is not None  # the forward has just made it
        return _read(model, applied.last_cache, logits, time.perf_counter() - start)


def _read(model: PreTrainedModel, cache: Cache, logits: Tensor, seconds: float) -> Compressed:
    layers: list[Any] = cache.layers
    return Compressed(
        model=model,
        cache=cache,
        logits=logits,
        stored_bytes=stored_bytes(cache),
        kept_bytes=needed_bytes(cache),
        bytes_at_16_bits=bytes_at_16_bits(layers),
        prefill_seconds=seconds,
    )


def rounded_cache(model: PreTrainedModel, bits: int) -> CacheMethod:
    """Return a method that keeps every entry, at fewer bits.

    Parameters
    ----------
    bits : int
        Of `kvalloc.accounting.costs.WIDTHS`, below 16.

    Raises
    ------
    InputError
        If entries cannot be stored at this width.
    """
    import numpy as np

    from kvalloc.extensions.making import make_cache
    from kvalloc.formats.budget_profile import BudgetProfile, Policy
    from kvalloc.models.loading import shape_of

    shape = shape_of(model)
    budgets, full = constant_entries(shape, ANY_CONTEXT), list(shape.full_layers)
    widths = np.full_like(budgets, 16)
    budgets[full], widths[full] = ANY_CONTEXT, bits
    profile = BudgetProfile(
        shape=shape,
        level="layer",
        context_tokens=ANY_CONTEXT,
        budgets=budgets,
        bits=widths,
        policy=Policy(scorer="streaming", scorer_parameters={}, sinks=4, window=8),
    )
    return CacheMethod(make_cache=lambda: make_cache(model, profile))


def full_cache(model: PreTrainedModel) -> CacheMethod:
    """Return the method of the plain cache."""
    from transformers import DynamicCache

    return CacheMethod(make_cache=lambda: DynamicCache(config=model.config))


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer, decoded greedily.

    Attributes
    ----------
    text : str
        Without special tokens.
    ids : tuple of int, (n_answer,)
        With the end mark.
    decode_seconds : float
        Wall time after the first token.
    """

    text: str
    ids: tuple[int, ...]
    decode_seconds: float


def answer_greedily(
    compressed: Compressed,
    tokenizer: PreTrainedTokenizerBase,
    question_ids: Sequence[int],
    max_new_tokens: int,
    *,
    first_line: bool = False,
) -> Answer:
    """Read a question and decode greedily until an end mark; the cache grows.

    Parameters
    ----------
    question_ids : sequence of int, (n_question,)
        Empty if the prompt ends with the question.
    max_new_tokens : int
    first_line : bool
        Whether the answer has one line.

    Raises
    ------
    InputError
        If `max_new_tokens` is below 1.
    """
    if max_new_tokens < 1:
        raise InputError(f"an answer of {max_new_tokens} tokens says nothing; allow at least 1")
    ends = end_tokens(compressed.model, tokenizer)
    logits = compressed.feed(question_ids, last=1)[-1] if question_ids else compressed.logits
    token = int(logits.argmax())
    answer_ids = [token]
    start = time.perf_counter()
    while token not in ends and len(answer_ids) < max_new_tokens:
        if first_line and "\n" in str(tokenizer.decode(answer_ids)).lstrip():
            break
        token = int(compressed.feed([token], last=1)[-1].argmax())
        answer_ids.append(token)
    return Answer(
        text=str(tokenizer.decode(answer_ids, skip_special_tokens=True)).strip(),
        ids=tuple(answer_ids),
        decode_seconds=time.perf_counter() - start,
    )
