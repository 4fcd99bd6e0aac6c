"""Budgets per layer of several profiles, side by side, as bars in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvalloc.accounting import FloatArray
from kvalloc.errors import InputError
from kvalloc.formats.budget_profile import BudgetProfile

_EIGHTHS = " ▏▎▍▌▋▊▉"
_LEAST_BAR = 4
_NUMBER_WIDTH = 5


def budget_columns(
    profiles: Mapping[str, BudgetProfile],
    *,
    width: int = 80,
    unicode: bool = True,
    max_rows: int = 40,
) -> list[str]:
    """Draw one row a layer and one column a profile: the kept share and its bar.

    Profiles with the same budgets share a column, so that what is equal is seen at once. A full
    bar is 100% of the context in every column. At head level a row shows the mean over the
    layer's heads.

    Parameters
    ----------
    profiles : mapping of str to BudgetProfile
        By the name to show; all of one model.
    width : int
        Columns of the terminal. Where the profiles do not fit side by side, they go below each
        other in blocks.
    unicode : bool
        Block characters, exact to an eighth of a column; ``#`` otherwise.
    max_rows : int
        Deeper models have neighbouring layers averaged into one row.

    Returns
    -------
    list of str
        Without trailing spaces, none longer than ``width``.

    Raises
    ------
    InputError
        If there is no profile, or they are of models of different depth.
    """
    columns = _merged(profiles)
    label_width = 7
    per_block = max(1, (width - label_width) // (2 + _NUMBER_WIDTH + 1 + _LEAST_BAR))
    lines: list[str] = []
    names = list(columns)
    for begin in range(0, len(names), per_block):
        block = {name: columns[name] for name in names[begin : begin + per_block]}
        lines += [""] if lines else []
        lines += _block(block, label_width, width, unicode, max_rows)
    return lines


def table_lines(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)
) -> list[str]:
    r"""Align cells in columns as wide as they need.

    Parameters
    ----------
    headings : sequence of str
        One a column.
    rows : sequence of sequence of str
        As many cells each.
    left : sequence of int
        Columns that are flush left; numbers are flush right.

    Returns
    -------
    list of str
        Heading, rule and rows, without trailing spaces.

    Examples
    --------
    >>> print("\n".join(table_lines(("solver", "MiB"), [("greedy", "5.53")])))
    solver   MiB
    ------  ----
    greedy  5.53
    """
    widths = [max(len(row[i]) for row in (headings, *rows)) for i in range(len(headings))]
    rule = tuple("-" * width for width in widths)
    return [
        "  ".join(
            f"{cell:<{width}}" if i in left else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (headings, rule, *rows)
    ]


def bar(share: float, width: int, *, unicode: bool = True) -> str:
    """Draw a bar of a share of a number of columns.

    Parameters
    ----------
    share : float
        0..1.
    width : int
        Columns of a full bar.
    unicode : bool
        Exact to an eighth of a column; whole ``#`` otherwise.

    Returns
    -------
    str

    Examples
    --------
    >>> bar(0.5, 4), bar(0.28125, 4), bar(0.5, 4, unicode=False)
    ('██', '█▏', '##')
    """
    if not unicode:
        return "#" * round(share * width)
    eighths = round(share * width * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def merged_names(profiles: Mapping[str, BudgetProfile]) -> dict[str, BudgetProfile]:
    """Put profiles with the same budgets under one name.

    Parameters
    ----------
    profiles : mapping of str to BudgetProfile

    Returns
    -------
    dict of BudgetProfile
        The first of each kind by the names of all, such as ``"greedy = ilp"``.
    """
    groups: list[tuple[list[str], BudgetProfile]] = []
    for name, profile in profiles.items():
        for names, other in groups:
            if np.array_equal(other.budgets, profile.budgets):
                names.append(name)
                break
        else:
            groups.append(([name], profile))
    return {" = ".join(names): profile for names, profile in groups}


def _merged(profiles: Mapping[str, BudgetProfile]) -> dict[str, FloatArray]:
    """Kept share of each layer, ``(n_layers,)``, by heading."""
    if not profiles:
        raise InputError("there is no budget profile to draw; give at least one")
    depths = {profile.shape.n_layers for profile in profiles.values()}
    if len(depths) > 1:
        raise InputError(
            f"profiles of models with {', '.join(map(str, sorted(depths)))} layers do not fit "
            "side by side; draw them one by one"
        )
    return {
        name: profile.budgets.mean(axis=1) / profile.context_tokens
        for name, profile in merged_names(profiles).items()
    }


def _block(
    columns: Mapping[str, FloatArray],
    label_width: int,
    width: int,
    unicode: bool,
    max_rows: int,
) -> list[str]:
    each = (width - label_width) // len(columns)
    bar_width = max(_LEAST_BAR, min(30, each - 2 - _NUMBER_WIDTH - 1))
    cell_width = _NUMBER_WIDTH + 1 + bar_width
    heads = [_shortened(name, cell_width) for name in columns]
    lines = [f"{'layer':<{label_width - 2}}" + "".join(f"  {h:<{cell_width}}" for h in heads)]
    depth = len(next(iter(columns.values())))
    step = -(-depth // max_rows)
    for first in range(0, depth, step):
        last = min(depth, first + step) - 1
        line = f"{first if step == 1 else f'{first}-{last}':>{label_width - 2}}"
        for shares in columns.values():
            share = float(shares[first : last + 1].mean())
            drawn = bar(min(share, 1.0), bar_width, unicode=unicode)
            line += f"  {100 * share:>{_NUMBER_WIDTH - 1}.0f}% {drawn:<{bar_width}}"
        lines.append(line)
    return [line.rstrip() for line in lines]


def _shortened(name: str, width: int) -> str:
    """A heading that fits: the first of several names and how many more, else cut."""
    if len(name) <= width:
        return name
    first, *others = name.split(" = ")
    counted = f"{first} = {len(others)} more" if others else name
    return counted if len(counted) <= width else f"{counted[: width - 2]}.."
