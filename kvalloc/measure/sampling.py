"""Sampling: from texts to measured token ids."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.engine.contract import Failed
from kvalloc.errors import InputError, option
from kvalloc.prompts.chat import encode
from kvalloc.prompts.examples import prompt_ids
from kvalloc.prompts.splits import refuse_held_out
from kvalloc.prompts.texts import Document, Prompt


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A measured prompt.

    Attributes
    ----------
    token_ids : ndarray of int64, (n_tokens,)
    answer_ids : ndarray of int64, (n_answer,), or None
    question_ids : ndarray of int64, (n_question,), or None
        Read after the compression.
    name : str
        Origin, for messages.
    task : str
        By default ``"answers"`` with an answer, else ``"text"``.
    """

    token_ids: IntArray
    answer_ids: IntArray | None = None
    question_ids: IntArray | None = None
    name: str = ""
    task: str = "text"


def read_shard(text: str) -> tuple[int, int]:
    """Return number, from 1, and count of shards such as ``2/8``."""
    match = re.fullmatch(r"\s*(\d{1,4})\s*/\s*(\d{1,4})\s*", text)
    number, of = map(int, match.groups()) if match else (0, 0)
    if not 1 <= number <= of or of < 2:
        raise InputError(
            f"the shard is {text!r}, expected its number and the number of shards, such as "
            f"{option('shard', '1/8')} up to 8/8"
        )
    return number, of


@dataclass(frozen=True, kw_only=True)
class SampleSet:
    """Samples of one measurement, with a description for people."""

    samples: tuple[Sample, ...]
    description: str

    def set_aside(self, failed: Mapping[int, Failed]) -> dict[int, str]:
        """Return failed samples' names and reasons, by place."""
        return {
            place: f"{self.samples[place].name or f'sample {place}'}: {failed[place].reason}"
            for place in sorted(failed)
        }

    def digest(self) -> str:
        """Return SHA-256 over lengths and token ids, without answers."""
        return _digest([one.token_ids for one in self.samples])

    def answers_digest(self) -> str:
        """Return SHA-256 over answers and any questions."""
        questions = [one.question_ids for one in self.samples]
        asks = any(ids is not None for ids in questions)
        return _digest([one.answer_ids for one in self.samples] + (questions if asks else []))


def _digest(arrays: Sequence[IntArray | None]) -> str:
    hasher = hashlib.sha256()
    for ids in arrays:
        hasher.update(np.array([-1 if ids is None else ids.size], dtype="<i8").tobytes())
        hasher.update(b"" if ids is None else ids.astype("<i8").tobytes())
    return hasher.hexdigest()


def choose_samples(
    texts: Iterable[str | Document | Prompt],
    tokenizer: Any,
    *,
    context_tokens: int,
    least_tokens: int,
    samples: int | None = None,
    sampling_ratio: float = 0.1,
    seed: int = 0,
) -> SampleSet:
    """Choose samples in the texts' order, one from each of equally long stretches.

    Running text, also a string, is joined, tokenised and cut into pieces of exactly
    `context_tokens` tokens, with any start token. A prompt is one sample; a longer one loses its
    middle. By default their number is the share `sampling_ratio` of all candidates (10% in XKV,
    Section IV-C), rounded up.

    Raises
    ------
    InputError
        If a text is reserved for the final evaluation, candidates are too few, or a chosen prompt
        is shorter than `least_tokens`, named by file and line.
    """
    documents, prompts = _sort_out(texts)
    refuse_held_out([*documents, *prompts])
    prose = [_encode(tokenizer, f"{document.text}\n\n") for document in documents]
    stream = np.concatenate(prose or [np.empty(0, np.int64)])
    prefix = _start_tokens(tokenizer) if documents else stream
    own_tokens = context_tokens - prefix.size
    n_pieces = stream.size // own_tokens
    n_candidates = n_pieces + len(prompts)
    if n_candidates == 0:
        raise InputError(
            f"the text has {stream.size + prefix.size} tokens, fewer than one sample of "
            f"{context_tokens}; give more text or a shorter {option('context')}"
        )
    chosen = _chosen(n_candidates, samples, sampling_ratio, seed)
    pieces = [index for index in chosen if index < n_pieces]
    picked = [prompts[index - n_pieces] for index in chosen[len(pieces) :]]
    parts = [
        f"{taken} of {count} {kind}{_names(text.name for text in sources)}"
        for taken, count, kind, sources in (
            (len(pieces), n_pieces, f"pieces of {context_tokens} tokens", documents),
            (len(picked), len(prompts), "prompts", prompts),
        )
        if count
    ]
    cut = [
        Sample(
            token_ids=np.concatenate([prefix, stream[at * own_tokens : (at + 1) * own_tokens]]),
            name=f"piece {at + 1} of the text",
        )
        for at in pieces
    ]
    cut += [_of_prompt(prompt, tokenizer, context_tokens, least_tokens) for prompt in picked]
    return SampleSet(samples=tuple(cut), description=" and ".join(parts))


def _sort_out(
    texts: Iterable[str | Document | Prompt],
) -> tuple[list[Document], list[Prompt]]:
    sources = [texts] if isinstance(texts, str) else list(texts)
    for text in sources:
        if not isinstance(text, str | Document | Prompt):
            raise InputError(
                f"a text is a {type(text).__name__}; give strings, Documents or Prompts"
            )
    running = [Document(text=text) if isinstance(text, str) else text for text in sources]
    prompts = [text for text in running if isinstance(text, Prompt)]
    documents = [text for text in running if isinstance(text, Document) and text.text.strip()]
    if not documents and not prompts:
        raise InputError("there is no text to measure; give some that is not empty")
    return documents, prompts


def _of_prompt(prompt: Prompt, tokenizer: Any, context_tokens: int, least_tokens: int) -> Sample:
    ids = cut_middle(np.asarray(prompt_ids(tokenizer, prompt), dtype=np.int64), context_tokens)
    if ids.size < least_tokens:
        raise InputError(
            f"{prompt.where}: the prompt has {ids.size} tokens, but sinks and window leave "
            f"something to decide only from {least_tokens} tokens on; lengthen or remove it"
        )
    before = prompt.question or prompt.text
    space = " " if before and not before[-1].isspace() else ""
    spoken = f"{space}{prompt.answer}" if prompt.answer else ""
    answer = _ids(prompt.answer_ids, spoken, tokenizer)
    if answer is not None and answer.size == 0:
        raise InputError(
            f"{prompt.where}: the answer has no token, so no loss can be measured on it; write "
            "another one, or leave it out"
        )
    question = _ids(prompt.question_ids, prompt.question, tokenizer)
    return Sample(
        token_ids=ids,
        answer_ids=answer,
        question_ids=question,
        name=prompt.where,
        task=prompt.task or ("text" if answer is None else "answers"),
    )


def _ids(ids: tuple[int, ...], text: str, tokenizer: Any) -> IntArray | None:
    if ids:
        return np.asarray(ids, dtype=np.int64)
    return _encode(tokenizer, text) if text else None


def _encode(tokenizer: Any, text: str, *, special: bool = False) -> IntArray:
    return np.asarray(encode(tokenizer, text, special=special), dtype=np.int64)


def _start_tokens(tokenizer: Any) -> IntArray:
    start = getattr(tokenizer, "bos_token_id", None)
    ids = _encode(tokenizer, "a", special=True)
    return ids[: int(start is not None and ids.size > 1 and ids[0] == start)]


def cut_middle(ids: IntArray, context_tokens: int) -> IntArray:
    """Drop the middle of a long text: questions are at an end."""
    if ids.size <= context_tokens:
        return ids
    head = (context_tokens + 1) // 2
    return np.concatenate([ids[:head], ids[ids.size - (context_tokens - head) :]])


def _chosen(n_candidates: int, samples: int | None, ratio: float, seed: int) -> list[int]:
    if samples is None:
        if not 0 < ratio <= 1:
            raise InputError(f"the sampling ratio is {ratio}, expected a share above 0, up to 1")
        samples = max(1, math.ceil(round(ratio * n_candidates, 9)))
    if samples < 1:
        raise InputError(f"{samples} samples were asked for, expected at least 1")
    if samples > n_candidates:
        raise InputError(
            f"{samples} samples were asked for, but the text gives only {n_candidates} at this "
            "context; give more text, fewer samples or a shorter context"
        )
    return spread(n_candidates, samples, seed)


def spread(n: int, count: int, seed: int) -> list[int]:
    """Draw one index below `n` from each of `count` equal stretches."""
    random = np.random.default_rng(seed)
    edges = [index * n // count for index in range(count + 1)]
    return [int(random.integers(low, high)) for low, high in pairwise(edges)]


def _names(names: Iterable[str], limit: int = 5) -> str:
    known = list(dict.fromkeys(name for name in names if name))
    if not known:
        return ""
    more = f" and {len(known) - limit} more" if len(known) > limit else ""
    return f" of {', '.join(known[:limit])}{more}"
