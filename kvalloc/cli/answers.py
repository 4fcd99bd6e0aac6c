"""A prompt from the command line, and answers as they come: what generate and chat share."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from kvalloc.cli.output import note, wants_json
from kvalloc.cli.progress import ProgressBar
from kvalloc.cli.reduction import Reduction, note_way
from kvalloc.errors import InputError, option
from kvalloc.files import check_writable
from kvalloc.models.names import cache_keyword
from kvalloc.models.structure import context_limit, input_device
from kvalloc.prompts.chat import DocumentForm, chat_text, encode, wants_chat, without_chat
from kvalloc.prompts.texts import decoded, read_utf8
from kvalloc.units import Option, check_temperature, size

if TYPE_CHECKING:
    from kvalloc.models.loading import LoadedModel

PROMPT, ANSWER = "Prompt", "Answer"
"""Headings in the help."""


@dataclass(frozen=True, kw_only=True)
class PromptOptions(Reduction):
    """A prompt, how its cache is reduced, and how it is answered."""

    prompt: Annotated[str | None, Option("TEXT", PROMPT)] = None
    """The prompt."""

    prompt_file: Annotated[Path | None, Option("FILE", PROMPT)] = None
    """A file with the prompt; stdin without either."""

    chat: Annotated[bool | None, Option("--chat/--no-chat", PROMPT)] = None
    """Put the prompt into the model's chat form, or not. Where the model has one by default."""

    max_new_tokens: Annotated[int, Option("N", ANSWER, least=1)] = 128
    """Length of an answer at most, tokens."""

    temperature: Annotated[float | None, Option("T", ANSWER)] = None
    """Draw each token, at a temperature such as 0.7."""

    seed: Annotated[int | None, Option("N", ANSWER, least=0)] = None
    """With `temperature`: draws the same answer each time; 0 by default."""

    save_cache: Annotated[Path | None, Option("FILE", ANSWER)] = None
    """Save what was read and answered, for 'chat --cache'."""

    def __post_init__(self) -> None:
        """Refuse a temperature that no answer can be drawn at, and a file that cannot be written.

        Raises
        ------
        InputError
        """
        check_temperature(self.temperature)
        if self.save_cache is not None:
            check_writable(self.save_cache)

    def read(self) -> tuple[str, str]:
        """Read the prompt.

        Returns
        -------
        tuple of str
            The text, and where it came from: the command line, a file or stdin.

        Raises
        ------
        InputError
            If there is none, or it is empty, unreadable or no text.
        """
        if self.prompt is not None:
            text, where = check_text(self.prompt, "--prompt"), "--prompt"
        elif self.prompt_file is not None:
            text, where = read_utf8(self.prompt_file), self.prompt_file.name
        elif sys.stdin is None or sys.stdin.isatty():
            raise InputError("there is no prompt; give --prompt TEXT, --prompt-file FILE or stdin")
        else:
            text, where = decoded(sys.stdin.buffer.read(), "stdin"), "stdin"
        if not text.strip():
            raise InputError(f"the prompt from {where} is empty; give some text")
        return text, where


def check_text(text: str, where: str) -> str:
    """Return a text of the command line, which is no text where it was not typed in UTF-8.

    Raises
    ------
    InputError
        If it was not.
    """
    return decoded(text.encode(errors="surrogateescape"), where)


@dataclass(kw_only=True)
class Answer:
    """An answer while it is written.

    Attributes
    ----------
    begun : float
        Reading of ``time.perf_counter()`` before the first forward.
    tokens : list of int
        So far.
    times : list of float
        When each of them came.
    text : str
        Of all tokens, once it is complete.
    cut : bool
        Whether the limit of tokens ended it.
    """

    begun: float = field(default_factory=time.perf_counter)
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    text: str = ""
    cut: bool = False

    @property
    def count_text(self) -> str:
        """Return how many tokens came, and whether the limit ended them."""
        limit = f", cut at the limit of {option('max_new_tokens', len(self.tokens))}"
        return f"{len(self.tokens):,} new token{'s'[: len(self.tokens) > 1]}{limit * self.cut}"

    @property
    def first_seconds(self) -> float:
        """Return how long the first token took."""
        return self.times[0] - self.begun

    @property
    def tokens_per_second(self) -> float | None:
        """Return how fast the others came; None where there is one token."""
        steps = len(self.tokens) - 1
        return steps / (self.times[-1] - self.times[0]) if steps > 0 else None

    @property
    def speed_text(self) -> str:
        """Return the same, behind the time of the first token; empty where there is one token."""
        speed = self.tokens_per_second
        return "" if speed is None else f", then {speed:.1f} tokens/s"


@dataclass(kw_only=True)
class Conversation:
    """A model, its cache, and the state between two turns.

    Attributes
    ----------
    options : PromptOptions
    target : mapping
        Target of each prompt, as typed.
    loaded : LoadedModel
    make_cache : callable
        Makes an empty cache for a prompt of these tokens.
    cache : transformers.Cache or None
        All tokens that were read; None before the first turn.
    answered : bool
        Whether the cache ends with an answer.
    document : str
        Name of the text that was read first.
    read_seconds, load_seconds : float or None
        Time to read the document, now or before it was saved, and to load it; None if it was not
        read, or not loaded.
    has_documents : bool
        Whether `make_cache` puts saved documents in front of a question's tokens: it is then
        called for each question that is asked alone.
    """

    options: PromptOptions
    target: Mapping[str, Any]
    loaded: LoadedModel
    make_cache: Callable[[Sequence[int]], Any]
    cache: Any = None
    answered: bool = False
    document: str = ""
    read_seconds: float | None = None
    load_seconds: float | None = None
    has_documents: bool = False
    _unread: Sequence[int] = ()
    """The last token of an answer that it does not end with: it was written, not read."""

    @classmethod
    def begin(cls, options: PromptOptions, target: Mapping[str, Any]) -> Self:
        """Load the model, for a conversation in which nothing was said yet.

        Raises
        ------
        KVAllocError
            As `Reduction.load`.
        """
        loaded, make_cache = options.load(target)
        return cls(options=options, target=target, loaded=loaded, make_cache=make_cache)

    @property
    def in_chat(self) -> bool:
        """Return whether turns are put into the model's chat form."""
        return wants_chat(self.loaded.tokenizer, self.options.chat)

    @cached_property
    def form(self) -> DocumentForm:
        """Return the texts around a document, questions and answers."""
        return DocumentForm.of(self.loaded.tokenizer, self.options.chat)

    @cached_property
    def ends(self) -> set[int]:
        """Return the tokens that end an answer."""
        from kvalloc.evaluate.caches import end_tokens

        return end_tokens(self.loaded.model, self.loaded.tokenizer)

    @property
    def seen_tokens(self) -> int:
        """Return the number of tokens that have been read."""
        return 0 if self.cache is None else int(self.cache.get_seq_length())

    def turn_ids(self, text: str) -> tuple[int, ...]:
        """Return the tokens of the next turn, with what calls for its answer."""
        tokenizer = self.loaded.tokenizer
        if self.cache is not None or self.has_documents:
            return (*self._unread, *self.form.question_ids(tokenizer, text, turn=self.answered))
        if not self.in_chat:
            return encode(tokenizer, text, special=True)
        messages = [{"role": "user", "content": text}]
        return encode(tokenizer, chat_text(tokenizer, messages, way_out=without_chat()))

    def check_room(self, n_tokens: int) -> None:
        """Refuse more tokens than leave room for an answer.

        Raises
        ------
        InputError
        """
        limit = context_limit(self.loaded.model)
        tokens, longest = self.seen_tokens + n_tokens, self.options.max_new_tokens
        if limit is not None and tokens + longest > limit:
            raise InputError(
                f"{tokens:,} tokens to read leave no room for an answer of up to {longest:,} within"
                f" the {limit:,} tokens of {self.loaded.model_id}; shorten the text, or "
                "--max-new-tokens"
            )

    def open_cache(self, ids: Sequence[int]) -> None:
        """Make the cache for a prompt of these tokens, and say which way it takes."""
        self.cache = self.make_cache(ids)
        note_way(self.cache, self.options, self.target, len(ids))

    def read(self, ids: Sequence[int]) -> None:
        """Let the model read tokens into the cache."""
        import torch

        from kvalloc.models.quiet import quiet_transformers

        if ids:
            model, is_first = self.loaded.model, not self.seen_tokens
            prompt = torch.tensor([[*ids]], device=input_device(model))
            with torch.no_grad(), quiet_transformers():
                model(input_ids=prompt, logits_to_keep=1, **cache_keyword(model, self.cache))
            if is_first:
                self.cache.read_ids = prompt

    def answer(
        self,
        text: str,
        stopped: Callable[[], bool] = lambda: False,
        *,
        keep: bool = True,
    ) -> Answer:
        """Answer a turn, on stdout as the answer comes unless JSON is wanted.

        Parameters
        ----------
        text : str
            The turn.
        keep : bool
            Leave turn and answer in the cache; otherwise it stays as it was.
        stopped : callable
            Whether the answer is to end with the token that has come.

        Raises
        ------
        InputError
            If there is no room for it.
        """
        import torch
        from transformers import TextStreamer

        from kvalloc.extensions.answering import answer
        from kvalloc.models.quiet import quiet_transformers

        ids, options = self.turn_ids(text), self.options
        self.check_room(len(ids))
        if self.cache is None:
            self.open_cache(ids)
        streamer: Any = TextStreamer(self.loaded.tokenizer, skip_special_tokens=True)
        written = Answer()
        with ExitStack() as until_first, quiet_transformers():
            until_first.enter_context(ProgressBar("reading the prompt"))
            tokens = answer(
                self.loaded.model,
                self.cache,
                ids,
                max_new_tokens=options.max_new_tokens,
                ends=self.ends,
                keep=keep,
                temperature=options.temperature,
                seed=options.seed or 0,
            )
            try:
                for token in tokens:
                    written.times.append(time.perf_counter())
                    written.tokens.append(token)
                    until_first.close()
                    if not wants_json():
                        streamer.put(torch.tensor([token]))
                    if stopped():
                        break
            finally:
                tokens.close()  # ends the turn now, also if the answer is broken off
                if written.tokens and not wants_json():  # later output begins a new line
                    streamer.end()
        written.text = self.loaded.tokenizer.decode(written.tokens, skip_special_tokens=True)
        unended = [token for token in written.tokens[-1:] if token not in self.ends]
        written.cut = bool(unended) and len(written.tokens) == options.max_new_tokens
        if keep:
            self.answered, self._unread = True, unended
        return written

    def save(self) -> None:
        """Save the cache if a file was named, and say so."""
        from kvalloc.extensions.saved import save_cache

        if (path := self.options.save_cache) is None:
            return
        self.read(self._unread)
        names = ("document", "read_seconds", "answered")
        notes = {"chat": self.in_chat, **{name: getattr(self, name) for name in names}}
        save_cache(self.cache, path, notes=notes)
        note(f"saved as {path}, {size(path.stat().st_size)}")
