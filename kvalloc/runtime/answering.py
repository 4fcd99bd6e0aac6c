"""Questions to a text that was read once: answers that leave the cache as it was."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, RepetitionPenaltyLogitsProcessor

from kvalloc.models.structure import (
    context_limit,
    decoder_of,
    end_tokens,
    input_device,
    repetition_penalty,
)
from kvalloc.runtime.cache import BudgetCache
from kvalloc.runtime.lossless import lossless_tokens
from kvalloc.runtime.refusals import refuse
from kvalloc.units import check_temperature

__all__ = ["answer"]


def answer(
    model: Any,
    cache: Cache,
    question: Tensor | Sequence[int],
    *,
    max_new_tokens: int = 128,
    ends: Collection[int] | None = None,
    keep: bool = False,
    temperature: float | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Answer a question about what a cache holds, token by token.

    The answer is written on a copy of the cache, which a reduced one is small enough for: the
    next question finds the text as it was read, also when an answer is broken off. A repetition
    penalty of the model's generation config counts the tokens of question and answer.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The cache's model, with its head.
    cache : transformers.Cache
        Holds a text, one row.
    question : Tensor of int64, (n_tokens,) or (1, n_tokens), or sequence of int
        What follows the text.
    max_new_tokens : int
        Longest answer.
    ends : collection of int, optional
        Tokens that end an answer; those of the model's generation config by default.
    keep : bool
        Leave question and answer in the cache, for a conversation. The last token of an answer is
        not in it then: it belongs in front of what follows, unless it is one of the ends.
    temperature : float, optional
        Draw each token at this temperature; by default the most likely one is taken.
    seed : int
        Of what is drawn.

    Yields
    ------
    int
        Token ids as they come, the one that ends the answer included.

    Raises
    ------
    InputError
        If the question or the answer has no tokens, text and question and answer are more than
        the model was made for, the cache holds several rows, or the temperature is none.
    ModelMismatchError
        If the cache was made for another model.

    Examples
    --------
    >>> cache = kvalloc.load_cache("doc.kv", model)  # doctest: +SKIP
    >>> for text in questions:  # doctest: +SKIP
    ...     ids = tokenizer(text, return_tensors="pt").input_ids
    ...     print(tokenizer.decode(list(answer(model, cache, ids))))
    """
    ids = torch.as_tensor(question, dtype=torch.long, device=input_device(model))
    ids = ids.reshape(1, -1) if ids.ndim < 2 else ids
    _check(model, cache, ids, max_new_tokens)
    check_temperature(temperature)
    stops = end_tokens(model) if ends is None else frozenset(ends)
    generator = torch.Generator(ids.device).manual_seed(seed)
    own = cache if keep else copy.deepcopy(cache)
    return _written(model, own, ids, max_new_tokens, stops, temperature, generator, ends_turn=keep)


def _picked(temperature: float | None, generator: torch.Generator, logits: Tensor) -> int:
    """The most likely token, or one that is drawn."""
    if temperature is None:
        return int(logits.argmax())
    shares = (logits.float() / temperature).softmax(dim=-1)
    return int(torch.multinomial(shares, 1, generator=generator))


def _written(
    model: Any,
    cache: Cache,
    ids: Tensor,
    max_new_tokens: int,
    ends: Collection[int],
    temperature: float | None,
    generator: torch.Generator,
    *,
    ends_turn: bool,
) -> Iterator[int]:
    penalty = repetition_penalty(model)
    penalise, seen = RepetitionPenaltyLogitsProcessor(penalty), ids
    try:
        if isinstance(cache, BudgetCache) and cache.verifier is not None:
            yield from _verified(
                model, cache, ids, max_new_tokens, ends, temperature, generator, penalise
            )
            return
        for _ in range(max_new_tokens):
            with torch.no_grad():
                logits = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]
            scores = logits if penalty == 1 else penalise(seen, logits.float())
            token = _picked(temperature, generator, scores[0])
            yield token
            if token in ends:
                return
            ids = ids.new_tensor([[token]])
            seen = torch.cat([seen, ids], dim=1)
    finally:  # also where an answer is broken off
        if ends_turn and isinstance(cache, BudgetCache) and cache.interrupted is None:
            cache.end_turn()


def _verified(
    model: Any,
    cache: BudgetCache,
    ids: Tensor,
    max_new_tokens: int,
    ends: Collection[int],
    temperature: float | None,
    generator: torch.Generator,
    penalise: RepetitionPenaltyLogitsProcessor,
) -> Iterator[int]:
    """Write an answer that the full cache beside a reduced one verifies."""
    seen = cache.get_seq_length()

    def process(tokens: Tensor, logits: Tensor) -> Tensor:
        scores: Tensor = penalise(tokens[:, seen:], logits)
        return scores if temperature is None else scores / temperature

    tokens = lossless_tokens(
        model,
        cache,
        torch.cat([ids.new_zeros(1, seen), ids], dim=1),  # what was seen is not read again
        process=process,
        ends=lambda tokens: int(tokens[0, -1]) in ends,
        longest=max_new_tokens,
        draws=temperature is not None,
        generator=generator,
    )
    with closing(tokens), torch.no_grad():
        for token in tokens:
            yield int(token)
            if int(token) in ends:
                return


def _check(model: Any, cache: Cache, ids: Tensor, max_new_tokens: int) -> None:
    owner = getattr(cache, "decoder", None)
    other = owner is not None and owner() is not decoder_of(model)
    refuse(asked_by_other=other and type(model).__name__)
    (n_rows, n_tokens), held = ids.shape, int(cache.get_seq_length())
    rows, limit = getattr(cache, "batch", 1), context_limit(model)
    beyond = limit is not None and held + n_tokens + max_new_tokens > limit
    refuse(
        asked_in_rows=n_rows != 1 and n_rows,
        asked_nothing=not n_tokens,
        answers_nothing=max_new_tokens < 1 and (max_new_tokens,),
        asked_of_rows=held and rows != 1 and rows,
        asked_beyond=beyond and (held, n_tokens, max_new_tokens, limit),
    )
