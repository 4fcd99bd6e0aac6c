"""The measured half of the interface: retention curves with their provenance."""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.accounting.costs import BIT_WIDTHS
from kvalloc.formats.budget_profile import Policy
from kvalloc.formats.record import (
    ROUNDING,
    ArrayOf,
    ArrayRecord,
    FileRecord,
    FloatArray5D,
    IntArray1D,
    MeasuredHeader,
    Record,
    require,
    require_shape,
)

Shares4D = Annotated[FloatArray, ArrayOf(np.float64, 4, low=0, high=1)]
Tokens1D = Annotated[IntArray, ArrayOf(np.int64, 1, low=1)]
Masses3D = Annotated[FloatArray, ArrayOf(np.float64, 3, low=0)]

MAX_SHARDS = 9_999
"""Largest number of parts of a measurement."""

LOSS_NOISE_NATS = 1e-3
"""A measured loss may be this far below 0 in any case; see `_require_losses`."""


class ShareError(Record):
    """Measured and predicted loss of whole caches at one share."""

    NAME: ClassVar[str] = "error at a share"

    share: float = Field(gt=0, le=1)
    """Share of the bytes of a cache at 16 bits."""

    predicted: float = Field(gt=0)
    """Sum of the losses of single heads, nats per token."""

    loss: float = Field(gt=0)
    """Measured loss of the whole cache, nats per token: the mean over tasks."""

    interval: tuple[float, float] | None = None
    """95% bootstrap interval of the loss over the prompts; None if a task has only one."""

    prompts: int = Field(ge=1)
    """Number of prompts, on which no curve was measured."""

    p99: float | None = Field(default=None, ge=0)
    """Loss that 99% of the predicted tokens do not exceed, nats; None of fewer than 300 tokens."""

    second_read: float | None = Field(default=None, gt=0)
    """Loss of caches of the same bytes that a second read of each prompt decides; None if it was
    not measured."""


class ScoreHeader(MeasuredHeader):
    """All of a score profile but its arrays."""

    NAME: ClassVar[str] = "score profile"
    MADE_BY: ClassVar[str] = "kvalloc profile"
    PROVENANCE: ClassVar[tuple[str, ...]] = ("interpolation_error", *MeasuredHeader.PROVENANCE)
    OPTIONAL: ClassVar[tuple[str, ...]] = ("errors", "shard", *MeasuredHeader.OPTIONAL)

    kind: Literal["kvalloc.score_profile"] = "kvalloc.score_profile"
    """Kind of the file."""

    schema_version: Literal[2] = 2
    """Version of the file's schema."""

    scorer: str
    """Name of the scorer."""

    scorer_parameters: dict[str, Any]
    """Parameters that rebuild it: ``get_scorer(scorer, **scorer_parameters)``."""

    sinks: int = Field(ge=0)
    """First tokens of the prompt, never evicted and therefore left out of the curves."""

    window: int = Field(ge=0)
    """Last tokens of the prompt, likewise."""

    loss_method: Literal["", "measured", "fast"] = ""
    """Whether losses were measured or estimated (``--loss fast``). Empty without losses."""

    interpolation_error: float = Field(default=0.0, ge=0, lt=1)
    """Largest measured difference between a curve and its interpolation on the grid; 0 if ``ranks``
    holds every rank."""

    shard: tuple[int, int] | None = None
    """For a part of a measurement (``kvalloc profile --shard``): its number, from 1, and the number
    of shards. Shard i of n has every n-th sample, from the i-th on. None for an undivided
    measurement."""

    errors: tuple[ShareError, ...] = ()
    """Model error: losses of whole caches with entries and bits of each head solved from these
    losses, the smallest share first."""


class ScoreProfile(ArrayRecord, ScoreHeader):
    """Retention curves of one model on some text, with everything that made them.

    Raises
    ------
    InputError
        If arrays do not fit each other, or curves are not rising, concave and within 0..1.

    References
    ----------
    XKV: Personalized KV Cache Memory Reduction, Eq. 3 and 4.
    """

    HEADER: ClassVar[type[FileRecord]] = ScoreHeader

    PER_SAMPLE: ClassVar[tuple[str, ...]] = (
        "curves",
        "masses",
        "sample_tokens",
        "losses",
    )
    """Arrays with the samples as their first axis."""

    ranks: IntArray1D
    """Numbers of kept evictable entries, from 0 to ``evictable_tokens``, ``(n_points,)``."""

    curves: Shares4D
    """``curves[..., k]`` is R(ranks[k]), the share of a head's evictable score mass in its
    ``ranks[k]`` best entries, 0..1 (XKV, Eq. 4); ``(n_samples, n_layers, n_kv_heads, n_points)``.
    """

    masses: Masses3D
    """The evictable score mass, ``(n_samples, n_layers, n_kv_heads)``; zero in sliding layers,
    which have no curve."""

    sample_tokens: Tokens1D
    """Tokens of each sample, ``(n_samples,)``. The curve of a shorter sample is stretched over the
    reference ranks by the kept share."""

    loss_tokens: IntArray1D | None = None
    """Budgets of the loss curves, in tokens at the reference context, ``(n_levels,)``; rising, the
    last one is the context."""

    loss_bits: IntArray1D | None = None
    """Bit widths of the losses, 16 first, ``(n_widths,)``: the unit's entries evicted down to a
    budget and stored at the width."""

    losses: FloatArray5D | None = None
    """Loss curves C(n, width): KL(full cache || reduced cache) of the next-token distribution, nats
    per token, with only this unit reduced to ``loss_tokens`` and stored at each of ``loss_bits``.
    One row a layer if whole layers were reduced; ``(n_samples, n_layers, n_kv_heads or 1, n_widths,
    n_levels)``. 0 at 16 bits and the last level. Measured values, noise included: a curve need not
    fall, be convex, or stay above 0."""

    def __repr__(self) -> str:
        return (
            f"ScoreProfile({self.shape.model_id}, {self.scorer}, {self.samples_text} of "
            f"{self.context_tokens} tokens, {'with' if self.has_losses else 'without'} losses, "
            f"{self.part_text}{self.digest[:8]})"
        )

    __str__ = __repr__

    def _digest_over(self, content: dict[str, Any]) -> str:
        # the path of a scorer's file does not change the measurement
        parameters = {**content["scorer_parameters"]}
        parameters.pop("file", None)
        return super()._digest_over({**content, "scorer_parameters": parameters})

    @cached_property
    def n_samples(self) -> int:
        """Number of measured samples."""
        return int(self.curves.shape[0])

    @property
    def samples_text(self) -> str:
        """Number of samples, for people."""
        return "1 sample" if self.n_samples == 1 else f"{self.n_samples:,} samples"

    @cached_property
    def protected_tokens(self) -> int:
        """Sinks and window, never evicted."""
        return self.sinks + self.window

    @cached_property
    def evictable_tokens(self) -> int:
        """Entries of a head that can be evicted at the reference context."""
        return self.context_tokens - self.protected_tokens

    @cached_property
    def has_losses(self) -> bool:
        """Whether loss curves were measured."""
        return self.losses is not None

    @cached_property
    def policy(self) -> Policy:
        """The policy of curves and losses: the scorer's best entries."""
        return Policy(
            scorer=self.scorer,
            scorer_parameters=dict(self.scorer_parameters),
            sinks=self.sinks,
            window=self.window,
        )

    @property
    def loss_widths(self) -> tuple[int, ...]:
        """Bit widths with measured losses, 16 first."""
        return () if self.loss_bits is None else tuple(self.loss_bits.tolist())

    def error_at(self, share: float) -> float | None:
        """Return measured over predicted loss at a share, interpolated."""
        if not self.errors:
            return None
        shares = np.log([one.share for one in self.errors])
        ratios = np.log([one.loss / one.predicted for one in self.errors])
        return float(np.exp(np.interp(np.log(share), shares, ratios)))

    def tail_at(self, share: float) -> float | None:
        """Return `ShareError.p99` over the mean, interpolated."""
        known = {one.share: one.p99 / one.loss for one in self.errors if one.p99 is not None}
        if not known:
            return None
        return float(np.interp(np.log(share), np.log([*known]), [*known.values()]))

    def second_read_at(self, share: float) -> tuple[float, float] | None:
        """Return the measured loss of a second read, and of solved budgets, interpolated.

        None above the shares at which a second read was measured; below, the smallest one's.
        """
        known = [one for one in self.errors if one.second_read is not None]
        if not known or share > known[-1].share:
            return None
        shares = np.log([one.share for one in known])

        def at_share(losses: list[float]) -> float:
            return float(np.exp(np.interp(np.log(share), shares, np.log(losses))))

        second = [one.second_read for one in known if one.second_read is not None]
        return at_share(second), at_share([one.loss for one in known])

    @property
    def part_text(self) -> str:
        """Shard, and a comma; empty if undivided."""
        return "" if self.shard is None else "shard {} of {}, ".format(*self.shard)

    @property
    def places(self) -> list[int]:
        """Places of the samples in the measurement, which may leave gaps."""
        number, of = self.shard or (1, 1)
        end = (self.n_samples + len(self.set_aside)) * of
        return [place for place in range(number - 1, end, of) if place not in self.set_aside]

    @property
    def is_exact(self) -> bool:
        """Whether the curves hold every rank."""
        return self.ranks.size == self.evictable_tokens + 1

    @cached_property
    def head_shares(self) -> FloatArray:
        """Each head's share of its layer's evictable mass, (n_samples, n_layers, n_kv_heads)."""
        totals = self.masses.sum(axis=-1, keepdims=True)
        even = np.full_like(self.masses, 1.0 / self.masses.shape[-1])
        return np.asarray(np.divide(self.masses, totals, out=even, where=totals > 0))

    def contributions(self, sample: int | None = None) -> FloatArray:
        """Return each head's part of its layer's retention, (n_layers, n_kv_heads, n_points).

        With n_h entries in head h, a layer's retention is the sum of ``share_h * R_h(n_h)``. At
        equal n_h this is the layer's curve: head-level and layer-level budgets have one measure.
        The mean over samples is the default.
        """
        shares = self.head_shares
        mean: FloatArray
        if sample is not None:
            mean = shares[sample][..., None] * self.curves[sample]
        else:
            mean = np.einsum("slh,slhp->lhp", shares, self.curves) / self.n_samples
        return mean

    @model_validator(mode="after")
    def _fits(self) -> Self:
        protected, evictable, ranks = self.protected_tokens, self.evictable_tokens, self.ranks
        expected = f"more than the {protected} tokens of sinks and window"
        require(evictable >= 1, "context_tokens", self.context_tokens, expected)
        require(ranks.size > 1, "ranks", f"shaped {ranks.shape}", "a list of at least two ranks")
        rising = ranks[0] == 0 and ranks[-1] == evictable and (np.diff(ranks) > 0).all()
        require(rising, "ranks", f"{ranks[0]}..{ranks[-1]}", f"rising from 0 to {evictable}")
        size = (max(1, self.n_samples), self.shape.n_layers, self.shape.n_kv_heads)
        require_shape("curves", self.curves, (*size, ranks.size))
        require_shape("masses", self.masses, size)
        require_shape("sample_tokens", self.sample_tokens, size[:1])
        # One layer of one sample at a time: with a long context, a copy of all curves is gigabytes.
        for sample, layer in itertools.product(range(self.n_samples), self.shape.full_layers):
            where = f"in sample {sample}, layer {layer}"
            _require_curves("curves", self.curves[sample, layer], 1.0, ranks, where)
        self._require_losses()
        self._require_part()
        return self

    def _require_losses(self) -> None:
        """Refuse impossible loss curves, but for noise.

        A reversed sign, or reversed levels, are impossible.
        """
        levels, widths, losses = self.loss_tokens, self.loss_bits, self.losses
        if levels is None or widths is None or losses is None:
            none = {levels is None, widths is None, losses is None} == {True}
            names = "loss_tokens, loss_bits, losses"
            require(none, names, "one without the other", "both or neither")
            expected = "losses that it belongs to"
            require(not self.loss_method, "loss_method", self.loss_method, expected)
            return
        smallest, context = max(1, self.protected_tokens), self.context_tokens
        require(levels.size > 1, "loss_tokens", f"shaped {levels.shape}", "two levels or more")
        sound = (np.diff(levels) > 0).all() and levels[0] >= smallest and levels[-1] == context
        value = f"{levels.tolist()[:4]}..{int(levels[-1])}"
        expected = f"rising from at least {smallest} (sinks and window) to the context of {context}"
        require(sound, "loss_tokens", value, expected)
        bits = widths.tolist()
        sound = bits[:1] == [16] and len({*bits}) == len(bits) and {*bits} <= {*BIT_WIDTHS}
        expected = f"16, then some of {', '.join(map(str, BIT_WIDTHS[1:]))} once"
        require(sound, "loss_bits", f"int64 {bits}", expected)
        units = 1 if losses.shape[2] == 1 else self.shape.n_kv_heads
        size = (self.n_samples, self.shape.n_layers, units, len(bits), levels.size)
        require_shape("losses", losses, size)
        decided = losses[:, list(self.shape.full_layers)]
        whole = (np.abs(decided[..., 0, -1]) <= ROUNDING).all()
        expected = "C(context) = 0, levels rising"
        require(whole, "losses", "not 0 where everything is kept", expected)
        low, high = float(decided.min()), float(decided.max())
        expected = "KL in nats: what is lost, above 0 but for noise"
        require(low >= -max(LOSS_NOISE_NATS, high), "losses", f"{low:.6g}..{high:.6g}", expected)

    def _require_part(self) -> None:
        if self.shard is None:
            return
        number, of = self.shard
        expected = f"a number from 1 up to that of the shards, 2 to {MAX_SHARDS:,}"
        require(1 <= number <= of and 1 < of <= MAX_SHARDS, "shard", f"{number} of {of}", expected)
        expected = "places of samples of this shard"
        sound = len(self.places) == self.n_samples
        require(sound, "set_aside", [*self.set_aside][:8], expected)


def _require_curves(
    field: str, curves: FloatArray, ends: FloatArray | float, ranks: IntArray, where: str
) -> None:
    """Refuse impossible retention curves, ``(n_kv_heads, n_points)``, or another end."""
    whole = (np.abs(curves[:, -1] - ends) <= ROUNDING).all()
    expected = "R(all evictable entries) = 1 of each layer"
    require(whole, field, f"not whole where everything is kept {where}", expected)
    gains = np.diff(curves, axis=1)
    gains /= np.diff(ranks)
    rising = gains.min() >= -ROUNDING
    require(rising, field, f"falling {where}", "curves that rise with every entry")
    concave = np.diff(gains, axis=1).max(initial=0.0) <= ROUNDING
    require(concave, field, f"not concave {where}", "best entries first (concave)")


def interpolate_curves(curves: FloatArray, ranks: IntArray, at: FloatArray) -> FloatArray:
    """Return curves (..., n_points) at other ranks (n_at,), linear: concave ones stay concave.

    ``ranks`` (n_points,) rise strictly; ``at`` are real numbers within them.
    """
    if at.size == ranks.size and np.array_equal(at, ranks):
        return curves
    left = np.clip(np.searchsorted(ranks, at, side="right") - 1, 0, ranks.size - 2)
    weight = (at - ranks[left]) / (ranks[left + 1] - ranks[left])
    values = np.empty((*curves.shape[:-1], at.size))
    rows = curves.reshape(-1, ranks.size), values.reshape(-1, at.size)
    # One curve at a time: with a long context, every copy of all curves is gigabytes.
    for curve, row in zip(*rows, strict=True):
        np.multiply(curve[left], 1.0 - weight, out=row)
        row += curve[left + 1] * weight
    return values
