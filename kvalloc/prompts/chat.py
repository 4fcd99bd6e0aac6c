"""Documents and questions, in a model's chat form or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvalloc.errors import InputError, one_line, option

_DOCUMENT, _QUESTION, _ANSWER, _NEXT = (
    f"kvalloc{name}marks" for name in ("doc", "ask", "say", "go")
)


def encode(tokenizer: Any, text: str, *, special: bool = False) -> tuple[int, ...]:
    """Return a text's tokens, with a start token if ``special``."""
    ids = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return tuple(int(token) for token in ids)


def chat_text(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    where: str = "",
    way_out: str = "use a model without one",
) -> str:
    """Return messages in the model's chat form, up to its answer.

    Parameters
    ----------
    where, way_out : str
        Both ends of the error's message.

    Raises
    ------
    InputError
        If the form cannot be applied.
    """
    template = tokenizer.apply_chat_template
    try:
        return str(template(list(messages), tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template is a program of its own and fails in its own ways
        raise InputError(
            f"{where}the model's chat template cannot be applied ({one_line(error)}); {way_out}"
        ) from error


def wants_chat(tokenizer: Any, chat: bool | None) -> bool:
    """Return whether to use the model's chat form; by default if it has one.

    Raises
    ------
    InputError
        If it is wanted but missing.
    """
    has_form = bool(getattr(tokenizer, "chat_template", None))
    if chat and not has_form:
        raise InputError(f"the model has no chat form; leave out {option('chat', True)}")
    return has_form if chat is None else chat


def without_chat() -> str:
    """Return the advice to leave out the chat form."""
    return f"use {option('no_chat', keyword='chat=False')}"


@dataclass(frozen=True, kw_only=True)
class DocumentForm:
    """Texts around document, questions and answers.

    Attributes
    ----------
    before, after, turn : str
        Before the document, after a question, and between answer and next question.
    special : bool
        Whether the tokenizer adds its start token.
    """

    before: str = ""
    after: str = "\n"
    turn: str = "\n\n"
    special: bool = True

    @classmethod
    def of(cls, tokenizer: Any, chat: bool | None = None, *, way_out: str = "") -> DocumentForm:
        """Return the model's own chat form, or none.

        Parameters
        ----------
        chat : bool or None
            See `wants_chat`.
        way_out : str
            Advice if it cannot be used.

        Raises
        ------
        InputError
            As `wants_chat`, or if the form cannot be taken apart.
        """
        if not wants_chat(tokenizer, chat):
            return cls()
        first = {"role": "user", "content": f"{_DOCUMENT}\n\n{_QUESTION}"}
        answer = {"role": "assistant", "content": _ANSWER}
        way_out = way_out or without_chat()
        single, several = (
            chat_text(tokenizer, messages, way_out=way_out)
            for messages in ([first], [first, answer, {"role": "user", "content": _NEXT}])
        )
        before, _, rest = single.partition(_DOCUMENT)
        between, _, after = rest.partition(_QUESTION)
        turn, _, rest = several.partition(_ANSWER)[2].partition(_NEXT)
        whole = between == "\n\n" and turn and rest == after and several.startswith(before)
        if not whole:
            raise InputError(
                "the model's chat form cannot be taken apart into a document and questions about "
                f"it; {way_out}"
            )
        return cls(before=before, after=after, turn=turn, special=False)

    def document_ids(self, tokenizer: Any, text: str) -> tuple[int, ...]:
        """Return the tokens of a document, up to the first question."""
        return encode(tokenizer, f"{self.before}{text.rstrip()}\n\n", special=self.special)

    def question_ids(self, tokenizer: Any, question: str, *, turn: bool = False) -> tuple[int, ...]:
        """Return a question's tokens up to the answer, after another if ``turn``."""
        return encode(tokenizer, f"{self.turn if turn else ''}{question.strip()}{self.after}")
