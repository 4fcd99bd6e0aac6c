"""Every policy, in every arrival, on every model, against the oracle.

`make test` runs a selection in which any two settings (a policy and an arrival, an arrival and a
model, ...) meet at least once; `make test-matrix` runs them all, or as many as it is asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from runtime_cells import (
    FACTORS,
    Cell,
    all_cells,
    answers_as_the_oracle,
    comparable,
    covering_cells,
    drawn_cells,
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" in metafunc.fixturenames:
        asked = metafunc.config.getoption
        cells = list(all_cells()) if asked("--whole-matrix") else covering_cells()
        if asked("--matrix-cells"):
            cells = drawn_cells(asked("--matrix-cells"), asked("--matrix-seed"))
        metafunc.parametrize("cell", cells, ids=["-".join(cell) for cell in cells])


@pytest.fixture
def attention(cell: Cell, attention_on_cpu: Any) -> Iterator[str]:
    """Of flash attention what its masks ask for, see other_attention.py."""
    name = cell[list(FACTORS).index("attention")]
    with attention_on_cpu(name):
        yield name


def test_the_cache_answers_as_the_oracle(
    tiny: ModuleType, cell: Cell, attention: str, tmp_path: Path
) -> None:
    answers_as_the_oracle(tiny, cell, tmp_path)


def test_any_two_settings_meet() -> None:
    cells = covering_cells()
    assert len(cells) < 150
    assert all(map(comparable, cells))
    for (i, one), (j, other) in itertools.combinations(enumerate(FACTORS.values()), 2):
        assert {(cell[i], cell[j]) for cell in cells} == set(itertools.product(one, other))
