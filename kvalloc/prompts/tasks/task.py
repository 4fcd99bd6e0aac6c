"""Tasks, and how their prompts are made by rule."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvalloc.errors import InputError, option
from kvalloc.prompts.cases import LONG_ANSWER_TOKENS, Case
from kvalloc.prompts.chat import encode
from kvalloc.prompts.examples import Draft, Example, Question, render
from kvalloc.prompts.splits import Split, split_texts, stream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_TURNS = 8
SPARE = 1.25
"""A piece of a text may have fewer tokens to a word than the whole."""

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True, kw_only=True)
class PromptRequest:
    """Request to a task.

    Attributes
    ----------
    tokenizer : PreTrainedTokenizerBase
    n_cases, turns : int
        Prompts, and questions about each one.
    n_tokens : int
        Longest prompt, first question included.
    seed : int
    split : str
        See `kvalloc.prompts.splits`.
    after : bool
        Whether questions follow the compression.
    opened : bool
        Whether an unmeasured question comes first.
    answer_tokens : int
        Longest free answer, and length of a continuation.
    """

    tokenizer: PreTrainedTokenizerBase
    n_cases: int
    n_tokens: int
    seed: int = 0
    split: Split = "development"
    after: bool = False
    turns: int = 1
    opened: bool = False
    answer_tokens: int = LONG_ANSWER_TOKENS


@dataclass(frozen=True, kw_only=True)
class Task:
    """A kind of prompts.

    Attributes
    ----------
    name : str
        Value of ``--tasks``.
    build : callable
        Gives the cases of a `PromptRequest`.
    most_turns : int
        Most questions about one prompt.
    """

    name: str
    build: Callable[[PromptRequest], list[Case]]
    most_turns: int = 1

    def make(
        self, tokenizer: Any, n_cases: int, n_tokens: int, seed: int = 0, **options: Any
    ) -> list[Case]:
        """Make prompts, equal for equal requests.

        Parameters
        ----------
        n_cases, n_tokens, seed, **options
            See `PromptRequest`.

        Raises
        ------
        InputError
            If such prompts cannot be made.
        """
        request = PromptRequest(
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
class Brief:
    """Input for one example.

    Attributes
    ----------
    request : PromptRequest
    draw : random.Random
    source, text : str
        Name of a text, and the text.
    depth : float
        Place of the first answer in the prompt, 0..1, spread over the examples.
    """

    request: PromptRequest
    draw: random.Random
    source: str
    text: str
    depth: float

    def scattered(
        self,
        lead: str,
        sentences: Sequence[str],
        depths: Sequence[float],
        questions: Sequence[Question],
    ) -> Draft:
        """Return questions about sentences scattered over an excerpt.

        It begins at random. See `between`.
        """
        text_words, request = self.text.split(), self.request
        words_per_token = len(text_words) / len(encode(request.tokenizer, self.text))
        enough = math.ceil(SPARE * words_per_token * request.n_tokens)
        begin = self.draw.randrange(max(1, len(text_words) - enough))
        words = text_words[begin : begin + enough]
        draft = self.between(lead, words, sentences, depths, questions)
        return replace(draft, min_items=20)

    def between(
        self,
        lead: str,
        pieces: Sequence[str],
        sentences: Sequence[str],
        depths: Sequence[float],
        questions: Sequence[Question],
        *,
        chat: bool = True,
    ) -> Draft:
        """Return questions about sentences scattered over a text's first pieces.

        Parameters
        ----------
        lead : str
            Words before the text.
        pieces : sequence of str
            Words or sentences, more than fit.
        sentences, depths, chat
            See `scatter` and `Example`.
        questions : sequence of Question
        """

        def make(size: int) -> Example:
            text = scatter(" ".join(pieces[:size]), sentences, depths)
            return Example(
                context=f"{lead}{text}", questions=tuple(questions), source=self.source, chat=chat
            )

        return Draft(make=make, min_items=1, max_items=len(pieces))

    def depths(self, count: int) -> list[float]:
        """Return this many depths, spread evenly from the brief's on, each 0..1."""
        return [(self.depth + place / count) % 1.0 for place in range(count)]


def by_rule(name: str, recipe: Callable[[Brief], Draft], *, most_turns: int = 1) -> Task:
    """Return a task of prompts made by rule.

    Parameters
    ----------
    name, most_turns
        See `Task`; the name seeds random numbers.
    recipe : callable
        Gives the `Draft` of a `Brief`.
    """

    def build(request: PromptRequest) -> list[Case]:
        draw = stream(request.split, name, request.seed)
        texts = list(split_texts(request.split).items())
        cases = []
        for index in range(request.n_cases):
            source, text = texts[index % len(texts)]
            brief = Brief(
                request=request,
                draw=draw,
                source=source,
                text=text,
                depth=(index + 0.5) / request.n_cases,
            )
            example = recipe(brief).fitted(request.tokenizer, request.n_tokens, task=name)
            where = {"after": request.after, "opened": request.opened}
            cases.append(render(request.tokenizer, example, **where))
        return cases

    return Task(name=name, build=build, most_turns=most_turns)


def scatter(text: str, sentences: Sequence[str], depths: Sequence[float]) -> str:
    """Put each sentence at the text's sentence boundary nearest to its depth.

    Parameters
    ----------
    sentences : sequence of str, (n_hidden,)
    depths : sequence of float, (n_hidden,)
        Share of the text's characters before it, 0..1.
    """
    boundaries = [0, *(match.end() for match in _SENTENCE_END.finditer(text)), len(text)]
    places = [
        (min(boundaries, key=lambda place: abs(place - depth * len(text))), order, sentence)
        for order, (depth, sentence) in enumerate(zip(depths, sentences, strict=True))
    ]
    parts, begin = [], 0
    for place, _, sentence in sorted(places):
        parts += [text[begin:place].strip(), sentence]
        begin = place
    return " ".join(part for part in [*parts, text[begin:].strip()] if part)
