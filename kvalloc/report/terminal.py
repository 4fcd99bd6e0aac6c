"""Tables and bars in a terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

from kvalloc.errors import one_line, plain
from kvalloc.shape import REDUCIBLE

if TYPE_CHECKING:
    from kvalloc.formats.budget_profile import BudgetProfile
    from kvalloc.formats.score_profile import ScoreProfile

_MAX_WIDTH = 120
_EIGHTHS = " ▏▎▍▌▋▊▉"
_SPARKS = "▁▂▃▄▅▆▇█"
_SCALES = (0.05, 0.1, 0.25, 0.5, 1.0)


def terminal_width() -> int:
    """Return the terminal's columns, at most `_MAX_WIDTH`; 80 without one."""
    return min(shutil.get_terminal_size((80, 24)).columns, _MAX_WIDTH)


def table_lines(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: Sequence[int] = (0,),
) -> list[str]:
    r"""Align cells in columns, a line each, without trailing spaces.

    Columns are two spaces apart, or one in a narrow terminal. Wide characters take two of its
    columns, combining ones none. Columns of ``left``, negative from the end, are flush left.

    Examples
    --------
    >>> print("\n".join(table_lines(("solver", "MiB"), [("greedy", "5.53")])))
    solver   MiB
    greedy  5.53
    """
    flush_left = {place % len(headings) for place in left}
    cells = [[plain(cell) for cell in row] for row in (headings, *rows)]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    wide = sum(widths) + 2 * (len(widths) - 1)
    space = "  " if wide <= terminal_width() else " "
    lines = []
    for row in cells:
        padding = [" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
        aligned = (
            cell + padding[place] if place in flush_left else padding[place] + cell
            for place, cell in enumerate(row)
        )
        lines.append(space.join(aligned).rstrip())
    return lines


def table_text(headings: Sequence[str], rows: Sequence[Sequence[str]], *, keys: int = 1) -> str:
    """Align a table, its first ``keys`` columns, which name a row, and the last one flush left.

    In a narrow terminal, columns that do not fit stand below; in a pipe a row is one line.
    """
    last, keys = len(headings) - 1, min(keys, len(headings))
    left = {*range(keys), last}

    def lines(places: Sequence[int]) -> list[str]:
        cells = [[row[place] for place in places] for row in (headings, *rows)]
        left_places = [place for place, column in enumerate(places) if column in left]
        return table_lines(cells[0], cells[1:], left=left_places)

    blocks = [[*range(keys)]]
    for place in range(keys, last + 1):
        wider = lines([*blocks[-1], place])
        fits = not sys.stdout.isatty() or max(map(len, wider)) <= terminal_width()
        if not (fits or len(blocks[-1]) == keys):
            blocks.append([*range(keys)])
        blocks[-1].append(place)
    return "\n\n".join("\n".join(lines(block)) for block in blocks)


def hanging(text: str, indent: int) -> str:
    """Wrap a text behind ``indent`` columns; one line in a pipe."""
    text = plain(text)
    if not sys.stdout.isatty():
        return text
    width = max(20, terminal_width() - indent)
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    return f"\n{'':<{indent}}".join(lines)


def field_lines(fields: Mapping[str, str]) -> list[str]:
    """Return a line a name and text, aligned and wrapped, without empty texts."""
    fields = {name: text for name, text in fields.items() if text}
    indent = max(map(len, fields), default=0) + 2
    return [f"{plain(name):<{indent}}{hanging(text, indent)}" for name, text in fields.items()]


def number_text(value: Any, form: str, unknown: str = "unknown") -> str:
    """Return a number in a format, or the text for unknown."""
    return format(value, form) if isinstance(value, int | float) else unknown


def can_print_bars() -> bool:
    """Return whether stdout is a terminal that encodes blocks."""
    if not sys.stdout.isatty():  # a pipe gets plain characters
        return False
    try:
        (_SPARKS + _EIGHTHS).encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def bar(share: float, width: int, *, unicode: bool | None = None) -> str:
    """Draw a share (0..1) of ``width`` columns: exact to an eighth, or in whole ``#``.

    Examples
    --------
    >>> bar(0.5, 4, unicode=True), bar(0.28125, 4, unicode=True), bar(0.5, 4, unicode=False)
    ('██', '█▏', '##')
    """
    if not (can_print_bars() if unicode is None else unicode):
        return "#" * round(share * width)
    eighths = round(share * width * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def sparks(shares: Sequence[float], *, unicode: bool | None = None) -> str:
    """Return a character a share (0..1), higher for more; digits without blocks."""
    steps = _SPARKS if (can_print_bars() if unicode is None else unicode) else "0123456789"
    return "".join(steps[min(int(share * len(steps)), len(steps) - 1)] for share in shares)


def bar_scale(largest: float) -> float:
    """Return a round share for a full bar, not below the largest (0..1)."""
    return next((scale for scale in _SCALES if largest <= scale), 1.0)


def budget_picture(profile: BudgetProfile) -> list[str]:
    """Return a heading and a line a layer: index, tokens per KV head, share, and a bar.

    At head level a line has the heads' mean, smallest, largest and sparks.
    """
    shares, by_head = profile.budgets / profile.context_tokens, profile.level == "head"
    by_head = by_head and profile.shape.n_kv_heads > 1
    full_bar = bar_scale(float(shares.max()))
    rows = []
    for layer, (budgets, kept) in enumerate(zip(profile.budgets, shares, strict=True)):
        spread = (
            f"{int(budgets.min()):,}..{int(budgets.max()):,}",
            sparks((kept / full_bar).tolist()),
        )
        heads = spread if by_head else ()
        rows.append([str(layer), f"{budgets.mean():,.0f}", *heads, f"{kept.mean():.1%}"])
    headings = ("layer", "tokens", *(("over heads", "heads") if by_head else ()), "kept")
    return layer_bars(headings, rows, shares.mean(axis=1).tolist(), profile)


def layer_bars(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    shares: Sequence[float],
    profile: BudgetProfile | ScoreProfile,
    drawn: str = "",
) -> list[str]:
    """Return a table of layers that ends with bars of shares of the context."""
    full_bar = bar_scale(max(shares))
    scale = f"{drawn}line: {full_bar:.0%} of {profile.context_tokens:,} tokens"
    heading, *lines = table_lines((*headings, scale), [(*row, "") for row in rows], left=(-1,))
    begin, types = heading.index(scale), profile.shape.layer_types
    for place, (line, share) in enumerate(zip(lines, shares, strict=True)):
        remark = "" if types[place] in REDUCIBLE else f"  {types[place]}"
        width = max(10, terminal_width() - begin - len(remark))
        lines[place] = f"{line:<{begin}}{bar(share / full_bar, width)}{remark}".rstrip()
    return [heading, *lines]


def merged_names(profiles: Mapping[str, BudgetProfile]) -> dict[str, BudgetProfile]:
    """Put profiles with the same budgets under one name, such as ``"greedy = ilp"``."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, profile in profiles.items():
        key = (profile.budgets.shape, profile.budgets.tobytes())
        groups.setdefault(key, []).append(name)
    return {" = ".join(names): profiles[names[0]] for names in groups.values()}


def short_name(name: str, width: int) -> str:
    """Return a name that fits: the first and the number of others, else cut."""
    first, *same = name.split(" = ")
    counted = f"{first} = {len(same)} more" if same and len(name) > width else name
    return one_line(counted, width)
