"""Choose cells of the runtime's matrix: a product, few that cover pairs, or some at random."""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Callable
from typing import Any

from runtime_cells import FACTORS, Cell, comparable, refusal

PRODUCT = ("policy", "arrival", "mode")
NAMES = list(FACTORS)
REFUSED_FOR = ("mode", "family", "level", "bits")
"""Factors whose settings are why some cells are refused."""

Place = tuple[int, str]
"""A factor, by its number, and a setting of it."""


def chosen_cells(option: Callable[[str], Any]) -> list[Cell]:
    """Return the cells that the command line asks for; by default few that cover pairs."""
    if option("--matrix-cells"):
        return drawn_cells(option("--matrix-cells"), option("--matrix-seed"))
    return product_cells() if option("--matrix-product") else covering_cells()


def drawn_cells(number: int, seed: int) -> list[Cell]:
    """Draw that many of all cells."""
    every = filter(comparable, itertools.product(*FACTORS.values()))
    return random.Random(seed).sample(list(every), number)


def covering_cells() -> list[Cell]:
    """Return few cells in which any two settings of different factors meet."""
    pairs = {
        ((i, a), (j, b))
        for i, j in itertools.combinations(range(len(NAMES)), 2)
        for a in FACTORS[NAMES[i]]
        for b in FACTORS[NAMES[j]]
    }
    return cells_of(pairs, {})


def product_cells() -> list[Cell]:
    """Return every policy in every arrival and mode, each with every setting of all else."""
    cells, mode = [], NAMES.index("mode")
    for triple in itertools.product(*(FACTORS[name] for name in PRODUCT)):
        pairs = {
            ((mode, triple[mode]), (place, setting))
            for place in range(len(PRODUCT), len(NAMES))
            for setting in FACTORS[NAMES[place]]
        }
        cells += cells_of(pairs, dict(enumerate(triple)))
    return cells


def cells_of(missing: set[tuple[Place, Place]], base: dict[int, str]) -> list[Cell]:
    """Choose few cells with the settings of ``base`` in which each of the pairs meets: greedily.

    Each cell begins with a pair that is still missing and takes, factor by factor, the setting that
    meets most of what it has not met, and of several the one that was taken least so far. A cell
    that would be refused is changed where it can be, so that policies and arrivals are answered.
    """
    cells: list[Cell] = []
    taken: collections.Counter[Place] = collections.Counter()
    while missing:
        first = base | dict(min(missing))
        cell = dict(first)
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
        missing = missing - set(itertools.combinations(sorted(cell.items()), 2))
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
        if comparable(other) and refusal(other) is None
    ]
    if not others:
        return cell
    nearest = min(others, key=lambda other: sum(other[i] != value for i, value in cell.items()))
    return dict(enumerate(nearest))
