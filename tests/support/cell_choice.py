"""Which cells of the runtime's matrix are taken: all, a product, few that cover pairs, or drawn."""

from __future__ import annotations

import collections
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

from runtime_cells import FACTORS, Cell, comparable, refusal

PRODUCT = ("policy", "arrival", "mode")
OTHERS = tuple(name for name in FACTORS if name not in PRODUCT)
NAMES = list(FACTORS)
REFUSED_FOR = ("mode", "family", "level", "bits")
"""Factors whose settings are why some cells are refused."""
CANDIDATES = 200
"""So many cells of each triple of the product are looked at: of all, it would take a minute."""


def chosen_cells(option: Callable[[str], Any]) -> list[Cell]:
    """What the options of the command line ask for; by default few that cover pairs."""
    if option("--matrix-cells"):
        return drawn_cells(option("--matrix-cells"), option("--matrix-seed"))
    return product_cells() if option("--matrix-product") else covering_cells()


def cells_of(triple: Cell) -> Iterator[Cell]:
    """All cells of one of the product."""
    rest = itertools.product(*(FACTORS[name] for name in OTHERS))
    return filter(comparable, (triple + each for each in rest))


def drawn_cells(number: int, seed: int) -> list[Cell]:
    """So many of all, at random."""
    every = filter(comparable, itertools.product(*FACTORS.values()))
    return random.Random(seed).sample(list(every), number)


def covering_cells() -> list[Cell]:
    """Few cells in which any two settings of different factors meet: the greedy choice.

    Each cell begins with a pair that is still missing and takes, factor by factor, the setting that
    meets most of what it has not met, and of several the one that was taken least so far. One that
    would be refused is changed where it can be, so that policies and arrivals meet in an answer.
    """
    missing = {
        ((i, a), (j, b))
        for i, j in itertools.combinations(range(len(NAMES)), 2)
        for a in FACTORS[NAMES[i]]
        for b in FACTORS[NAMES[j]]
    }
    cells: list[Cell] = []
    taken: collections.Counter[tuple[int, str]] = collections.Counter()
    while missing:
        first = dict(min(missing))
        cell: dict[int, str] = dict(first)
        for place, name in enumerate(NAMES):
            if place not in cell:
                cell[place] = max(
                    (value for value in FACTORS[name] if comparable((*cell.values(), value))),
                    key=lambda value, place=place, cell=cell: (
                        sum(
                            tuple(sorted([(place, value), other])) in missing
                            for other in cell.items()
                        ),
                        -taken[place, value],
                    ),
                )
        cell = answered(cell, first)
        missing -= set(itertools.combinations(sorted(cell.items()), 2))
        taken.update(cell.items())
        cells.append(tuple(cell[place] for place in range(len(NAMES))))
    return cells


def answered(cell: dict[int, str], first: dict[int, str]) -> dict[int, str]:
    """Return the cell, or one like it that is not refused: policy, arrival, first pair stay."""
    stay = {*first, NAMES.index("policy"), NAMES.index("arrival")}
    choices = [
        [cell[place]] if place in stay or name not in REFUSED_FOR else FACTORS[name]
        for place, name in enumerate(NAMES)
    ]
    others = [
        other
        for other in itertools.product(*choices)
        if comparable(other) and refused_as(other) is None
    ]
    if not others:
        return cell
    nearest = min(others, key=lambda other: sum(other[i] != value for i, value in cell.items()))
    return dict(enumerate(nearest))


@functools.cache
def product_cells() -> list[Cell]:
    """Return every policy in every arrival and mode, each with every setting of every other factor.

    Of each of these triples `CANDIDATES` cells are drawn. Those that meet the most new settings are
    taken until all have been met: first cells that are answered, then cells that are refused.
    """
    cells, draw = [], random.Random(0)
    for triple in itertools.product(*(FACTORS[name] for name in PRODUCT)):
        candidates = draw.sample(list(cells_of(triple)), CANDIDATES)
        met: set[tuple[str, str]] = set()
        for refused in (False, True):
            pool = [cell for cell in candidates if (refusal(cell) is not None) == refused]
            while pool:
                best = max(pool, key=lambda cell: len(settings_of(cell) - met))
                if settings_of(best) <= met:
                    break
                met |= settings_of(best)
                cells.append(best)
    return cells


def settings_of(cell: Cell) -> set[tuple[str, str]]:
    """Return the settings of the factors outside of the product."""
    return set(zip(OTHERS, cell[len(PRODUCT) :], strict=True))


# What became of them


def refused_as(cell: Cell) -> str | None:
    """Why a cell ends in a refusal, what arrivals expect by themselves included."""
    reason = refusal(cell)
    if reason is None and {"crop", "gemma3"} <= set(cell):
        return "sliding layers cannot be cropped (the prompt before it is answered)"
    return reason


def impossible() -> dict[Cell, str]:
    """Triples of the product that are refused whatever the rest is, and why."""
    found: dict[Cell, str] = {}
    for triple in itertools.product(*(FACTORS[name] for name in PRODUCT)):
        reasons: set[str] = set()
        for cell in cells_of(triple):
            if (reason := refused_as(cell)) is None:
                break
            reasons.add(reason)
        else:
            found[triple] = " | ".join(sorted(reasons))
    return found
