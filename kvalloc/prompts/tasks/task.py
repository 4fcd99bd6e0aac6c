"""What a task is, and how its prompts are made by rule."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvalloc.errors import InputError, option
from kvalloc.prompts.cases import Case
from kvalloc.prompts.examples import Example, encode, fitted, render
from kvalloc.prompts.splits import Split, split_texts, stream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_TURNS = 8
SPARE = 1.25
"""A piece of a text may have fewer tokens to a word than the whole."""

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked of a task.

    Attributes
    ----------
    tokenizer : PreTrainedTokenizerBase
    n_cases : int
        Prompts.
    n_tokens : int
        Longest prompt, first question included, tokens.
    seed : int
    split : str
        Whose texts, words and random numbers; see `kvalloc.prompts.splits`.
    after : bool
        Whether the question comes after the compression.
    turns : int
        Questions about each prompt.
    """

    tokenizer: PreTrainedTokenizerBase
    n_cases: int
    n_tokens: int
    seed: int = 0
    split: Split = "development"
    after: bool = False
    turns: int = 1


@dataclass(frozen=True, kw_only=True)
class Task:
    """A kind of prompts.

    Attributes
    ----------
    name : str
        What ``--tasks`` takes.
    summary : str
        One line.
    build : callable
        Gives the cases of a `Request`.
    most_turns : int
        Questions that it can ask about one prompt.
    """

    name: str
    summary: str
    build: Callable[[Request], list[Case]]
    most_turns: int = 1

    def make(
        self, tokenizer: Any, n_cases: int, n_tokens: int, seed: int = 0, **options: Any
    ) -> list[Case]:
        """Make prompts.

        Parameters
        ----------
        tokenizer : PreTrainedTokenizerBase
        n_cases, n_tokens, seed : int
            See `Request`.
        **options
            ``split``, ``after`` and ``turns`` of `Request`.

        Returns
        -------
        list of Case
            The same for the same request.

        Raises
        ------
        InputError
            If such prompts cannot be made.
        """
        request = Request(
            tokenizer=tokenizer, n_cases=n_cases, n_tokens=n_tokens, seed=seed, **options
        )
        if n_cases < 1:
            raise InputError(f"{n_cases} samples evaluate nothing; ask for at least 1")
        if request.turns > self.most_turns:
            raise InputError(
                f"the task {self.name} asks {self.most_turns} "
                f"question{'s' * (self.most_turns > 1)} a prompt, not {request.turns}; "
                f"ask for fewer {option('turns')}"
            )
        return self.build(request)


@dataclass(frozen=True, kw_only=True)
class Room:
    """What the maker of one example is given.

    Attributes
    ----------
    draw : random.Random
        Its random numbers.
    split : str
    source : str
        Name of a text of the split, another one from example to example.
    text : str
        That text.
    depth : float
        Where in the prompt the answer of the first question should stand, 0..1, evenly spread
        over the examples.
    n_tokens : int
        Longest prompt, tokens.
    turns : int
        Questions.
    words_per_token : float
        Of the text.
    """

    draw: random.Random
    split: Split
    source: str
    text: str
    depth: float
    n_tokens: int
    turns: int
    words_per_token: float

    def excerpt_words(self) -> list[str]:
        """Words of the text from a random place on, somewhat more than will fit."""
        words = self.text.split()
        enough = math.ceil(SPARE * self.words_per_token * self.n_tokens)
        begin = self.draw.randrange(max(1, len(words) - enough))
        return words[begin : begin + enough]


@dataclass(frozen=True, kw_only=True)
class Draft:
    """One example in any size.

    Attributes
    ----------
    make : callable
        ``make(size)``: draws no random numbers.
    least, most : int
        Sizes there are.
    """

    make: Callable[[int], Example]
    least: int
    most: int


Recipe = Callable[[Room], Draft]


def by_rule(name: str, recipe: Recipe) -> Callable[[Request], list[Case]]:
    """A task's `Task.build` from the recipe of one example.

    Parameters
    ----------
    name : str
        The task, for random numbers and messages.
    recipe : callable
        Gives the `Draft` of an example from its `Room`.

    Returns
    -------
    callable
    """

    def build(request: Request) -> list[Case]:
        draw = stream(request.split, name, request.seed)
        texts = list(split_texts(request.split).items())
        ratios = {
            name: len(text.split()) / len(encode(request.tokenizer, text))
            for name, text in texts[: request.n_cases]
        }
        cases = []
        for index in range(request.n_cases):
            source, text = texts[index % len(texts)]
            room = Room(
                draw=draw,
                split=request.split,
                source=source,
                text=text,
                depth=(index + 0.5) / request.n_cases,
                n_tokens=request.n_tokens,
                turns=request.turns,
                words_per_token=ratios[source],
            )
            draft = recipe(room)
            sizes = (draft.least, max(draft.least, draft.most))
            example = fitted(request.tokenizer, draft.make, sizes, request.n_tokens, task=name)
            cases.append(render(request.tokenizer, example, after=request.after))
        return cases

    return build


def scatter(text: str, sentences: Sequence[str], depths: Sequence[float]) -> str:
    """Put each sentence at the sentence boundary of the text that is nearest to its depth.

    Parameters
    ----------
    text : str
    sentences : sequence of str, (n_hidden,)
    depths : sequence of float, (n_hidden,)
        Share of the text's characters before it, 0..1.
    """
    boundaries = [0, *(found.end() for found in _SENTENCE_END.finditer(text)), len(text)]
    places = [
        (min(boundaries, key=lambda place: abs(place - depth * len(text))), order, sentence)
        for order, (depth, sentence) in enumerate(zip(depths, sentences, strict=True))
    ]
    parts, begin = [], 0
    for place, _, sentence in sorted(places):
        parts += [text[begin:place].strip(), sentence]
        begin = place
    return " ".join(part for part in [*parts, text[begin:].strip()] if part)
