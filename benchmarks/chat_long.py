"""Long answers within a share or a memory: parts of bench_chat.py."""

from __future__ import annotations

import argparse
import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

import torch
from _common import Row, row_met
from chat_common import LARGEST, SHARE, held_out, layer_bytes, ratio_row
from quality.tables import HELD_OUT, LEAST_KL, SEED
from torch import Tensor
from transformers import DynamicCache

import kvalloc
from kvalloc.accounting.costs import constant_entries, full_bytes, plain_bytes
from kvalloc.evaluate.methods import end_tokens
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.measure.kl import Predictions
from kvalloc.models.loading import LoadedModel, shape_of
from kvalloc.models.structure import decoder_of
from kvalloc.online.methods import Setting
from kvalloc.online.solved import SINKS
from kvalloc.prompts.cases import Case, Turn
from kvalloc.prompts.tasks import TASKS
from kvalloc.runtime.plan import default_interval
from kvalloc.scorers import get_scorer

PROMPT, STARTS, INTERVAL = 100, (0, 500, 1000, 2000), 125
"""Tokens in front, where ranges begin, tokens between a press's evictions."""
WINDOW = 16
PRESSES: dict[str, dict[str, int]] = {"TOVA": {}, "SnapKV": {"window_size": WINDOW}}
"""With parameters: 20 of 100 tokens stay, and a window of 64, the default, would leave no sink."""
OWN_SCORERS = {"H2O by kvalloc": "h2o:window=8"}
"""Methods that no press decodes with sdpa: a scorer of kvalloc, in equal budgets at 16 bits."""
QUESTIONS = ("state", "tree")
"""Of a walk: the path to where it stands, and the nodes below one."""
SOLVED = 0.5
"""Least score of the full cache for which a question is shown."""
TIMES = 2.0
"""How many times TOVA's score is wanted, unless the full cache's is reached."""


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

    def fork(self) -> Reader:
        """Return a reader of a copy of the cache, which evicts by itself only.

        A press evicts every `INTERVAL` tokens, and question and answer are shorter.
        """
        clone = Reader(self.name, copy.deepcopy(self.cache))
        if hasattr(clone.cache, "end_turn"):
            clone.cache.end_turn()
        return clone


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
    stops: Mapping[int, Callable[[int, Sequence[Reader]], None]] | None = None,
    half: bool = True,
) -> Sequence[Reader]:
    """Let all methods read an answer, (1, n_tokens), side by side with the full cache.

    Parameters
    ----------
    stops : mapping of int to callable, optional
        What to do after tokens of the answer, with the position and all readers, full cache first.
    half : bool
        Whether numbers of 32 bits count as 16 in shares.
    """
    plain, stops, shape = Reader("full cache", DynamicCache()), stops or {}, shape_of(model)
    for reader in (plain, *readers):
        reader.logits(model, prompt, 0)
    for first, end in pairwise([0, *segment_ends(answer.shape[1], stops)]):
        part, position = answer[:, first:end], prompt.shape[1] + first
        expected = Predictions(plain.logits(model, part, position))
        for reader in readers:
            reader.kl.append(expected.divergences(reader.logits(model, part, position)))
            reader.end_segment(end, full_bytes(shape, prompt.shape[1] + end), half=half)
        if end in stops:
            stops[end](prompt.shape[1] + end, [plain, *readers])
    return readers


def segment_ends(tokens: int, stops: Mapping[int, Any] | Sequence[int] = ()) -> list[int]:
    """Return where pieces of an answer end: every `INTERVAL` tokens, at stops and at its end.

    No piece has fewer tokens than a press's window, unless two stops are so near: what would be
    left behind the last stop is not read.
    """
    fixed = {*stops} if max(stops, default=0) >= tokens - WINDOW else {*stops, tokens}
    between = range(INTERVAL, tokens, INTERVAL)
    return sorted(fixed | {one for one in between if all(abs(one - end) > WINDOW for end in fixed)})


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
        best = 1 + means[1:].index(min(means[1:]))
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
        met = row_met(row) or means[0] <= LEAST_KL
        where = {} if math.isinf(largest) else {"where": f"at most {largest:.0%} of the bytes"}
        yield row | {"met": met and shares[0] <= largest, **where}


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


# A walk through a tree


def path_after(steps: str) -> tuple[str, ...]:
    """Return the nodes below the root on the path after lines of a walk.

    Examples
    --------
    >>> path_after("down to a\\ndown to b\\nup to a\\ndown to c")
    ('a', 'c')
    """
    path = list[str]()
    for line in steps.strip().splitlines():
        direction, _, node = line.partition(" to ")
        if direction == "down":
            path.append(node)
        else:
            path.pop()
    return tuple(path)


def stops_of(tokenizer: Any, walk: Sequence[int], tokens: int) -> dict[int, tuple[str, ...]]:
    """Return the path at the last node entered in each range of a walk, by the tokens so far."""
    lines = [place for place, token in enumerate(walk) if "\n" in tokenizer.decode([token])]
    paths = {place: path_after(tokenizer.decode(walk[:place])) for place in (*lines[1:], len(walk))}
    asked = [max(p for p, path in paths.items() if p <= end and path) for _, end in ranges(tokens)]
    return {place: paths[place] for place in asked}


def listed_score(answer: str, right: Sequence[str]) -> float:
    """Return the share of nodes that an answer's first line lists in their places, 0..1.

    Nodes beyond the right ones count against it, so that a list of all nodes is not right.

    Examples
    --------
    >>> listed_score("a > b", ["a", "b"]), listed_score("a > c > b", ["a", "b"])
    (1.0, 0.3333333333333333)
    """
    line = (answer.strip().splitlines() or [""])[0].strip(" .")
    nodes = [one for one in re.split(r"\s*[>,]\s*", line) if one]
    places = sum(mine == node for mine, node in zip(nodes, right, strict=False))
    return places / max(len(nodes), len(right))


@torch.inference_mode()
def answer_of(loaded: LoadedModel, reader: Reader, question: Turn, position: int) -> str:
    """Return the first line that a copy of a reader's cache answers, or what is surely wrong."""
    model, tokenizer, copied = loaded.model, loaded.tokenizer, reader.fork()
    ends, answer, unread = end_tokens(model, tokenizer), list[int](), [*question.question_ids]
    text = ""
    for _ in range(question.max_new_tokens):
        token = int(copied.logits(model, torch.tensor([unread]), position)[-1].argmax())
        position += len(unread)
        unread = [token]
        answer.append(token)
        text = tokenizer.decode(answer, skip_special_tokens=True)
        over = text.count(">") + text.count(",") > len(question.answers)
        if token in ends or "\n" in text.lstrip() or over:
            break
    return text


def walked(
    loaded: LoadedModel, case: Case, readers: Sequence[Reader], tokens: int
) -> tuple[Sequence[Reader], Tensor]:
    """Let all methods read a walk and answer the questions at the end of each range.

    Returns
    -------
    readers
    scores : Tensor, (n_ranges, 1 + n_readers, 2)
        The full cache's first; see `QUESTIONS` and `listed_score`.
    """
    walk, path_turn, *tree_turns = case.turns
    prompt, answer = (torch.tensor([ids]) for ids in (case.input_ids, walk.continuation_ids))
    scores = list[list[list[float]]]()

    def score_of(reader: Reader, turn: Turn, position: int) -> float:
        return listed_score(answer_of(loaded, reader, turn, position), turn.answers)

    def ask(path: tuple[str, ...], position: int, asked: Sequence[Reader]) -> None:
        by_question = [[replace(path_turn, answers=path)], tree_turns]
        scores.append(
            [
                [fmean(score_of(reader, turn, position) for turn in turns) for turns in by_question]
                for reader in asked
            ]
        )

    paths = stops_of(loaded.tokenizer, walk.continuation_ids, tokens)
    stops = {place: partial(ask, path) for place, path in paths.items()}
    return long_answers(loaded.model, prompt, answer, readers, stops=stops), torch.tensor(scores)


def score_row(name: str, methods: Sequence[str], scores: Tensor) -> Row:
    """Return kvalloc's score over TOVA's, which is met if the full cache's is reached, too.

    Parameters
    ----------
    methods : sequence of str, (n_methods,)
        The full cache's first, then kvalloc's.
    scores : Tensor, (n_prompts, n_methods)
    """
    means = dict(zip(methods, scores.mean(0).tolist(), strict=True))
    full, ours, other = (means[one] for one in (*methods[:2], "TOVA"))
    ratio = ours / other if other else math.inf if ours else 1.0
    listed = ", ".join(map("{} {:.2f}".format, means, means.values()))
    return {
        "name": name,
        "figure": ratio,
        "at_least": TIMES,
        "met": ratio >= TIMES or ours >= full,
        "note": f"mean scores of {len(scores)} prompts: {listed}",
    }


def dfs_rows(loaded: LoadedModel, arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of a walk through a tree, of questions that the full cache solves."""
    model, size = loaded.model, {"seed": SEED, "split": HELD_OUT, "turns": 3}
    cases = TASKS["dfs"].make(
        loaded.tokenizer, arguments.texts, arguments.tree, answer_tokens=arguments.tokens, **size
    )
    tokens = min(len(case.turns[0].continuation_ids) for case in cases)
    ends = [end for _, end in ranges(tokens)]
    name = f"{loaded.model_id}, dfs, trees of {arguments.tree} tokens"
    full = torch.stack([walked(loaded, case, [], tokens)[1] for case in cases]).mean(0)[:, 0]
    solved = [
        (number, kind)
        for kind in range(len(QUESTIONS))
        for number in range(len(ends))
        if full[number, kind] >= SOLVED
    ]
    for kind, what in enumerate(QUESTIONS):
        listed = ", ".join(map("{:.2f} after {}".format, full[:, kind].tolist(), ends))
        shown = "" if any(one == kind for _, one in solved) else "; not shown"
        yield {
            "name": f"{name}, {what}: the full cache's score after {ends[-1]} tokens",
            "figure": float(full[-1, kind]),
            "note": f"{len(cases)} prompts; {listed} tokens{shown}",
        }
    if not solved:
        return
    read = [
        walked(loaded, case, readers_at_share(model, len(case.input_ids), arguments.block), tokens)
        for case in cases
    ]
    answers, scores = [readers for readers, _ in read], torch.stack([one for _, one in read])
    tokens = min(sum(map(len, readers[0].kl)) for readers in answers)
    methods = ["full cache", *(reader.name for reader in answers[0])]
    for number, kind in solved:
        after = f"{QUESTIONS[kind]} after {ends[number]} tokens at {SHARE:.0%}"
        yield score_row(f"{name}, {after}: score over TOVA's", methods, scores[:, number, :, kind])
    yield from kl_rows(name, answers, tokens, largest=LARGEST)
    yield peak_row(f"{name}, {SHARE:.0%}", answers, tokens, BY_SHARE)
