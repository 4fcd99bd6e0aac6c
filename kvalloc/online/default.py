"""The default for any model, nothing measured: the best way known within a share of the bytes.

`kvalloc.online.ways` has the ways; here each row of a prompt gets one, and a cache that follows it.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from kvalloc.accounting.costs import full_bytes, plain_bytes, reading_bytes
from kvalloc.allocation.request import Request
from kvalloc.errors import InputError, one_line, option
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.fitted import FittedModel
from kvalloc.formats.shipped_profiles import find_fitted, load_fitted
from kvalloc.models.attention import rotates_halves
from kvalloc.models.loading import shape_of
from kvalloc.models.structure import context_limit
from kvalloc.online.prompt_size import UNKNOWN, PromptSize
from kvalloc.online.solved import grid_length, share_for_loss, shares_of_rows
from kvalloc.online.ways import Decided, Early, Rows, Setting, Way, Whole, chosen_way
from kvalloc.runtime.cache import BudgetCache
from kvalloc.runtime.making import Way as RowWay
from kvalloc.runtime.making import build_cache, build_rows
from kvalloc.runtime.options import CacheOptions
from kvalloc.shape import ModelShape
from kvalloc.units import bytes_text, parse_share, size

_TARGETS = {"budget", "target_loss", "memory"}
_PARTS = 100_000
"""Of these a share is so many, where the largest one that fits is looked for."""

DETAIL = 100
"""Characters of a line of detail."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Default:
    """The request of every prompt: a share of the bytes, within the memory of the options.

    Parameters
    ----------
    share : float, optional
        Of the bytes of a cache at 16 bits a number, for any type of the model; above 0 and up to 1.
        Without it, and without a loss, it is the largest one that fits in the memory at its peak.
    target_loss : float, optional
        Instead of a share: the least one that is predicted to lose no more, nats per token.
    options : CacheOptions
        How the cache keeps the share, and the memory at its peak; the full cache fits where none
        is given. Its fitted file is by default that of the cache folder, or the one that ships for
        the model; a policy is not taken.
    """

    share: float | None = None
    target_loss: float | None = None
    options: CacheOptions = CacheOptions()
    memory_only: bool = False
    """Whether the memory says the share, of which a growing conversation gets less and less."""

    @staticmethod
    def applies(**options: object) -> bool:
        """Return whether a budget, a loss or a memory is given, and nothing else but a file."""
        named = {
            name for name, value in options.items() if value is not None and value is not False
        }
        one = bool(named & _TARGETS) and not {"budget", "target_loss"} <= named
        return one and named <= _TARGETS | {"fitted"}

    @classmethod
    def parse(
        cls,
        budget: Any = None,
        options: CacheOptions | None = None,
        target_loss: float | None = None,
        **more: Any,
    ) -> Default:
        """Read the share or loss that the user wrote; ``more`` are unset, or in the options.

        Raises
        ------
        InputError
            If it is no share, or no loss.
        """
        if target_loss is not None:
            request = Request.parse(target_loss=target_loss)
            return cls(target_loss=float(request.target.value), options=options or CacheOptions())
        share = None if budget is None else parse_share(budget)
        return cls(share=share, options=options or CacheOptions())

    def cache(self, model: Any, size: PromptSize = UNKNOWN) -> BudgetCache:
        """Make a cache for one prompt; each row is served by its own length.

        Parameters
        ----------
        model : transformers.PreTrainedModel
        size : PromptSize
            If the length of a prompt is not known, its full cache is taken to fit.

        Raises
        ------
        InputError
            If no way fits the memory, or a loss is asked for and there is no fitted file.
        KVAllocError
            As `kvalloc.make_cache`.
        """
        if self.target_loss is not None:
            share = self._least_share(model, self.target_loss, size)
            return replace(self, share=share, target_loss=None).cache(model, size)
        if self.share is None:
            share = self._largest_share(shape_of(model), size)
            return replace(self, share=share, memory_only=True).cache(model, size)
        setting, tokens = self.setting(shape_of(model), rotates=rotates_halves(model)), size.tokens

        def way_of(setting: Setting, length: int | None) -> Way:
            return chosen_way(setting, length, limit=context_limit(model))

        if tokens is None:
            way = way_of(setting, None)
            options = replace(self.options, by_layer=way.by_layer)
            return build_cache(model, way.profile(None), options, prompt_tokens=size.announced)
        # a row of padding alone keeps nothing in any way
        lengths = [max(length, 1) for length in size.lengths or (tokens,)]
        settings = [setting] * len(lengths)
        if self.options.across is not None:
            settings = _settings_of_rows(setting, lengths)
        ways = [way_of(*each) for each in zip(settings, lengths, strict=True)]
        groups = self._that_fit(tokens, lengths, ways, chunked=size.chunked)
        of_row = dict[int, RowWay]()
        for way, rows in groups.items():
            alike = [lengths[row] for row in rows]
            profile = way.profile(max(alike))
            share = way.setting.share
            read = Rows(max(alike), len(alike), tokens, size.chunked)
            text, rest = _text(profile, way, alike, read)
            if len(groups) > 1:
                text = f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows))}: {text}"
            _LOG.info("%s; %s", text, rest)
            if way.other_weights:
                _LOG.warning("%s", way.other_weights)
            text = one_line(text, DETAIL)
            memory = self.options.memory if self.memory_only else None
            profile = _requested(profile, share, text, memory)
            part = self.options.memory and self.options.memory * len(rows) // len(lengths)
            options = replace(self.options, by_layer=way.by_layer, memory=part)
            longer_profile = way.longer_profile()
            if longer_profile is not None:  # of the same request
                longer_profile = _requested(longer_profile, share, text, memory)
            within = partial(_profile_within, way.setting, text, memory)
            kept = RowWay(
                profile=profile,
                options=options,
                longer_profile=longer_profile,
                within=within if self.memory_only else None,
            )
            of_row |= dict.fromkeys(rows, kept)
        return build_rows(
            model,
            [of_row[row] for row in range(len(lengths))],
            prompt_tokens=size.announced,
            lengths=size.lengths,
        )

    def _largest_share(self, shape: ModelShape, size: PromptSize) -> float:
        """Return the largest share of a prompt that fits in the memory at its peak."""
        if (columns := size.tokens) is None:
            return 1.0
        memory, lengths = self.options.memory or 0, size.lengths or (columns,)
        setting, rows, longest = self.setting(shape), len(lengths), max(*lengths, 1)
        read, whole = Rows(longest, rows, columns, size.chunked), rows * full_bytes(shape, longest)
        # decided budgets fill their share, and values are fitted in float32
        wide = replace(shape, dtype_bytes=max(shape.dtype_bytes, 4))
        extra = reading_bytes(wide, columns, rows) - reading_bytes(shape, columns, rows)

        def unfilled(part: int) -> float:  # below 0: too short for the share, and kept whole
            early = Early(setting=replace(setting, share=part / _PARTS))
            return part / _PARTS - early.profile(longest).share_at(longest) + 1e-9

        def over(part: int, *, decided: bool) -> bool:
            needs = unfilled(part) * whole + extra if decided else 0
            early = Early(setting=replace(setting, share=part / _PARTS))
            return unfilled(part) >= 0 and early.peak_bytes(read) + needs > memory

        if plain_bytes(shape, columns, rows) <= memory:
            return 1.0
        for decided in (True, False)[setting.file is None or size.chunked :]:
            parts = range(1, _PARTS)  # below all of it, which is stored as the model makes it
            part = bisect.bisect_left(parts, True, key=partial(over, decided=decided))
            if part and unfilled(part) >= 0:
                return part / _PARTS
        return (part + 1) / _PARTS  # the smallest share, refused with its bytes

    def _least_share(self, model: Any, loss: float, size: PromptSize) -> float:
        """Return the least share that is predicted to lose no more at a prompt's length."""
        use = f"{option('target_loss', f'{loss:g}')} is solved from"
        setting = self.setting(shape_of(model), rotates=rotates_halves(model))
        file = setting.require_file(use, f", or give {option('budget', '20%')}")
        tokens = max(size.lengths or (size.tokens or load_fitted(file).context_tokens,))
        return share_for_loss(file, loss, grid_length(tokens))

    def setting(self, shape: ModelShape, *, rotates: bool = True) -> Setting:
        """Return what all ways of a model share.

        Its fitted file is the named one, else the model's, if it exists.

        Raises
        ------
        ModelMismatchError
            If the named one is of another model.
        InputError
            If rows are to share their bytes and there is no fitted file.
        """
        if self.options.fitted is None:
            file = find_fitted(shape)
        else:
            file = str(self.options.fitted)
            load_fitted(file).shape.require_same_model(
                shape,
                allow_other_model=self.options.allow_other_model,
                file=f"fitted file {file}",
                made_by=FittedModel.MADE_BY,
            )
        setting = Setting(
            shape=shape,
            share=self.share or 1.0,
            file=file,
            rotates=rotates,
        )
        if (across := self.options.across) is not None:
            setting.require_file(
                f"{option('across', across)} shares bytes by", ", or leave that out"
            )
        return setting

    def _that_fit(
        self, tokens: int, lengths: Sequence[int], ways: Sequence[Way], *, chunked: bool
    ) -> dict[Way, tuple[int, ...]]:
        """Return the rows that are served alike; all early where the memory asks for it."""
        groups, memory = _alike(lengths, ways), self.options.memory
        if memory is None:
            return groups
        rest = [way if isinstance(way, Whole) else Early(setting=ways[0].setting) for way in ways]
        early = _alike(lengths, rest)
        needs = [0, 0]
        for place, each in enumerate((groups, early)):
            for way, rows in each.items():
                longest = max(lengths[row] for row in rows)
                needs[place] += way.peak_bytes(Rows(longest, len(rows), tokens, chunked))
        if min(needs) > memory:
            n_rows = len(lengths)
            in_rows = f" in {n_rows} rows" if n_rows > 1 else ""
            smaller = "or" if self.memory_only else "a smaller budget or"
            full = max(needs[0], plain_bytes(ways[0].setting.shape, tokens, n_rows))
            raise InputError(
                f"{option('memory', bytes_text(memory))} is {size(memory)}, but a prompt of "
                f"{tokens:,} tokens{in_rows} needs {size(full)} where its full cache is held, and "
                f"{size(min(needs))} where it is evicted while it is read (the budget, and one "
                f"layer in full); give more, {smaller} a shorter prompt"
            )
        return groups if needs[0] <= memory else early


def _profile_within(
    setting: Setting, text: str, memory: int | None, share: float, tokens: int
) -> BudgetProfile:
    """Return the budgets of a conversation of a length at a share."""
    way = chosen_way(replace(setting, share=share), tokens)
    if not isinstance(way, Decided | Whole):
        way = Early(setting=way.setting)
    return _requested(way.profile(tokens), share, text, memory)


def _requested(
    profile: BudgetProfile, share: float, text: str, memory: int | None
) -> BudgetProfile:
    """Return a profile by which a cache keeps a share, of a memory if one is asked for alone."""
    requested = {**profile.requested, "value": share}
    if memory is not None:
        requested["memory"] = memory
    whole = share == 1
    return profile.replace(
        requested=requested, target_share=share, plain_if_full=whole, detail=text
    )


def _settings_of_rows(setting: Setting, lengths: Sequence[int]) -> list[Setting]:
    """Return the setting of each row; rows within the curves share their bytes."""
    covered = [row for row, tokens in enumerate(lengths) if setting.solved_tokens(tokens)]
    shared = shares_of_rows(str(setting.file), setting.share, tuple(lengths[r] for r in covered))
    shares = dict(zip(covered, shared, strict=True))
    return [replace(setting, share=shares.get(row, setting.share)) for row in range(len(lengths))]


def _text(
    profile: BudgetProfile,
    way: Way,
    lengths: Sequence[int],
    read: Rows,
) -> tuple[str, str]:
    """Return the line of detail of rows of these lengths, and its end: way, peak and cost."""
    shape, share, peak = profile.shape, way.setting.share, way.peak_bytes(read)
    full = list(shape.full_layers)
    kept = sum(profile.budgets_for(n)[full].mean() for n in lengths) / sum(lengths)
    stored = sum(map(profile.retained_bytes_at, lengths))
    cost, text, brief = way.cost, way.says(chunked=read.chunked), way.brief
    evicted = f"{1 - kept:.0%} evicted"
    if kept == 1:
        cost, text, peak = Whole.cost, Whole.text, plain_bytes(shape, read.columns, read.n_rows)
        evicted = "nothing evicted"
        if share < 1 and max(map(profile.share_at, lengths)) > share:
            brief = f"too short for {share:.1%}"
    width, share_now = "at 16 bits", f" ({stored / sum(full_bytes(shape, n) for n in lengths):.1%})"
    if not profile.reduces:
        width, share_now = "nothing rounded", ""
        stored = sum(plain_bytes(shape, length) for length in lengths)
    if profile.bits is not None:
        widths = np.unique(profile.bits[full]).tolist()
        width = f"rounded to {' to '.join(map(str, widths[:: max(len(widths) - 1, 1)]))} bits"
    detail = f"{evicted}, {width}; {size(stored)}{share_now}; {brief}"
    rest = f"{text}; about {size(peak)} while it is read, and {cost} times a plain prefill"
    return detail, rest + way.advice(max(lengths))


def _alike(lengths: Sequence[int], ways: Sequence[Way]) -> dict[Way, tuple[int, ...]]:
    """Return groups of rows that are served alike, the group of the longest row first."""
    longest_first = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    return {
        way: tuple(row for row, other in enumerate(ways) if other == way)
        for way in dict.fromkeys(ways[row] for row in longest_first)
    }
