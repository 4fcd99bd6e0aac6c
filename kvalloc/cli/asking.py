"""Questions about a document, from the command line or as they are typed."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from kvalloc.cli.output import duration
from kvalloc.cli.reading import Reading, check_room
from kvalloc.errors import InputError


def check_questions(questions: Sequence[str]) -> None:
    """Refuse a question without text.

    Raises
    ------
    InputError
    """
    for place, question in enumerate(questions, start=1):
        if not question.strip():
            which = f"question {place}" if len(questions) > 1 else "the question"
            raise InputError(f"{which} is empty; ask something")


def typed_questions(*, quiet: bool) -> Iterator[str]:
    """Questions from stdin, a line each: prompted for in a terminal, where an empty line ends.

    Raises
    ------
    InputError
        If stdin is not text.
    """
    if sys.stdin is None:
        return
    if not sys.stdin.isatty():
        try:
            for line in sys.stdin:
                if line.strip():
                    yield line.strip()
        except UnicodeDecodeError as error:
            raise InputError(
                f"stdin is not UTF-8 text (byte {error.start} cannot be read); give questions as "
                "text, a line each"
            ) from error
        return
    with suppress(ImportError):
        import readline  # noqa: F401  (line editing and a history for input())
    if not quiet:
        _say("[dim]Ask; an empty line or Ctrl-D ends.[/]")
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            _say("")
            return
        if not line:
            return
        yield line


class Asker:
    """Asks questions about one document.

    Parameters
    ----------
    reading : Reading
    max_new_tokens : int
        Longest answer.
    keep_turns : bool
        A conversation: each question follows the answers before it. Otherwise each one follows
        the document alone.
    stream : bool
        Write answers to stdout as they come, an empty line between two of them wherever nothing
        else is shown there.
    quiet : bool
        Write nothing but answers.
    """

    def __init__(
        self,
        reading: Reading,
        *,
        max_new_tokens: int,
        keep_turns: bool = False,
        stream: bool = True,
        quiet: bool = False,
    ) -> None:
        from kvalloc.evaluate.caches import end_tokens

        self._reading = reading
        self._max_new_tokens = max_new_tokens
        self._keep_turns = keep_turns
        self._stream = stream
        self._quiet = quiet or not stream
        self._ends = end_tokens(reading.loaded.model, reading.loaded.tokenizer)
        # Of the answer before: its last token was never fed, as nothing followed it.
        self._unfed: list[int] = []
        self._asked = 0
        self._answering = False  # whether there is an answer or the beginning of one

    def check_room(self, question: str) -> None:
        """Refuse a question for which the model's context has no room.

        Raises
        ------
        InputError
        """
        held = int(self._reading.cache.get_seq_length())
        needed = len(self._ids(question)) + self._max_new_tokens
        check_room(self._reading.loaded, held, needed)

    def ask(self, question: str, *, show: bool = True) -> dict[str, Any]:
        """Answer one question.

        Parameters
        ----------
        question : str
        show : bool
            Show the question, too, where it was not typed in a terminal.

        Returns
        -------
        dict
            Of plain values, for ``--json``.

        Raises
        ------
        InputError
            If there is no room for it.
        """
        self.check_room(question)
        if self._answering and self._stream and (self._quiet or not _shown_together()):
            print()
        self._answering = True
        if show and not self._quiet:
            _say("", f"[bold]> {_escaped(question.strip())}[/]")
        ids = self._ids(question)
        start = time.perf_counter()
        found, seconds = self._answered(ids)
        self._asked += 1
        if self._keep_turns:
            self._unfed = [token for token in found[-1:] if token not in self._ends]
        first, steps = seconds[0] - start, len(found) - 1
        row = {
            "question": question.strip(),
            "answer": self._reading.loaded.tokenizer.decode(found, skip_special_tokens=True),
            "question_tokens": len(ids),
            "new_tokens": len(found),
            "first_token_seconds": first,
            "decode_tokens_per_second": steps / (seconds[-1] - seconds[0]) if steps else None,
        }
        if not self._quiet:
            speed = row["decode_tokens_per_second"]
            then = "" if speed is None else f", then {speed:.1f} tokens/s"
            many = "s" if len(found) > 1 else ""
            _say(f"[dim]{len(found):,} token{many}; the first after {duration(first)}{then}[/]")
        return row

    def _ids(self, question: str) -> list[int]:
        turn = self._keep_turns and self._asked > 0
        form, tokenizer = self._reading.form, self._reading.loaded.tokenizer
        return [*self._unfed, *form.question_ids(tokenizer, question, turn=turn).tolist()]

    def _answered(self, ids: list[int]) -> tuple[list[int], list[float]]:
        """The answer's tokens, and when each of them came."""
        import torch
        from transformers import TextStreamer

        from kvalloc.models.quiet import quiet_transformers
        from kvalloc.runtime.answering import answer

        loaded = self._reading.loaded
        streamer = TextStreamer(loaded.tokenizer, skip_special_tokens=True)
        found: list[int] = []
        seconds: list[float] = []
        with quiet_transformers():
            tokens = answer(
                loaded.model,
                self._reading.cache,
                ids,
                max_new_tokens=self._max_new_tokens,
                ends=self._ends,
                keep=self._keep_turns,
            )
            try:
                for token in tokens:
                    seconds.append(time.perf_counter())
                    found.append(token)
                    if self._stream:
                        streamer.put(torch.tensor([token]))  # type: ignore[no-untyped-call]
            except KeyboardInterrupt:
                if self._stream:  # what is said next gets a line of its own
                    streamer.end()  # type: ignore[no-untyped-call]
                raise
            if self._stream:
                streamer.end()  # type: ignore[no-untyped-call]
        return found, seconds


def ask_all(asker: Asker, questions: Sequence[str]) -> list[dict[str, Any]]:
    """Answer questions that were given beforehand; all are checked before the first."""
    for question in questions:
        asker.check_room(question)
    return [asker.ask(question) for question in questions]


def ask_typed(asker: Asker, *, quiet: bool, keep_turns: bool) -> list[dict[str, Any]]:
    """Answer questions as they are typed; in a terminal a mistake or Ctrl-C ends no more than one.

    Raises
    ------
    InputError
        If there was no question in a stdin that is no terminal, or one cannot be asked.
    """
    rows = []
    interactive = sys.stdin is not None and sys.stdin.isatty()
    for question in typed_questions(quiet=quiet):
        try:
            rows.append(asker.ask(question, show=not interactive))
        except InputError as error:
            if not interactive:
                raise
            _say(f"[red]{_escaped(str(error))}[/]")
        except KeyboardInterrupt:
            if not interactive or keep_turns:  # the conversation would go on from half an answer
                raise
            _say("[dim]broken off[/]")
    if not rows and not interactive:
        raise InputError(
            "there is no question; give --question TEXT, or questions on stdin, a line each"
        )
    return rows


def _shown_together() -> bool:
    """Whether stderr, with the questions, stands between the answers on stdout."""
    return sys.stdout.isatty() and sys.stderr.isatty()


def _say(*lines: str) -> None:
    """Lines with rich's marks, on stderr."""
    from rich.console import Console

    # a question is not to be read for emoji: ":key:" stays what was typed
    console = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    for line in lines:
        console.print(line)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
