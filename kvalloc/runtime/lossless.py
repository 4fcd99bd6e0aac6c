"""Answers without loss: drafted with the reduced cache, verified with a full one."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from kvalloc.models import names
from kvalloc.models.structure import input_device
from kvalloc.runtime.cache import BudgetCache
from kvalloc.runtime.layer import BudgetLayer
from kvalloc.runtime.refusals import is_assisted, refuse, setting
from kvalloc.runtime.verifier import LONGEST_DRAFT, Verifier

ROUNDING = {4: 12.0, 2: 3.0}
"""Times the precision of the model's numbers, by their bytes, by which the logits of two tokens may
differ and be called a tie: several tokens in one forward can round otherwise than one at a time
(SmolLM2-135M: the two best of 64 tokens move by up to 8.9 in float32, 2.1 and 1.2 in halves).
"""

Process = Callable[[Tensor, Tensor], Tensor]
"""Given all tokens (rows, n) and the logits behind them (rows, vocabulary): processed logits."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is taken from the logits behind all tokens.

    Attributes
    ----------
    process : callable
        Processes the logits, in 32 bits.
    draws : bool
        Draw each token; otherwise the most likely one is taken.
    generator : torch.Generator or None
        Of what is drawn; the default one where it is None.
    """

    process: Process
    draws: bool = False
    generator: torch.Generator | None = None

    def shares(self, scores: Tensor) -> Tensor:
        """Return the distribution of what follows, (rows, vocabulary); greedy: all on one token."""
        if self.draws:
            return scores.softmax(dim=-1)
        return nn.functional.one_hot(scores.argmax(dim=-1), scores.shape[-1]).to(scores.dtype)

    def draw(self, shares: Tensor) -> Tensor:
        """Return a token for each row, (rows, 1)."""
        if not self.draws:
            return shares.argmax(dim=-1, keepdim=True)
        return torch.multinomial(shares, 1, generator=self.generator)

    def accepts(self, odds: Tensor) -> Tensor:
        """Return where a drafted token of these odds stays; greedy: where they are not 0."""
        if not self.draws:
            return odds > 0
        return torch.rand(odds.shape, generator=self.generator, device=odds.device) < odds


def verify_with(cache: BudgetCache, model: Any) -> None:
    """Keep the full cache beside an empty reduced one, so that answers are those of the full one.

    Parameters
    ----------
    cache : BudgetCache
    model : transformers.PreTrainedModel
        The cache's model.

    Raises
    ------
    UnsupportedRequestError
        If the cache has seen tokens, or leaves entries unread at each decoded token.
    """
    seen = cache.get_seq_length()
    refuse(
        lossless_apart=seen > 0 and (seen, 0),
        drafts_read_all=cache.leaves_unread and cache.profile.policy.name,
    )
    offloads = input_device(model).type == "cuda"
    full = DynamicCache(config=model.config, offloading=offloads)
    refuse(drafts_slide_out=not all(map(names.can_take_back, full.layers)))
    cache.verifier = Verifier(full=full)


def check_lossless(model: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Refuse a ``generate()`` call, by its keyword arguments, whose answer cannot be verified.

    Raises
    ------
    UnsupportedRequestError
        For beams, drafts or a decoding of the caller's, a prompt in chunks or of embeddings.
    """
    asked = partial(setting, model, arguments)
    among = {
        "num_beams": (asked("num_beams") or 1) > 1,
        "custom_generate": arguments.get("custom_generate"),
        "prefill_chunk_size": asked("prefill_chunk_size"),
        "drafts of another kind": is_assisted(model, arguments),
    }
    refuse(
        lossless_with=next((name for name, given in among.items() if given), None),
        lossless_of_embeddings=arguments.get("inputs_embeds") is not None,
    )


@dataclass
class _Answer:
    """One answer, drafted and verified round by round.

    Attributes
    ----------
    model : transformers.PreTrainedModel
    cache : BudgetCache
        With a `Verifier`.
    sampling : Sampling
    mask : Tensor of int64, (rows, n_tokens), or None
        What is no padding of the tokens given; all that come are none. None where there is none.
    scores : list of Tensor, each (rows, vocabulary)
        Processed logits of the tokens so far.
    """

    model: Any
    cache: BudgetCache
    sampling: Sampling
    mask: Tensor | None
    scores: list[Tensor]

    @property
    def verifier(self) -> Verifier:
        found = self.cache.verifier
        assert found is not None
        return found

    def _logits(self, ids: Tensor, cache: Any, keep: int) -> Tensor:
        """Read all tokens that a cache has not seen; returns the last logits, in 32 bits."""
        seen, end = int(cache.get_seq_length()), int(ids.shape[1])
        given: dict[str, Any] = {}
        if self.mask is not None:
            mask = nn.functional.pad(self.mask, (0, end - self.mask.shape[1]), value=1)
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
            given = {"attention_mask": mask, "position_ids": positions[:, seen:]}
        output = self.model(
            input_ids=ids[:, seen:],
            logits_to_keep=keep,
            **names.cache_keyword(self.model, cache),
            **given,
        )
        logits: Tensor = output.logits[:, -keep:].float()
        return logits

    def read(self, ids: Tensor) -> Tensor:
        """Let both caches see a prompt or a turn; returns the logits behind it.

        A prompt is read once: while a layer is read nothing has gone of it, so what the reduced
        cache is given is what a full one would store. A turn is read by each.
        """
        cache, full = self.cache, self.verifier.full
        cache.draft_from(None)
        if not full.get_seq_length():
            with _given_to(full, cache):
                logits = self._logits(ids, cache, 1)
        else:
            self._logits(ids, cache, 1)
            logits = self._logits(ids, full, 1)
        names.record_past(full.layers)
        cache.draft_from(int(ids.shape[1]))
        return logits[:, -1]

    def draft(self, ids: Tensor, length: int) -> tuple[Tensor, list[Tensor]]:
        """Draft tokens with the reduced cache; returns all tokens, and what each was drawn from."""
        drawn_from = []
        with self.cache.drafting():
            for _ in range(length):
                logits = self._logits(ids, self.cache, 1)[:, -1]
                drawn_from.append(self.sampling.shares(self.sampling.process(ids, logits)))
                ids = torch.cat([ids, self.sampling.draw(drawn_from[-1])], dim=1)
        return ids, drawn_from

    def round(self, ids: Tensor, longest: int, ends: Callable[[Tensor], bool]) -> Tensor:
        """Draft and verify; returns all tokens, with those that are accepted.

        Rows go on together: the first token that any refuses is the last of all. Each token is
        distributed as the full cache has it, whatever the drafts were (Leviathan et al. 2023,
        algorithm 1): accepted with min(1, p / q), else drawn from what p has above q.

        Parameters
        ----------
        ids : Tensor of int64, (rows, n_tokens)
            All tokens; the full cache has seen all but the last.
        longest : int
            Tokens, at most, that the answer still takes.
        ends : callable
            Given all tokens: whether the answer of a row ends with the last.

        Returns
        -------
        Tensor of int64, (rows, n_tokens + n_new)
        """
        verifier, sampling, n_tokens = self.verifier, self.sampling, int(ids.shape[1])
        room = self.cache.room_for_drafts(LONGEST_DRAFT)
        length = max(0, min(verifier.draft_tokens, room, longest - 1))
        drafted, drawn_from = self.draft(ids, length)
        logits = self._logits(drafted, verifier.full, length + 1)
        verifier.rounds += 1
        verifier.bytes_read += verifier.full_bytes
        for place in range(length):
            shares, token = self.noted(ids, logits[:, place]), drafted[:, n_tokens + place, None]
            odds = shares.gather(1, token) / drawn_from[place].gather(1, token)
            accepted = sampling.accepts(odds)
            if not accepted.all():
                rest = (shares - drawn_from[place]).clamp(min=0)
                again = sampling.draw(torch.where(accepted, shares, rest))
                token = torch.where(accepted, token, again)
            verifier.tried += 1
            verifier.accepted += bool(accepted.all())
            ids = torch.cat([ids, token], dim=1)
            if not accepted.all() or ends(ids):
                return ids
        return torch.cat([ids, sampling.draw(self.noted(ids, logits[:, length]))], dim=1)

    def noted(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Return the distribution of a verified token; note its scores, and whether it is a tie."""
        self.verifier.tokens += 1
        scores = self.sampling.process(ids, logits)
        self.scores.append(scores)
        if not self.sampling.draws:
            best = scores.topk(2, dim=-1).values
            precision = torch.finfo(self.model.dtype).eps
            within = ROUNDING[self.model.dtype.itemsize] * precision * best[:, 0].abs()
            self.verifier.ties += int((best[:, 0] - best[:, 1] <= within).sum())
        return self.sampling.shares(scores)

    def take_back(self, begin: int, end: int) -> None:
        """Let both caches end before a column.

        Entries from another column on, which drafts gave the reduced one, become the full one's.
        """
        cache, full = self.cache, self.verifier.full
        taken = int(full.get_seq_length()) - end
        if taken or any(full.is_sliding):  # which also drop what has slid out
            full.crop(-taken)
        seen = cache.get_seq_length()
        end = min(end, seen)
        for rows, own in cache.groups:
            for layer, exact in zip(own.layers, full.layers, strict=True):
                if isinstance(layer, BudgetLayer):
                    gone = seen - layer.dense_tokens
                    layer.keys[:, :, begin - gone : end - gone] = exact.keys[rows, :, begin:end]
                    layer.values[:, :, begin - gone : end - gone] = exact.values[rows, :, begin:end]
        cache.crop(end - seen)

    def level(self, ids: Tensor) -> None:
        """Let the reduced cache see these tokens where it has not: a draft that was accepted."""
        self.cache.draft_from(None)
        if self.cache.get_seq_length() < ids.shape[1]:
            self._logits(ids, self.cache, 1)


@contextmanager
def _given_to(full: DynamicCache, cache: BudgetCache) -> Iterator[None]:
    """Let a full cache store what a reduced one is given."""
    update: Any = cache.update

    def both(keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        full.update(keys, values, layer)
        return update(keys, values, layer, *args, **kwargs)

    vars(cache)["update"] = both
    try:
        yield
    finally:
        del vars(cache)["update"]


@torch.no_grad()
def lossless_tokens(
    model: Any,
    cache: BudgetCache,
    ids: Tensor,
    sampling: Sampling,
    *,
    ends: Callable[[Tensor], bool],
    longest: int,
    mask: Tensor | None = None,
    scores: list[Tensor] | None = None,
) -> Generator[Tensor, None, None]:
    """Answer as the full cache does, in fewer reads of it.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    cache : BudgetCache
        See `verify_with`.
    ids : Tensor of int64, (rows, n_tokens)
        All tokens, those that the cache has seen included.
    sampling : Sampling
    ends : callable
        Given all tokens: whether the answer, or that of a row, ends with the last.
    longest : int
        Tokens of an answer, at most.
    mask : Tensor of int64, (rows, n_tokens), optional
        What is no padding.
    scores : list, optional
        Takes the processed logits of each token, (rows, vocabulary).

    Yields
    ------
    Tensor of int64, (rows, 1)
        The next token of each row. Wherever that is broken off, both caches have then seen all
        tokens but the last.

    Raises
    ------
    UnsupportedRequestError
        If the full cache has not seen what the reduced one has.
    """
    if not (seen := cache.get_seq_length()):
        verify_with(cache, model)  # also after a reset
    full: Any = cache.verifier.full if cache.verifier else None
    held = 0 if full is None else int(full.get_seq_length())
    refuse(lossless_apart=held != seen and (seen, held))
    answer = _Answer(model, cache, sampling, mask, [] if scores is None else scores)
    first = int(ids.shape[1])
    ids = torch.cat([ids, sampling.draw(answer.noted(ids, answer.read(ids)))], dim=1)
    shown, read = first, None
    while True:
        try:
            for column in range(shown, int(ids.shape[1])):
                shown += 1
                yield ids[:, column, None]
            goes_on = shown - first < longest
        except GeneratorExit:
            goes_on = False
        if read is not None:
            answer.take_back(read, shown - 1)
        if not goes_on:
            break
        read = cache.get_seq_length()
        ids = answer.round(ids, longest - (shown - first), ends)
    answer.level(ids[:, : shown - 1])


def generate_lossless(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any = None,
    **given: Any,
) -> Any:
    """Decode for ``generate(custom_generate=...)``: see `lossless_tokens`."""
    cache, mask = names.cache_among(given), given.get("attention_mask")
    ids, scores = input_ids, list[Tensor]()
    padding, ends = generation_config.pad_token_id, generation_config.eos_token_id
    if padding is None:  # as generate() itself fills a row that has ended
        padding = ends[0] if isinstance(ends, list) else ends
    unfinished = torch.ones(len(ids), 1, dtype=torch.bool, device=ids.device)

    def ended(tokens: Tensor) -> Tensor:
        found: Tensor = stopping_criteria(tokens, None)
        return found[:, None] & unfinished

    def process(tokens: Tensor, logits: Tensor) -> Tensor:
        found: Tensor = logits_processor(tokens, logits)
        if bool(unfinished.all()):
            return found
        only = torch.full_like(found, -torch.inf)  # a row that has ended gives padding
        only[:, padding] = 0
        return torch.where(unfinished, found, only)

    tokens = lossless_tokens(
        model,
        cache,
        ids,
        Sampling(process=process, draws=bool(generation_config.do_sample)),
        ends=lambda tokens: bool(ended(tokens).any()),
        longest=generation_config.max_length - int(ids.shape[1]),
        mask=None if mask is None or bool(mask.all()) else mask,
        scores=scores,
    )
    with closing(tokens):
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
        scores=tuple(scores) if generation_config.output_scores else None,
        **{names.generation_argument(): cache},
    )
