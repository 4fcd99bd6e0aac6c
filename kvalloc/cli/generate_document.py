"""``kvalloc generate`` with a document: read or loaded once, saved, and asked about."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvalloc.cli.generate_facts import (
    bytes_of,
    context_limit,
    device_of,
    granted_fields,
    kept_text,
    note_short,
    policies_of,
    wants_chat,
)
from kvalloc.cli.generate_request import Asked, check_text, given_prompt, load_with_cache
from kvalloc.cli.output import duration, note, print_json, size
from kvalloc.cli.progress import load, slow
from kvalloc.errors import InputError, one_line, plain

if TYPE_CHECKING:
    from kvalloc.accounting import IntArray
    from kvalloc.models.loading import LoadedModel

_DOCUMENT, _QUESTION, _ANSWER, _NEXT = (
    f"kvalloc{name}marks" for name in ("doc", "ask", "say", "go")
)


def ask_document(asked: Asked) -> None:
    """A document, read or loaded, saved or not, and any number of questions about it."""
    reading = _read(asked) if asked.cache is None else _loaded(asked, asked.cache)
    facts: dict[str, Any] = {
        "model": reading.loaded.model_id,
        "cache": None if asked.cache is None else str(asked.cache),
        "saved": None if asked.save_cache is None else str(asked.save_cache),
        "profile": asked.profile,
        **policies_of(reading.cache),
        **reading.as_dict(),
    }
    quiet = asked.quiet or asked.json
    note(reading.summary(), quiet=quiet)
    if asked.save_cache is not None:
        stored = _save(reading, asked.save_cache)
        note(f"saved as {asked.save_cache}, {size(stored)}", quiet=quiet)
    asker = _Asker(reading, asked)
    for question in asked.questions:
        asker.check_room(question)  # all of them before the first answer
    rows = [asker.ask(question) for question in asked.questions]
    if asked.ask or (asked.cache is not None and not asked.questions):
        rows = _ask_typed(asker, quiet=quiet, keep_turns=asked.keep_turns)
    if asked.json:
        print_json({**facts, "answers": rows})


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
    def of(cls, loaded: LoadedModel, chat: bool | None) -> Form:
        """The model's own chat form, or none.

        Parameters
        ----------
        loaded : LoadedModel
        chat : bool or None
            Whether it is wanted; where the model has one by default.

        Raises
        ------
        InputError
            If it is wanted and there is none, or it cannot be taken apart.
        """
        if not wants_chat(loaded, chat):
            return cls()
        first = {"role": "user", "content": f"{_DOCUMENT}\n\n{_QUESTION}"}
        turns = [
            first,
            {"role": "assistant", "content": _ANSWER},
            {"role": "user", "content": _NEXT},
        ]
        alone, several = _rendered(loaded, [first]), _rendered(loaded, turns)
        before, _, rest = alone.partition(_DOCUMENT)
        between, _, after = rest.partition(_QUESTION)
        turn, _, rest = several.partition(_ANSWER)[2].partition(_NEXT)
        whole = between == "\n\n" and turn and rest == after and several.startswith(before)
        if not whole:
            raise InputError(
                f"the chat form of {loaded.model_id} cannot be taken apart into a document and "
                "questions about it; use --no-chat"
            )
        return cls(before=before, after=after, turn=turn, special=False)

    def document_ids(self, tokenizer: Any, text: str) -> IntArray:
        """Tokens of a document and all that stands in front of the first question."""
        return _encoded(tokenizer, f"{self.before}{text.rstrip()}\n\n", special=self.special)

    def question_ids(self, tokenizer: Any, question: str, *, turn: bool = False) -> IntArray:
        """Tokens of a question and what calls for its answer; after an answer in a ``turn``."""
        written = f"{self.turn if turn else ''}{question.strip()}{self.after}"
        return _encoded(tokenizer, written, special=False)


def _rendered(loaded: LoadedModel, messages: list[dict[str, str]]) -> str:
    template = loaded.tokenizer.apply_chat_template
    try:
        return str(template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template is a program of its own and fails in its own ways
        raise InputError(
            f"the chat form of {loaded.model_id} cannot be applied ({one_line(error)}); use "
            "--no-chat"
        ) from error


def _encoded(tokenizer: Any, text: str, *, special: bool) -> IntArray:
    ids = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return np.asarray(ids, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A document that questions can be asked about.

    Attributes
    ----------
    loaded : LoadedModel
    cache : transformers.Cache
        Holds the document.
    form : Form
        What stands around questions and answers.
    name : str
        Of the document, for people.
    read_seconds : float or None
        What reading took, now or when it was saved; None where that was not noted.
    load_seconds : float or None
        What loading took; None where it was read.
    """

    loaded: LoadedModel
    cache: Any
    form: Form
    name: str
    read_seconds: float | None
    load_seconds: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """What was read and what it takes, before any question, as plain values."""
        tokens = int(self.cache.get_seq_length())
        return {
            "document": self.name,
            "document_tokens": tokens,
            **granted_fields(self.cache, tokens),
            **bytes_of(self.loaded, self.cache),
            "read_seconds": self.read_seconds,
            "load_seconds": self.load_seconds,
            "decision_seconds": self._decision_seconds,
        }

    def summary(self) -> str:
        """The same on one line."""
        if self.load_seconds is None:
            assert self.read_seconds is not None  # it was read just now
            how = f"read in {duration(self.read_seconds)}"
            if self._decision_seconds is not None:
                how += f", {duration(self._decision_seconds)} of it to decide the budgets"
        else:
            how = f"loaded in {duration(self.load_seconds)}"
            if self.read_seconds is not None:
                times = self.read_seconds / self.load_seconds
                how += f" (reading it took {duration(self.read_seconds)}, {times:,.0f}x as long)"
        kept = kept_text(self.cache, **bytes_of(self.loaded, self.cache))
        return f"{self.name}: {self.cache.get_seq_length():,} tokens {how}; cache {kept}"

    @property
    def _decision_seconds(self) -> float | None:
        """How much of reading was deciding the budgets; None where they were stored."""
        return getattr(self.cache, "decision_seconds", None) if self.load_seconds is None else None


def _read(asked: Asked) -> Reading:
    """Let the model read the document into a new cache."""
    import torch

    from kvalloc.models.quiet import quiet_transformers

    text, name = given_prompt(asked)
    loaded, cache = load_with_cache(asked)
    form = Form.of(loaded, asked.chat)
    ids = form.document_ids(loaded.tokenizer, text)
    with slow(f"reading {name}", quiet=asked.quiet):
        _check_room(loaded, int(ids.size), _room(form, loaded, asked))
        prompt = torch.from_numpy(ids)[None].to(device_of(loaded))
        start = time.perf_counter()
        with torch.no_grad(), quiet_transformers():
            loaded.model(input_ids=prompt, past_key_values=cache, logits_to_keep=1)
        seconds = time.perf_counter() - start
    note_short(cache, int(ids.size), quiet=asked.quiet)
    return Reading(loaded=loaded, cache=cache, form=form, name=name, read_seconds=seconds)


def _loaded(asked: Asked, path: Path) -> Reading:
    """Take the document from a file that `_save` wrote, in the type that it was read in."""
    from kvalloc.formats.saved_cache import SavedCacheHeader
    from kvalloc.models.loading import require_run_packages

    require_run_packages()
    header = SavedCacheHeader.load(path)  # before the model is loaded
    dtype, notes = header.dtype, header.notes
    if asked.dtype not in (None, dtype):
        raise InputError(
            f"{path} holds {dtype} entries, and --dtype is {asked.dtype}; leave out --dtype, or "
            "read the document again"
        )
    loaded = load(asked.model, dtype=dtype, device=asked.device, quiet=asked.quiet)
    from kvalloc.runtime.loading import load_cache

    form = Form.of(loaded, bool(notes.get("chat")) if asked.chat is None else asked.chat)
    start = time.perf_counter()
    cache = load_cache(path, loaded.model, allow_other_model=asked.allow_other_model)
    seconds = time.perf_counter() - start
    if cache.batch != 1:
        raise InputError(
            f"{path} holds {cache.batch} texts at once, and questions are about one; save a cache "
            "of one"
        )
    _check_room(loaded, int(cache.get_seq_length()), _room(form, loaded, asked))
    return Reading(
        loaded=loaded,
        cache=cache,
        form=form,
        name=str(notes.get("document") or path),
        read_seconds=header.read_seconds,
        load_seconds=seconds,
    )


def _save(reading: Reading, path: Path) -> int:
    """Save a document that was read; returns the bytes of the file."""
    from kvalloc.runtime.saving import save_cache

    chat = not reading.form.special
    notes = {"document": reading.name, "read_seconds": reading.read_seconds, "chat": chat}
    save_cache(reading.cache, path, notes=notes)
    return path.stat().st_size


def _room(form: Form, loaded: LoadedModel, asked: Asked) -> int:
    """Tokens that the longest question and its answer need; the shortest where none is known."""
    questions = asked.questions or [""]
    longest = max(form.question_ids(loaded.tokenizer, one).size for one in questions)
    return int(longest) + asked.max_new_tokens


def _check_room(loaded: LoadedModel, document_tokens: int, room_tokens: int) -> None:
    """Refuse a document after which questions have no room."""
    limit = context_limit(loaded)
    if limit is not None and document_tokens + room_tokens > limit:
        raise InputError(
            f"a document of {document_tokens:,} tokens leaves no room for a question and its "
            f"answer, {room_tokens:,} tokens, within the {limit:,} of {loaded.model_id}; shorten "
            "the document, the question or --max-new-tokens"
        )


class _Asker:
    """Asks questions about one document.

    Answers are written to stdout as they come, an empty line between two of them wherever nothing
    else is shown there; with ``--json`` nothing is.
    """

    def __init__(self, reading: Reading, asked: Asked) -> None:
        from kvalloc.evaluate.caches import end_tokens

        self._reading, self._asked = reading, asked
        self._stream = not asked.json
        self._quiet = asked.quiet or asked.json
        self._ends = end_tokens(reading.loaded.model, reading.loaded.tokenizer)
        # Of the answer before: its last token was never fed, as nothing followed it.
        self._unfed: list[int] = []
        self._n_answers = 0
        self._answering = False  # whether there is an answer or the beginning of one

    def check_room(self, question: str) -> None:
        """Refuse a question for which the model's context has no room."""
        held = int(self._reading.cache.get_seq_length())
        needed = len(self._ids(question)) + self._asked.max_new_tokens
        _check_room(self._reading.loaded, held, needed)

    def ask(self, question: str, *, show: bool = True) -> dict[str, Any]:
        """Answer one question, and show it, too, where it was not typed in a terminal.

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
        # in a terminal the question, on stderr, stands between the answers on stdout
        shown_together = sys.stdout.isatty() and sys.stderr.isatty()
        if self._answering and self._stream and (self._quiet or not shown_together):
            print()
        self._answering = True
        if show and not self._quiet:
            _say("")
            _say(f"> {question.strip()}", "bold")
        ids = self._ids(question)
        start = time.perf_counter()
        found, seconds = self._answered(ids)
        self._n_answers += 1
        if self._asked.keep_turns:
            self._unfed = [token for token in found[-1:] if token not in self._ends]
        first, steps = seconds[0] - start, len(found) - 1
        speed = steps / (seconds[-1] - seconds[0]) if steps else None
        if not self._quiet:
            then = "" if speed is None else f", then {speed:.1f} tokens/s"
            many = "s" if len(found) > 1 else ""
            _say(f"{len(found):,} token{many}; the first after {duration(first)}{then}", "dim")
        return {
            "question": question.strip(),
            "answer": self._reading.loaded.tokenizer.decode(found, skip_special_tokens=True),
            "question_tokens": len(ids),
            "new_tokens": len(found),
            "first_token_seconds": first,
            "decode_tokens_per_second": speed,
        }

    def _ids(self, question: str) -> list[int]:
        turn = self._asked.keep_turns and self._n_answers > 0
        form, tokenizer = self._reading.form, self._reading.loaded.tokenizer
        return [*self._unfed, *form.question_ids(tokenizer, question, turn=turn).tolist()]

    def _answered(self, ids: list[int]) -> tuple[list[int], list[float]]:
        """The answer's tokens, and when each of them came."""
        import torch
        from transformers import TextStreamer

        from kvalloc.models.quiet import quiet_transformers
        from kvalloc.runtime.answering import answer

        loaded = self._reading.loaded
        streamer: Any = TextStreamer(loaded.tokenizer, skip_special_tokens=True)
        found: list[int] = []
        seconds: list[float] = []
        with quiet_transformers():
            tokens = answer(
                loaded.model,
                self._reading.cache,
                ids,
                max_new_tokens=self._asked.max_new_tokens,
                ends=self._ends,
                keep=self._asked.keep_turns,
            )
            try:
                for token in tokens:
                    seconds.append(time.perf_counter())
                    found.append(token)
                    if self._stream:
                        streamer.put(torch.tensor([token]))
            finally:
                if self._stream:  # what is said next gets a line of its own
                    streamer.end()
        return found, seconds


def _ask_typed(asker: _Asker, *, quiet: bool, keep_turns: bool) -> list[dict[str, Any]]:
    """Answer questions as they are typed; in a terminal a mistake or Ctrl-C ends no more than one.

    Raises
    ------
    InputError
        If there was no question in a stdin that is no terminal, or one cannot be asked.
    """
    rows = []
    interactive = sys.stdin is not None and sys.stdin.isatty()
    for question in _typed_questions(quiet=quiet):
        try:
            rows.append(asker.ask(check_text(question, "the question"), show=not interactive))
        except InputError as error:
            if not interactive:
                raise
            _say(str(error), "red")
        except KeyboardInterrupt:
            if not interactive or keep_turns:  # the conversation would go on from half an answer
                raise
            _say("broken off", "dim")
    if not rows and not interactive:
        raise InputError(
            "there is no question; give --question TEXT, or questions on stdin, a line each"
        )
    return rows


def _typed_questions(*, quiet: bool) -> Iterator[str]:
    """Questions from stdin, a line each: prompted for in a terminal, where an empty line ends."""
    if sys.stdin is None:
        return
    if not sys.stdin.isatty():
        try:
            yield from (line.strip() for line in sys.stdin if line.strip())
        except UnicodeDecodeError as error:
            raise InputError(
                f"stdin is not UTF-8 text (byte {error.start} cannot be read); give questions as "
                "text, a line each"
            ) from error
        return
    with suppress(ImportError):
        import readline  # noqa: F401  (line editing and a history for input())
    if not quiet:
        _say("Ask; an empty line or Ctrl-D ends.", "dim")
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            _say("")
            return
        if not line:
            return
        yield line


def _say(text: str, style: str | None = None) -> None:
    """A line on stderr, as it stands: nothing in it is read as rich's marks or as emoji."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True).print(Text(plain(text)), style=style)
