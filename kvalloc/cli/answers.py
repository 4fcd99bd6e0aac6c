"""Prompts and answers of generate and chat."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import numpy as np

from kvalloc.allocation.request import TARGETS, RequestOptions
from kvalloc.cli.options import FittedOptions, LoadOptions, ModelArgument
from kvalloc.cli.output import ProgressBar, is_verbose, note, wants_json
from kvalloc.errors import InputError, option
from kvalloc.files import check_writable
from kvalloc.models.names import cache_keyword
from kvalloc.models.structure import context_limit, input_device
from kvalloc.online.conflicts import check_conflicts, given_names
from kvalloc.prompts.chat import DocumentForm, chat_text, encode, wants_chat, without_chat
from kvalloc.prompts.texts import decoded, read_utf8
from kvalloc.units import Option, check_temperature, size

if TYPE_CHECKING:
    from kvalloc.formats.budget_profile import BudgetProfile
    from kvalloc.models.loading import LoadedModel

BUDGETS, KEPT, PROMPT, ANSWER = "Budgets", "Which entries stay", "Prompt", "Answer"
"""Headings in the help."""

OF_A_PROMPT: dict[type, Collection[str]] = {RequestOptions: (*TARGETS, "level")}
"""Options of a request that can be decided from one prompt."""


@dataclass(frozen=True, kw_only=True)
class PromptOptions(FittedOptions, LoadOptions, ModelArgument):
    """A prompt, its cache and its answer."""

    profile: Annotated[str | None, Option("P.json", BUDGETS)] = None
    """A budget profile, or a shipped one's name."""

    solver: Annotated[str | None, Option("NAME", BUDGETS)] = None
    """Solver, or module:Class, with its options after colons, such as ilp:gap=0.001; see 'kvalloc
    list solvers'."""

    policy: Annotated[str | None, Option("NAME", KEPT)] = None
    """Pick the entries in another way within the same budgets: by a policy, or by the best scores
    of a scorer; see 'kvalloc list policies'. Its parameters follow colons, such as nacl:seed=1.
    """

    decode_every: Annotated[int | None, Option("N", KEPT, minimum=1)] = None
    """Evict again every N tokens after the prompt; every 64 or more by default."""

    lossless: Annotated[bool, Option("", KEPT)] = False
    """Answer as the full cache does: it verifies what the reduced cache drafts."""

    prompt: Annotated[str | None, Option("TEXT", PROMPT)] = None
    """The prompt."""

    prompt_file: Annotated[Path | None, Option("FILE", PROMPT)] = None
    """A file with the prompt; stdin without either."""

    chat: Annotated[bool | None, Option("--chat/--no-chat", PROMPT)] = None
    """Put the prompt into the model's chat form, or not. By default if the model has one."""

    max_new_tokens: Annotated[int, Option("N", ANSWER, minimum=1)] = 128
    """Largest length of an answer, tokens."""

    temperature: Annotated[float | None, Option("T", ANSWER)] = None
    """Draw each token, at a temperature such as 0.7."""

    seed: Annotated[int | None, Option("N", ANSWER, minimum=0)] = None
    """With `temperature`: draws the same answer each time; 0 by default."""

    save_cache: Annotated[Path | None, Option("FILE", ANSWER)] = None
    """Save the cache with prompt and answer, for 'chat --cache'."""

    def check(self, target: Mapping[str, Any]) -> None:
        """Refuse conflicting options, or none that reduce a prompt."""
        check_temperature(self.temperature)
        if self.save_cache is not None:
            check_writable(self.save_cache)
        names = given_names({**vars(self), **target})
        check_conflicts(names)
        if not {*TARGETS, "profile", "cache", "document"} & names:
            raise InputError(
                "say how much to keep with --budget 20%, of which 100% is the full cache, or which "
                "budgets to use with --profile P.json"
            )

    def read(self) -> tuple[str, str]:
        """Return the prompt and its source; refuse an empty or unreadable one."""
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
    """Return a command line's text; refuse other than UTF-8."""
    return decoded(text.encode(errors="surrogateescape"), where)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer and its times.

    ``cut``: the limit ended it. ``first_seconds`` include the prompt; the speed is of other tokens.
    """

    text: str
    new_tokens: int
    cut: bool
    first_seconds: float
    decode_tokens_per_second: float | None

    @property
    def count_text(self) -> str:
        """Return the number of tokens, and whether they were cut."""
        text = f"{self.new_tokens:,} new token{'s' if self.new_tokens > 1 else ''}"
        limit = f", cut at the limit of {option('max_new_tokens', self.new_tokens)}"
        return text + limit if self.cut else text

    @property
    def speed_text(self) -> str:
        """Return the speed after the first token."""
        speed = self.decode_tokens_per_second
        return "" if speed is None else f", then {speed:.1f} tokens/s"

    def facts(self) -> dict[str, Any]:
        """Return plain values without the time of the first token."""
        names = ("new_tokens", "cut", "decode_tokens_per_second")
        return {"answer": self.text, **{name: getattr(self, name) for name in names}}


@dataclass(kw_only=True)
class Conversation:
    """A model, its cache, and the state between turns.

    ``make_cache`` makes an empty cache for these tokens; with ``has_documents`` it puts saved
    documents before them, for each question. ``answered``: the cache ends with an answer;
    ``document`` names the first text. ``read_seconds`` are known of saved documents, too.
    """

    options: PromptOptions
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
        """Load a conversation's model, after all checks without it."""
        from kvalloc.extensions.lossless import verify_with
        from kvalloc.online.application import decision_of
        from kvalloc.online.decision import PromptSize
        from kvalloc.online.default import Default
        from kvalloc.runtime.options import CacheOptions

        names = ("policy", "decode_every", "allow_other_model", "fitted")
        reduction = CacheOptions(**{name: getattr(options, name) for name in names})
        decision = decision_of(options.profile, reduction, **target, solver=options.solver)
        loaded = options.load(options.model)
        if options.profile is not None:
            decision.cache(loaded.model)  # of another model it is refused before all reading

        def make_cache(ids: Sequence[int]) -> Any:
            row = np.array(ids, dtype=np.int64)
            cache = decision.cache(loaded.model, PromptSize(tokens=row.size, rows=(row,)))
            if options.lossless:
                verify_with(cache, loaded.model)
            if isinstance(decision, Default) and not is_verbose():  # which logs the method
                note(f"{row.size:,} tokens: {cache.profile.detail}")
            return cache

        return cls(options=options, loaded=loaded, make_cache=make_cache)

    @property
    def in_chat(self) -> bool:
        """Return whether turns are in chat form."""
        return wants_chat(self.loaded.tokenizer, self.options.chat)

    @cached_property
    def form(self) -> DocumentForm:
        """Return the texts around documents, questions and answers."""
        return DocumentForm.of(self.loaded.tokenizer, self.options.chat)

    @property
    def seen_tokens(self) -> int:
        """Return the number of read tokens."""
        return 0 if self.cache is None else int(self.cache.get_seq_length())

    def turn_ids(self, text: str) -> tuple[int, ...]:
        """Return the next turn's tokens, with the start of its answer."""
        tokenizer = self.loaded.tokenizer
        if self.cache is not None or self.has_documents:
            return (*self._unread, *self.form.question_ids(tokenizer, text, turn=self.answered))
        if not self.in_chat:
            return encode(tokenizer, text, special=True)
        messages = [{"role": "user", "content": text}]
        return encode(tokenizer, chat_text(tokenizer, messages, way_out=without_chat()))

    def check_room(self, n_tokens: int) -> None:
        """Refuse tokens that leave no room for an answer."""
        limit = context_limit(self.loaded.model)
        tokens, longest = self.seen_tokens + n_tokens, self.options.max_new_tokens
        if limit is not None and tokens + longest > limit:
            raise InputError(
                f"{tokens:,} tokens to read leave no room for an answer of up to {longest:,} within"
                f" the {limit:,} tokens of {self.loaded.model_id}; shorten the text, or "
                "--max-new-tokens"
            )

    def note_whole(self, n_tokens: int) -> None:
        """Note it if the prompt was kept whole."""
        kept = self.cache.kept_tokens[list(self.cache.profile.shape.full_layers)]
        if (kept >= self.seen_tokens).all():
            note(
                f"note: these budgets leave nothing out of {n_tokens:,} tokens: everything is kept"
            )

    def read(self, ids: Sequence[int]) -> None:
        """Read tokens into the cache."""
        import torch

        from kvalloc.models.pretrained import quiet_transformers

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
        """Answer a turn, streamed to stdout unless JSON is requested.

        ``stopped`` returns whether to end with the current token. Without ``keep`` the cache stays
        unchanged. Raises InputError without room.
        """
        import torch
        from transformers import TextStreamer

        from kvalloc.evaluate.methods import end_tokens
        from kvalloc.extensions.answering import answer
        from kvalloc.models.pretrained import quiet_transformers

        ids, options, tokenizer = self.turn_ids(text), self.options, self.loaded.tokenizer
        ends = end_tokens(self.loaded.model, tokenizer)
        self.check_room(len(ids))
        if self.cache is None:
            self.cache = self.make_cache(ids)
        streamer: Any = TextStreamer(tokenizer, skip_special_tokens=True)
        written, times = list[int](), [time.perf_counter()]
        with ExitStack() as until_first, quiet_transformers():
            until_first.enter_context(ProgressBar("reading the prompt"))
            tokens = answer(
                self.loaded.model,
                self.cache,
                ids,
                max_new_tokens=options.max_new_tokens,
                ends=ends,
                keep=keep,
                temperature=options.temperature,
                seed=options.seed or 0,
            )
            try:
                for token in tokens:
                    times.append(time.perf_counter())
                    written.append(token)
                    until_first.close()
                    if not wants_json():
                        streamer.put(torch.tensor([token]))
                    if stopped():
                        break
            finally:
                tokens.close()  # ends the turn now, also if the answer is broken off
                if written and not wants_json():  # later output begins a new line
                    streamer.end()
        unended = [token for token in written[-1:] if token not in ends]
        if keep:
            self.answered, self._unread = True, unended
        begun, first, *later = times
        return Answer(
            text=tokenizer.decode(written, skip_special_tokens=True),
            new_tokens=len(written),
            cut=bool(unended) and len(written) == options.max_new_tokens,
            first_seconds=first - begun,
            decode_tokens_per_second=len(later) / (later[-1] - first) if later else None,
        )

    def facts(self) -> dict[str, Any]:
        """Return the cache's figures for ``--json``.

        Budgets decided from this prompt have ``requested``, ``retention`` and ``decision_seconds``.
        ``granted_bytes`` are allowed by budgets or memory; ``share`` is of a 16-bit cache.
        """
        cache = self.cache
        profile: BudgetProfile = cache.profile
        is_decided = cache.decision_seconds is not None
        requested = {name: profile.requested.get(name) for name in ("target", "value")}
        granted = profile.retained_bytes_at(self.seen_tokens)
        return {
            "policy": profile.policy.name,
            "scorer": profile.policy.scorer,
            "requested": requested if is_decided else None,
            "retention": profile.retention if is_decided else None,
            "decision_seconds": cache.decision_seconds,
            "granted_bytes": requested["value"] if is_decided and profile.fits_a_peak else granted,
            "share": cache.share,
            "retained_bytes": cache.retained_bytes,
            "full_bytes": cache.full_bytes,
            "lossless": None if cache.verifier is None else cache.verifier.facts,
        }

    def save(self) -> None:
        """Save the cache if a file was named."""
        from kvalloc.extensions.saved import save_cache

        if (path := self.options.save_cache) is None:
            return
        self.read(self._unread)
        names = ("document", "read_seconds", "answered")
        notes = {"chat": self.in_chat, **{name: getattr(self, name) for name in names}}
        save_cache(self.cache, path, notes=notes)
        note(f"saved as {path}, {size(path.stat().st_size)}")
