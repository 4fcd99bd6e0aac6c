"""Profiles in a notebook: a few facts and a strip of bars, without scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.report.wording import budget_fields, score_fields, tokens_for

if TYPE_CHECKING:
    from kvalloc.formats.score_profile import ScoreProfile

HEIGHT, BAR = 44, 9
"""Pixels of a full bar, and from one bar to the next."""


def profile_html(profile: BudgetProfile | ScoreProfile) -> str:
    """Return what a notebook shows of a profile."""
    return _budget_html(profile) if isinstance(profile, BudgetProfile) else _scores_html(profile)


def _budget_html(profile: BudgetProfile) -> str:
    """Return the fields of a budget profile and the share of the context that each layer keeps."""
    names = ("model", "request", "solver", "retention", "predicted loss", "bound", "bytes", "bits")
    shares = profile.budgets.mean(axis=1) / profile.context_tokens
    what = f"kept of {profile.context_tokens:,} tokens, layer by layer"
    return _html(repr(profile), budget_fields(profile), names, shares.tolist(), what)


def _scores_html(scores: ScoreProfile) -> str:
    """Return the fields of a score profile and the need of each layer for 90% of its score mass."""
    names = ("model", "scorer", "context", "samples", "loss curves", "text", "made")
    needed = [(tokens or 0) / scores.context_tokens for tokens in tokens_for(scores, 0.9)]
    what = "needed for a retention of 0.9, layer by layer"
    return _html(repr(scores), score_fields(scores), names, needed, what)


def _html(
    title: str, fields: Mapping[str, str], names: Sequence[str], shares: Sequence[float], what: str
) -> str:
    rows = "".join(
        f"<tr><th style='text-align:left'>{name}</th>"
        f"<td style='text-align:left'>{escape(fields[name])}</td></tr>"
        for name in names
        if fields.get(name)
    )
    bars = "".join(
        f"<rect x='{BAR * place}' y='{HEIGHT * (1 - share):.1f}' width='{BAR - 1}' "
        f"height='{HEIGHT * share:.1f}'><title>layer {place}: {share:.1%}</title></rect>"
        for place, share in enumerate(shares)
    )
    low, high = min(shares), max(shares)
    label = f"{what}: {low:.1%} to {high:.1%}; a bar of full height is 100%"
    return (
        f"<div><code>{escape(title)}</code><table>{rows}</table>"
        f"<svg role='img' aria-label='{label}' width='{BAR * len(shares)}' height='{HEIGHT + 1}' "
        f"fill='currentColor'>{bars}<rect y='{HEIGHT}' width='100%' height='1'/></svg>"
        f"<div>{label}</div></div>"
    )
