"""The unmeasured default for any model."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvalloc.accounting.costs import counts_of, full_bytes, plain_bytes, reading_bytes
from kvalloc.errors import InputError, one_line, option
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.fitted import FittedModel
from kvalloc.formats.shipped_profiles import find_fitted, fitted_of_same_sizes, load_fitted
from kvalloc.models.attention import probe_of
from kvalloc.models.structure import context_limit
from kvalloc.online.conflicts import given_names
from kvalloc.online.decision import Decision, PromptSize
from kvalloc.online.methods import Immediate, Method, Setting, Solved, Whole, method_for
from kvalloc.online.solved import LossTarget, grid_length, share_for_loss, shares_of_rows
from kvalloc.runtime.making import Way
from kvalloc.runtime.options import CacheOptions
from kvalloc.runtime.plan import layers_together
from kvalloc.shape import ModelShape
from kvalloc.units import bytes_text, parse_share
from kvalloc.units import size as size_text

_TARGETS = {"budget", "target_loss", "memory"}
_PARTS = 100_000
"""Steps from 0 to 1 among which the largest fitting share is searched."""

DETAIL = 100
"""Characters of a line of detail."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Default(Decision):
    """Request for every prompt: a share of the bytes, within a memory.

    Parameters
    ----------
    share : float, optional
        Of the bytes at 16 bits, for any model type; above 0, up to 1. By default the largest with a
        peak within the memory; it falls as a conversation grows.
    target_loss : LossTarget, optional
        Takes the smallest share at which solved budgets lose at most this.
    options : CacheOptions
        Without a memory the full cache fits; a policy is not used.
    """

    share: float | None = None
    target_loss: LossTarget | None = None

    @staticmethod
    def applies(**options: object) -> bool:
        """Return whether a budget or loss, or a memory, is set, and otherwise only a file."""
        names = given_names(options)
        one = bool(names & _TARGETS) and not {"budget", "target_loss"} <= names
        return one and names <= _TARGETS | {"fitted"}

    @classmethod
    def parse(
        cls,
        budget: Any = None,
        options: CacheOptions | None = None,
        target_loss: str | float | None = None,
        **more: Any,
    ) -> Default:
        """Read the share or loss; ``more`` are unset, or in the options.

        Raises
        ------
        InputError
        """
        share = None if budget is None else parse_share(budget)
        target = None if target_loss is None else LossTarget.parse(target_loss)
        return cls(share=share, target_loss=target, options=options or CacheOptions())

    @property
    def _memory_only(self) -> bool:
        return self.share is None and self.target_loss is None

    def ways(self, model: Any, shape: ModelShape, size: PromptSize) -> list[Way]:
        """Return each row's way by its length; an unknown length gets no full cache.

        Raises
        ------
        InputError
            If no method fits the memory, or a needed fitted file is missing.
        """
        probe, setting = probe_of(model), self.setting(shape)
        setting = replace(setting, rotates=probe.moves_queries, fits=probe.knows_rotations)
        if self.target_loss is not None:
            setting = replace(setting, share=self._smallest_share(setting, self.target_loss, size))
        if (across := self.options.across) is not None:
            use = f"{option('across', across)} shares bytes by"
            setting.require_file(use, "leave that out")
        if size.tokens is None:
            profile = Immediate(setting=setting).profile(None)
            return [Way(profile=profile, options=replace(self.options, by_layer=True))]
        scattered = size.scattered or (False,) * size.n_rows
        size = size.of_rows(range(size.n_rows))
        if self._memory_only:
            setting = replace(setting, share=self._largest_share(setting, size))
        settings = [setting] * size.n_rows
        if across is not None:
            settings = _settings_of_rows(setting, size.lengths)
        settings = [
            replace(one, file=None, rotates=False, fits=False) if scatters else one
            for one, scatters in zip(settings, scattered, strict=True)
        ]
        limit = context_limit(model)
        methods = [
            method_for(one, tokens, limit=limit, one_read=self.options.memory is not None)
            for one, tokens in zip(settings, size.lengths, strict=True)
        ]
        if not (setting.file and load_fitted(setting.file).shape.has_weights_of(shape)):
            _warn_of_other_weights(setting, methods)
        methods = self._that_fit(methods, size)
        ways = {one: self._way(one, rows, size) for one, rows in _grouped(methods).items()}
        return [ways[method] for method in methods]

    def _way(self, method: Method, indices: Sequence[int], size: PromptSize) -> Way:
        rows = size.of_rows(indices)
        profile = method.profile(rows.longest)
        detail, rest = _text(method, profile, rows, self.options.memory)
        if len(indices) < size.n_rows:
            names = ", ".join(map(str, indices))
            detail = f"row{'s' * (len(indices) > 1)} {names}: {detail}"
        _LOG.info("%s; %s", detail, rest)
        memory = self.options.memory

        def stated(profile: BudgetProfile) -> BudgetProfile:
            requested = profile.requested
            if self._memory_only:
                requested = {**requested, "memory": memory}
            return profile.replace(requested=requested, detail=one_line(detail, DETAIL))

        def within(share: float, tokens: int) -> BudgetProfile:
            setting = replace(method.setting, share=share)
            later = method_for(setting, tokens, one_read=True)
            if not isinstance(later, Solved | Whole):
                later = Immediate(setting=setting)
            return stated(later.profile(tokens))

        longer_profile = method.longer_profile()
        part = memory and memory * len(indices) // size.n_rows
        return Way(
            profile=stated(profile),
            options=replace(self.options, by_layer=method.by_layer, memory=part),
            longer_profile=None if longer_profile is None else stated(longer_profile),
            within=within if self._memory_only else None,
        )

    def _largest_share(self, setting: Setting, size: PromptSize) -> float:
        shape, memory = setting.shape, self.options.memory or 0
        columns, rows, longest = size.columns, size.n_rows, size.longest
        # solved budgets fill their share, and values are fitted in float32
        wide = replace(shape, dtype_bytes=max(shape.dtype_bytes, 4))
        extra = reading_bytes(wide, columns, rows) - reading_bytes(shape, columns, rows)

        def unfilled(part: int) -> float:  # below 0: too short for the share, and kept whole
            method = Immediate(setting=replace(setting, share=part / _PARTS))
            return part / _PARTS - method.profile(longest).share_at(longest) + 1e-9

        def over(part: int, *, solved: bool) -> bool:
            needs = unfilled(part) * full_bytes(shape, longest, rows) + extra if solved else 0
            method = Immediate(setting=replace(setting, share=part / _PARTS))
            return unfilled(part) >= 0 and method.peak_bytes(size) + needs > memory

        if plain_bytes(shape, columns + 1, rows) <= memory:  # and the next token, before it evicts
            return 1.0
        for solved in (True, False)[setting.file is None or size.chunked :]:
            parts = range(1, _PARTS)  # below all of it, which is stored as the model makes it
            part = bisect.bisect_left(parts, True, key=partial(over, solved=solved))
            if part and unfilled(part) >= 0:
                return part / _PARTS
        return (part + 1) / _PARTS  # the smallest share, refused with its bytes

    def _smallest_share(self, setting: Setting, target: LossTarget, size: PromptSize) -> float:
        use = f"{option('target_loss', str(target))} is solved from"
        file = setting.require_file(use, f"give {option('budget', '20%')}")
        tokens = max(size.lengths or (size.tokens or load_fitted(file).context_tokens,))
        return share_for_loss(file, target, grid_length(tokens))

    def setting(self, shape: ModelShape) -> Setting:
        """Return a model's setting.

        Raises
        ------
        ModelMismatchError
            If the named fitted file is another model's.
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
        return Setting(shape=shape, share=self.share or 1.0, file=file)

    def _that_fit(self, methods: list[Method], size: PromptSize) -> list[Method]:
        """Return each row's method, all immediate if the memory requires it."""
        if (memory := self.options.memory) is None:
            return methods
        immediate: list[Method] = [
            one if isinstance(one, Whole) else Immediate(setting=one.setting) for one in methods
        ]
        needs = [
            sum(one.peak_bytes(size.of_rows(rows)) for one, rows in _grouped(choice).items())
            for choice in (methods, immediate)
        ]
        if min(needs) > memory:
            in_rows = f" in {size.n_rows} rows" if size.n_rows > 1 else ""
            smaller = "or" if self._memory_only else "a smaller budget or"
            full = max(plain_bytes(methods[0].setting.shape, size.columns, size.n_rows), needs[0])
            raise InputError(
                f"{option('memory', bytes_text(memory))} is {size_text(memory)}, but a prompt of "
                f"{size.columns:,} tokens{in_rows} needs {size_text(full)}, or "
                f"{size_text(min(needs))} with eviction while it is read; give more, {smaller} a "
                "shorter prompt"
            )
        return immediate if needs[0] > memory else methods


def _grouped(methods: Sequence[Method]) -> dict[Method, tuple[int, ...]]:
    return {
        method: tuple(row for row, other in enumerate(methods) if other == method)
        for method in dict.fromkeys(methods)
    }


def _settings_of_rows(setting: Setting, lengths: Sequence[int]) -> list[Setting]:
    covered = [row for row, tokens in enumerate(lengths) if setting.solved_tokens(tokens)]
    shared = shares_of_rows(str(setting.file), setting.share, tuple(lengths[r] for r in covered))
    shares = dict(zip(covered, shared, strict=True))
    return [replace(setting, share=shares.get(row, setting.share)) for row in range(len(lengths))]


def _warn_of_other_weights(setting: Setting, methods: Sequence[Method]) -> None:
    similar = setting.file or fitted_of_same_sizes(setting.shape)
    if similar is None or all(isinstance(one, Whole) for one in methods):
        return
    text = f"{similar} was fitted to other weights of the same sizes, or another form of these"
    if setting.file is None:
        text += f"; {option('fitted', similar)} and {option('allow_other_model', True)} take it"
    _LOG.warning("%s", text)


def _text(
    method: Method, profile: BudgetProfile, size: PromptSize, memory: int | None
) -> tuple[str, str]:
    """Return the line of detail, and the log's end."""
    shape, share, lengths = profile.shape, method.setting.share, size.lengths
    peak = method.peak_bytes(size)
    if layers_together(sum(lengths), profile, memory) > 1:
        peak = max(peak, plain_bytes(shape, size.columns, size.n_rows))
    full, all_bytes = list(shape.full_layers), sum(full_bytes(shape, n) for n in lengths)
    kept = sum(profile.budgets_for(n)[full].mean() for n in lengths) / sum(lengths)
    stored = sum(map(profile.retained_bytes_at, lengths))
    cost, text, brief = method.cost, method.text, method.brief
    if size.chunked:
        text = method.chunked_text or text
    evicted = f"{1 - kept:.0%} evicted"
    if kept == 1:
        cost, text, evicted = Whole.cost, Whole.text, "nothing evicted"
        peak = plain_bytes(shape, size.columns, size.n_rows)
        if share < 1 and max(map(profile.share_at, lengths)) > share:
            brief = f"too short for {share:.1%}"
    width, share_now = "at 16 bits", f" ({stored / all_bytes:.1%})"
    if not profile.reduces:
        width, share_now = "nothing rounded", ""
        stored = sum(plain_bytes(shape, length) for length in lengths)
    if profile.bits is not None:
        widths = sorted(counts_of(profile.budgets[full], profile.bits[full]))
        width = (
            f"at {widths[0]} to {widths[-1]} bits" if widths[1:] else f"rounded to {widths[0]} bits"
        )
    detail = f"{evicted}, {width}; {size_text(stored)}{share_now}; {brief}"
    text = text.format(method.setting.file)
    rest = f"{text}; about {size_text(peak)} while it is read, and {cost} times a plain prefill"
    return detail, rest + method.advice(size.longest)
