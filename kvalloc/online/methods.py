"""Methods by which the default serves a prompt.

`Solved` follows a fitted file's curves. `SecondRead` shares entries over heads by each prompt's
scores: without a file, below the shares of its curves, and where it measured that this loses far
less. `Immediate` serves unknown lengths, and full caches beyond
the memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar

import numpy as np

from kvalloc.accounting.costs import (
    MIXES,
    constant_entries,
    entries_in_share,
    head_bytes,
    plain_bytes,
    reading_bytes,
)
from kvalloc.errors import InputError
from kvalloc.formats.budget_profile import BudgetProfile, Policy
from kvalloc.formats.shipped_profiles import load_fitted
from kvalloc.online.decision import PromptSize
from kvalloc.online.solved import (
    SINKS,
    WINDOW,
    fitting_policy,
    grid_length,
    matching_options,
    solve_share,
)
from kvalloc.scorers import Scorer, get_scorer
from kvalloc.scorers.later_pass import CARRIED_TOKENS, SHOWN_FIRST
from kvalloc.scorers.lookahead import LATEST_VOTES, latest_votes
from kvalloc.shape import ModelShape
from kvalloc.units import gap_text

BITS_FROM = {1.0: 16, 0.42: 8, 0.15: 85, 0.07: 5, 0.0: 4}
"""Width, or mix of widths, with the smallest loss from a share of the bytes on, without a fitted
file (SmolLM2-135M; below 7% also Qwen2.5-Coder-0.5B)."""

PIECE, NEARBY = 256, 0
"""Prompt tokens in a piece of the second read, and tokens around them that they see. More take
longer, and SmolLM2-135M loses no less at 600 tokens. With pieces of 1,024 Qwen2.5-Coder-0.5B loses
half at 3% on three of four prompts of 1,000 tokens, and 1.9 times on the other."""

SECOND_READ_FROM = 0.8
"""Measured loss of a second read over solved budgets' loss, below which a prompt is read twice:
it takes as long as another read."""

GROWTH, LONGER_TOKENS = 4, 256
"""A conversation that begins with less than half of 256 tokens goes on with budgets of a text four
times as long, at most of 256: sinks and windows fill a short text's budgets. SmolLM2-135M at 20%,
560 tokens after 16 and 28: .019 and .0061 nats a token, with budgets of 256 .037 and .0090."""

FAR = 8
"""Factor on the length of the curves' prompts from which the line of detail warns."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Share, of the bytes at 16 bits, model and fitted file, for all methods.

    For `rotates` see `kvalloc.online.solved.fits_values`. `fits`: keys can be rotated back, or have
    no rotation, as a fitted file requires.
    """

    shape: ModelShape
    share: float
    file: str | None = None
    rotates: bool = True
    fits: bool = True

    def require_file(self, use: str, instead: str = "") -> str:
        """Return the fitted file.

        Parameters
        ----------
        use : str
            Words before "what 'kvalloc fit' measures".
        instead : str
            Another way out.

        Raises
        ------
        InputError
            If there is none.
        """
        if self.file is not None:
            return self.file
        why, joint = "was not measured; run it once", ", or "
        if not self.fits:
            why = "cannot be measured, since it is not known how a layer rotates its queries"
            joint = "; "
        way_out = f"{joint}{instead}" if instead else ""
        raise InputError(
            f"{use} what 'kvalloc fit' measures of a model, and {self.shape.model_id} {why}"
            f"{way_out}"
        )

    @property
    def bits(self) -> int:
        """Return the width of kept entries."""
        return next(bits for share, bits in BITS_FROM.items() if self.share >= share)

    @property
    def reads_twice(self) -> bool:
        """Return whether a second read's measured loss is far below solved budgets' loss."""
        if self.file is None:
            return False
        known = load_fitted(self.file).scores.second_read_at(self.share)
        return known is not None and known[0] < SECOND_READ_FROM * known[1]

    def entries(self, tokens: int, bits: int | None = None) -> int:
        """Return each head's kept entries of a row, at `bits` by default."""
        bits = bits or self.bits
        return entries_in_share(self.share, tokens, bits, self.shape, minimum=SINKS + WINDOW)

    def solved(self, tokens: int) -> BudgetProfile | None:
        """Return `solve_share`'s budgets."""
        return solve_share(str(self.file), self.share, tokens, self.rotates)

    def solved_tokens(self, tokens: int) -> int | None:
        """Return the length at which curves are solved for a prompt.

        None without a file, if its curves do not cover the share, or if everything stays.
        """
        if self.file is None or self.share == 1:
            return None
        longest = min(tokens, self.shape.max_context_tokens or tokens)
        for length in (grid_length(longest), longest):
            solved = self.solved(length)
            if solved is not None and solved.share_at(tokens) <= self.share:
                return length
        return None


@dataclass(frozen=True, kw_only=True)
class Method:
    """Method of serving a row; equal objects serve one group.

    `cost` is the time of 2,048 tokens over a plain prefill's (SmolLM2-135M, two threads). `text` is
    for a log, with ``{}`` for the fitted file; `chunked_text`, if set, for several forwards;
    `action` for a line of detail. See `CacheOptions.by_layer` and `BudgetProfile.by_prompt`.
    """

    cost: ClassVar[float]
    text: ClassVar[str]
    action: ClassVar[str] = ""
    chunked_text: ClassVar[str] = ""
    by_layer: ClassVar[bool] = False
    by_prompt: ClassVar[bool] = True

    setting: Setting

    @property
    def bits(self) -> int:
        """Return the width of stored entries."""
        return self.setting.bits

    @property
    def scorer(self) -> Scorer:
        """Return the surrogate, or the last tokens' attention."""
        if (file := self.setting.file) is not None:
            return get_scorer("surrogate", file=file, window=WINDOW)
        return latest_votes(window=WINDOW, rotates=self.setting.rotates)

    @property
    def policy(self) -> Policy:
        """Return its policy."""
        return self.scorer.policy(SINKS)

    def profile(self, tokens: int | None) -> BudgetProfile:
        """Return the profile; its budgets hold for all lengths."""
        setting, shape = self.setting, self.setting.shape
        context = tokens or min(shape.max_context_tokens or 4096, 4096)
        budgets, full = constant_entries(shape, context), list(shape.full_layers)
        bits = np.full_like(budgets, 16)
        bits[full], budgets[full] = self.bits, setting.entries(context, self.bits)
        return BudgetProfile(
            shape=shape,
            level="head",
            context_tokens=context,
            budgets=budgets,
            share_of_16_bits=setting.share,
            bits=None if self.bits == 16 else bits,
            by_prompt=self.by_prompt,
            policy=self.policy,
            target_share=setting.share,
            plain_if_full=setting.share == 1,
            requested={"target": "budget", "value": setting.share},
        )

    def longer_profile(self) -> BudgetProfile | None:
        """Return a longer conversation's budgets, if they differ."""
        return None

    def peak_bytes(self, size: PromptSize) -> int:
        """Return the bytes of K, V and stored queries while rows are read."""
        columns, longest = size.columns, size.longest
        if self.setting.share == 1:  # stored as the model makes it
            return plain_bytes(self.setting.shape, columns, size.n_rows)
        profile = self.profile(longest)
        return profile.peak_bytes_at(longest, size.n_rows, columns=columns, chunked=size.chunked)

    @property
    def brief(self) -> str:
        """Return the action and predicted loss, for a line of detail."""
        known = "nothing measured" if self.setting.file is None else "no loss predicted"
        if not self.setting.fits:
            known = "no fit"
        return f"{known}: {self.action}" if self.action else known

    def advice(self, tokens: int) -> str:
        """Return the log's end, on the prediction."""
        return ""

    def _holding_bytes(self, size: PromptSize) -> int:
        """Return the bytes of the full cache and stored queries."""
        shape, matched = self.setting.shape, matching_options(self.setting.share)["rows"]
        queries = min(max(matched, self.scorer.query_rows(size.longest)), size.longest)
        each = len(shape.full_layers) * shape.n_query_heads * shape.head_dim * shape.dtype_bytes
        return plain_bytes(shape, size.columns, size.n_rows) + size.n_rows * queries * each


@dataclass(frozen=True, kw_only=True)
class Whole(Method):
    """All entries stay, rounded if smaller, scales included."""

    cost = 1.0
    text = "evicts nothing"
    by_prompt = False

    width: int

    @property
    def bits(self) -> int:
        """Return the width of all entries."""
        return self.width


@dataclass(frozen=True, kw_only=True)
class Immediate(Method):
    """A layer's heads share its budget as it is read."""

    cost = 1.2
    text = action = "evicts while the prompt is read"
    by_layer = True


@dataclass(frozen=True, kw_only=True)
class Solved(Method):
    """The surrogate ranks, within entries and bits solved from losses at `solved_tokens`."""

    cost = 1.5
    text = "evicts while the prompt is read, as solved from {}"
    chunked_text = "holds the full cache until the prompt is complete, and evicts as solved from {}"

    solved_tokens: int

    def profile(self, tokens: int | None) -> BudgetProfile:
        """See `Method.profile`."""
        solved = self.setting.solved(self.solved_tokens)
        assert solved is not None  # else `method_for` takes another method
        return solved

    def longer_profile(self) -> BudgetProfile | None:
        """Return budgets for a text `GROWTH` times as long, if the prompt is short."""
        if 2 * self.solved_tokens > LONGER_TOKENS:
            return None
        return self.setting.solved(min(GROWTH * self.solved_tokens, LONGER_TOKENS))

    def peak_bytes(self, size: PromptSize) -> int:
        """Return the peak; a chunked prompt is held in full."""
        return self._holding_bytes(size) if size.chunked else super().peak_bytes(size)

    @property
    def predicted_loss(self) -> float:
        """Return the summed single losses, times the model error."""
        return self.profile(None).expected_loss or 0.0

    @property
    def brief(self) -> str:
        """See `Method.brief`."""
        return f"predicted loss {self.predicted_loss:.2g} nats a token"

    def advice(self, tokens: int) -> str:
        """See `Method.advice`."""
        solved = self.profile(tokens)
        advice = f"; {self.brief}, a sum of single losses within {gap_text(solved.gap)} of the "
        advice += "least"
        if solved.model_error is not None:
            advice += f", times {solved.model_error:.2g} as whole caches measured"
        if tail := load_fitted(str(self.setting.file)).scores.tail_at(self.setting.share):
            advice += f"; 99% of the tokens lose at most {tail * self.predicted_loss:.2g}"
        return advice + _far(str(self.setting.file), tokens)


@dataclass(frozen=True, kw_only=True)
class SecondRead(Method):
    """A second read and latest queries rank.

    Attributes
    ----------
    measured : bool
        Whether `fit` measured that it loses less.
    """

    cost = 2.5
    text = "reads the prompt twice and holds the full cache meanwhile"
    action = "reads the prompt twice"

    measured: bool = False

    @property
    def scorer(self) -> Scorer:
        """Return its scorer."""
        votes = LATEST_VOTES if self.setting.rotates else 0
        return get_scorer("reconstruction", chunk=PIECE, nearby=NEARBY, window=WINDOW, votes=votes)

    @property
    def policy(self) -> Policy:
        """Return `fitting_policy`'s policy."""
        setting = self.setting
        return fitting_policy(self.scorer, setting.share, setting.shape, rotates=setting.rotates)

    @property
    def predicted_loss(self) -> float | None:
        """Return the loss that `fit` measured; None below the smallest of its shares."""
        if not self.measured:
            return None
        share, scores = self.setting.share, load_fitted(str(self.setting.file)).scores
        known = scores.second_read_at(share)
        smallest = min(one.share for one in scores.errors if one.second_read is not None)
        return known[0] if known and share >= smallest else None

    @property
    def brief(self) -> str:
        """Return the predicted loss if `fit` measured it; see `Method.brief`."""
        loss = self.predicted_loss
        return super().brief if loss is None else f"predicted loss {loss:.2g} nats, read twice"

    def peak_bytes(self, size: PromptSize) -> int:
        """Return the peak, with second-read pieces and one layer."""
        shape, tokens = self.setting.shape, size.longest
        shown = min(SHOWN_FIRST + PIECE, tokens)
        second_read = plain_bytes(shape, min(CARRIED_TOKENS + PIECE, tokens), size.n_rows)
        one_layer = reading_bytes(shape, size.columns, size.n_rows)
        return self._holding_bytes(size) + one_layer * shown // size.columns + second_read

    def advice(self, tokens: int) -> str:
        """See `Method.advice`."""
        if self.measured:
            return _far(str(self.setting.file), tokens)
        if self.setting.file is not None or not self.setting.fits:  # then there is none
            return ""
        return f"; 'kvalloc fit' once, and one read does, {Solved.cost} times a plain prefill"


def _far(file: str, tokens: int) -> str:
    """Return a warning if a prompt is far longer than the prompts of a fitted file."""
    measured = load_fitted(file).scores.context_tokens
    if tokens <= FAR * measured:
        return ""
    return f"; its curves were measured at {measured:,} tokens, this is {tokens:,}"


def method_for(
    setting: Setting, tokens: int, *, limit: int | None = None, one_read: bool = False
) -> Method:
    """Return a row's method, if the memory takes its full cache.

    Parameters
    ----------
    setting : Setting
    tokens : int
        Of the row's prompt.
    limit : int, optional
        Tokens that the model was made for.
    one_read : bool
        Whether solved budgets are taken also if a second read loses less.
    """
    reads_twice = tokens + min(PIECE, tokens) + CARRIED_TOKENS <= (limit or inf)
    whole = setting.entries(tokens) == tokens  # also for a second read
    if (solved := setting.solved_tokens(tokens)) is not None:
        if reads_twice and not one_read and not whole and setting.reads_twice:
            return SecondRead(setting=setting, measured=True)
        return Solved(setting=setting, solved_tokens=solved)
    if whole:
        widths = MIXES.get(setting.bits, (setting.bits,))
        width = next(one for one in widths if setting.entries(tokens, one) == tokens)
        rounds = head_bytes(tokens, width, setting.shape) < tokens * setting.shape.bytes_per_entry
        return Whole(setting=setting, width=width if rounds else 16)
    return SecondRead(setting=setting) if reads_twice else Immediate(setting=setting)
