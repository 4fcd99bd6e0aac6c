"""Budgets solved for a share, from a fitted file."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from kvalloc.accounting.costs import CacheCosts, bytes_in_share
from kvalloc.allocation.decision import decide
from kvalloc.allocation.formulation import PosedRequest
from kvalloc.allocation.pool import solve_pool
from kvalloc.allocation.request import Request
from kvalloc.errors import InfeasibleError, InputError, option
from kvalloc.formats.budget_profile import BudgetProfile, Policy
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.formats.shipped_profiles import load_fitted, while_unchanged
from kvalloc.problem.registry import get_solver
from kvalloc.scorers import Scorer, get_scorer
from kvalloc.shape import ModelShape

SINKS, WINDOW = 4, 8
"""Tokens at the prompt's begin and end, never evicted."""

WIDTHS = (8, 5, 4, 2, 85, 853, 53, 532, 52)
"""Widths, and mixes of widths, of a head's entries, beside 16 bits."""

MATCHED, MATCHED_BY_FEW, STEP = 64, 128, 2
"""Numbers of latest queries to which values are fitted, the second if few entries stay. If many
stay, every second query is used, which loses no more in half the time."""

FEW_BELOW = 0.15
"""Shares of the bytes below which few entries stay."""

LOOSE = 0.01
"""Largest accepted gap of a dual bound; it is larger if few heads have budgets."""

_STEPS = 8
"""Lengths of the grid between one and its double."""


def matching_options(share: float) -> dict[str, int]:
    """Return `attention_matching`'s parameters at a share."""
    if share < FEW_BELOW:
        return {"rows": MATCHED_BY_FEW, "interval": 1}
    return {"rows": MATCHED, "interval": STEP}


def fits_values(shape: ModelShape, rotates: bool) -> bool:
    """Return whether values are fitted; `rotates`: queries can be moved to later positions."""
    return rotates and "latent" not in shape.layer_types  # a latent is a key, too


def fitting_policy(scorer: Scorer, share: float, shape: ModelShape, *, rotates: bool) -> Policy:
    """Return a scorer's policy, which fits values if it can."""
    if not fits_values(shape, rotates):
        return scorer.policy(SINKS)
    return scorer.policy(SINKS, name="attention_matching", parameters=matching_options(share))


def grid_length(tokens: int) -> int:
    """Return the length at which a prompt is solved.

    Examples
    --------
    >>> [grid_length(tokens) for tokens in (50, 600, 1_000, 10_000)]
    [50, 576, 960, 9216]
    """
    step = max(1, 2 ** (tokens.bit_length() - 1) // _STEPS) if tokens >= 128 else 1
    return tokens // step * step


@while_unchanged(maxsize=256)
def solve_share(file: str, share: float, tokens: int, rotates: bool = True) -> BudgetProfile | None:
    """Return each head's budgets and widths with the smallest sum of losses; cached.

    The share is of the bytes at 16 bits; for `rotates` see `fits_values`. None if the share, or the
    prompt, is below the fitted file's curves.
    """
    fitted = load_fitted(file)
    if tokens <= fitted.scores.protected_tokens:
        return None
    request = Request.parse(
        budget=share, level="head", objective="loss", bits=fitted.widths, context=tokens
    )
    try:
        posed = PosedRequest(scores=fitted.scores, request=request)
        # its bound is a dual one, which `kvalloc verify` proves again
        decided = decide(posed, get_solver("lagrangian"), priced=False)
        exact = get_solver("dp")  # on whose word it is the optimum
        if (decided.gap or 0.0) > LOOSE and exact.can_solve(posed.problem) is True:
            decided = decide(posed, exact, priced=False)
    except InfeasibleError:
        return None
    scorer = get_scorer("surrogate", file=file, window=WINDOW)
    return decided.with_policy(fitting_policy(scorer, share, fitted.shape, rotates=rotates))


@dataclass(frozen=True, kw_only=True)
class LossTarget:
    """Largest predicted loss of a token, nats: mean, or with `tail` of 99% of them."""

    nats: float
    tail: bool = False

    @classmethod
    def parse(cls, typed: str | float) -> LossTarget:
        """Read ``0.02``, or ``"0.05@99%"``; refuse other text."""
        number, at, percentile = (part.strip() for part in str(typed).partition("@"))
        try:
            nats = float(number)
        except ValueError:
            raise InputError(
                f"{typed!r} is not a loss in nats per token; give a mean, such as 0.02, or what "
                "99% of the tokens may lose, such as 0.05@99%"
            ) from None
        target = Request.parse(target_loss=nats).target
        if at and percentile != "99%":
            raise InputError(
                f"{typed!r} asks for another share of the tokens than 99%, the one that is "
                f"measured; give {option('target_loss', f'{number}@99%')}"
            )
        return cls(nats=float(target.value), tail=bool(at))

    def __str__(self) -> str:
        return f"{self.nats:.15g}{'@99%' * self.tail}"

    def factor_at(self, share: float, scores: ScoreProfile) -> float | None:
        """Return the factor on a predicted mean at a share; None if the tail is not known."""
        return scores.tail_at(share) if self.tail else 1.0


@while_unchanged(maxsize=256)
def share_for_loss(file: str, target: LossTarget, tokens: int) -> float:
    """Return the smallest share, to a thousandth, with at most this predicted loss; cached."""
    scores = load_fitted(file).scores

    def meets(part: int) -> bool:
        share = part / 1000
        solved = solve_share(file, share, tokens)
        if solved is None or solved.expected_loss is None:
            return False
        if (factor := target.factor_at(share, scores)) is None:
            raise InputError(
                f"{option('target_loss', str(target))} is about single tokens, and {file} has "
                "too few of them, under 300; run 'kvalloc fit' on more prompts, or leave @99% out"
            )
        return solved.expected_loss * factor <= target.nats

    # bisected, since a larger share never loses more
    return (bisect_left(range(1, 1000), True, key=meets) + 1) / 1000


@while_unchanged(maxsize=256)
def shares_of_rows(file: str, share: float, lengths: tuple[int, ...]) -> tuple[float, ...]:
    """Return each row's share with the smallest sum of predicted losses; cached.

    The given share is of all rows' bytes at 16 bits. No prompt is below the curves, and equal
    lengths get equal shares.
    """
    if len(set(lengths)) < 2:
        return (share,) * len(lengths)
    fitted = load_fitted(file)
    scores = fitted.scores.replace(
        scorer_parameters={**fitted.scores.scorer_parameters, "file": file}
    )
    costs = [
        CacheCosts(shape=scores.shape, context_tokens=tokens, batch=1, page_tokens=1)
        for tokens in lengths
    ]
    extra = [one.constant_bytes + one.reading_bytes for one in costs]  # a pool holds the peaks
    request = {"level": "head", "objective": "loss", "bits": fitted.widths}
    pool = solve_pool(
        [(scores, {**request, "context": tokens}, 1.0) for tokens in lengths],
        memory=sum(extra) + sum(bytes_in_share(share, one.full) for one in costs),
        solver="lagrangian",
    )
    granted = [Request.read(member).target.value for member in pool]
    parts = zip(granted, extra, costs, strict=True)
    shares = np.array([(part - stored) / one.full for part, stored, one in parts])
    same = np.equal.outer(lengths, lengths)  # rows of one length, such as beams, are kept alike
    return tuple(np.minimum((same * shares).sum(axis=1) / same.sum(axis=1), 1.0).tolist())
