"""The ways in which the default serves a prompt: entries, peak and cost of each.

At equal bytes it pays to round first and to evict then, and to evict what a second read of the
prompt does not look up. Where there is a fitted file of the model, its curves say how many entries
each head keeps, and at how many bits, and its surrogate of a second read says which. Below what
they cover, and without a file, entries are stored at 5 bits (8 where the share is large, 4 where it
is small), as many as fit, and the values of kept entries are fitted to the output of all.
The model then reads the prompt twice, for which it holds the full cache. Where it cannot, the
prompt's length is not known or memory does not allow that, the heads of each layer share its budget
as it is read, by the surrogate or the attention of the prompt's last tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from kvalloc.accounting.costs import (
    entries_in_share,
    head_bytes,
    plain_bytes,
    reading_bytes,
    sliding_entries,
)
from kvalloc.errors import InputError, option
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.shipped_profiles import fitted_of_same_sizes, load_fitted
from kvalloc.online.solved import (
    FEW_BELOW,
    SINKS,
    WINDOW,
    grid_length,
    matching_options,
    solve_share,
)
from kvalloc.scorers import Scorer, get_scorer
from kvalloc.scorers.later_pass import CARRIED_TOKENS, SHOWN_FIRST
from kvalloc.scorers.lookahead import latest_votes
from kvalloc.shape import ModelShape
from kvalloc.units import gap_text

EIGHT_BITS_FROM, FOUR_BITS_BELOW = 0.42, FEW_BELOW
"""Shares of the bytes from which on fewer entries at 8 bits lose less than more at 5, and below
which more at 4 do (SmolLM2-135M)."""

PIECE, NEARBY = 256, 0
"""Tokens of the prompt that are read again at once, and how many around them are seen meanwhile:
to see more takes longer and loses no less."""

LONGER_TOKENS = 256
"""Tokens for which a conversation is solved that begins with less than half of them: sinks and
windows are most of a short text's budgets (SmolLM2-135M at 20%, 36 tokens and then turns of 250:
4.5 and 3.1 of reading all again, and 7.2 and 4.6 where the short text's budgets go on)."""

FAR = 8
"""Times the length of the curves' prompts beyond which the line of detail says so."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The share, the model and its fitted file, for all ways of serving a request.

    Attributes
    ----------
    shape : ModelShape
    share : float
        Of the bytes of a cache at 16 bits a number.
    file : str or None
        The model's fitted file.
    rotates : bool
        Whether the model's queries can be put behind the prompt, to which values are fitted.
    """

    shape: ModelShape
    share: float
    file: str | None = None
    rotates: bool = True

    def require_file(self, use: str, instead: str = "") -> str:
        """Return the fitted file.

        Parameters
        ----------
        use : str
            What it is for, in words that end before "what 'kvalloc fit' measures".
        instead : str
            The way out beside a fit.

        Raises
        ------
        InputError
            If the model was not measured.
        """
        if self.file is None:
            why = f"was not measured; run it once{instead}"
            if not self.rotates:
                why = "cannot be measured, since a layer does not rotate halves of its queries"
                why += instead.replace(", or", ";")
            raise InputError(
                f"{use} what 'kvalloc fit' measures of a model, and {self.shape.model_id} {why}"
            )
        return self.file

    @property
    def bits(self) -> int:
        """Return the width of the entries that are kept."""
        if self.share >= EIGHT_BITS_FROM:
            return 16 if self.share == 1 else 8
        return 5 if self.share >= FOUR_BITS_BELOW else 4

    def entries(self, tokens: int) -> int:
        """Return the number of entries that each head keeps of a row."""
        protected, share = SINKS + WINDOW, self.share
        return entries_in_share(share, tokens, self.bits, self.shape, least=protected)

    def solved_tokens(self, tokens: int) -> int | None:
        """Return the length at which the curves of the fitted file are solved for a prompt.

        None where there is no file, its curves do not cover the share, or everything stays.
        """
        if self.file is None or self.share == 1:
            return None
        longest = min(tokens, self.shape.max_context_tokens or tokens)
        for length in (grid_length(longest), longest):
            solved = solve_share(self.file, self.share, length)
            if solved is not None and solved.share_at(tokens) <= self.share:
                return length
        return None


class Rows(NamedTuple):
    """Rows of a prompt that are served alike.

    Attributes
    ----------
    tokens, n_rows : int
        Length of the longest, without padding, and how many there are.
    columns : int
        Length with padding.
    chunked : bool
        Whether the prompt comes in several forwards.
    """

    tokens: int
    n_rows: int
    columns: int
    chunked: bool = False


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a row is served; rows that are served alike have equal ways.

    Attributes
    ----------
    cost : float
        Time of a prompt of 2,048 tokens over a plain prefill's (SmolLM2-135M, two threads).
    text, action : str
        Its method, in a log and in a line of detail.
    by_layer : bool
        Option of that name of the caches that serve it, see `CacheOptions`.
    by_prompt : bool
        Whether heads share what they may keep, and each prompt hands it out.
    fits_values : bool
        Whether values are fitted to what all entries gave.
    width : int or None
        At how many bits entries are stored; as the setting has it where it is None.
    """

    cost: ClassVar[float]
    text: ClassVar[str]
    action: ClassVar[str] = ""
    by_layer: ClassVar[bool] = False
    by_prompt: ClassVar[bool] = True
    fits_values: ClassVar[bool] = False

    setting: Setting
    width: int | None = None

    @property
    def scorer(self) -> Scorer:
        """Return the scorer: the surrogate, or the attention of the last tokens."""
        if (file := self.setting.file) is not None:
            return get_scorer("surrogate", file=file, window=WINDOW)
        return latest_votes(window=WINDOW, rotates=self.setting.rotates)

    def profile(self, tokens: int | None) -> BudgetProfile:
        """Return the budget profile; its budgets hold for all lengths.

        Parameters
        ----------
        tokens : int or None
            Length of the prompt for which they are written down, where it is known.
        """
        setting, shape = self.setting, self.setting.shape
        context = tokens or min(shape.max_context_tokens or 4096, 4096)
        matching: dict[str, Any] = {}
        if self.fits_values and setting.rotates:
            parameters = matching_options(setting.share)
            matching = {"name": "attention_matching", "parameters": parameters}
        policy = self.scorer.policy(SINKS, **matching)
        table, width = (shape.n_layers, shape.n_kv_heads), self.width or setting.bits
        kept = setting.entries(context)
        bits, budgets = np.full(table, width), np.full(table, kept)
        bits[list(shape.sliding_layers)] = 16
        budgets[list(shape.sliding_layers)] = sliding_entries(shape, context)
        return BudgetProfile(
            shape=shape,
            level="head",
            context_tokens=context,
            budgets=budgets,
            share_of_16_bits=setting.share,
            bits=None if width == 16 else bits,
            by_prompt=self.by_prompt,
            policy=policy,
            target_share=setting.share,
            requested={"target": "budget", "value": setting.share},
        )

    def peak_bytes(self, read: Rows) -> int:
        """Return the bytes of K, V and stored queries while rows of a prompt are read."""
        tokens, rows, columns, chunked = read
        profile = self.profile(tokens)
        if self.setting.share == 1:  # stored as the model makes it
            return plain_bytes(self.setting.shape, columns, rows)
        return profile.peak_bytes_at(tokens, rows, columns=columns, chunked=chunked)

    def longer_profile(self) -> BudgetProfile | None:
        """Return the budgets by which a conversation goes once it is longer, if they differ."""
        return None

    @property
    def brief(self) -> str:
        """Return the same in a line of detail, with the predicted loss."""
        known = "nothing measured" if self.setting.file is None else "no loss predicted"
        return f"{known}: {self.action}" if self.action else known

    def says(self, *, chunked: bool) -> str:
        """Return its method for a prompt that comes in several forwards, or in one."""
        return self.text

    def advice(self, tokens: int) -> str:
        """Return what to know of the prediction, or of a model without one."""
        return ""

    @property
    def other_weights(self) -> str:
        """Return a warning about a file of other weights that is taken, or could be."""
        file, shape = self.setting.file, self.setting.shape
        of_these = file is not None and load_fitted(file).shape.has_weights_of(shape)
        similar = file or fitted_of_same_sizes(shape)
        if of_these or similar is None:
            return ""
        text = f"{similar} was fitted to other weights of the same sizes, or another form of these"
        if file is None:
            text += f"; {option('fitted', similar)} and {option('allow_other_model', True)} take it"
        return text

    def _holding_bytes(self, read: Rows) -> int:
        """Return the bytes of the full cache, and of queries that choose and that values fit."""
        shape, rows = self.setting.shape, matching_options(self.setting.share)["rows"]
        queries = min(max(rows, self.scorer.query_rows(read.tokens)), read.tokens)
        each = len(shape.full_layers) * shape.n_query_heads * shape.head_dim * shape.dtype_bytes
        return plain_bytes(shape, read.columns, read.n_rows) + read.n_rows * queries * each


@dataclass(frozen=True, kw_only=True)
class Whole(Way):
    """All entries stay, rounded where that takes less."""

    cost = 1.0
    text = "evicts nothing"
    by_prompt = False

    @classmethod
    def of(cls, setting: Setting, tokens: int) -> Whole:
        """Return the way at the bits at which a row takes least, scales included."""
        rounded = int(head_bytes(tokens, setting.bits, setting.shape))
        less = rounded < tokens * setting.shape.bytes_per_entry
        return cls(setting=setting, width=setting.bits if less else 16)

    @property
    def other_weights(self) -> str:
        """Return nothing: no file is needed."""
        return ""


@dataclass(frozen=True, kw_only=True)
class Early(Way):
    """The heads of each layer share its budget as it is read."""

    cost = 1.2
    text = action = "evicts while the prompt is read"
    by_layer = True


@dataclass(frozen=True, kw_only=True)
class Decided(Way):
    """The surrogate chooses, within entries and bits of each head that are solved from losses.

    Attributes
    ----------
    solved_tokens : int
        The length at which the fitted file is solved.
    """

    cost = 1.2
    text = "evicts while the prompt is read, as solved from {}"
    in_chunks = "holds the full cache until the prompt is complete, and evicts as solved from {}"

    solved_tokens: int

    def profile(self, tokens: int | None) -> BudgetProfile:
        """Return the budgets that are solved; see `Way.profile`."""
        setting = self.setting
        solved = solve_share(str(setting.file), setting.share, self.solved_tokens)
        assert solved is not None  # or nothing is served so
        return solved

    def longer_profile(self) -> BudgetProfile | None:
        """Return the budgets of a text of `LONGER` tokens, where the prompt is far shorter."""
        setting = self.setting
        if 2 * self.solved_tokens > LONGER_TOKENS:
            return None
        return solve_share(str(setting.file), setting.share, LONGER_TOKENS)

    @property
    def brief(self) -> str:
        """Return the predicted loss; see `Way.brief`."""
        return f"predicted loss {self.predicted_loss:.2g} nats a token"

    @property
    def predicted_loss(self) -> float:
        """Return the sum of single losses, times what whole caches lost beside it."""
        return self.profile(None).expected_loss or 0.0

    def peak_bytes(self, read: Rows) -> int:
        """Return it; in chunks, values are fitted to queries that come last."""
        return self._holding_bytes(read) if read.chunked else super().peak_bytes(read)

    def says(self, *, chunked: bool) -> str:
        """Return its method, and the fitted file; see `Way.says`."""
        return (self.in_chunks if chunked else self.text).format(self.setting.file)

    def advice(self, tokens: int) -> str:
        """Return what loss is predicted, and how well; see `Way.advice`."""
        solved, fitted = self.profile(tokens), load_fitted(str(self.setting.file))
        ratio, measured = solved.model_error, fitted.scores.context_tokens
        advice = f"; predicted loss {self.predicted_loss:.2g} nats a token, a sum of "
        advice += f"single losses within {gap_text(solved.gap)} of the least"
        if ratio is not None:
            advice += f", times {ratio:.2g} as whole caches measured"
        if tokens > FAR * measured:
            advice += f"; its curves were measured at {measured:,} tokens, this is {tokens:,}"
        return advice


@dataclass(frozen=True, kw_only=True)
class Twice(Way):
    """A second read of the prompt chooses."""

    cost = 2.5
    text = "reads the prompt twice and holds the full cache meanwhile"
    action = "reads the prompt twice"
    fits_values = True

    @property
    def scorer(self) -> Scorer:
        """Return what notes the second read."""
        return get_scorer("reconstruction", chunk=PIECE, nearby=NEARBY, window=WINDOW)

    def peak_bytes(self, read: Rows) -> int:
        """Return it, with the pieces of the second read and one layer of the prompt."""
        tokens, rows, columns, _ = read
        shown = min(SHOWN_FIRST + PIECE, tokens)
        second_read = plain_bytes(self.setting.shape, min(CARRIED_TOKENS + PIECE, tokens), rows)
        one_layer = reading_bytes(self.setting.shape, columns, rows)
        return self._holding_bytes(read) + one_layer * shown // columns + second_read

    def advice(self, tokens: int) -> str:
        """Return what spares the second read; see `Way.advice`."""
        if self.setting.file is not None or not self.setting.rotates:  # then there is none
            return ""
        return f"; 'kvalloc fit' once, and one read does, {Decided.cost} times a plain prefill"


def chosen_way(
    setting: Setting,
    tokens: int | None,
    *,
    limit: int | None = None,
) -> Way:
    """Return how a row is served where the memory takes its full cache.

    Parameters
    ----------
    setting : Setting
    tokens : int or None
        Its length, where it is known.
    limit : int or None
        Tokens that the model was made for.
    """
    if tokens is None:
        return Early(setting=setting)
    if (solved := setting.solved_tokens(tokens)) is not None:
        return Decided(setting=setting, solved_tokens=solved)
    if setting.entries(tokens) == tokens:
        return Whole.of(setting, tokens)
    second_read = tokens + min(PIECE, tokens) + CARRIED_TOKENS
    return (Early if limit is not None and second_read > limit else Twice)(setting=setting)
