"""From texts to the token ids that are measured: which samples, and where they are cut."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.errors import InputError, one_line, option
from kvalloc.prompts.held_out import refuse_held_out
from kvalloc.prompts.texts import Document, Prompt


@dataclass(frozen=True, kw_only=True)
class SampleSet:
    """The samples of one measurement.

    Attributes
    ----------
    token_ids : tuple of ndarray of int64, (n_tokens,)
        One array a sample.
    description : str
        Where they came from, for people.
    answer_ids : tuple of (ndarray of int64, (n_answer,), or None)
        What follows each sample, where the data says so.
    question_ids : tuple of (ndarray of int64, (n_question,), or None)
        What is read between the two, after the compression, where the data says so.
    """

    token_ids: tuple[IntArray, ...]
    description: str
    answer_ids: tuple[IntArray | None, ...] = ()
    question_ids: tuple[IntArray | None, ...] = ()

    def __post_init__(self) -> None:
        for name in ("answer_ids", "question_ids"):
            if not getattr(self, name):
                object.__setattr__(self, name, (None,) * len(self.token_ids))

    def digest(self) -> str:
        """SHA-256 over the samples' lengths and token ids, answers not included."""
        hasher = hashlib.sha256()
        for ids in self.token_ids:
            hasher.update(np.array([ids.size], dtype="<i8").tobytes())
            hasher.update(ids.astype("<i8").tobytes())
        return hasher.hexdigest()

    def answers_digest(self) -> str:
        """SHA-256 over the answers, and over the questions where there are any."""
        hasher = hashlib.sha256()
        asks = any(ids is not None for ids in self.question_ids)
        for ids in (*self.answer_ids, *(self.question_ids if asks else ())):
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
    """Choose samples, spread evenly over the texts.

    Running text is joined, tokenised and cut into pieces of exactly `context_tokens` tokens
    (the tokenizer's start token included, if it has one). A prompt is one sample: a longer one
    loses its middle, a shorter one keeps its length.

    Parameters
    ----------
    texts : iterable of str, Document or Prompt
        A string is running text.
    tokenizer : transformers.PreTrainedTokenizerBase
        The model's tokenizer.
    context_tokens : int
        Reference context.
    least_tokens : int
        The fewest tokens that a sample must have.
    samples : int, optional
        How many; by default the share `sampling_ratio` of all candidates, rounded up.
    sampling_ratio : float
        Share of the candidates (XKV, Section IV-C: 10%).
    seed : int
        The candidates are split into as many stretches as there are samples, and one is drawn
        from each.

    Returns
    -------
    SampleSet
        In the order of the texts.

    Raises
    ------
    InputError
        If there is no text, it is too short, there are fewer candidates than samples asked for,
        or a chosen prompt is too short; names the file and line of the prompt. If a text is one
        of those kept for the final evaluation.
    """
    documents, prompts = _sort_out(texts)
    refuse_held_out([*documents, *prompts])
    stream = _tokenise_prose(documents, tokenizer) if documents else np.empty(0, np.int64)
    prefix = _start_tokens(tokenizer) if documents else np.empty(0, np.int64)
    own_tokens = context_tokens - prefix.size
    n_pieces = stream.size // own_tokens
    n_candidates = n_pieces + len(prompts)
    if n_candidates == 0:
        raise InputError(
            f"the text has {stream.size + prefix.size} tokens, fewer than one sample of "
            f"{context_tokens}; give more text or a shorter context"
        )
    chosen = _spread(n_candidates, samples, sampling_ratio, seed)
    token_ids = []
    answer_ids: list[IntArray | None] = []
    question_ids: list[IntArray | None] = []
    for index in chosen:
        if index < n_pieces:
            piece = stream[index * own_tokens : (index + 1) * own_tokens]
            token_ids.append(np.concatenate([prefix, piece]))
            answer_ids.append(None)
            question_ids.append(None)
        else:
            prompt = prompts[index - n_pieces]
            token_ids.append(cut_middle(_tokenise(prompt, tokenizer), context_tokens))
            answer_ids.append(_tokenise_answer(prompt, tokenizer))
            question_ids.append(_tokenise_question(prompt, tokenizer))
            _check_length(prompt, token_ids[-1].size, least_tokens)
    description = _describe(documents, prompts, chosen, n_pieces, context_tokens)
    return SampleSet(
        token_ids=tuple(token_ids),
        description=description,
        answer_ids=tuple(answer_ids),
        question_ids=tuple(question_ids),
    )


def _sort_out(
    texts: Iterable[str | Document | Prompt],
) -> tuple[list[Document], list[Prompt]]:
    if isinstance(texts, str):
        texts = [texts]
    documents: list[Document] = []
    prompts: list[Prompt] = []
    for text in texts:
        if isinstance(text, str):
            documents.append(Document(text=text))
        elif isinstance(text, Document):
            documents.append(text)
        elif isinstance(text, Prompt):
            prompts.append(text)
        else:
            raise InputError(
                f"a text is a {type(text).__name__}; give strings, Documents or Prompts"
            )
    documents = [document for document in documents if document.text.strip()]
    if not documents and not prompts:
        raise InputError("there is no text to measure; give some that is not empty")
    return documents, prompts


def _tokenise_prose(documents: Sequence[Document], tokenizer: Any) -> IntArray:
    ids = [_encode(tokenizer, f"{document.text}\n\n", special=False) for document in documents]
    return np.concatenate(ids)


def _tokenise(prompt: Prompt, tokenizer: Any) -> IntArray:
    if prompt.token_ids:
        return np.asarray(prompt.token_ids, dtype=np.int64)
    if not prompt.messages:
        return _encode(tokenizer, prompt.text, special=True)
    try:
        text = tokenizer.apply_chat_template(
            list(prompt.messages), tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a template is a program of its own and fails in its own ways
        raise InputError(
            f"{prompt.where}: the tokenizer cannot apply its chat template ({one_line(error)}); "
            "give the prompt as text"
        ) from error
    return _encode(tokenizer, text, special=False)  # the template writes the special tokens


def _tokenise_answer(prompt: Prompt, tokenizer: Any) -> IntArray | None:
    """The answer as it would go on: after a text that ends in a word comes a space first."""
    if prompt.answer_ids:
        return np.asarray(prompt.answer_ids, dtype=np.int64)
    if not prompt.answer:
        return None
    before = prompt.question or prompt.text
    goes_on = bool(before) and not before[-1].isspace()
    ids = _encode(tokenizer, f"{' ' if goes_on else ''}{prompt.answer}", special=False)
    if ids.size == 0:
        raise InputError(
            f"{prompt.where}: the answer has no token, so no loss can be measured on it; write "
            "another one, or leave it out"
        )
    return ids


def _tokenise_question(prompt: Prompt, tokenizer: Any) -> IntArray | None:
    """What is read after the prompt and before the answer, just as it stands."""
    if prompt.question_ids:
        return np.asarray(prompt.question_ids, dtype=np.int64)
    return _encode(tokenizer, prompt.question, special=False) if prompt.question else None


def _encode(tokenizer: Any, text: str, *, special: bool) -> IntArray:
    ids = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return np.asarray(ids, dtype=np.int64)


def _start_tokens(tokenizer: Any) -> IntArray:
    """The start token, if the tokenizer puts one before a text."""
    start = getattr(tokenizer, "bos_token_id", None)
    ids = _encode(tokenizer, "a", special=True)
    if start is not None and ids.size > 1 and ids[0] == start:
        return ids[:1]
    return ids[:0]


def cut_middle(ids: IntArray, context_tokens: int) -> IntArray:
    """Drop the middle of what is too long: the question stands at one of the ends."""
    if ids.size <= context_tokens:
        return ids
    head = (context_tokens + 1) // 2
    return np.concatenate([ids[:head], ids[ids.size - (context_tokens - head) :]])


def _check_length(prompt: Prompt, n_tokens: int, least_tokens: int) -> None:
    if n_tokens < least_tokens:
        raise InputError(
            f"{prompt.where}: the prompt has {n_tokens} tokens, but sinks and window leave "
            f"something to decide only from {least_tokens} tokens on; lengthen or remove it, or "
            f"choose a smaller {option('window')}"
        )


def _spread(n_candidates: int, samples: int | None, ratio: float, seed: int) -> list[int]:
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
    random = np.random.default_rng(seed)
    edges = [index * n_candidates // samples for index in range(samples + 1)]
    return [int(random.integers(low, high)) for low, high in pairwise(edges)]


def _describe(
    documents: Sequence[Document],
    prompts: Sequence[Prompt],
    chosen: Sequence[int],
    n_pieces: int,
    context_tokens: int,
) -> str:
    parts = []
    if n_pieces:
        names = _names(document.name for document in documents)
        taken = sum(index < n_pieces for index in chosen)
        parts.append(f"{taken} of {n_pieces} pieces of {context_tokens} tokens{names}")
    if prompts:
        names = _names(prompt.name for prompt in prompts)
        taken = sum(index >= n_pieces for index in chosen)
        parts.append(f"{taken} of {len(prompts)} prompts{names}")
    return " and ".join(parts)


def _names(names: Iterable[str], limit: int = 5) -> str:
    known = list(dict.fromkeys(name for name in names if name))
    if not known:
        return ""
    more = f" and {len(known) - limit} more" if len(known) > limit else ""
    return f" of {', '.join(known[:limit])}{more}"
