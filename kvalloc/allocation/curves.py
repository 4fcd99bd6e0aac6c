"""The curves of a score profile as a request reads them.

Values of options and predictions of budgets are read from the same curves, so that a budget
profile states what its problem promised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.accounting.costs import CacheCosts
from kvalloc.allocation.request import Request
from kvalloc.errors import InputError, command, option
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.score_profile import ScoreProfile, interpolate_curves
from kvalloc.prompts.intervals import interval


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestCurves:
    """A score profile as one request reads it: at its context and level.

    Attributes
    ----------
    scores : ScoreProfile
        Measured curves.
    request : Request
        Its objective and level.
    sample : int or None
        One sample, or the mean of all.
    columns : int or None
        Length of the longest prompt of a batch; None where all are as long as the context.
    """

    scores: ScoreProfile
    request: Request
    sample: int | None = None
    columns: int | None = None

    @cached_property
    def context_tokens(self) -> int:
        """Prompt length of the budgets."""
        context = self.request.context
        return self.scores.context_tokens if context is None else context

    @cached_property
    def costs(self) -> CacheCosts:
        """Return what the whole cache of the request costs.

        Raises
        ------
        InputError
            If that is more bytes than can be counted.
        """
        request = self.request
        return CacheCosts(
            shape=self.scores.shape,
            context_tokens=self.context_tokens,
            batch=request.batch,
            page_tokens=request.page,
            columns=self.columns,
        )

    # Values of options

    def values(self, tokens: IntArray, bits: int) -> tuple[FloatArray, FloatArray]:
        """Return the value of budgets to each unit at a bit width, and the units' weights.

        Parameters
        ----------
        tokens : ndarray of int64, (n_options,)
            Budgets.
        bits : int
            Width of the entries.

        Returns
        -------
        values : ndarray of float64, (n_units, n_options)
            Retention that the unit adds to its layer; its own retention for the worst unit; less
            its loss for the objective ``"loss"``.
        weights : ndarray of float64, (n_units,)

        Raises
        ------
        InputError
            If losses or bits are needed and were not measured for such units.
        """
        scores, request = self.scores, self.request
        if request.objective == "loss":
            values = -self._losses(tokens, bits)
            return values, np.ones(values.shape[0])
        n_layers = len(scores.shape.full_layers)
        single = 0 if scores.n_samples == 1 else self.sample
        if request.level == "head" and single is not None:
            # The measured curves with the heads' shares as weights: their product, what a head adds
            # to its layer, would be a second copy, which is gigabytes with a long context.
            layers = list(scores.shape.full_layers)
            curves, shares = scores.curves[single], scores.head_shares[single, layers].ravel()
            curves = self._full_layers(curves).reshape(-1, scores.ranks.size)
            weights = np.ones_like(shares) if request.objective == "worst" else shares / n_layers
            return self._retained_at(curves, tokens), weights
        curves = self._full_layers(scores.contributions(self.sample))
        axis = 1 if request.level == "layer" else ()
        curves = curves.sum(axis=axis).reshape(-1, scores.ranks.size)
        values = self._retained_at(curves, tokens)
        if request.objective == "worst":  # a unit's own retention, not what it adds to its layer's
            return values / curves[:, -1:], np.ones(values.shape[0])
        return values, np.full(values.shape[0], 1.0 / n_layers)

    def _full_layers(self, curves: FloatArray) -> FloatArray:
        """Return the curves of the full-attention layers; a view if those are all."""
        shape = self.scores.shape
        layers = shape.full_layers
        return curves if len(layers) == shape.n_layers else curves[list(layers)]

    def _losses(self, tokens: IntArray, bits: int) -> FloatArray:
        """Return the loss of each unit at each budget, nats per token, (n_units, n_options)."""
        scores, layers = self.scores, list(self.scores.shape.full_layers)
        curves = loss_curves(scores, self.sample, bits=bits)[layers]
        if self.request.level == "layer":
            curves = curves.sum(axis=1)
        elif curves.shape[1] == scores.shape.n_kv_heads:
            curves = curves.reshape(-1, curves.shape[-1])
        else:
            raise InputError(
                "the loss curves of this score profile were measured on whole layers, so they "
                f"cannot tell KV heads apart; ask for {option('level', 'layer')}, or measure every "
                "head"
            )
        return self._losses_at(curves, tokens)

    @property
    def min_loss_tokens(self) -> int:
        """Smallest budget whose loss is known: the lowest measured level, at this context."""
        scores = self.scores
        assert scores.loss_tokens is not None  # only read with loss curves
        lowest = int(scores.loss_tokens[0]) - scores.protected_tokens
        stretch = (self.context_tokens - scores.protected_tokens) / scores.evictable_tokens
        return scores.protected_tokens + math.ceil(lowest * stretch - 1e-9)

    def _losses_at(self, curves: FloatArray, tokens: IntArray) -> FloatArray:
        """Return loss curves at budgets, linear between the measured levels."""
        scores = self.scores
        assert scores.loss_tokens is not None  # loss_curves has returned the curves
        ranks = evictable_rank(scores, tokens, self.context_tokens)
        return interpolate_curves(curves, scores.loss_tokens - scores.protected_tokens, ranks)

    def _retained_at(self, curves: FloatArray, tokens: IntArray) -> FloatArray:
        """Return retention curves at budgets, linear between the measured ranks."""
        ranks = evictable_rank(self.scores, tokens, self.context_tokens)
        return interpolate_curves(curves, self.scores.ranks, ranks)

    # Predictions for budgets

    def retention(self, budgets: IntArray) -> float:
        """Return the mean over full-attention layers of the kept share of score mass.

        Parameters
        ----------
        budgets : ndarray of int64, (n_layers, n_kv_heads)
            Entries that each head keeps, sinks and window included.

        Returns
        -------
        float
            0..1.
        """
        scores, full = self.scores, self.scores.shape.full_layers
        curves = scores.contributions(self.sample)
        kept = [
            self._retained_at(curves[layer, head], budgets[layer, [head]])
            for layer in full
            for head in range(scores.shape.n_kv_heads)
        ]
        return math.fsum(np.concatenate(kept)) / len(full)

    def predicted_loss(self, budgets: IntArray, bits: IntArray | None = None) -> float | None:
        """Return the sum of the units' measured losses at their budgets, nats per token.

        Parameters
        ----------
        budgets, bits : ndarray of int64, (n_layers, n_kv_heads)
            Entries that each head keeps, sinks and window included, and their width; 16 everywhere
            by default.

        Returns
        -------
        float or None
            None where it is not known: no loss curves, a budget below the lowest measured level,
            bits that were not measured, or different heads where only whole layers were measured.
        """
        scores, full = self.scores, self.scores.shape.full_layers
        widths = np.full_like(budgets, 16) if bits is None else bits
        used = np.unique(widths[list(full)]).tolist()
        if not {*used} <= {*scores.loss_widths}:
            return None
        if int(budgets[list(full)].min()) < self.min_loss_tokens:
            return None
        curves = {width: loss_curves(scores, self.sample, bits=width) for width in used}
        columns = curves[used[0]].shape[1]
        chosen = np.stack([budgets, widths])[:, list(full)]
        if columns == 1 and np.any(chosen != chosen[..., :1]):
            return None
        lost = [
            self._losses_at(curves[int(widths[layer, head])][layer, head], budgets[layer, [head]])
            for layer in full
            for head in range(columns)
        ]
        return math.fsum(np.concatenate(lost))

    def model_error(self, bits: IntArray | None, share: float) -> float | None:
        """Return what whole caches of a share lost over the sum of single losses.

        None where it was not measured: it is of entries and bits of each head.
        """
        by_head = bits is not None and self.request.level == "head"
        return self.scores.error_at(share) if by_head else None

    def predicted_loss_interval(self, profile: BudgetProfile) -> tuple[float, float] | None:
        """Return the 95% bootstrap interval of a predicted loss over the measured samples.

        It covers what other samples of such text would change. It does not cover the difference
        between the sum of single losses and the loss of all units together.

        Parameters
        ----------
        profile : BudgetProfile
            Decided from these curves.

        Returns
        -------
        low, high : float
            Nats per token; None where no loss is known, or of one sample only.
        """
        samples = (replace(self, sample=one) for one in range(self.scores.n_samples))
        each = [one.predicted_loss(profile.budgets, profile.bits) for one in samples]
        ends = interval([np.array([loss for loss in each if loss is not None])], seed=0)
        return None if ends is None else (ends[0], ends[1])


def evictable_rank(scores: ScoreProfile, tokens: IntArray, context_tokens: int) -> FloatArray:
    """Return the place on a curve of budgets: evictable entries kept of the reference context.

    Parameters
    ----------
    scores : ScoreProfile
    tokens : ndarray of int64
        Budgets, sinks and window included.
    context_tokens : int
        Prompt length of the budgets; they stand at the same share of the evictable entries.

    Returns
    -------
    ndarray of float64, as ``tokens``
    """
    stretch = scores.evictable_tokens / (context_tokens - scores.protected_tokens)
    ranks = (tokens - scores.protected_tokens) * stretch
    within: FloatArray = np.clip(ranks, 0.0, float(scores.evictable_tokens)).astype(np.float64)
    return within


def check_losses(scores: ScoreProfile, bits: tuple[int, ...] = (16,)) -> None:
    """Refuse losses at bit widths that were not measured.

    Raises
    ------
    InputError
        If there are no loss curves, or none at one of the widths; names what to measure.
    """
    missing = [width for width in bits if width not in scores.loss_widths]
    if not missing:
        return
    every = tuple(sorted({16, *scores.loss_widths, *bits}, reverse=True))
    widths = {} if every == (16,) else {"bits": every}
    again = command("profile", loss=scores.loss_method or "measured", **widths)
    if scores.losses is None:
        raise InputError(
            "this score profile holds no loss curves, so no loss can be predicted; measure them "
            f"with {again}, or ask for retention"
        )
    listed, known = (" and ".join(map(str, some)) for some in (missing, scores.loss_widths))
    raise InputError(
        f"what {listed} bits lose was not measured in this score profile (of {known} bits it was); "
        f"measure it with {again}, or leave it out of {option('bits')}"
    )


def loss_curves(scores: ScoreProfile, sample: int | None = None, *, bits: int = 16) -> FloatArray:
    """Return the loss curves, the mean over samples or those of one.

    Parameters
    ----------
    scores : ScoreProfile
    sample : int, optional
        One sample; the mean over all by default.
    bits : int
        Width at which the kept entries are stored.

    Returns
    -------
    ndarray of float64, (n_layers, n_kv_heads or 1, n_levels)
        Nats per token.

    Raises
    ------
    InputError
        As `check_losses`.
    """
    check_losses(scores, (bits,))
    assert scores.losses is not None  # checked above
    at_width = scores.losses[:, :, :, scores.loss_widths.index(bits)]
    chosen: FloatArray = at_width.mean(axis=0) if sample is None else at_width[sample]
    return chosen
