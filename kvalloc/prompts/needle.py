"""Needle questions: a number hidden in real text, and a question that only it answers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvalloc.errors import InputError
from kvalloc.prompts.cases import Case, Turn
from kvalloc.prompts.examples import Example, fitted, render
from kvalloc.prompts.splits import KEYS, split_texts
from kvalloc.prompts.tasks.needles import LEAD, hidden_number
from kvalloc.prompts.tasks.task import scatter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class NeedleCase(Case):
    """One needle question, ready to be given to a model: chat template, text, question, answer.

    Attributes
    ----------
    key : str
        What the number belongs to; stands nowhere else in the text.
    number : str
        Seven digits: the right answer.
    depth : float
        Where the needle really stands: share of the text's characters before it, 0..1.
    """

    turns: tuple[Turn, ...] = field(init=False)
    key: str
    number: str
    depth: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "turns", (Turn(answers=(self.number,)),))


def make_needle_cases(
    tokenizer: PreTrainedTokenizerBase, n_cases: int, n_tokens: int, *, seed: int = 0
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

    Returns
    -------
    list of NeedleCase

    Raises
    ------
    InputError
        If no prompt of that length can be made.

    References
    ----------
    The passkey task of Landmark Attention (Mohtashami and Jaggi, 2023), Sec. 4.2, in real text
    as in "needle in a haystack".
    """
    if n_cases < 1:
        raise InputError(f"{n_cases} needle questions ask nothing; ask for at least 1")
    texts, draw = list(split_texts("development").items()), random.Random(seed)
    return [
        _make_case(tokenizer, *texts[i % len(texts)], (i + 0.5) / n_cases, n_tokens, draw)
        for i in range(n_cases)
    ]


def _make_case(
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    text: str,
    depth: float,
    n_tokens: int,
    draw: random.Random,
) -> NeedleCase:
    words = text.split()
    number = str(draw.randrange(1_000_000, 10_000_000))
    lowered = text.casefold()
    key = draw.choice([key for key in KEYS["development"] if key not in lowered])
    sentence, question = hidden_number(key, number)
    # Any word that leaves the whole prompt's worth of words behind it: a token is rarely longer
    # than a word, so n_tokens words are always enough.
    begin = draw.randrange(max(1, len(words) - n_tokens))

    def make(size: int) -> Example:
        hidden = scatter(" ".join(words[begin : begin + size]), [sentence], [depth])
        return Example(context=f"{LEAD}{hidden}", questions=(question,), source=source)

    sizes = (1, len(words) - begin)
    example = fitted(tokenizer, make, sizes, n_tokens, task="needle")
    real_depth = (example.context.index(sentence) - len(LEAD)) / len(example.context)
    ids = render(tokenizer, example).input_ids
    return NeedleCase(input_ids=ids, key=key, number=number, depth=real_depth, source=source)
