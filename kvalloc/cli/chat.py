"""``kvalloc chat``."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, Unpack

import typer

from kvalloc.allocation.request import RequestOptions
from kvalloc.cli.answers import OF_A_PROMPT, Conversation, PromptOptions, check_text
from kvalloc.cli.options import takes
from kvalloc.cli.output import ProgressBar, is_quiet, note, print_result, wants_json
from kvalloc.errors import InputError, plain
from kvalloc.formats.saved_cache import SavedCacheHeader
from kvalloc.online.conflicts import given_names
from kvalloc.prompts.chat import encode
from kvalloc.report.wording import deciding_text, kept_text
from kvalloc.units import Option, duration

DOCUMENT = "Questions about a document"


@dataclass(frozen=True, kw_only=True)
class ChatOptions(PromptOptions):
    """Questions, and the source of their document."""

    question: Annotated[Sequence[str] | None, Option("TEXT", DOCUMENT)] = None
    """A question about the document alone."""

    cache: Annotated[Path | None, Option("FILE", DOCUMENT)] = None
    """Take the document from a saved cache."""

    document: Annotated[Sequence[Path] | None, Option("FILE", DOCUMENT)] = None
    """A saved cache of a document that was read with --no-chat. Several are joined in this order.
    """

    recompute: Annotated[str | None, Option("SHARE", DOCUMENT)] = None
    """Share of all documents' tokens that is recomputed for a question; 15% by default."""


@takes(only=OF_A_PROMPT)
def chat(options: ChatOptions, **target: Unpack[RequestOptions]) -> None:
    """Talk with a model, or ask about a document, with a reduced cache.

    Turns are typed, a line each. --prompt or --prompt-file gives a document, which is read once.
    Each --question is about it alone; --save-cache without one reads and saves. The budget holds
    for all tokens read and answered. Answers go to stdout, all else to stderr.

    Examples
    --------
    kvalloc chat demo --budget 20%

    Read a long text once, ask about it as often as you like; or about several, read --no-chat:
    kvalloc chat demo --budget 20% --prompt-file doc.txt --save-cache doc.kv
    kvalloc chat demo --cache doc.kv --question "Who speaks?" --question "To whom?"
    kvalloc chat demo --document a.kv --document b.kv --question "Who speaks?"
    """
    options.check(target)
    questions = options.question or ()
    for place, question in enumerate(questions, start=1):
        if not check_text(question, f"question {place}").strip():
            raise InputError(f"question {place} is empty; ask something")
    if options.cache is not None:
        conversation = _with_saved(options.cache, options, questions)
    elif options.document is not None:
        conversation = _with_documents(options.document, options, questions)
    elif questions or {"prompt", "prompt_file", "save_cache"} & given_names(vars(options)):
        conversation = _with_document(options, target, questions)
    else:
        conversation = Conversation.begin(options, target)
        _check_questions(conversation, ())
    document_tokens = conversation.seen_tokens
    conversation.save()
    only_reads = options.save_cache is not None and not questions
    rows = [] if only_reads else _answers(conversation, questions)
    facts = {
        "model": conversation.loaded.model_id,
        "cache": options.cache,
        "saved": options.save_cache,
        "profile": options.profile,
        "document": conversation.document or None,
        "document_tokens": document_tokens or conversation.seen_tokens,
        **({} if conversation.cache is None else conversation.facts()),
        "read_seconds": conversation.read_seconds,
        "load_seconds": conversation.load_seconds,
        "answers": rows,
    }
    print_result(facts)


def _check_questions(
    conversation: Conversation, questions: Sequence[str], n_unread: int = 0
) -> None:
    ask, tokenizer = conversation.form.question_ids, conversation.loaded.tokenizer
    longest = max(len(ask(tokenizer, question)) for question in questions or [""])
    conversation.check_room(n_unread + longest)


def _with_document(
    options: ChatOptions, target: Mapping[str, Any], questions: Sequence[str]
) -> Conversation:
    text, name = options.read()
    conversation = Conversation.begin(options, target)
    ids = conversation.form.document_ids(conversation.loaded.tokenizer, text)
    _check_questions(conversation, questions, len(ids))
    conversation.cache = conversation.make_cache(ids)
    with ProgressBar(f"reading {name}"):
        start = time.perf_counter()
        conversation.read(ids)
        seconds = time.perf_counter() - start
    conversation.note_whole(len(ids))
    conversation.document, conversation.read_seconds = name, seconds
    _note_document(conversation, f"read in {duration(seconds)}{deciding_text(conversation.cache)}")
    return conversation


def _with_saved(path: Path, options: ChatOptions, questions: Sequence[str]) -> Conversation:
    start = time.perf_counter()
    header, tensors = SavedCacheHeader.read(path)  # before the model is loaded
    seconds = time.perf_counter() - start
    dtype, notes = header.dtype, header.notes
    if options.dtype not in (None, dtype):
        raise InputError(
            f"{path} holds {dtype} entries, and --dtype is {options.dtype}; leave out --dtype, or "
            "read the document again"
        )
    loaded = replace(options, dtype=dtype).load(options.model)
    from kvalloc.extensions.saved import filled_cache

    start = time.perf_counter()
    cache = filled_cache(path, header, tensors, loaded.model, options.allow_other_model)
    seconds += time.perf_counter() - start
    if cache.batch != 1:
        raise InputError(
            f"{path} holds {cache.batch} texts at once, and questions are about one; save a cache "
            "of one"
        )
    if options.chat is None:
        options = replace(options, chat=bool(notes.get("chat")))
    conversation = Conversation(
        options=options, loaded=loaded, make_cache=lambda tokens: cache, cache=cache,
        document=str(notes.get("document") or path), answered=bool(notes.get("answered")),
        read_seconds=header.read_seconds, load_seconds=seconds,
    )  # fmt: skip
    _check_questions(conversation, questions)
    how = f"loaded in {duration(seconds)}"
    if (reading := header.read_seconds) is not None:
        how += f" (reading it took {duration(reading)}, {reading / seconds:,.0f}x as long)"
    _note_document(conversation, how)
    return conversation


def _with_documents(
    paths: Sequence[Path], options: ChatOptions, questions: Sequence[str]
) -> Conversation:
    headers = [SavedCacheHeader.read(path)[0] for path in paths]  # before the model is loaded
    loading = replace(options, **{"dtype": headers[0].dtype, **options.keywords})
    loaded = loading.load(options.model)
    from kvalloc.extensions.documents import blend

    def put(question: Sequence[int]) -> Any:
        return blend(
            loaded.model, paths, question=question, before=before, recompute=options.recompute,
            allow_other_model=options.allow_other_model,
        )  # fmt: skip

    conversation = Conversation(
        options=options, loaded=loaded, make_cache=put, has_documents=True,
        document=", ".join(Path(path).name for path in paths),
    )  # fmt: skip
    before = encode(loaded.tokenizer, conversation.form.before)
    n_tokens = len(before) + sum(header.seen_tokens for header in headers)
    _check_questions(conversation, questions, n_tokens)
    return conversation


def _put_documents(conversation: Conversation, question: str) -> None:
    ids = conversation.form.question_ids(conversation.loaded.tokenizer, question)
    start = time.perf_counter()
    with ProgressBar("putting documents together"):
        conversation.cache = conversation.make_cache(ids)
    conversation.load_seconds = seconds = time.perf_counter() - start
    _note_document(conversation, f"put together in {duration(seconds)}")


def _note_document(conversation: Conversation, how: str) -> None:
    read = f"{conversation.document}: {conversation.seen_tokens:,} tokens {how}"
    note(f"{read}; cache: {kept_text(conversation.cache)}")


def _answer(
    conversation: Conversation,
    question: str,
    stopped: Callable[[], bool],
    *,
    first: bool,
    keep: bool,
    show: bool,
) -> dict[str, Any]:
    if conversation.has_documents and (conversation.cache is None or not keep):
        _put_documents(conversation, question)
    n_tokens = len(conversation.turn_ids(question))
    conversation.check_room(n_tokens)
    quiet = is_quiet() or wants_json()
    # in a terminal the question, on stderr, stands between the answers on stdout
    shown_together = sys.stdout.isatty() and sys.stderr.isatty()
    if not (first or wants_json()) and (quiet or not shown_together):
        print()
    if show and not quiet:
        _say("")
        _say(f"> {question.strip()}", bold=True)
    written = conversation.answer(question, stopped, keep=keep)
    if not quiet:
        took = f"the first after {duration(written.first_seconds)}{written.speed_text}"
        _say(f"{written.count_text}; {took}", dim=True)
        if keep:
            seen = f"conversation of {conversation.seen_tokens:,} tokens"
            _say(f"{seen}: {kept_text(conversation.cache)}", dim=True)
    return {
        "question": question.strip(),
        "question_tokens": n_tokens,
        **written.facts(),
        "first_token_seconds": written.first_seconds,
    }


def _answers(conversation: Conversation, questions: Sequence[str]) -> list[dict[str, Any]]:
    """Answer questions or typed turns; in a terminal mistakes or Ctrl-C end one turn."""
    rows: list[dict[str, Any]] = []
    interactive = not questions and sys.stdin is not None and sys.stdin.isatty()
    for turn in questions or _typed_turns():
        try:
            check_text(turn, "the question")
            with _ctrl_c_pressed(watch=interactive) as stopped:
                how = {"first": not rows, "keep": not questions, "show": not interactive}
                rows.append(_answer(conversation, turn, stopped, **how))
                if stopped():
                    _say("broken off", dim=True)
        except InputError as error:
            if not interactive:
                raise
            _say(str(error), fg="red")
    if not rows and not interactive:
        raise InputError(
            "there is no question; give --question TEXT, or turns on stdin, a line each"
        )
    return rows


@contextmanager
def _ctrl_c_pressed(*, watch: bool) -> Iterator[Callable[[], bool]]:
    """Note the first Ctrl-C instead of raising: half a forward would break the cache."""
    pressed: list[int] = []

    def press(number: int, frame: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, press) if watch else None
    try:
        yield lambda: bool(pressed)
    finally:
        if watch:
            signal.signal(signal.SIGINT, before)


def _typed_turns() -> Iterator[str]:
    if sys.stdin is None:
        return
    if isinstance(sys.stdin, TextIOWrapper):  # `check_text` refuses other texts than UTF-8
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    with suppress(ImportError):
        import readline  # noqa: F401  (line editing and a history for input())
    if not (is_quiet() or wants_json()):
        _say("Ask; Ctrl-D ends.", dim=True)
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            _say("")
            return
        if line:
            yield line


def _say(text: str, **style: Any) -> None:
    shown = plain(text)
    print(typer.style(shown, **style) if sys.stderr.isatty() else shown, file=sys.stderr)
