"""Answers about a text that was read once."""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Generator, Sequence
from contextlib import closing
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, RepetitionPenaltyLogitsProcessor

from kvalloc.errors import InputError
from kvalloc.extensions.lossless import LosslessAnswer, Sampling
from kvalloc.models.names import cache_keyword
from kvalloc.models.structure import (
    context_limit,
    end_tokens,
    input_device,
    repetition_penalty,
)
from kvalloc.runtime.cache import BudgetCache
from kvalloc.runtime.refusals import check_owner
from kvalloc.units import check_temperature


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
) -> Generator[int, None, None]:
    """Answer a question about a cached text, token by token.

    It is written on a copy: the cache keeps the text. The generation config's repetition penalty
    counts question and answer.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The cache's model, with its head.
    cache : transformers.Cache
        A text, one row.
    question : Tensor of int64, (n_tokens,) or (1, n_tokens), or sequence of int
    max_new_tokens : int
    ends : collection of int, optional
        Tokens that end answers; by default the generation config's.
    keep : bool
        Leave both in the cache, except a last token that does not end the answer: the next question
        begins with it.
    temperature : float, optional
        Draws tokens; by default the most likely are taken.
    seed : int

    Yields
    ------
    int
        Token ids, the ending one included.

    Raises
    ------
    InputError
        For no tokens, tokens beyond the model's limit, several rows, or an invalid temperature.
    ModelMismatchError
        If the cache is another model's.

    Examples
    --------
    >>> for ids in questions:  # doctest: +SKIP
    ...     print(tokenizer.decode(list(answer(model, cache, ids))))
    """
    ids = torch.as_tensor(question, dtype=torch.long, device=input_device(model))
    ids = ids.reshape(1, -1) if ids.ndim < 2 else ids
    _check(model, cache, ids, max_new_tokens)
    check_temperature(temperature)
    stops = end_tokens(model) if ends is None else frozenset(ends)
    seen = int(cache.get_seq_length())
    penalise = RepetitionPenaltyLogitsProcessor(repetition_penalty(model))

    def process(tokens: Tensor, logits: Tensor) -> Tensor:
        scores: Tensor = penalise(tokens[:, seen:], logits)
        return scores if temperature is None else scores / temperature

    generator = torch.Generator(ids.device).manual_seed(seed)
    sampling = Sampling(process=process, draws=temperature is not None, generator=generator)
    text = torch.cat([ids.new_zeros(1, seen), ids], dim=1)  # seen tokens are not read again
    writable = cache if keep else copy.deepcopy(cache)
    reduced = writable if isinstance(writable, BudgetCache) else None
    if reduced is None or reduced.verifier is None:
        tokens = _tokens(model, writable, text, sampling)
    else:
        verified = LosslessAnswer(
            model=model,
            cache=reduced,
            sampling=sampling,
            ends=lambda tokens: int(tokens[0, -1]) in stops,
            longest=max_new_tokens,
        )
        tokens = verified.tokens(text)
    return _written(tokens, max_new_tokens, stops, reduced if keep else None)


def _written(
    tokens: Generator[Tensor, None, None], longest: int, ends: Collection[int], cache: Any
) -> Generator[int, None, None]:
    """Yield an answer's tokens, then end a reduced cache's turn."""
    try:
        with closing(tokens):
            for token in islice(tokens, longest):
                yield int(token)
                if int(token) in ends:
                    return
    finally:  # also if an answer is broken off, but torch computes nothing while Python exits
        if not (cache is None or cache.interrupted or sys.is_finalizing()):
            cache.end_turn()


@torch.no_grad()
def _tokens(
    model: Any, cache: Cache, ids: Tensor, sampling: Sampling
) -> Generator[Tensor, None, None]:
    """Yield tokens, (1, 1), without end."""
    while True:
        new = ids[:, int(cache.get_seq_length()) :]
        logits = model(input_ids=new, logits_to_keep=1, **cache_keyword(model, cache)).logits[:, -1]
        token = sampling.draw(sampling.shares(sampling.process(ids, logits.float())))
        yield token
        ids = torch.cat([ids, token], dim=1)


def _check(model: Any, cache: Cache, ids: Tensor, max_new_tokens: int) -> None:
    check_owner(model, cache)
    (n_rows, n_tokens), seen = ids.shape, int(cache.get_seq_length())
    rows, limit = getattr(cache, "batch", 1), context_limit(model)
    if n_rows != 1:
        raise InputError(f"a question has one row, but this one has {n_rows}; ask one by one")
    if not n_tokens:
        raise InputError("the question has no tokens; ask something")
    if max_new_tokens < 1:
        raise InputError(f"an answer of {max_new_tokens} tokens says nothing; allow at least 1")
    if seen and rows != 1:
        raise InputError(
            f"the cache holds {rows} rows, and a question is about one; take one of them with "
            "cache.batch_select_indices"
        )
    if limit is not None and seen + n_tokens + max_new_tokens > limit:
        raise InputError(
            f"{seen} tokens in the cache, a question of {n_tokens} and an answer of "
            f"{max_new_tokens} are beyond the {limit} tokens of the model; shorten the question "
            "or the answer"
        )
