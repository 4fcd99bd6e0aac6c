"""When enough has been measured: budgets from other samples would be as good."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvalloc.accounting import FloatArray
from kvalloc.allocation.curves import RequestCurves
from kvalloc.allocation.decision import solve
from kvalloc.allocation.request import Request
from kvalloc.errors import InputError, option
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.formats.statistics import sample_of_contributions

DRAWS, CONFIDENCE = 20, 0.95

LEAST_SAMPLES = 8
"""Fewer samples say nothing about each other."""


class BudgetsSettled:
    """Whether budgets would be as good, had other samples of the text been measured.

    As many samples as there are are drawn from them, with replacement, and budgets are decided on
    their mean curves; what these budgets retain on the mean of all samples is compared with what
    the budgets retain that were decided on it. The budgets are settled when in 95% of 20 draws the
    two differ by no more than the tolerance.

    Parameters
    ----------
    tolerance : float
        Retention, above 0 and below 1.
    **request
        As `kvalloc.solve` takes it, such as ``budget="20%"`` or ``target_retention=0.9``.

    Attributes
    ----------
    difference : float or None
        What was found the last time; None before.
    n_samples : int
        How many there were then.

    Raises
    ------
    InputError
        If the tolerance cannot be.

    References
    ----------
    Efron and Tibshirani, An Introduction to the Bootstrap (1993), percentile method.
    """

    def __init__(self, tolerance: float, **request: Any) -> None:
        if not 0 < tolerance < 1:
            raise InputError(
                f"{option('tolerance')} is {tolerance:g}, expected a retention above 0 and below 1"
            )
        self._tolerance, self._request = tolerance, request
        self.difference: float | None = None
        self.n_samples = 0

    def __call__(self, scores: ScoreProfile) -> bool:
        """Whether the budgets of these samples are settled."""
        scores.require_samples("knowing when budgets are settled")
        self.n_samples = scores.n_samples
        if scores.n_samples < LEAST_SAMPLES:
            return False
        mean = _mean_of(scores, np.full(scores.n_samples, 1 / scores.n_samples))
        reached = self._retention(mean, mean)
        random = np.random.default_rng(0)
        draws = random.multinomial(
            scores.n_samples, np.full(scores.n_samples, 1 / scores.n_samples), size=DRAWS
        )
        found = [
            abs(reached - self._retention(_mean_of(scores, draw / scores.n_samples), mean))
            for draw in draws
        ]
        self.difference = float(np.quantile(found, CONFIDENCE, method="inverted_cdf"))
        return self.difference <= self._tolerance

    @property
    def text(self) -> str:
        """What was found, for people."""
        if self.difference is None:
            return (
                f"fewer than {LEAST_SAMPLES} samples were compared, so nothing is known of others"
            )
        beyond = "" if self.difference <= self._tolerance else f", beyond {self._tolerance:g}"
        return (
            f"after {self.n_samples} samples, 95% of draws of others give budgets within "
            f"{self.difference:.2g} of this retention{beyond}"
        )

    def _retention(self, decided_on: ScoreProfile, judged_by: ScoreProfile) -> float:
        """What budgets that were decided on some samples retain on others."""
        decided: BudgetProfile = solve(decided_on, **self._request)
        curves = RequestCurves(scores=judged_by, request=Request.read(decided))
        return curves.retention(decided.budgets)


def _mean_of(scores: ScoreProfile, weights: FloatArray) -> ScoreProfile:
    """One sample that stands for the weighted mean of some."""
    contributions = np.einsum("s,slh,slhp->lhp", weights, scores.head_shares, scores.curves)
    without = dict.fromkeys(ScoreProfile.model_fields.keys() & _LEFT_OUT)
    return scores.replace(
        **without,
        **sample_of_contributions(contributions, scores.shape.full_layers),
        sample_tokens=scores.sample_tokens[:1],
        loss_policies=(),
        loss_method="",
    )


_LEFT_OUT = {
    *("shards", "sample_places", "loss_tokens", "loss_bits", "losses", "loss_stderr"),
    *("other_losses", "other_loss_stderr", "loss_probed", "bit_widths", "bit_fidelity"),
    *("shared_runs", "shared_curves"),
}
"""What a mean is not made of: budgets are decided on the curves."""
