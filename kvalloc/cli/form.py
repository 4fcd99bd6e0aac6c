"""What a chat model wants around a document, the questions about it, and the answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.errors import InputError

_DOCUMENT, _QUESTION, _ANSWER, _NEXT = (
    f"kvalloc{name}marks" for name in ("doc", "ask", "say", "go")
)


@dataclass(frozen=True, kw_only=True)
class Form:
    """Texts between which document, questions and answers stand.

    Attributes
    ----------
    before : str
        In front of the document.
    after : str
        Between a question and its answer.
    turn : str
        Between an answer and the next question.
    special : bool
        Whether the tokenizer still has to add its own start token to the document.
    """

    before: str = ""
    after: str = "\n"
    turn: str = "\n\n"
    special: bool = True

    @classmethod
    def of(cls, tokenizer: Any, model_id: str, chat: bool | None) -> Form:
        """The model's own chat form, or none.

        Parameters
        ----------
        tokenizer : transformers.PreTrainedTokenizerBase
        model_id : str
            Named in errors.
        chat : bool or None
            Whether it is wanted; where the model has one by default.

        Raises
        ------
        InputError
            If it is wanted and there is none, or it cannot be taken apart.
        """
        has_form = bool(getattr(tokenizer, "chat_template", None))
        if chat and not has_form:
            raise InputError(f"{model_id} has no chat form; leave out --chat")
        if not (has_form if chat is None else chat):
            return cls()
        first = {"role": "user", "content": f"{_DOCUMENT}\n\n{_QUESTION}"}
        turns = [
            first,
            {"role": "assistant", "content": _ANSWER},
            {"role": "user", "content": _NEXT},
        ]
        alone = _rendered(tokenizer, [first], model_id)
        several = _rendered(tokenizer, turns, model_id)
        before, _, rest = alone.partition(_DOCUMENT)
        between, _, after = rest.partition(_QUESTION)
        turn, _, rest = several.partition(_ANSWER)[2].partition(_NEXT)
        whole = between == "\n\n" and turn and rest == after and several.startswith(before)
        if not whole:
            raise InputError(
                f"the chat form of {model_id} cannot be taken apart into a document and questions "
                "about it; use --no-chat"
            )
        return cls(before=before, after=after, turn=turn, special=False)

    def document_ids(self, tokenizer: Any, text: str) -> IntArray:
        """Tokens of a document and all that stands in front of the first question."""
        written = f"{self.before}{text.rstrip()}\n\n"
        return _encoded(tokenizer, written, special=self.special)

    def question_ids(self, tokenizer: Any, question: str, *, turn: bool = False) -> IntArray:
        """Tokens of a question and what calls for its answer; after an answer in a ``turn``."""
        written = f"{self.turn if turn else ''}{question.strip()}{self.after}"
        return _encoded(tokenizer, written, special=False)


def _rendered(tokenizer: Any, messages: list[dict[str, str]], model_id: str) -> str:
    from kvalloc.models.quiet import one_line

    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program of its own and fails in its own ways
        raise InputError(
            f"the chat form of {model_id} cannot be applied ({one_line(error)}); use --no-chat"
        ) from error
    return str(text)


def _encoded(tokenizer: Any, text: str, *, special: bool) -> IntArray:
    ids = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return np.asarray(ids, dtype=np.int64)
