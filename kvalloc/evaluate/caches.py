"""Ask the same questions through different caches, and measure answers, bytes and time."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvalloc.errors import InputError
from kvalloc.evaluate.kl import divergence
from kvalloc.prompts.needle import NeedleCase

if TYPE_CHECKING:
    from torch import Tensor, UntypedStorage
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

    from kvalloc.shape import ModelShape

ANSWER_TOKENS = 16
"""Longest answer: a seven-digit number takes ten tokens of most vocabularies."""

MakeCache = Callable[[], "Cache"]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What the full cache made of one question: the yardstick for every reduced cache.

    Attributes
    ----------
    case : NeedleCase
        The question.
    answer : str
        Greedy answer.
    answer_ids : tuple of int, (n_answer,)
        The same as tokens, the end mark included.
    logits : Tensor of float32, (n_answer - 1, vocabulary)
        Teacher-forced predictions of the answer from its second token on. The first one is
        predicted while the prompt is read, before anything can be evicted, so it is the same for
        every cache and counts nowhere.
    full_bytes : int
        Bytes of K and V after the prompt that later tokens attend to, see `needed_bytes`.
    prefill_seconds, decode_seconds : float
        Wall time of the prompt, and of the answer after its first token.
    """

    case: NeedleCase
    answer: str
    answer_ids: tuple[int, ...]
    logits: Tensor
    full_bytes: int
    prefill_seconds: float
    decode_seconds: float

    @property
    def found(self) -> bool:
        """Whether the answer holds the number."""
        return self.case.is_found(self.answer)


@dataclass(frozen=True, kw_only=True)
class CacheRow:
    """What one cache made of one question.

    Attributes
    ----------
    case : NeedleCase
        The question.
    answer : str
        Greedy answer with this cache.
    found : bool
        Whether it holds the number.
    kl : float or None
        Mean teacher-forced KL(full cache ‖ this cache) over the full cache's answer, nats per
        token; None when that answer has one token only.
    top1_agreement : float or None
        Share of that answer's tokens on which both caches agree, 0..1.
    retained_bytes : int
        Bytes of K and V stored after the prompt, read from the tensors.
    full_bytes : int
        Those that the full cache needs, see `needed_bytes`.
    prefill_seconds, decode_seconds : float
        Wall time of the prompt, and of the answer after its first token.
    """

    case: NeedleCase
    answer: str
    found: bool
    kl: float | None
    top1_agreement: float | None
    retained_bytes: int
    full_bytes: int
    prefill_seconds: float
    decode_seconds: float


def measure_references(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cases: Iterable[NeedleCase],
    *,
    max_new_tokens: int = ANSWER_TOKENS,
) -> list[Reference]:
    """Answer every question once with the full cache.

    Parameters
    ----------
    model : PreTrainedModel
    tokenizer : PreTrainedTokenizerBase
    cases : iterable of NeedleCase
    max_new_tokens : int
        Longest answer, tokens.

    Returns
    -------
    list of Reference
        Shared by all the calls of `evaluate_cache` on these questions.

    Raises
    ------
    InputError
        If the answer may not have a token.
    """
    from transformers import DynamicCache

    references = []
    for case in cases:
        cache = DynamicCache(config=model.config)
        run = answer_with(model, tokenizer, case.input_ids, cache, max_new_tokens)
        references.append(
            Reference(
                case=case,
                answer=run.answer,
                answer_ids=run.answer_ids,
                logits=forced_logits(model, run.after_prompt, run.answer_ids),
                full_bytes=run.needed_bytes,
                prefill_seconds=run.prefill_seconds,
                decode_seconds=run.decode_seconds,
            )
        )
    return references


def evaluate_cache(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    references: Iterable[Reference],
    make_cache: MakeCache,
    *,
    max_new_tokens: int = ANSWER_TOKENS,
) -> Iterator[CacheRow]:
    """Answer every question with a fresh cache, and compare to the full cache's answers.

    For each question the prompt is read once. The cache then decodes its own answer, and a copy of
    it, taken after the prompt, is fed the full cache's answer (teacher forcing) for KL and
    agreement.

    Parameters
    ----------
    model : PreTrainedModel
    tokenizer : PreTrainedTokenizerBase
    references : iterable of Reference
        From `measure_references` with the same model.
    make_cache : callable
        Gives a new, empty cache for each question, such as ``lambda: profile.cache(model)``.
    max_new_tokens : int
        Longest answer, tokens.

    Yields
    ------
    CacheRow
        One a question, as soon as it is measured.

    Raises
    ------
    InputError
        If the answer may not have a token.
    """
    for reference in references:
        cache = make_cache()
        run = answer_with(model, tokenizer, reference.case.input_ids, cache, max_new_tokens)
        compared = None
        if len(reference.answer_ids) > 1:
            forced = forced_logits(model, run.after_prompt, reference.answer_ids)
            compared = divergence(reference.logits, forced)
        yield CacheRow(
            case=reference.case,
            answer=run.answer,
            found=reference.case.is_found(run.answer),
            kl=None if compared is None else compared.kl,
            top1_agreement=None if compared is None else compared.top1_agreement,
            retained_bytes=run.stored_bytes,
            full_bytes=reference.full_bytes,
            prefill_seconds=run.prefill_seconds,
            decode_seconds=run.decode_seconds,
        )


def stored_bytes(cache: Cache) -> int:
    """Bytes of K and V that a cache really holds, read from its tensors' storage.

    Parameters
    ----------
    cache : transformers.Cache

    Returns
    -------
    int
        Every storage counted once and in full, so a view that keeps a larger tensor alive costs
        what it keeps alive.
    """
    return sum(storage.nbytes() for storage, _ in _storages(cache))


def needed_bytes(cache: Cache) -> int:
    """Bytes of K and V that later tokens attend to: of each storage what its tensors show.

    After a prompt, a sliding layer of transformers shows the last tokens of its window and keeps
    the whole prompt's storage alive until the next token; what a model needs is what it shows.

    Parameters
    ----------
    cache : transformers.Cache

    Returns
    -------
    int
        At most `stored_bytes`.
    """
    return sum(min(storage.nbytes(), shown) for storage, shown in _storages(cache))


def full_bytes(cache: Cache, shape: ModelShape) -> int:
    """Bytes of K and V that a full cache needs for the tokens that a cache of one row has seen.

    To be compared with `stored_bytes` of the same moment. Of a sliding layer the last
    ``sliding_window - 1`` entries count and, after a decoded token, the one that has just slid
    out: it is still allocated, in a full cache as in a reduced one.

    Parameters
    ----------
    cache : transformers.Cache
        A full or a reduced one.
    shape : ModelShape
        Of its model.
    """
    known: int | None = getattr(cache, "full_bytes", None)
    if known is not None:  # a reduced cache
        return known
    slid_out = 0
    for layer in cache.layers:
        states = (getattr(layer, "keys", None), getattr(layer, "values", None))
        for tensor in (one for one in states if one is not None):
            more = tensor.untyped_storage().nbytes() - tensor.nbytes
            if more == tensor[:, :, :1].nbytes:  # right after a prompt it may be all of that
                slid_out += more
    return shape.full_bytes(int(cache.get_seq_length())) + slid_out


def _storages(cache: Cache) -> list[tuple[UntypedStorage, int]]:
    """Every storage of K and V once, and the bytes of the tensors in it."""
    found: dict[int, tuple[UntypedStorage, int]] = {}
    for layer in cache.layers:
        # a reduced layer may hold entries elsewhere, too
        own = getattr(layer, "stored_tensors", None)
        plain = (getattr(layer, "keys", None), getattr(layer, "values", None))
        for tensor in plain if own is None else own():
            if tensor is not None:
                storage = tensor.untyped_storage()
                _, shown = found.get(storage.data_ptr(), (storage, 0))
                found[storage.data_ptr()] = (storage, shown + tensor.nbytes)
    return list(found.values())


@dataclass(frozen=True, kw_only=True)
class Run:
    """One prompt through one cache.

    Attributes
    ----------
    answer : str
        Greedy answer.
    answer_ids : tuple of int, (n_answer,)
        The same as tokens, the end mark included.
    after_prompt : transformers.Cache
        A copy of the cache as it was after the prompt.
    stored_bytes, needed_bytes : int
        Bytes of K and V after the prompt, see the functions of these names.
    prefill_seconds, decode_seconds : float
        Wall time of the prompt, and of the answer after its first token.
    """

    answer: str
    answer_ids: tuple[int, ...]
    after_prompt: Cache
    stored_bytes: int
    needed_bytes: int
    prefill_seconds: float
    decode_seconds: float


def answer_with(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[int],
    cache: Cache,
    max_new_tokens: int,
) -> Run:
    """Read a prompt into a cache, then decode greedily until an end mark.

    Parameters
    ----------
    model : PreTrainedModel
    tokenizer : PreTrainedTokenizerBase
    prompt_ids : sequence of int, (n_tokens,)
    cache : transformers.Cache
        A new, empty one.
    max_new_tokens : int
        Longest answer, tokens.

    Returns
    -------
    Run

    Raises
    ------
    InputError
        If the answer may not have a token.
    """
    if max_new_tokens < 1:
        raise InputError(f"an answer of {max_new_tokens} tokens says nothing; allow at least 1")
    ends = end_tokens(model, tokenizer)
    start = time.perf_counter()
    token = int(next_logits(model, cache, prompt_ids, last=1)[-1].argmax())
    prefill_seconds = time.perf_counter() - start
    stored, needed = stored_bytes(cache), needed_bytes(cache)
    # A copy instead of a crop: a sliding-window layer cannot take back what slid out.
    after_prompt = copy.deepcopy(cache)
    answer_ids = [token]
    start = time.perf_counter()
    while token not in ends and len(answer_ids) < max_new_tokens:
        token = int(next_logits(model, cache, [token], last=1)[-1].argmax())
        answer_ids.append(token)
    return Run(
        answer=str(tokenizer.decode(answer_ids, skip_special_tokens=True)).strip(),
        answer_ids=tuple(answer_ids),
        after_prompt=after_prompt,
        stored_bytes=stored,
        needed_bytes=needed,
        prefill_seconds=prefill_seconds,
        decode_seconds=time.perf_counter() - start,
    )


def forced_logits(model: PreTrainedModel, cache: Cache, answer_ids: Sequence[int]) -> Tensor:
    """Predictions of an answer from its second token on, teacher-forced.

    Parameters
    ----------
    model : PreTrainedModel
    cache : transformers.Cache
        Holds the prompt.
    answer_ids : sequence of int, (n_answer,)

    Returns
    -------
    Tensor of float32, (n_answer - 1, vocabulary)
    """
    import torch

    if len(answer_ids) < 2:
        return torch.empty(0, model.config.vocab_size)
    return next_logits(model, cache, answer_ids[:-1], last=len(answer_ids) - 1)


def next_logits(model: PreTrainedModel, cache: Cache, ids: Sequence[int], *, last: int) -> Tensor:
    """Float32 logits of the last positions after feeding tokens, ``(last, vocabulary)``."""
    import torch

    with torch.inference_mode():
        output = model(
            input_ids=torch.tensor([list(ids)], device=model.device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=last,
        )
    logits: Tensor = output.logits[0].float().cpu()
    return logits


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The tokens that end an answer, by the model's and by the tokenizer's word."""
    ends: set[int] = set()
    for marks in (getattr(model.generation_config, "eos_token_id", None), tokenizer.eos_token_id):
        if isinstance(marks, int):
            ends.add(marks)
        elif marks is not None:
            ends.update(int(mark) for mark in marks)
    return ends
