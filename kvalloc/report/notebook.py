"""Profiles in a notebook."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.report.wording import record_fields, tokens_for

if TYPE_CHECKING:
    from kvalloc.formats.score_profile import ScoreProfile

HEIGHT, BAR = 44, 9
"""Pixels of a full bar, and from one bar to the next."""


FIELDS = (
    *("model", "request", "solver", "retention", "predicted loss", "bound", "bytes", "bits"),
    *("scorer", "context", "samples", "loss curves", "text", "made"),
)
"""What is shown, of a budget profile and then of a score profile."""


def profile_html(profile: BudgetProfile | ScoreProfile) -> str:
    """Return fields, and a bar a layer, without scripts.

    A bar is the context's share that a budget profile keeps, or 90% of the score mass needs.
    """
    context = profile.context_tokens
    if isinstance(profile, BudgetProfile):
        shares = (profile.budgets.mean(axis=1) / context).tolist()
        what = f"kept of {context:,} tokens, layer by layer"
    else:
        shares = [(tokens or 0) / context for tokens in tokens_for(profile, 0.9)]
        what = "needed for a retention of 0.9, layer by layer"
    fields = record_fields(profile)
    rows = "".join(
        f"<tr><th style='text-align:left'>{name}</th>"
        f"<td style='text-align:left'>{escape(fields[name])}</td></tr>"
        for name in FIELDS
        if fields.get(name)
    )
    bars = "".join(
        f"<rect x='{BAR * place}' y='{HEIGHT * (1 - share):.1f}' width='{BAR - 1}' "
        f"height='{HEIGHT * share:.1f}'><title>layer {place}: {share:.1%}</title></rect>"
        for place, share in enumerate(shares)
    )
    label = f"{what}: {min(shares):.1%} to {max(shares):.1%}; a bar of full height is 100%"
    return (
        f"<div><code>{escape(repr(profile))}</code><table>{rows}</table>"
        f"<svg role='img' aria-label='{label}' width='{BAR * len(shares)}' height='{HEIGHT + 1}' "
        f"fill='currentColor'>{bars}<rect y='{HEIGHT}' width='100%' height='1'/></svg>"
        f"<div>{label}</div></div>"
    )
