"""A prompt from the command line, and its answer as it comes: what generate and chat share."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from kvalloc.cli.output import note, wants_json
from kvalloc.cli.progress import slow
from kvalloc.cli.reduction import model_shape
from kvalloc.errors import InputError
from kvalloc.files import near_file
from kvalloc.models.structure import input_device
from kvalloc.prompts.chat import without_chat
from kvalloc.prompts.examples import chat_text, encode
from kvalloc.units import Option, check_temperature, size

if TYPE_CHECKING:
    from kvalloc.models.loading import LoadedModel

PROMPT, ANSWER = "Prompt", "Answer"
"""Headings in the help."""


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """A prompt and how it is answered, as typed.

    Attributes
    ----------
    prompt : str
        The prompt.
    prompt_file : Path
        A file with the prompt; stdin without either.
    chat : bool
        Put the prompt into the model's chat form, or not. Where the model has one by default.
    max_new_tokens : int, default 128
        Length of an answer at most, tokens.
    temperature : float
        Draw each token of an answer at this temperature, such as 0.7; by default always the most
        likely one is taken.
    seed : int
        With `temperature`: draws the answer, the same one each time; 0 by default.
    """

    prompt: Annotated[str | None, Option("TEXT", PROMPT)] = None
    prompt_file: Annotated[Path | None, Option("FILE", PROMPT)] = None
    chat: Annotated[bool | None, Option("--chat/--no-chat", PROMPT)] = None
    max_new_tokens: Annotated[int, Option("N", ANSWER, least=1)] = 128
    temperature: Annotated[float | None, Option("T", ANSWER)] = None
    seed: Annotated[int | None, Option("N", ANSWER, least=0)] = None

    @classmethod
    def of(cls, typed: Mapping[str, Any]) -> Self:
        """Make it of everything that was typed.

        Raises
        ------
        InputError
            If the answer cannot be drawn so.
        """
        names = {one.name for one in fields(cls)} & {*typed}
        options = cls(**{name: typed[name] for name in names})
        check_temperature(options.temperature)
        return options

    def read(self) -> tuple[str, str]:
        """Read the prompt.

        Returns
        -------
        tuple of str
            The text, and where it came from: the command line, a file or stdin.

        Raises
        ------
        InputError
            If there is none or there are two, or it is empty, unreadable or no text.
        """
        if self.prompt is not None:
            text, where = check_text(self.prompt, "--prompt"), "--prompt"
        elif self.prompt_file is not None:
            text, where = _file_text(self.prompt_file), self.prompt_file.name
        elif sys.stdin is None or sys.stdin.isatty():
            raise InputError("there is no prompt; give --prompt TEXT, --prompt-file FILE or stdin")
        else:
            text, where = _decoded(sys.stdin.buffer.read(), "stdin"), "stdin"
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
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{where} is not UTF-8 text (character {error.start} cannot be read); convert it to "
            "UTF-8"
        ) from error
    return text


def _file_text(file: Path) -> str:
    try:
        return _decoded(file.read_bytes(), str(file))
    except FileNotFoundError:
        raise InputError(f"there is no file {file}; {near_file(file)}check the path") from None
    except OSError as error:
        raise InputError(f"cannot read {file} ({error.strerror})") from error


def _decoded(data: bytes, where: str) -> str:
    if b"\0" in data:
        raise InputError(f"{where} is not text (it holds zero bytes); give UTF-8 text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where} is not UTF-8 text (byte {error.start} cannot be read); convert it to UTF-8"
        ) from error


def prompt_ids(tokenizer: Any, text: str, in_chat: bool) -> tuple[int, ...]:
    """Return the tokens of a prompt, in the model's chat form or as it stands."""
    if not in_chat:
        return encode(tokenizer, text, special=True)
    messages = [{"role": "user", "content": text}]
    return encode(tokenizer, chat_text(tokenizer, messages, way_out=without_chat()))


def check_room(loaded: LoadedModel, n_tokens: int, options: PromptOptions) -> None:
    """Refuse more tokens than leave room for an answer.

    Raises
    ------
    InputError
    """
    limit, longest = model_shape(loaded).max_context_tokens, options.max_new_tokens
    if limit is not None and n_tokens + longest > limit:
        raise InputError(
            f"{n_tokens:,} tokens to read leave no room for an answer of up to {longest:,} within "
            f"the {limit:,} tokens of {loaded.model_id}; shorten the text, or --max-new-tokens"
        )


def save(cache: Any, path: Path, notes: Mapping[str, Any]) -> None:
    """Save what a cache holds, and say so."""
    from kvalloc.runtime.saving import save_cache

    cache.evict()  # nobody asks before it is saved: what has been read decides
    save_cache(cache, path, notes=notes)
    note(f"saved as {path}, {size(path.stat().st_size)}")


def feed(loaded: LoadedModel, cache: Any, ids: Sequence[int]) -> None:
    """Let the model read tokens into a cache."""
    import torch

    from kvalloc.models.quiet import quiet_transformers

    if ids:
        prompt = torch.tensor([[*ids]], device=input_device(loaded.model))
        with torch.no_grad(), quiet_transformers():
            loaded.model(input_ids=prompt, past_key_values=cache, logits_to_keep=1)


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
    """

    begun: float = field(default_factory=time.perf_counter)
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    text: str = ""

    @property
    def first_seconds(self) -> float:
        """Return how long the first token took."""
        return self.times[0] - self.begun

    @property
    def tokens_per_second(self) -> float | None:
        """Return how fast the others came; None where there is one token."""
        steps = len(self.tokens) - 1
        return steps / (self.times[-1] - self.times[0]) if steps > 0 else None


def write_answer(
    loaded: LoadedModel,
    cache: Any,
    ids: Sequence[int],
    options: PromptOptions,
    *,
    ends: Collection[int],
    keep: bool,
    waiting: str = "",
    at_first: Callable[[], object] = lambda: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Answer:
    """Write an answer, on stdout as it comes unless JSON is wanted.

    Parameters
    ----------
    loaded : LoadedModel
    cache : transformers.Cache
        What the model has read.
    ids : sequence of int
        What follows it.
    options : PromptOptions
    ends : collection of int
        Tokens that end an answer.
    keep : bool
        Leave question and answer in the cache; otherwise it stays as it was.
    waiting : str
        What is shown until the first token.
    at_first : callable
        Called with the first token, before it is read.
    stopped : callable
        Whether the answer is to end with the token that has come.
    """
    import torch
    from transformers import TextStreamer

    from kvalloc.models.quiet import quiet_transformers
    from kvalloc.runtime.answering import answer

    streamer: Any = TextStreamer(loaded.tokenizer, skip_special_tokens=True)
    written = Answer()
    with ExitStack() as until_first, quiet_transformers():
        if waiting:
            until_first.enter_context(slow(waiting))
        tokens = answer(
            loaded.model,
            cache,
            ids,
            max_new_tokens=options.max_new_tokens,
            ends=ends,
            keep=keep,
            temperature=options.temperature,
            seed=options.seed or 0,
        )
        try:
            for token in tokens:
                written.times.append(time.perf_counter())
                written.tokens.append(token)
                if len(written.tokens) == 1:
                    until_first.close()
                    at_first()
                if not wants_json():
                    streamer.put(torch.tensor([token]))
                if stopped():
                    break
        finally:
            if not wants_json():  # what is printed next gets a line of its own
                streamer.end()
    written.text = loaded.tokenizer.decode(written.tokens, skip_special_tokens=True)
    return written
