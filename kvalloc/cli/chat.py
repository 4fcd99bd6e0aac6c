"""``kvalloc chat``: a conversation, or questions about a document that was read once."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from kvalloc.allocation.request import RequestOptions
from kvalloc.cli.answers import (
    PromptOptions,
    check_room,
    check_text,
    feed,
    prompt_ids,
    save,
    write_answer,
)
from kvalloc.cli.options import takes
from kvalloc.cli.output import duration, is_quiet, note, print_json, wants_json
from kvalloc.cli.progress import load, slow
from kvalloc.cli.reduction import (
    OF_A_PROMPT,
    Reduction,
    cache_facts,
    kept_text,
    load_with_caches,
    note_way,
    note_whole,
)
from kvalloc.errors import InputError, plain
from kvalloc.prompts.chat import DocumentForm
from kvalloc.units import Option

if TYPE_CHECKING:
    from kvalloc.models.loading import LoadedModel

EXAMPLES = """\
  kvalloc chat demo --budget 20%
  kvalloc chat demo --budget 20% --prompt-file doc.txt

\b
  Read a long text once, ask about it as often as you like:
  kvalloc chat demo --budget 20% --prompt-file doc.txt --save-cache doc.kv
  kvalloc chat demo --cache doc.kv --question "Who speaks?" --question "To whom?"
  kvalloc chat demo --cache doc.kv
"""

DOCUMENT = "Questions about a document"
_OF_DOCUMENT = ("question", "cache", "save_cache")


class DocumentOptions(TypedDict, total=False):
    """Where the document comes from, and what is asked about it.

    Parameters
    ----------
    question : sequence of str
        A question about the prompt, which is then a document. Each one follows the document alone.
    save_cache : Path
        Save the cache with the document, for `cache`; without `question` that is all.
    cache : Path
        Take the document from a cache that was saved.
    """

    question: Annotated[Sequence[str], Option("TEXT", DOCUMENT)]
    save_cache: Annotated[Path, Option("FILE", DOCUMENT)]
    cache: Annotated[Path, Option("FILE", DOCUMENT)]


@takes(
    RequestOptions, Reduction, PromptOptions, DocumentOptions, only={RequestOptions: OF_A_PROMPT}
)
def chat(model: str, **typed: Any) -> None:
    """Talk with a model, or ask about a document, with a reduced cache.

    Turns are typed, a line each, and each follows the answers before. A prompt is a document to
    talk about; it is read once, and can be saved. Each --question follows the document alone.
    Budgets are those of 'kvalloc generate'. Answers go to stdout, what they took to stderr; in a
    pipe or a file an empty line stands between two answers, and --json keeps them apart whatever is
    in them.
    """
    reduction, options = Reduction.of(model, typed), PromptOptions.of(typed)
    questions, cache, save_cache = (typed.get(name) for name in _OF_DOCUMENT)
    _check(reduction, questions or ())
    if cache is not None:
        talk = _load_talk(cache, reduction, options, questions or ())
    elif reduction.given("prompt", "prompt_file", *_OF_DOCUMENT):
        talk = _read_talk(reduction, options, questions or ())
    else:
        loaded, make_cache = load_with_caches(reduction)
        form = DocumentForm.of(loaded.tokenizer, options.chat)
        talk = _Talk(loaded=loaded, form=form, make_cache=make_cache, options=options)
    document = {} if talk.cache is None else talk.facts()
    if save_cache is not None:
        in_chat = not talk.form.special
        notes = {"document": talk.document, "read_seconds": talk.read_seconds, "chat": in_chat}
        save(talk.cache, save_cache, notes)
    if questions:
        rows = [talk.answer(question, keep=False) for question in questions]
    else:
        rows = [] if save_cache is not None else _answer_typed(talk)
    if wants_json():
        files = {"cache": cache, "saved": save_cache, "profile": reduction.profile}
        if not document and rows:
            document = talk.facts()
        facts = {**files, **document, "answers": rows}
        print_json({"model": talk.loaded.model_id, **facts})


def _check(reduction: Reduction, questions: Sequence[str]) -> None:
    """Refuse what contradicts itself before anything is read.

    Raises
    ------
    InputError
    """
    save_cache = reduction.typed.get("save_cache")
    reduction.check()
    for place, question in enumerate(questions, start=1):
        which = f"question {place}" if len(questions) > 1 else "the question"
        if not check_text(question, which).strip():
            raise InputError(f"{which} is empty; ask something")
    if save_cache is not None:
        from kvalloc.files import check_writable

        check_writable(save_cache)


@dataclass(kw_only=True)
class _Talk:
    """A model, what it has read of a conversation, and its next answers.

    Answers are written to stdout as they come, an empty line between two of them wherever nothing
    else is shown there; with ``--json`` nothing is.

    Attributes
    ----------
    loaded : LoadedModel
    form : DocumentForm
        What stands around questions and answers.
    make_cache : callable
        Makes an empty cache for a prompt of that many tokens, once.
    options : PromptOptions
    cache : transformers.Cache or None
        What has been read; None before the first turn.
    document : str
        Its name, for people.
    read_seconds, load_seconds : float or None
        What reading it took, now or before it was saved, and loading it; None where it was not
        read, or not loaded.
    answered : bool
        Whether the cache ends with an answer.
    """

    loaded: LoadedModel
    form: DocumentForm
    make_cache: Callable[[int], Any]
    options: PromptOptions
    cache: Any = None
    document: str = ""
    read_seconds: float | None = None
    load_seconds: float | None = None
    answered: bool = False
    _unfed: Sequence[int] = ()
    """The last token of the answer before, where it does not end it: nothing followed it yet."""
    _printed: bool = False
    """Whether an answer or the beginning of one has been printed."""

    @cached_property
    def _ends(self) -> set[int]:
        from kvalloc.evaluate.caches import end_tokens

        return end_tokens(self.loaded.model, self.loaded.tokenizer)

    def check_room(self, question: str) -> None:
        """Refuse a question for which the model's context has no room."""
        seen = 0 if self.cache is None else int(self.cache.get_seq_length())
        check_room(self.loaded, seen + len(self._ids(question)), self.options)

    def answer(
        self,
        question: str,
        *,
        keep: bool,
        show: bool = True,
        stopped: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any]:
        """Answer one question.

        Parameters
        ----------
        question : str
        keep : bool
            Whether the next one follows it; otherwise what was read stays as it is.
        show : bool
            Show the question, too: it was not typed in a terminal.
        stopped : callable
            As in `write_answer`.

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
        quiet, ids = is_quiet() or wants_json(), self._ids(question)
        # in a terminal the question, on stderr, stands between the answers on stdout
        shown_together = sys.stdout.isatty() and sys.stderr.isatty()
        if self._printed and not wants_json() and (quiet or not shown_together):
            print()
        self._printed = True
        if show and not quiet:
            _say("")
            _say(f"> {question.strip()}", "bold")
        if first_turn := self.cache is None:
            self.cache = self.make_cache(len(ids))
        written = write_answer(
            self.loaded, self.cache, ids, self.options,
            ends=self._ends, keep=keep, stopped=stopped,
        )  # fmt: skip
        if keep:
            self.answered = True
            self._unfed = [token for token in written.tokens[-1:] if token not in self._ends]
        count, speed = len(written.tokens), written.tokens_per_second
        if not quiet:
            then = "" if speed is None else f", then {speed:.1f} tokens/s"
            first = duration(written.first_seconds)
            _say(f"{count:,} token{'s' * (count > 1)}; the first after {first}{then}", "dim")
        if first_turn:
            note(f"cache: {self._kept_text()}")
        return {
            "question": question.strip(),
            "answer": written.text,
            "question_tokens": len(ids),
            "new_tokens": count,
            "first_token_seconds": written.first_seconds,
            "decode_tokens_per_second": speed,
        }

    def _ids(self, question: str) -> list[int]:
        tokenizer = self.loaded.tokenizer
        if self.cache is None:
            return [*prompt_ids(tokenizer, question, not self.form.special)]
        return [*self._unfed, *self.form.question_ids(tokenizer, question, turn=self.answered)]

    def facts(self) -> dict[str, Any]:
        """Return what has been read and what it takes, as plain values."""
        tokens = int(self.cache.get_seq_length())
        return {
            "document": self.document or None,
            "document_tokens": tokens,
            **cache_facts(self.loaded, self.cache, tokens),
            "read_seconds": self.read_seconds,
            "load_seconds": self.load_seconds,
            "decision_seconds": self._decision_seconds,
        }

    def note_document(self) -> None:
        """Say what was read or loaded and what it takes, on one line."""
        read = None if self.read_seconds is None else duration(self.read_seconds)
        if self.load_seconds is None:
            how = f"read in {read}"
            if self._decision_seconds is not None:
                how += f", {duration(self._decision_seconds)} of it to decide the budgets"
        else:
            how = f"loaded in {duration(self.load_seconds)}"
            if self.read_seconds is not None:
                times = self.read_seconds / self.load_seconds
                how += f" (reading it took {read}, {times:,.0f}x as long)"
        tokens = self.cache.get_seq_length()
        note(f"{self.document}: {tokens:,} tokens {how}; cache: {self._kept_text()}")

    def _kept_text(self) -> str:
        facts = self.facts()
        return kept_text(self.cache, facts["share"], facts["retained_bytes"], facts["full_bytes"])

    @property
    def _decision_seconds(self) -> float | None:
        """Return the share of reading that decided budgets, seconds; None of stored ones."""
        return getattr(self.cache, "decision_seconds", None) if self.load_seconds is None else None


def _read_talk(reduction: Reduction, options: PromptOptions, questions: Sequence[str]) -> _Talk:
    """Let the model read the document, where questions about it have room."""
    text, name = options.read()
    loaded, make_cache = load_with_caches(reduction)
    form = DocumentForm.of(loaded.tokenizer, options.chat)
    ids = form.document_ids(loaded.tokenizer, text)
    longest = max(len(form.question_ids(loaded.tokenizer, one)) for one in questions or [""])
    check_room(loaded, len(ids) + longest, options)
    cache = make_cache(len(ids))
    note_way(cache, reduction)
    with slow(f"reading {name}"):
        start = time.perf_counter()
        feed(loaded, cache, ids)
        if "save_cache" in reduction.typed:
            cache.evict()  # nobody asks before it is saved: the document's own end decides
        seconds = time.perf_counter() - start
    note_whole(cache, len(ids))
    talk = _Talk(
        loaded=loaded, form=form, make_cache=make_cache, options=options,
        cache=cache, document=name, read_seconds=seconds,
    )  # fmt: skip
    talk.note_document()
    return talk


def _load_talk(
    path: Path, reduction: Reduction, options: PromptOptions, questions: Sequence[str]
) -> _Talk:
    """Take the document from a file that was saved, in the type that it was read in."""
    from kvalloc.formats.saved_cache import SavedCacheHeader
    from kvalloc.models.loading import require_run_packages

    require_run_packages()
    start = time.perf_counter()
    header, tensors = SavedCacheHeader.read(path)  # before the model is loaded
    seconds = time.perf_counter() - start
    dtype, notes = header.dtype, header.notes
    if reduction.dtype not in (None, dtype):
        raise InputError(
            f"{path} holds {dtype} entries, and --dtype is {reduction.dtype}; leave out --dtype, "
            "or read the document again"
        )
    loaded = load(reduction.model, {**reduction.typed, "dtype": dtype})
    from kvalloc.runtime.loading import filled_cache

    start = time.perf_counter()
    cache = filled_cache(path, header, tensors, loaded.model, reduction.allow_other_model)
    seconds += time.perf_counter() - start
    if cache.batch != 1:
        raise InputError(
            f"{path} holds {cache.batch} texts at once, and questions are about one; save a cache "
            "of one"
        )
    in_chat = bool(notes.get("chat")) if options.chat is None else options.chat
    talk = _Talk(
        loaded=loaded, form=DocumentForm.of(loaded.tokenizer, in_chat), options=options,
        make_cache=lambda tokens: cache, cache=cache,
        document=str(notes.get("document") or path), answered=bool(notes.get("answered")),
        read_seconds=header.read_seconds, load_seconds=seconds,
    )  # fmt: skip
    for question in questions or [""]:
        talk.check_room(question)
    talk.note_document()
    return talk


def _answer_typed(talk: _Talk) -> list[dict[str, Any]]:
    """Answer turns as they are typed; in a terminal a mistake or Ctrl-C ends no more than one.

    Raises
    ------
    InputError
        If there was no turn in a stdin that is no terminal, or one cannot be answered.
    """
    rows = []
    interactive = sys.stdin is not None and sys.stdin.isatty()
    for turn in _typed_turns():
        try:
            check_text(turn, "the question")
            with _ctrl_c_pressed(noted=interactive) as stopped:
                rows.append(talk.answer(turn, keep=True, show=not interactive, stopped=stopped))
                if stopped():
                    _say("broken off", "dim")
        except InputError as error:
            if not interactive:
                raise
            _say(str(error), "red")
    if not rows and not interactive:
        raise InputError(
            "there is no question; give --question TEXT, or turns on stdin, a line each"
        )
    return rows


@contextmanager
def _ctrl_c_pressed(*, noted: bool) -> Iterator[Callable[[], bool]]:
    """Note the first Ctrl-C instead of raising: half a forward would leave a broken cache.

    Yields
    ------
    callable
        Whether it has been pressed.
    """
    pressed: list[int] = []

    def press(number: int, frame: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, press) if noted else None
    try:
        yield lambda: bool(pressed)
    finally:
        if noted:
            signal.signal(signal.SIGINT, before)


def _typed_turns() -> Iterator[str]:
    """Yield turns from stdin, a line each; in a terminal each is prompted for, and none ends."""
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
    if not (is_quiet() or wants_json()):
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
    """Print a line on stderr as it stands: nothing in it is read as rich's marks or as emoji."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True).print(Text(plain(text)), style=style)
