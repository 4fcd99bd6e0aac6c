"""Lossless answers: drafted with the reduced cache, verified with a full one."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from kvalloc.accounting.stored import layer_tensors
from kvalloc.errors import UnsupportedRequestError, option
from kvalloc.extensions.assisted import Drafts, check_takes_back, is_assisted
from kvalloc.models import names
from kvalloc.models.structure import input_device
from kvalloc.runtime.cache import BudgetCache
from kvalloc.runtime.extension import Extension
from kvalloc.runtime.refusals import setting
from kvalloc.runtime.store import Store

ROUNDING = {4: 12.0, 2: 3.0}
"""Factors on the precision of the model's numbers, by their bytes, within which two logits count as
a tie. Several tokens in one forward can round otherwise than one at a time. SmolLM2-135M: the two
best of 64 tokens move by up to 8.9 in float32, 2.1 and 1.2 in halves."""

LONGEST_DRAFT, EVEN_ODDS = 16, 0.5
"""Longest draft, and the odds of full acceptance that set its length."""

BEFORE = (4.0, 5.0)
"""Prior counts of accepted and of tried tokens."""


Process = Callable[[Tensor, Tensor], Tensor]
"""Processes logits (rows, vocabulary), given all tokens (rows, n)."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Choice of a token from processed logits, in 32 bits.

    It is drawn, or the most likely one.
    """

    process: Process
    draws: bool = False
    generator: torch.Generator | None = None

    def shares(self, scores: Tensor) -> Tensor:
        """Return the next token's distribution, (rows, vocabulary); greedy: all on one."""
        if self.draws:
            return scores.softmax(dim=-1)
        return nn.functional.one_hot(scores.argmax(dim=-1), scores.shape[-1]).to(scores.dtype)

    def draw(self, shares: Tensor) -> Tensor:
        """Return each row's token, (rows, 1)."""
        if not self.draws:
            return shares.argmax(dim=-1, keepdim=True)
        return torch.multinomial(shares, 1, generator=self.generator)

    def accepts(self, odds: Tensor) -> Tensor:
        """Return whether drafts are accepted; greedy: odds above 0."""
        if not self.draws:
            return odds > 0
        return torch.rand(odds.shape, generator=self.generator, device=odds.device) < odds


@dataclass(kw_only=True, eq=False)
class Verifier(Extension):
    """The full cache beside a reduced one, and counts.

    Attributes
    ----------
    full : transformers.Cache
        All tokens seen; on the host if the model is on a GPU.
    tokens : int
        Answered, of each row.
    rounds : int
        Verifying forwards; each read the full cache once.
    tried, accepted : int
        Drafted tokens.
    ties : int
        Greedy tokens with a runner-up within rounding.
    bytes_read : int
        By verification.
    listens : bool
        Whether `full` stores the reduced one's entries.
    """

    full: Any = field(repr=False)
    tokens: int = 0
    rounds: int = 0
    tried: int = 0
    accepted: int = 0
    ties: int = 0
    bytes_read: int = 0
    listens: bool = False

    def appended(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Let the full cache store entries, if it listens."""
        if self.listens:
            self.full.update(keys, values, layer)

    @property
    def acceptance(self) -> float | None:
        """Return the share of accepted drafts; None before any."""
        return self.accepted / self.tried if self.tried else None

    @property
    def tokens_per_round(self) -> float | None:
        """Return the answered tokens a round; None before any."""
        return self.tokens / self.rounds if self.rounds else None

    @property
    def full_bytes(self) -> int:
        """Return the full cache's bytes."""
        return sum(tensor.nbytes for layer in self.full.layers for tensor in layer_tensors(layer))

    @property
    def facts(self) -> dict[str, int]:
        """Return all counts."""
        names = ("tokens", "rounds", "tried", "accepted", "ties", "bytes_read")
        return {"full_bytes": self.full_bytes, **{name: getattr(self, name) for name in names}}

    @property
    def draft_tokens(self) -> int:
        """Return the next draft's length.

        If a share a of drafts is accepted, all of k are with a^k (Leviathan et al. 2023).
        """
        share = (BEFORE[0] + self.accepted) / (BEFORE[1] + self.tried)
        longest = math.log(EVEN_ODDS) / math.log(min(share, 1 - 1e-6)) if share > 0 else 1
        return max(1, min(LONGEST_DRAFT, int(longest)))


def verify_with(cache: BudgetCache, model: Any) -> None:
    """Keep the full cache beside an empty reduced one.

    Raises
    ------
    UnsupportedRequestError
        If it has seen tokens, or leaves entries unread while decoding.
    """
    _check_same(cache.get_seq_length(), 0)
    cache.tell("refuse_taking_back", cache)
    offloads = input_device(model).type == "cuda"
    full = DynamicCache(config=model.config, offloading=offloads)
    check_takes_back(full.layers)
    listeners = [one for one in cache.extensions if not isinstance(one, Verifier)]
    cache.verifier = Verifier(full=full)
    cache.extensions = [*listeners, cache.verifier]


def _check_same(seen: int, in_full: int) -> None:
    if seen != in_full:
        raise UnsupportedRequestError(
            f"the reduced cache has seen {seen} tokens and the full one beside it {in_full}, so no "
            "answer can be verified; begin with a new cache"
        )


def check_lossless(model: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Refuse a ``generate()`` call that cannot be verified.

    Raises
    ------
    UnsupportedRequestError
        For beams, drafts, custom decoding, chunks, embeddings or images.
    """
    setting_of = partial(setting, model, arguments)
    among = {
        "num_beams": (setting_of("num_beams") or 1) > 1,
        "custom_generate": arguments.get("custom_generate"),
        "prefill_chunk_size": setting_of("prefill_chunk_size"),
        "drafts of another kind": is_assisted(model, arguments),
    }
    for name, is_set in among.items():
        if is_set:
            raise UnsupportedRequestError(
                f"{option('lossless')} drafts and verifies by itself and takes one token after the "
                f"other; leave out {name}"
            )
    if arguments.get("inputs_embeds") is not None:
        raise UnsupportedRequestError(
            f"{option('lossless')} reads again what it answered, as token ids; pass input_ids "
            "instead of inputs_embeds"
        )
    for name, value in arguments.items():
        of_image = isinstance(value, Tensor) and value.is_floating_point()
        if name == names.ENCODED or (of_image and name != "attention_mask"):
            raise UnsupportedRequestError(
                f"{option('lossless')} reads token ids alone, and this call brings {name}; leave "
                f"out {option('lossless')}, or the images"
            )


@dataclass(kw_only=True)
class LosslessAnswer:
    """One answer, round by round.

    `ends` returns whether any row's answer ends. `mask`, (rows, n_tokens), is the input's, None
    without padding; `scores` are processed logits, each (rows, vocabulary).
    """

    model: Any
    cache: BudgetCache
    sampling: Sampling
    ends: Callable[[Tensor], bool]
    longest: int
    mask: Tensor | None = None
    scores: list[Tensor] = field(default_factory=list)

    @torch.no_grad()
    def tokens(self, ids: Tensor) -> Generator[Tensor, None, None]:
        """Yield each row's next token, (rows, 1), as from the full cache.

        If broken off, both caches have seen all but the last. `ids`, (rows, n_tokens), include seen
        tokens.

        Raises
        ------
        UnsupportedRequestError
            If the full cache lacks the reduced one's tokens.
        """
        cache = self.cache
        if not (seen := cache.get_seq_length()):
            verify_with(cache, self.model)  # also after a reset
        _check_same(seen, int(cache.verifier.full.get_seq_length()) if cache.verifier else 0)
        first = int(ids.shape[1])
        ids = torch.cat([ids, self.sampling.draw(self._verified(ids, self._read(ids)))], dim=1)
        shown, read = first, None
        while True:
            try:
                for column in range(shown, int(ids.shape[1])):
                    shown += 1
                    yield ids[:, column, None]
                goes_on = shown - first < self.longest
            except GeneratorExit:
                goes_on = False
            if read is not None:
                self._take_back(read, shown - 1)
            if not goes_on:
                break
            read = cache.get_seq_length()
            ids = self._round(ids, self.longest - (shown - first))
        self._level(ids[:, : shown - 1])

    @property
    def _drafts(self) -> Drafts:
        return Drafts.of(self.cache)

    def _logits(self, ids: Tensor, cache: Any, keep: int) -> Tensor:
        """Read all unseen tokens; return the last logits, in 32 bits."""
        seen, end = int(cache.get_seq_length()), int(ids.shape[1])
        more: dict[str, Any] = {}
        if self.mask is not None:
            mask = nn.functional.pad(self.mask, (0, end - self.mask.shape[1]), value=1)
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
            more = {"attention_mask": mask, "position_ids": positions[:, seen:]}
        output = self.model(
            input_ids=ids[:, seen:],
            logits_to_keep=keep,
            **names.cache_keyword(self.model, cache),
            **more,
        )
        logits: Tensor = output.logits[:, -keep:].float()
        return logits

    def _read(self, ids: Tensor) -> Tensor:
        """Let both caches read, a prompt once: evictions come later. Return the last logits."""
        cache, full = self.cache, self.cache.verifier.full
        self._drafts.given = None
        if not full.get_seq_length():
            self.cache.verifier.listens = True
            try:
                logits = self._logits(ids, cache, 1)
            finally:
                self.cache.verifier.listens = False
        else:
            self._logits(ids, cache, 1)
            logits = self._logits(ids, full, 1)
        names.record_past(full.layers)
        self._drafts.given = int(ids.shape[1])
        names.record_past(cache.layers)
        return logits[:, -1]

    def _draft(self, ids: Tensor, length: int) -> tuple[Tensor, list[Tensor]]:
        drawn_from = []
        with self._drafts.open():
            for _ in range(length):
                logits = self._logits(ids, self.cache, 1)[:, -1]
                drawn_from.append(self.sampling.shares(self.sampling.process(ids, logits)))
                ids = torch.cat([ids, self.sampling.draw(drawn_from[-1])], dim=1)
        return ids, drawn_from

    def _round(self, ids: Tensor, longest: int) -> Tensor:
        """Draft and verify; return all tokens, (rows, n_tokens + n_new).

        The full cache has seen all but the last. Rows advance together, up to any row's refusal. A
        draft is accepted with min(1, p / q), else drawn from p's excess over q (Leviathan et al.
        2023, algorithm 1).
        """
        verifier, sampling, n_tokens = self.cache.verifier, self.sampling, int(ids.shape[1])
        room = self._drafts.room(self.cache, LONGEST_DRAFT)
        length = max(0, min(verifier.draft_tokens, room, longest - 1))
        drafted, drawn_from = self._draft(ids, length)
        logits = self._logits(drafted, verifier.full, length + 1)
        verifier.rounds += 1
        verifier.bytes_read += verifier.full_bytes
        for place in range(length):
            shares = self._verified(ids, logits[:, place])
            token = drafted[:, n_tokens + place, None]
            odds = shares.gather(1, token) / drawn_from[place].gather(1, token)
            accepted = sampling.accepts(odds)
            if not accepted.all():
                rest = (shares - drawn_from[place]).clamp(min=0)
                replacement = sampling.draw(torch.where(accepted, shares, rest))
                token = torch.where(accepted, token, replacement)
            verifier.tried += 1
            verifier.accepted += bool(accepted.all())
            ids = torch.cat([ids, token], dim=1)
            if not accepted.all() or self.ends(ids):
                return ids
        return torch.cat([ids, sampling.draw(self._verified(ids, logits[:, length]))], dim=1)

    def _verified(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Return a verified token's distribution; note scores and ties."""
        self.cache.verifier.tokens += 1
        scores = self.sampling.process(ids, logits)
        self.scores.append(scores)
        if not self.sampling.draws:
            best = scores.topk(2, dim=-1).values
            precision = torch.finfo(self.model.dtype).eps
            within = ROUNDING[self.model.dtype.itemsize] * precision * best[:, 0].abs()
            self.cache.verifier.ties += int((best[:, 0] - best[:, 1] <= within).sum())
        return self.sampling.shares(scores)

    def _take_back(self, begin: int, end: int) -> None:
        """Crop both caches; replace drafts' entries from `begin` on by exact ones."""
        cache, full = self.cache, self.cache.verifier.full
        taken = int(full.get_seq_length()) - end
        if taken or any(full.is_sliding):  # which also drop entries that have slid out
            full.crop(-taken)
        seen = cache.get_seq_length()
        end = min(end, seen)
        for layer, exact in zip(cache.layers, full.layers, strict=True):
            if isinstance(layer, Store):
                layer.write(begin, exact.keys[:, :, begin:end], exact.values[:, :, begin:end])
        cache.crop(end - seen)

    def _level(self, ids: Tensor) -> None:
        """Let the reduced cache read accepted drafts."""
        self._drafts.given = None
        if self.cache.get_seq_length() < ids.shape[1]:
            self._logits(ids, self.cache, 1)


def generate_lossless(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any = None,
    **arguments: Any,
) -> Any:
    """Decode for ``generate(custom_generate=...)``; see `LosslessAnswer`."""
    cache, mask = names.cache_among(arguments), arguments.get("attention_mask")
    ids = input_ids
    padding, ends = generation_config.pad_token_id, generation_config.eos_token_id
    if padding is None:  # as generate() itself fills a row that has ended
        padding = ends[0] if isinstance(ends, list) else ends
    unfinished = torch.ones(len(ids), 1, dtype=torch.bool, device=ids.device)

    def ended(tokens: Tensor) -> Tensor:
        result: Tensor = stopping_criteria(tokens, None)
        return result[:, None] & unfinished

    def process(tokens: Tensor, logits: Tensor) -> Tensor:
        result: Tensor = logits_processor(tokens, logits)
        if bool(unfinished.all()):
            return result
        only = torch.full_like(result, -torch.inf)  # a row that has ended gives padding
        only[:, padding] = 0
        return torch.where(unfinished, result, only)

    answer = LosslessAnswer(
        model=model,
        cache=cache,
        sampling=Sampling(process=process, draws=bool(generation_config.do_sample)),
        ends=lambda tokens: bool(ended(tokens).any()),
        longest=generation_config.max_length - int(ids.shape[1]),
        mask=None if mask is None or bool(mask.all()) else mask,
    )
    with closing(answer.tokens(ids)) as tokens:
        for token in tokens:
            ids = torch.cat([ids, token], dim=1)
            if streamer is not None:
                streamer.put(token[:, 0].cpu())
            unfinished &= ~ended(ids)
            if not unfinished.any():
                break
    if streamer is not None:
        streamer.end()
    if not generation_config.return_dict_in_generate:
        return ids
    output = names.lookup("transformers.generation:GenerateDecoderOnlyOutput", "a lossless answer")
    return output(
        sequences=ids,
        scores=tuple(answer.scores) if generation_config.output_scores else None,
        **{names.generation_argument(): cache},
    )
