"""Budgets as bars in a terminal."""

from __future__ import annotations

import sys

import numpy as np

from kvalloc.cli.output import terminal_width
from kvalloc.formats.budget_profile import BudgetProfile

__all__ = [
    "bar",
    "bar_scale",
    "budget_picture",
    "budget_spread",
    "can_print_bars",
    "terminal_width",
]

_EIGHTHS = " ▏▎▍▌▋▊▉"
_SCALES = (0.05, 0.1, 0.25, 0.5, 1.0)


def bar(share: float, width: int, *, unicode: bool = True) -> str:
    """A bar of ``share`` (0..1) of ``width`` columns, exact to an eighth of a column.

    Examples
    --------
    >>> bar(0.5, 4), bar(0.28125, 4), bar(0.5, 4, unicode=False)
    ('██', '█▏', '##')
    """
    if not unicode:
        return "#" * round(share * width)
    eighths = round(share * width * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def bar_scale(largest: float) -> float:
    """What a bar of full width stands for: a round share not below the largest (0..1)."""
    return next((scale for scale in _SCALES if largest <= scale), 1.0)


def can_print_bars() -> bool:
    """Whether stdout's encoding has the block characters."""
    try:
        ("█" + _EIGHTHS).encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def budget_picture(
    profile: BudgetProfile, *, width: int | None = None, unicode: bool | None = None
) -> list[str]:
    """One line a layer: index, tokens per KV head, share of the context, and a bar of that share.

    Parameters
    ----------
    profile : BudgetProfile
        At head level a line shows the mean over the layer's heads, and the smallest and largest.
    width : int, optional
        Columns; those of the terminal by default.
    unicode : bool, optional
        Whether block characters can be shown; found out from stdout by default.

    Returns
    -------
    list of str
        The first one is the heading.
    """
    width = terminal_width() if width is None else width
    unicode = can_print_bars() if unicode is None else unicode
    heads = profile.level == "head" and profile.shape.n_kv_heads > 1
    digits = max(6, len(f"{profile.context_tokens:,}"))
    heading = f"layer  {'tokens':>{digits}}  " + ("min..max over heads  " if heads else "")
    full_bar = bar_scale(float(profile.budgets.max()) / profile.context_tokens)
    scale = f"a whole line is {full_bar:.0%} of {profile.context_tokens:,} tokens"
    lines = [f"{heading}  kept  {scale}"]
    for layer, row in enumerate(profile.budgets):
        tokens = float(row.mean())
        text = f"{layer:>5}  {tokens:>{digits},.0f}  "
        if heads:
            spread = f"{int(row.min()):,}..{int(row.max()):,}"
            text += f"{spread:>19}  "
        share = tokens / profile.context_tokens
        text += f"{share:>6.1%}  "
        sliding = "  sliding" if profile.shape.layer_types[layer] == "sliding" else ""
        room = max(10, width - len(text) - len(sliding))
        lines.append((text + bar(share / full_bar, room, unicode=unicode) + sliding).rstrip())
    return lines


def budget_spread(profile: BudgetProfile) -> tuple[int, float, int]:
    """Smallest, mean and largest decided budget, tokens."""
    decided = profile.budgets[np.asarray(profile.shape.full_layers)]
    return int(decided.min()), float(decided.mean()), int(decided.max())
