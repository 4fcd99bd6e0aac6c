"""Needle questions: a number hidden in real text, and a question that only it answers."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvalloc.errors import InputError
from kvalloc.prompts.splits import KEYS as KEYS_OF_SPLIT
from kvalloc.prompts.splits import split_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEYS = KEYS_OF_SPLIT["development"]
"""One that stands in the chosen text is passed over."""

NEEDLE = "The secret number of the {key} is {number}."
QUESTION = "What is the secret number of the {key}? Answer with the number only."
ANSWER_PREFIX = "The secret number of the {key} is"
FRAME = "Read the text and remember what it says.\n\n{text}\n\n{question}"

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_BETWEEN_DIGITS = re.compile(r"(?<=\d)[, ](?=\d)")


@dataclass(frozen=True, kw_only=True)
class NeedleCase:
    """One needle question, ready to be given to a model.

    Attributes
    ----------
    input_ids : tuple of int, (n_tokens,)
        The whole prompt: chat template, text with the needle, question, start of the answer.
    key : str
        What the number belongs to; stands nowhere else in the text.
    number : str
        Seven digits: the right answer.
    depth : float
        Where the needle really stands: share of the text's characters before it, 0..1.
    source : str
        Name of the text.
    """

    input_ids: tuple[int, ...]
    key: str
    number: str
    depth: float
    source: str

    @property
    def n_tokens(self) -> int:
        """Length of the prompt, tokens."""
        return len(self.input_ids)

    def is_found(self, answer: str) -> bool:
        """Tell whether an answer holds the number, digit for digit.

        Parameters
        ----------
        answer : str
            What the model wrote after the start of the answer.

        Returns
        -------
        bool
            Commas and spaces inside a number do not count; a longer number is not a match.
        """
        plain = _BETWEEN_DIGITS.sub("", answer)
        return re.search(rf"(?<!\d){self.number}(?!\d)", plain) is not None


def haystack_texts() -> dict[str, str]:
    """Read the public-domain texts that ship for evaluation only, by name.

    Returns
    -------
    dict of str
        None of them is among the texts that profiles are measured on.
    """
    return split_texts("development")


def make_needle_cases(
    tokenizer: PreTrainedTokenizerBase,
    n_cases: int,
    n_tokens: int,
    *,
    seed: int = 0,
    texts: Mapping[str, str] | None = None,
) -> list[NeedleCase]:
    """Make needle questions by rule, none picked by hand.

    Case i of n uses text i modulo the number of texts and a needle at depth ``(i + 0.5) / n``;
    the seed draws where in the text the excerpt begins, the key and the number. The needle moves
    to the nearest sentence boundary.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        The model's own; with a chat template, the prompt is a chat.
    n_cases : int
        Number of questions.
    n_tokens : int
        Longest prompt, tokens. A prompt is as long as whole words allow.
    seed : int
        The same seed gives the same cases.
    texts : mapping of str to str, optional
        Haystacks by name; the shipped ones by default.

    Returns
    -------
    list of NeedleCase

    Raises
    ------
    InputError
        If there is no text, or none is long enough.

    References
    ----------
    The passkey task of Landmark Attention (Mohtashami and Jaggi, 2023), Sec. 4.2, in real text
    as in "needle in a haystack".
    """
    if n_cases < 1:
        raise InputError(f"{n_cases} needle questions ask nothing; ask for at least 1")
    sources = dict(haystack_texts() if texts is None else texts)
    if not sources:
        raise InputError("there is no text to hide a needle in; give at least one")
    draw = random.Random(seed)
    names = list(sources)
    return [
        _make_case(tokenizer, names[i % len(names)], sources, (i + 0.5) / n_cases, n_tokens, draw)
        for i in range(n_cases)
    ]


def _make_case(
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    sources: Mapping[str, str],
    depth: float,
    n_tokens: int,
    draw: random.Random,
) -> NeedleCase:
    words = sources[source].split()
    number = str(draw.randrange(1_000_000, 10_000_000))
    lowered = sources[source].casefold()
    free = [key for key in KEYS if key not in lowered]
    if not free or number in lowered:
        raise InputError(f"the text {source} holds every key; use another one")
    key = draw.choice(free)
    # Any word that leaves the whole prompt's worth of words behind it: a token is rarely longer
    # than a word, so n_tokens words are always enough.
    begin = draw.randrange(max(1, len(words) - n_tokens))

    def prompt(count: int) -> tuple[list[int], float]:
        hidden, real_depth = _hide(" ".join(words[begin : begin + count]), key, number, depth)
        question = QUESTION.format(key=key)
        content = FRAME.format(text=hidden, question=question)
        return _tokenise(tokenizer, content, ANSWER_PREFIX.format(key=key)), real_depth

    available = len(words) - begin
    count = _largest(lambda n: len(prompt(n)[0]) <= n_tokens, available)
    if count < 1 or (count == available and len(prompt(count)[0]) < 0.9 * n_tokens):
        raise InputError(
            f"a needle prompt of {n_tokens} tokens cannot be made from {source} with "
            f"{available} words: ask for another length"
        )
    ids, real_depth = prompt(count)
    return NeedleCase(input_ids=tuple(ids), key=key, number=number, depth=real_depth, source=source)


def _hide(text: str, key: str, number: str, depth: float) -> tuple[str, float]:
    """Put the needle at the sentence boundary nearest to the depth, and say where that is."""
    boundaries = [0, *(found.end() for found in _SENTENCE_END.finditer(text)), len(text)]
    at = min(boundaries, key=lambda place: abs(place - depth * len(text)))
    needle = NEEDLE.format(key=key, number=number)
    parts = (text[:at].strip(), needle, text[at:].strip())
    return " ".join(part for part in parts if part), at / max(1, len(text))


def _tokenise(tokenizer: PreTrainedTokenizerBase, content: str, answer_prefix: str) -> list[int]:
    if getattr(tokenizer, "chat_template", None):
        chat = [{"role": "user", "content": content}]
        rendered = str(
            tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        )
        # The template writes the special tokens itself.
        ids = tokenizer(rendered + answer_prefix, add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(f"{content}\n{answer_prefix}")["input_ids"]
    return [int(token) for token in ids]


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """Find the largest number up to ``most`` that fits, 0 if none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
