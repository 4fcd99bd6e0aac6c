"""Examples in words, and the tokens of their prompts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from kvalloc.errors import InputError, option
from kvalloc.prompts.cases import Case, Expected, Turn
from kvalloc.prompts.chat import DocumentForm, chat_text, encode
from kvalloc.prompts.texts import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIN_SHARE = 0.9
"""A prompt made by rule has at least this share of the requested tokens."""


@dataclass(frozen=True, kw_only=True)
class Question(Expected):
    """One question about a context.

    Attributes
    ----------
    text : str
        Question, or template with places such as ``{name}``.
    prefix : str
        Given start of the answer.
    continuation : str
        Text that caches read next, instead of the full cache's answer.
    """

    text: str
    prefix: str = ""
    continuation: str = ""

    def filled(self, *answers: str, **values: object) -> Question:
        """Return the question with answers, and values for its places."""
        text, prefix = (one.format(**values) for one in (self.text, self.prefix))
        return replace(self, text=text, prefix=prefix, answers=answers)

    def turn(self, question_ids: tuple[int, ...], **attributes: Any) -> Turn:
        """Return the question as a turn, with more attributes of `Turn`."""
        expected = {field.name: getattr(self, field.name) for field in fields(Expected)}
        return Turn(question_ids=question_ids, **attributes, **expected)


@dataclass(frozen=True, kw_only=True)
class Example:
    """Context and questions.

    Attributes
    ----------
    context, joint : str
        Text before the questions, and between both.
    questions : tuple of Question
    source : str
        Origin of the text.
    chat : bool
        Whether to use a chat template, if any.
    """

    context: str
    questions: tuple[Question, ...]
    source: str = ""
    joint: str = "\n\n"
    chat: bool = True


OPENING = Question(text="Who might have written this? Answer in one sentence.")
"""First question, if all questions of an example come in later turns."""


def render(
    tokenizer: PreTrainedTokenizerBase,
    example: Example,
    *,
    after: bool = False,
    opened: bool = False,
) -> Case:
    """Return an example as the model reads it.

    Parameters
    ----------
    after : bool
        Whether the first question, as all later ones, is read after the compression.
    opened : bool
        Whether another question comes first.

    Raises
    ------
    InputError
        If the chat template changes its texts.
    """
    if opened:
        example = replace(example, questions=(OPENING, *example.questions))
    form, context, rest = _first(tokenizer, example)
    first, *later = example.questions
    whole = encode(tokenizer, context + rest, special=form.special)
    bare = encode(tokenizer, (context + rest).removesuffix(first.prefix), special=form.special)
    question = encode(tokenizer, rest) if after else ()
    turns = [first.turn(question, begun_tokens=len(whole) - len(bare), measured=not opened)]
    turns += [one.turn(encode(tokenizer, _asking(form, one, form.turn))) for one in later]
    turns = [
        replace(turn, continuation_ids=encode(tokenizer, one.continuation))
        for turn, one in zip(turns, example.questions, strict=True)
    ]
    prompt = encode(tokenizer, context, special=form.special) if after else whole
    return Case(input_ids=prompt, turns=tuple(turns), source=example.source)


@dataclass(frozen=True, kw_only=True)
class Draft:
    """Example of any size.

    Attributes
    ----------
    make : callable
        ``make(size)`` returns an example, a larger one not shorter, without random numbers.
    min_items, max_items : int
        Smallest and largest size.
    """

    make: Callable[[int], Example]
    min_items: int
    max_items: int

    def fitted(self, tokenizer: PreTrainedTokenizerBase, n_tokens: int, *, task: str) -> Example:
        """Return the largest example that fits, first question included.

        Parameters
        ----------
        n_tokens : int
            Longest prompt, tokens; at least `MIN_SHARE` is used.
        task : str
            For messages.

        Raises
        ------
        InputError
            If the smallest is too long, or the largest too short.
        """

        def length(size: int) -> int:
            form, context, rest = _first(tokenizer, self.make(size))
            return len(encode(tokenizer, context + rest, special=form.special))

        sizes = range(self.min_items, max(self.min_items, self.max_items) + 1)
        if not (fitting := bisect_right(sizes, n_tokens, key=length)):
            raise InputError(
                f"no prompt of the task {task} fits into {n_tokens} tokens; ask for a longer "
                f"{option('context')}"
            )
        example = self.make(size := sizes[fitting - 1])
        if length(size) < MIN_SHARE * n_tokens:
            raise InputError(
                f"the task {task} cannot be made {n_tokens} tokens long from {example.source}; "
                f"ask for another {option('context')}"
            )
        return example


def prompt_ids(tokenizer: Any, prompt: Prompt) -> tuple[int, ...]:
    """Return a prompt's tokens, or those from its text or chat.

    Raises
    ------
    InputError
        If a chat cannot be written.
    """
    if prompt.token_ids:
        return prompt.token_ids
    if not prompt.messages:
        return encode(tokenizer, prompt.text, special=True)
    where = f"{prompt.where}: "
    text = chat_text(tokenizer, prompt.messages, where=where, way_out="give the prompt as text")
    return encode(tokenizer, text)  # the template writes the special tokens


def _first(tokenizer: Any, example: Example) -> tuple[DocumentForm, str, str]:
    """Return the form, the context as read, and the text up to the first answer."""
    chat = None if example.chat else False
    form = DocumentForm.of(tokenizer, chat, way_out="use a model without one")
    if form.special:  # a chat form writes its special tokens itself
        form = replace(form, turn=example.joint)
    rest = _asking(form, example.questions[0], example.joint)
    return form, f"{form.before}{example.context}", rest


def _asking(form: DocumentForm, question: Question, joint: str) -> str:
    """Return the text between context and answer."""
    after = "" if form.special and not (question.text and question.prefix) else form.after
    return f"{joint}{question.text}{after}{question.prefix}"
