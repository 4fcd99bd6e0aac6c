"""The default for any model, nothing measured: the best way known within a share of the bytes.

At equal bytes it pays to round first and to evict then, and to evict what a second read of the
prompt does not look up. Where there is a fitted file of the model, its curves say how many entries
each head keeps, and at how many bits, and its surrogate of a second read says which. Below what
they cover, and without a file, entries are stored at 5 bits (8 where the share is large, 4 where it
is small), as many as fit, and the values of those that stay are fitted to what all of them gave.
The model then reads the prompt twice; and where it cannot, the first tokens after the prompt
choose. For all heads to compete, these hold the full cache; where memory does not allow that, the
heads of each layer compete as it is read.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from kvalloc.accounting.costs import entries_in_share, head_bytes, reading_bytes
from kvalloc.errors import InputError, option
from kvalloc.formats.budget_profile import BudgetProfile, Policy
from kvalloc.formats.fitted import FittedModel
from kvalloc.formats.shipped_profiles import find_fitted, load_fitted
from kvalloc.models.attention import rotates_halves
from kvalloc.models.loading import shape_of
from kvalloc.models.structure import context_limit
from kvalloc.online.prompt_size import UNKNOWN, PromptSize
from kvalloc.online.solved import (
    FEW_BELOW,
    SINKS,
    WINDOW,
    grid_length,
    matching_options,
    solve_share,
)
from kvalloc.runtime.cache import BudgetCache
from kvalloc.runtime.grouped import GroupedCache
from kvalloc.runtime.making import build_cache
from kvalloc.runtime.options import CacheOptions
from kvalloc.runtime.plan import BOUNDED_BUDGETS
from kvalloc.scorers import Scorer, get_scorer
from kvalloc.scorers.later_pass import CARRIED_TOKENS, SHOWN_FIRST
from kvalloc.scorers.lookahead import LATEST_VOTES, latest_votes
from kvalloc.shape import ModelShape
from kvalloc.units import bytes_text, gap_text, parse_share, share_text, size

__all__ = ["Default"]

_LOG = logging.getLogger(__name__)

EIGHT_BITS_FROM, FOUR_BITS_BELOW = 0.42, FEW_BELOW
"""Shares of the bytes from which on fewer entries at 8 bits lose less than more at 5, and below
which more at 4 do (SmolLM2-135M)."""

PIECE, NEARBY = 256, 0
"""Tokens of the prompt that are read again at once, and how many around them are seen meanwhile:
to see more takes longer and loses no less."""

AWAITED = 16
"""Tokens whose queries vote where nothing is read twice, of those that follow a prompt, beside its
last ones from behind the end (`kvalloc.scorers.lookahead.latest_votes`). From behind the end they
lose less than in their own places (three speeches of 700 tokens, 20%, mean KL of 64 tokens:
SmolLM2-135M .0025 and not .0037; where layers are evicted as they are read, .0041 not .0144)."""

FAR = 8
"""Times the length of the curves' prompts beyond which the line of detail says so."""

Way = Literal["decided", "twice", "late", "bounded", "early", "whole"]
"""What chooses the entries: a surrogate, with the budgets and bits of each head that were solved
from measured losses; a second read, or the prompt's last tokens with those that follow it, of the
whole prompt or of twice the budgets; or, layer by layer, the surrogate or the prompt's last tokens
alone. Or all are kept."""

WAYS: dict[Way, tuple[float, str]] = {
    "decided": (1.3, "evicts while the prompt is read, as solved from {}"),
    "twice": (2.5, "reads the prompt twice and holds the full cache meanwhile"),
    "late": (1.1, f"holds the full cache until {AWAITED} tokens have followed the prompt"),
    "bounded": (
        1.1,
        f"keeps {BOUNDED_BUDGETS} times the budget until {AWAITED} tokens have followed the prompt",
    ),
    "early": (1.2, "evicts while the prompt is read"),
    "whole": (1.0, "evicts nothing"),
}
"""Time of a prompt of 2,048 tokens over a plain prefill's (SmolLM2-135M, two threads), and a text
with a place for the fitted file."""

ADVICE = f"; 'kvalloc fit' once, and one read does, {WAYS['decided'][0]} times a plain prefill"
"""What is said where nothing was fitted to the model."""

IN_CHUNKS = "holds the full cache until the prompt is complete, and evicts as solved from {}"
"""Text of the way ``decided``, whose new values are fitted to the prompt's last queries."""


class _Served(NamedTuple):
    """How a row is served.

    Attributes
    ----------
    way : Way
    solved_tokens : int
        Of the way ``decided``: the length at which the fitted file is solved.
    width : int
        Of the way ``whole``: at how many bits the row is kept.
    """

    way: Way
    solved_tokens: int = 0
    width: int = 0


@dataclass(frozen=True, kw_only=True)
class Default:
    """The request of every prompt: a share of the bytes, within the memory of the options.

    Parameters
    ----------
    share : float
        Of the bytes of a cache at 16 bits a number, whatever the model's type; above 0 and up to 1.
    options : CacheOptions
        How the cache keeps the share, and the memory at its peak; the full cache fits where none
        is given. Its fitted file is by default that of the cache folder, or the one that ships for
        the model; a policy is not taken.
    """

    share: float
    options: CacheOptions = CacheOptions()

    @staticmethod
    def applies(**given: object) -> bool:
        """Return whether nothing but a budget is given, with or without memory and file."""
        named = {name for name, value in given.items() if value is not None and value is not False}
        return "budget" in named and named <= {"budget", "memory", "fitted"}

    @classmethod
    def parse(cls, budget: Any, options: CacheOptions | None = None, **others: Any) -> Default:
        """Read the share that the user wrote; ``others`` are unset, or in the options.

        Raises
        ------
        InputError
            If it is no share.
        """
        return cls(share=parse_share(budget), options=options or CacheOptions())

    def cache(self, model: Any, size: PromptSize = UNKNOWN) -> BudgetCache:
        """Make a cache for one prompt, each of whose rows is served by what it is itself.

        Parameters
        ----------
        model : transformers.PreTrainedModel
        size : PromptSize
            Of a prompt whose length is not known the full cache is taken to fit.

        Raises
        ------
        InputError
            If no way fits the memory.
        KVAllocError
            As `kvalloc.make_cache`.
        """
        shape, fitted = shape_of(model), rotates_halves(model)
        tokens, chunked = size.tokens, size.chunked
        if tokens is None:
            unread = self._served(model, shape, None, size.embedded)
            profile = self.profile(shape, None, unread.way, fitted=fitted)
            return build_cache(model, profile, self.options, prompt_tokens=size.announced)
        # nothing of a row of padding alone is kept, whatever its way
        lengths = [max(length, 1) for length in size.lengths or (tokens,)]
        served = [self._served(model, shape, length, size.embedded) for length in lengths]
        groups = self._that_fit(shape, tokens, lengths, served, chunked=chunked)
        caches = []
        for how, rows in groups.items():
            alike = [lengths[row] for row in rows]
            if how.way == "decided":
                profile = self.decision(shape, how)
            else:
                profile = self.profile(shape, max(alike), how.way, fitted=fitted)
            text = self._text(profile, how, alike, tokens, chunked=chunked)
            text += self._advice(shape, how, max(alike))
            bounded = {"early": True, "whole": False}.get(how.way, self.options.bounded)
            if len(groups) > 1:
                text = f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows))}: {text}"
            _LOG.info(text)
            requested = {**profile.requested, "value": self.share}
            profile = profile.replace(requested=requested, detail=text)
            memory = self.options.memory and self.options.memory * len(rows) // len(lengths)
            options = replace(self.options, bounded=bounded, memory=memory)
            cache = build_cache(model, profile, options, prompt_tokens=size.announced)
            caches.append((rows, cache))
        return caches[0][1] if len(caches) == 1 else GroupedCache(caches)

    def _served(self, model: Any, shape: ModelShape, tokens: int | None, embedded: bool) -> _Served:
        """Return how a row is served where it may hold its full cache."""
        bounded = self.options.bounded
        if tokens is not None:
            if not bounded and (decided := self.decided(shape, tokens)) is not None:
                return decided
            if self._entries(shape, tokens) == tokens:
                return _Served("whole", width=self._width(shape, tokens))
        repeatable, limit = tokens is not None and not (embedded or bounded), context_limit(model)
        if tokens is not None and limit is not None:
            repeatable &= tokens + min(PIECE, tokens) + CARRIED_TOKENS <= limit
        return _Served("bounded" if bounded else "twice" if repeatable else "late")

    def decided(self, shape: ModelShape, tokens: int) -> _Served | None:
        """Return how a prompt is served whose entries and widths the fitted file's curves decide.

        None where there is no file, or its curves do not cover the share.
        """
        if (file := self.fitted_file(shape)) is not None:
            longest = min(tokens, shape.max_context_tokens or tokens)
            for length in (grid_length(longest), longest):
                solved = solve_share(file, self.share, length)
                if solved is not None and solved.share_at(tokens) <= self.share:
                    return _Served("decided", length)
        return None

    def decision(self, shape: ModelShape, served: _Served) -> BudgetProfile:
        """Return the budget profile of the way ``decided``."""
        file = self.fitted_file(shape)
        assert file is not None  # or nothing is served so
        solved = solve_share(file, self.share, served.solved_tokens)
        assert solved is not None
        return solved

    def fitted_file(self, shape: ModelShape) -> str | None:
        """Return the fitted file that is named, else the one of the model, if there is one.

        Raises
        ------
        ModelMismatchError
            If the named one is of another model.
        """
        if self.options.fitted is None:
            return find_fitted(shape)
        named = str(self.options.fitted)
        load_fitted(named).shape.require_same_model(
            shape,
            allow_other_model=self.options.allow_other_model,
            file=f"fitted file {named}",
            made_by=FittedModel.MADE_BY,
        )
        return named

    @property
    def bits(self) -> int:
        """Return the width of the entries that are kept."""
        if self.share >= EIGHT_BITS_FROM:
            return 16 if self.share == 1 else 8
        return 5 if self.share >= FOUR_BITS_BELOW else 4

    def profile(
        self, shape: ModelShape, tokens: int | None, way: Way, *, fitted: bool = True
    ) -> BudgetProfile:
        """Return the budget profile of a way, at a prompt's length where that is known.

        Parameters
        ----------
        shape : ModelShape
        tokens : int, optional
            For which the budgets are written down; they hold for all lengths.
        way : {"twice", "late", "bounded", "early", "whole"}
            What chooses the entries.
        fitted : bool
            Fit values and biases where a way does; not every model lets its queries be put behind
            the prompt.
        """
        context = tokens or min(shape.max_context_tokens or 4096, 4096)
        table = (shape.n_layers, shape.n_kv_heads)
        width = self._width(shape, context) if way == "whole" else self.bits
        scorer = self._scorer(shape, way, fitted=fitted)
        matching: dict[str, Any] = {}
        if fitted and way == "twice":
            parameters = matching_options(self.share, biases=self.share < FEW_BELOW)
            matching = {"name": "attention_matching", "parameters": parameters}
        policy = Policy(
            scorer=scorer.name,
            scorer_parameters=scorer.parameters(),
            sinks=SINKS,
            window=WINDOW,
            **matching,
        )
        kept = self._entries(shape, context, biased=policy.biased)
        bits, budgets = np.full(table, width), np.full(table, kept)
        bits[list(shape.sliding_layers)] = 16
        budgets[list(shape.sliding_layers)] = shape.sliding_entries(context)
        return BudgetProfile(
            shape=shape,
            level="head",
            context_tokens=context,
            budgets=budgets,
            share_of_16_bits=self.share,
            bits=None if width == 16 else bits,
            by_prompt=way != "whole",
            policy=policy,
            requested={"target": "budget", "value": self.share},
        )

    def _entries(self, shape: ModelShape, tokens: int, *, biased: bool = False) -> int:
        """Return the number of entries that each head keeps of a row."""
        least = SINKS + WINDOW
        return entries_in_share(self.share, tokens, self.bits, shape, least=least, biased=biased)

    def _width(self, shape: ModelShape, tokens: int) -> int:
        """Return the bits at which a row that is kept whole takes least, scales included."""
        rounded = int(head_bytes(tokens, self.bits, shape))
        return self.bits if rounded < tokens * shape.bytes_per_entry else 16

    def _scorer(self, shape: ModelShape, way: Way, *, fitted: bool) -> Scorer:
        """Return the scorer that chooses the entries of a way."""
        file = self.fitted_file(shape)
        if way == "twice":
            return get_scorer("reconstruction", chunk=PIECE, nearby=NEARBY, window=WINDOW)
        if way in ("early", "whole") and file is not None:
            return get_scorer("surrogate", file=file, window=WINDOW)
        votes = latest_votes(window=WINDOW, rotates=fitted)
        return replace(votes, tokens=AWAITED) if way in ("late", "bounded") else votes

    def _votes(self, shape: ModelShape, way: Way, tokens: int) -> int:
        """Return the number of a prompt's last queries by which a way chooses entries."""
        served = self.decided(shape, tokens) if way == "decided" else None
        if served is None:
            return self._scorer(shape, way, fitted=True).query_rows(tokens)
        policy = self.decision(shape, served).policy
        return get_scorer(policy.scorer, **policy.scorer_parameters).query_rows(tokens)

    def _that_fit(
        self,
        shape: ModelShape,
        tokens: int,
        lengths: Sequence[int],
        served: Sequence[_Served],
        *,
        chunked: bool,
    ) -> dict[_Served, tuple[int, ...]]:
        """Return the rows that are served alike; all early where the memory asks for it."""
        groups, memory = _alike(lengths, served), self.options.memory
        if memory is None:
            return groups
        early = _alike(lengths, [one if one.way == "whole" else _Served("early") for one in served])
        needs = [0, 0]
        for place, each in enumerate((groups, early)):
            for how, rows in each.items():
                longest = max(lengths[row] for row in rows)
                needs[place] += self.peak_bytes(
                    shape, longest, len(rows), how.way, chunked=chunked, columns=tokens
                )
        if min(needs) > memory:
            n_rows = len(lengths)
            in_rows = f" in {n_rows} rows" if n_rows > 1 else ""
            full = max(needs[0], shape.plain_bytes(tokens, n_rows))
            raise InputError(
                f"{option('memory', bytes_text(memory))} is {size(memory)}, but a prompt of "
                f"{tokens:,} tokens{in_rows} needs {size(full)} where its full cache is held, and "
                f"{size(min(needs))} where it is evicted while it is read (the budget, and one "
                "layer in full); give more, a smaller budget or a shorter prompt"
            )
        return groups if needs[0] <= memory else early

    def peak_bytes(
        self,
        shape: ModelShape,
        tokens: int,
        rows: int,
        way: Way,
        *,
        chunked: bool = False,
        columns: int | None = None,
    ) -> int:
        """Return the bytes of K, V and stored queries while rows of a prompt are read.

        With padding they are of more columns than tokens.
        """
        columns = columns or tokens
        one_layer = reading_bytes(shape, columns, rows)
        if way in ("early", "whole") or (way == "decided" and not chunked):
            served = self.decided(shape, tokens) if way == "decided" else None
            kept = self.decision(shape, served) if served else self.profile(shape, tokens, way)
            return kept.peak_bytes_at(tokens, rows, columns=columns, chunked=chunked)
        if way in ("late", "bounded"):
            held = min(LATEST_VOTES, tokens) + AWAITED
        else:
            held = min(
                max(matching_options(self.share)["rows"], self._votes(shape, way, tokens)), tokens
            )
        queries = len(shape.full_layers) * shape.n_query_heads * shape.head_dim
        peak = shape.plain_bytes(columns, rows) + rows * held * queries * shape.dtype_bytes
        if way == "bounded":  # at 16 bits until the last eviction
            entries = min(BOUNDED_BUDGETS * self._entries(shape, tokens), tokens)
            if entries < columns:
                stays = entries * shape.n_kv_heads * shape.bytes_per_entry * rows
                peak += one_layer - len(shape.full_layers) * (one_layer - stays)
        if way == "twice":  # what is read again, and what one layer shows of the prompt
            peak += one_layer * min(SHOWN_FIRST + PIECE, tokens) // columns
            peak += shape.plain_bytes(min(CARRIED_TOKENS + PIECE, tokens), rows)
        return peak

    def _advice(self, shape: ModelShape, served: _Served, tokens: int) -> str:
        """Return what to know of the fitted file, or of a model without one."""
        file = self.fitted_file(shape)
        if file is None:
            return ADVICE if served.way == "twice" else ""
        fitted, advice = load_fitted(file), ""
        if different := fitted.shape.other_signs(shape):
            advice = f"; fitted to other weights, {different:.1%} of whose signs differ"
        if served.way == "decided":
            solved = self.decision(shape, served)
            predicted, ratio = solved.predicted_loss or 0.0, fitted.error_at(self.share)
            advice += f"; predicted loss {predicted * (ratio or 1):.2g} nats a token, a sum of "
            advice += f"single losses within {gap_text(solved.gap)} of the least"
            if ratio is not None:
                advice += f", times {ratio:.2g} as whole caches measured"
            if tokens > FAR * fitted.scores.context_tokens:
                measured = fitted.scores.context_tokens
                advice += f"; its curves were measured at {measured:,} tokens, this is {tokens:,}"
        return advice

    def _text(
        self,
        profile: BudgetProfile,
        served: _Served,
        lengths: Sequence[int],
        columns: int,
        *,
        chunked: bool,
    ) -> str:
        """Return one line on rows of these lengths: their way, what is kept, peak and cost."""
        shape, way = profile.shape, served.way
        full, longest, rows = list(shape.full_layers), max(lengths), len(lengths)
        kept = sum(profile.budgets_for(n)[full].mean() for n in lengths) / sum(lengths)
        stored = sum(map(profile.retained_bytes_at, lengths))
        reached = float(np.average([*map(profile.share_at, lengths)], weights=lengths))
        cost, text = WAYS[way]
        text = IN_CHUNKS if chunked and way == "decided" else text
        text = text.format(self.fitted_file(shape))
        peak = self.peak_bytes(shape, longest, rows, way, chunked=chunked, columns=columns)
        if kept == 1:
            (cost, text), peak = WAYS["whole"], shape.plain_bytes(columns, rows)
            if reached > self.share < 1:
                text = f"keeps the prompt whole, which is too short for {self.share:.1%}"
        width = "at 16 bits"
        if not profile.reduces:
            width, stored = "as they are", sum(map(shape.plain_bytes, lengths))
        if profile.bits is not None:
            widths = np.unique(profile.bits[full]).tolist()
            width = f"at {' to '.join(map(str, widths[:: max(len(widths) - 1, 1)]))} bits"
        measured = "" if way == "decided" else ", nothing measured"
        return (
            f"by default{measured}: {text}; {kept:.0%} of the entries {width}, "
            f"{size(stored)}, {share_text(reached)}; about {size(peak)} while it is read, and "
            f"{cost} times a plain prefill"
        )


def _alike(lengths: Sequence[int], served: Sequence[_Served]) -> dict[_Served, tuple[int, ...]]:
    """Return the rows that are served alike, those of the longest row first."""
    longest_first = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    return {
        how: tuple(row for row, other in enumerate(served) if other == how)
        for how in dict.fromkeys(served[row] for row in longest_first)
    }
