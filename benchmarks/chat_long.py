"""Long answers within a share or a memory: parts of bench_chat.py."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from _common import Row, row_met
from chat_common import LARGEST, SHARE, held_out, layer_bytes, ratio_row
from quality.tables import LEAST_KL
from torch import Tensor
from transformers import DynamicCache

import kvalloc
from kvalloc.accounting.costs import constant_entries, full_bytes, plain_bytes
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.measure.kl import Predictions
from kvalloc.models.loading import LoadedModel, shape_of
from kvalloc.models.structure import decoder_of
from kvalloc.online.methods import Setting
from kvalloc.online.solved import SINKS
from kvalloc.runtime.plan import default_interval
from kvalloc.scorers import get_scorer

PROMPT, STARTS, INTERVAL = 100, (0, 500, 1000, 2000), 125
"""Tokens in front, where ranges begin, tokens between a press's evictions."""
PRESSES: dict[str, dict[str, int]] = {"TOVA": {}, "SnapKV": {"window_size": 16}}
"""With parameters: 20 of 100 tokens stay, and a window of 64, the default, would leave no sink."""
OWN_SCORERS = {"H2O": "h2o:window=8"}
"""Methods that no press decodes with sdpa: a scorer of kvalloc, in equal budgets at 16 bits."""


class Segment(NamedTuple):
    """What a cache stores at the end of a piece of an answer.

    Attributes
    ----------
    end : int
        Tokens of the answer so far.
    share : float
        Of the bytes of a 16-bit cache of all tokens seen.
    peak : float
        Largest bytes over the promised bytes within the piece; 0 if nothing is promised.
    """

    end: int
    share: float
    peak: float


class Reader:
    """One method's cache of a text, what reads with it, and what it has lost so far.

    Parameters
    ----------
    cache : transformers.Cache, optional
        By default the first forward makes it.
    around : callable
        Makes the context manager of a forward; without a `cache` only of the first one.
    block : int, optional
        Tokens of a forward after the prompt; by default all that are read at once.
    promise : callable, optional
        Returns the stored bytes of a cache, and the bytes that it promises not to exceed.
    """

    def __init__(
        self,
        name: str,
        cache: Any = None,
        *,
        around: Callable[[Any], AbstractContextManager[Any]] = nullcontext,
        block: int | None = None,
        promise: Callable[[Any], tuple[int, int]] | None = None,
    ) -> None:
        self.name, self.cache, self.around = name, cache, around
        self.block, self.promise = block, promise
        self.lasts = cache is not None  # whether each forward needs the context
        self.peak, self.kl, self.segments = 0.0, list[Tensor](), list[Segment]()

    def logits(self, model: Any, ids: Tensor, first: int) -> Tensor:
        """Read tokens from a position on; return logarithms of probabilities, (n, vocabulary)."""
        parts, prompt = [], self.cache is None
        around = self.around if self.lasts or prompt else nullcontext
        block = ids.shape[1] if prompt or self.block is None else self.block
        last = decoder_of(model).layers[-1]  # then each layer has the new tokens
        hook = last.register_forward_hook(self._note)
        try:
            with around(model):
                for part in ids.split(block, dim=1):
                    positions = torch.arange(first, first + part.shape[1])[None]
                    out = model(input_ids=part, position_ids=positions, past_key_values=self.cache)
                    self.cache = out.past_key_values
                    parts.append(out.logits[0].float().log_softmax(-1))
                    first += part.shape[1]
        finally:
            hook.remove()
        return torch.cat(parts)

    def _note(self, *_: Any) -> None:
        if self.promise is not None and self.cache is not None:
            stored, promised = self.promise(self.cache)
            self.peak = max(self.peak, stored / promised)

    def end_segment(self, end: int, seen_bytes: int, *, half: bool) -> None:
        """Note what is stored after tokens of the answer, beside a 16-bit cache's bytes.

        See `layer_bytes` for ``half``.
        """
        share = layer_bytes(self.cache, half=half) / seen_bytes
        self.segments.append(Segment(end, share, self.peak))
        self.peak = 0.0


# Methods


def press_of(name: str) -> Any:
    """Return a press that keeps the share of all tokens seen."""
    import kvpress

    make = partial(getattr(kvpress, f"{name}Press"), **PRESSES[name])
    return kvpress.PrefillDecodingPress(
        prefilling_press=make(compression_ratio=1 - SHARE),
        decoding_press=kvpress.CompressionRatioDecodingPress(
            base_press=make(),
            target_compression_ratio=1 - SHARE,
            compression_interval=1,  # one forward is one step
            hidden_states_buffer_size=INTERVAL,
        ),
    )


def press_within(name: str, tokens: int) -> Any:
    """Return a press that keeps a number of tokens."""
    import kvpress

    return kvpress.DecodingPress(
        base_press=getattr(kvpress, f"{name}Press")(**PRESSES[name]),
        target_size=tokens,
        compression_interval=1,
        hidden_states_buffer_size=INTERVAL,
    )


def equal_budgets(model: Any, scorer: str, tokens: int) -> BudgetProfile:
    """Return the share's budgets at 16 bits, equal in all heads, ranked by a scorer."""
    shape, policy = shape_of(model), get_scorer(scorer).policy(SINKS)
    budgets, full = constant_entries(shape, tokens), list(shape.full_layers)
    budgets[full] = Setting(shape=shape, share=SHARE).entries(tokens, 16)
    return BudgetProfile(
        shape=shape,
        level="head",
        context_tokens=tokens,
        budgets=budgets,
        share_of_16_bits=SHARE,
        target_share=SHARE,
        policy=policy,
    )


def promised_by_share(cache: Any) -> tuple[int, int]:
    """Return the stored bytes at 16 bits, and those that the share promises.

    These are the share of all tokens seen at the latest eviction, and at 16 bits the tokens since
    then, or those until the next eviction if more.
    """
    row, shape = cache.rows[0], cache.profile.shape
    since = max(cache.get_seq_length() - row.evicted_at, default_interval(row.evicted_at))
    promised = SHARE * full_bytes(shape, row.evicted_at) + full_bytes(shape, since)
    return layer_bytes(cache, half=True), int(promised)


def ours_at_share(block: int) -> Reader:
    """Return kvalloc's reader at the share of the bytes."""
    around = partial(kvalloc.apply, budget=f"{SHARE:.0%}")
    return Reader("kvalloc", around=around, block=block, promise=promised_by_share)


def readers_at_share(model: Any, tokens: int, block: int) -> list[Reader]:
    """Return the readers that keep the share of all tokens seen, kvalloc's first."""
    presses = [Reader(name, DynamicCache(), around=press_of(name)) for name in PRESSES]
    own = []
    for name, scorer in OWN_SCORERS.items():
        profile = equal_budgets(model, scorer, tokens)
        cache = kvalloc.make_cache(model, profile, decode_every=INTERVAL)
        own.append(Reader(name, cache))
    return [ours_at_share(block), *presses, *own]


def readers_within(memory: int, model: Any, block: int) -> list[Reader]:
    """Return the readers that keep a memory, in bytes, kvalloc's first."""
    around = partial(kvalloc.apply, memory=memory)

    def promise(cache: Any) -> tuple[int, int]:
        return cache.retained_bytes, memory

    tokens = memory // plain_bytes(shape_of(model), 1)
    presses = [Reader(name, DynamicCache(), around=press_within(name, tokens)) for name in PRESSES]
    return [Reader("kvalloc", around=around, block=block, promise=promise), *presses]


# Reading


@torch.inference_mode()
def long_answers(
    model: Any,
    prompt: Tensor,
    answer: Tensor,
    readers: Sequence[Reader],
    *,
    half: bool = True,
) -> Sequence[Reader]:
    """Let all methods read an answer, (1, n_tokens), side by side with the full cache.

    Parameters
    ----------
    half : bool
        Whether numbers of 32 bits count as 16 in shares.
    """
    plain, shape = Reader("full cache", DynamicCache()), shape_of(model)
    for reader in (plain, *readers):
        reader.logits(model, prompt, 0)
    for first, end in pairwise([0, *segment_ends(answer.shape[1])]):
        part, position = answer[:, first:end], prompt.shape[1] + first
        expected = Predictions(plain.logits(model, part, position))
        for reader in readers:
            reader.kl.append(expected.divergences(reader.logits(model, part, position)))
            reader.end_segment(end, full_bytes(shape, prompt.shape[1] + end), half=half)
    return readers


def segment_ends(tokens: int) -> list[int]:
    """Return where pieces of an answer end: every `INTERVAL` tokens, and at its end."""
    return [*range(INTERVAL, tokens, INTERVAL), tokens]


def ranges(tokens: int) -> list[tuple[int, int]]:
    """Return first and end of each range of positions in an answer."""
    ends = [*STARTS[1:], max(tokens, STARTS[-1] + 1)]
    return [(a, min(b, tokens)) for a, b in zip(STARTS, ends, strict=True) if a < tokens]


def segments_in(reader: Reader, first: int, end: int) -> list[Segment]:
    """Return a reader's segments that end in a range."""
    return [one for one in reader.segments if first < one.end <= end]


# Rows


def kl_rows(
    name: str, answers: Sequence[Sequence[Reader]], tokens: int, *, largest: float
) -> Iterator[Row]:
    """Yield the KL of each range over that of the best other method.

    Means below `LEAST_KL` count as that.

    Parameters
    ----------
    answers : sequence of sequence of Reader, (n_texts, n_methods)
        Kvalloc's first.
    largest : float
        Mean share of kvalloc's from which a KL is not met.
    """
    methods = [reader.name for reader in answers[0]]
    losses = torch.stack(
        [torch.stack([torch.cat(one.kl)[:tokens] for one in text]) for text in answers]
    )
    for first, end in ranges(tokens):
        by_text = losses[..., first:end].mean(-1).clamp(min=LEAST_KL)
        means = by_text.mean(0).tolist()
        best = means.index(min(means[1:]))
        kept = [
            torch.tensor([s.share for text in answers for s in segments_in(text[i], first, end)])
            for i in range(len(methods))
        ]
        shares = [float(one.mean()) for one in kept]
        row = ratio_row(
            f"{name}, tokens {first}-{end - 1} of an answer, KL over that of {methods[best]}",
            means[0] / means[best],
            by_text[:, 0] / by_text[:, best],
            0.5,
            ", ".join(map("{} {:.4f} at {:.1%}".format, methods, means, shares)),
        )
        yield row | {"met": row_met(row) and shares[0] <= largest}


def peak_row(name: str, answers: Sequence[Sequence[Reader]], tokens: int, promise: str) -> Row:
    """Return the largest stored bytes over the promised bytes, with each range's in the note."""
    by_range = {
        f"{first}-{end - 1}": [
            max(segment.peak for segment in segments_in(text[0], first, end)) for text in answers
        ]
        for first, end in ranges(tokens)
    }
    by_text = torch.tensor([*by_range.values()]).amax(0)
    listed = ", ".join(f"{max(peaks):.3f} in {range_}" for range_, peaks in by_range.items())
    return ratio_row(
        f"{name}, largest stored bytes over promised",
        float(by_text.max()),
        by_text,
        1.0,
        f"{listed}; promised: {promise}",
    )


BY_SHARE = "20% of the tokens seen at an eviction, and the tokens until the next one at 16 bits"


def long_rows(loaded: LoadedModel, arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of running text within the share."""
    answers = [
        long_answers(
            loaded.model, *split(ids), readers_at_share(loaded.model, PROMPT, arguments.block)
        )
        for _, ids in held_out(loaded, PROMPT + arguments.tokens, arguments.texts)
    ]
    yield from kl_rows(loaded.model_id, answers, arguments.tokens, largest=LARGEST)
    yield peak_row(f"{loaded.model_id}, {SHARE:.0%}", answers, arguments.tokens, BY_SHARE)


def memory_rows(loaded: LoadedModel, arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of running text within a memory: the share of all tokens in the end."""
    tokens, model = arguments.tokens, loaded.model
    memory = int(SHARE * full_bytes(shape_of(model), PROMPT + tokens))
    answers = [
        long_answers(model, *split(ids), readers_within(memory, model, arguments.block), half=False)
        for _, ids in held_out(loaded, PROMPT + tokens, arguments.texts)
    ]
    name = f"{loaded.model_id}, memory={memory / 2**20:.1f}MiB"
    yield from kl_rows(name, answers, tokens, largest=math.inf)
    yield peak_row(name, answers, tokens, f"{memory:,} bytes at each moment")


def split(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return a text's prompt and answer."""
    return ids[:, :PROMPT], ids[:, PROMPT:]
