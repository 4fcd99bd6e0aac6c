"""Planning: rows and share with the most tokens a second."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvalloc.accounting.costs import plain_bytes, reading_bytes
from kvalloc.errors import InputError, nearest, option
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.shipped_profiles import load_fitted
from kvalloc.measure.step_times import DEVICES, StepTimes, device_steps, measure_steps
from kvalloc.models.loading import shape_of
from kvalloc.models.structure import context_limit
from kvalloc.online.decision import PromptSize
from kvalloc.online.default import Default
from kvalloc.online.methods import Setting, Solved, method_for
from kvalloc.online.solved import LossTarget, grid_length, share_for_loss
from kvalloc.runtime.options import CacheOptions
from kvalloc.runtime.plan import default_interval
from kvalloc.runtime.tail import room_for
from kvalloc.shape import ModelShape
from kvalloc.units import bytes_text, parse_bytes, size

BEST, STEP = 5, 1.5
"""Number of returned settings, and the factor between two tried shares."""

LARGE = 0.6
"""A share with about the smallest loss."""

MEASURED_TOKENS = 1024
"""Longest prompt of the measured caches."""


@dataclass(frozen=True, kw_only=True)
class PlannedBatch:
    """Rows at a share, and predictions for them.

    Attributes
    ----------
    share : float
        As in ``kvalloc.apply(budget=...)``; 1 for a plain cache.
    predicted_loss : float
        Nats per token: summed single losses, times the model error.
    peak_bytes : int
    tokens_per_second : float
        Of all rows, while they answer.
    """

    rows: int
    share: float
    predicted_loss: float
    peak_bytes: int
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Best settings within one memory.

    Attributes
    ----------
    best : tuple of PlannedBatch
        Fastest first.
    plain : PlannedBatch or None
        The most rows of a plain cache; None if none fits.
    fitted : str
    times : StepTimes
    """

    best: tuple[PlannedBatch, ...]
    plain: PlannedBatch | None
    fitted: str
    times: StepTimes


def plan_batch(
    model: Any,
    *,
    memory: str | int,
    prompt: int,
    answer: int,
    target_loss: str | float = 0.01,
    times: StepTimes | str | None = None,
    fitted: str | Path | None = None,
    allow_other_model: bool = False,
) -> BatchPlan:
    """Return rows and shares with most tokens a second.

    Bytes and losses are as with `kvalloc.apply` and that budget.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Has a fitted file.
    memory : str or int
        Bytes of the cache at its peak.
    prompt, answer : int
        Tokens of each row.
    target_loss : float or str
        Largest predicted loss, nats per token: the mean, or as ``"0.05@99%"`` of 99% of them.
    times : StepTimes or str, optional
        From an earlier plan or published figures (``"a100"``, ``"h100"``, ``"h200"``); by default
        measured, in seconds.
    fitted, allow_other_model : optional
        As for `kvalloc.apply`.

    Raises
    ------
    InputError
        If the model has no fitted file, no share meets the loss, no row fits, or tokens exceed the
        model's limit.

    Examples
    --------
    >>> plan_batch(model, memory="1GiB", prompt=1000, answer=200).best[0].rows  # doctest: +SKIP
    """
    shape, room = shape_of(model), parse_bytes(memory)
    _check(model, prompt, answer, times)
    options = CacheOptions(fitted=fitted, allow_other_model=allow_other_model)
    target = LossTarget.parse(target_loss)
    default = Default(target_loss=target, options=options)
    setting = default.setting(shape)
    file = setting.require_file("losses are predicted from")
    min_share = share_for_loss(file, target, grid_length(prompt))
    methods = list(_methods(setting, min_share, prompt))
    if not methods:
        scores = load_fitted(file).scores
        known = [
            one.predicted_loss * (target.factor_at(one.setting.share, scores) or 1.0)
            for one in _methods(setting, LARGE, prompt)
        ]
        smallest = replace(target, nats=math.ceil(1e6 * min(known, default=0.0)) / 1e6)
        way_out = f"{smallest} is possible" if known else "give a longer prompt"
        raise InputError(
            f"no share of a cache of {prompt:,} tokens is predicted to lose no more than "
            f"{option('target_loss', str(target))}; {way_out}"
        )
    loads = [Load.of(one, shape, prompt, answer) for one in methods]
    if loads[0].peak_bytes > room:
        raise InputError(
            f"{option('memory', bytes_text(room))} is {size(room)}, but one row of {prompt:,} and "
            f"{answer:,} tokens takes {size(loads[0].peak_bytes)} at its peak at "
            f"{loads[0].share:.1%} of a cache at 16 bits; give at least "
            f"{option('memory', bytes_text(loads[0].peak_bytes))}"
        )
    if isinstance(times, str):
        times = device_steps(model, times)
    if times is None:
        tokens = min(prompt + answer // 2, max(1, room // plain_bytes(shape, 1)))
        times = measure_steps(model, _measured(setting, min_share, prompt), tokens)
    planned = [one.planned(room, times) for one in loads if one.peak_bytes <= room]
    planned.sort(key=lambda one: -one.tokens_per_second)
    plain = Load.of_plain(shape, prompt, answer)
    return BatchPlan(
        best=tuple(planned[:BEST]),
        plain=plain.planned(room, times) if plain.peak_bytes <= room else None,
        fitted=file,
        times=times,
    )


def _check(model: Any, prompt: int, answer: int, times: StepTimes | str | None) -> None:
    for name, tokens in (("prompt", prompt), ("answer", answer)):
        if tokens < 1:
            raise InputError(f"{option(name, tokens)} is not a number of tokens; give 1 or more")
    limit = context_limit(model)
    if limit is not None and prompt + answer > limit:
        raise InputError(
            f"{option('prompt', prompt)} and {option('answer', answer)} are {prompt + answer:,} "
            f"tokens, but the model was made for {limit:,}; give fewer"
        )
    if isinstance(times, str) and times not in DEVICES:
        measuring = option("device", keyword="times")
        raise InputError(
            f"there are no figures of a device {times!r}; {nearest(times, DEVICES)}choose from "
            f"{', '.join(DEVICES)}, or leave {measuring} out to measure this machine"
        )


def _methods(setting: Setting, min_share: float, prompt: int) -> Iterator[Solved]:
    share = min_share
    while share < 1:
        one = replace(setting, share=share)
        if isinstance(method := method_for(one, prompt), Solved):  # others exceed its bytes
            yield method
        share = round(max(STEP * share, share + 0.001), 3)


def _measured(
    setting: Setting, min_share: float, prompt: int
) -> tuple[BudgetProfile, BudgetProfile]:
    """Return budgets at two shares, for lengths read in seconds."""
    tokens = min(prompt, MEASURED_TOKENS)
    long = [one.profile(tokens) for one in _methods(setting, min_share, tokens)]
    short = [one.profile(tokens) for one in _methods(setting, min_share, tokens // 2)] or long
    return short[0], long[min(2, len(long) - 1)]


@dataclass(frozen=True, kw_only=True)
class Load:
    """One row's bytes and seconds while it is read and answered.

    `seconds` gives its cache's time over all steps.
    """

    share: float
    predicted_loss: float
    peak_bytes: int
    answer: int
    seconds: Callable[[StepTimes], float]

    @classmethod
    def of(cls, method: Solved, shape: ModelShape, prompt: int, answer: int) -> Load:
        """Return a solved cache's load."""
        profile = method.profile(prompt)
        token = len(shape.full_layers) * reading_bytes(shape, 1)
        peak, parts = method.peak_bytes(PromptSize(tokens=prompt)), []
        seen, end = prompt, prompt + answer
        while seen < end:
            due, head_bytes = default_interval(seen), profile.head_bytes_at(seen)
            filled = profile.filled_bytes_at(seen) - int(head_bytes[list(shape.full_layers)].sum())
            kept = int(head_bytes.sum()) + max(filled, 0)
            followed = min(due, end - seen)
            parts.append((followed, seen, kept, followed * token // 2))  # of the tail in the mean
            peak = max(peak, kept + room_for(followed, due) * token)
            seen += followed

        def seconds(times: StepTimes) -> float:
            total = 0.0
            for tokens, before, kept, followed in parts:  # between two evictions
                step = times.kept.at(kept) + times.followed.at(followed)
                total += tokens * step + times.evicting.at(before) + times.entered.at(tokens)
            return total

        return cls(
            share=method.setting.share,
            predicted_loss=method.predicted_loss,
            peak_bytes=peak,
            answer=answer,
            seconds=seconds,
        )

    @classmethod
    def of_plain(cls, shape: ModelShape, prompt: int, answer: int) -> Load:
        """Return a plain cache's load."""
        mean_bytes = plain_bytes(shape, prompt + answer // 2)
        return cls(
            share=1.0,
            predicted_loss=0.0,
            peak_bytes=plain_bytes(shape, prompt + answer),
            answer=answer,
            seconds=lambda times: answer * times.plain.at(mean_bytes),
        )

    def planned(self, memory: int, times: StepTimes) -> PlannedBatch:
        """Return the fastest number of rows within a memory."""
        max_rows = memory // self.peak_bytes
        # between two rows that were measured the time is a line, so the best is at its ends
        choices = [*(rows for rows in times.rows if rows < max_rows), max_rows]
        speed, rows = max((self.tokens_per_second(rows, times), rows) for rows in choices)
        return PlannedBatch(
            rows=rows,
            share=self.share,
            predicted_loss=self.predicted_loss,
            peak_bytes=rows * self.peak_bytes,
            tokens_per_second=speed,
        )

    def tokens_per_second(self, rows: int, times: StepTimes) -> float:
        """Return all rows' tokens a second."""
        seconds = self.answer * times.of_model(rows) + rows * self.seconds(times)
        return rows * self.answer / seconds
