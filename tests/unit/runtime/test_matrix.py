"""Every policy, in every arrival, on every model, against the oracle.

`make test` runs a selection in which any two settings (a policy and an arrival, an arrival and a
model, ...) meet at least once; `make test-matrix` the product of the three, each with every setting
of all else, or the whole, or as many as it is asked for.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cell_choice import (
    OTHERS,
    PRODUCT,
    all_cells,
    chosen_cells,
    covering_cells,
    impossible,
    product_cells,
    refused_as,
    told,
)
from runtime_cells import FACTORS, SCORERS, Cell, answers_as_the_oracle, comparable, scorer_of


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" in metafunc.fixturenames:
        cells = chosen_cells(metafunc.config.getoption)
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


@pytest.fixture(scope="module")
def product() -> list[Cell]:
    return product_cells()


def test_the_product_leaves_nothing_out(product: list[Cell]) -> None:
    """All triples, each with every setting of the rest, and answered wherever one of all is."""
    triples = set(itertools.product(*(FACTORS[name] for name in PRODUCT)))
    seen, answered = collections.defaultdict(set), set()
    for cell in product:
        seen[cell[: len(PRODUCT)]] |= set(zip(OTHERS, cell[len(PRODUCT) :], strict=True))
        if refused_as(cell) is None:
            answered.add(cell[: len(PRODUCT)])
    assert set(seen) == triples
    assert len(set(product)) == len(product)
    assert all(map(comparable, product))
    every = {(name, setting) for name in OTHERS for setting in FACTORS[name]}
    incomparable = {("attention", "padding_only")}
    for triple, settings in seen.items():
        beside_flash = {"different_lengths", "gemma3"} <= set(triple)
        assert settings == (every - incomparable if beside_flash else every), triple
    assert triples - answered == set(impossible())


def test_what_is_impossible_is_known() -> None:
    """Assisted generation; rows of different length with `mpcache`; cropping sliding layers."""
    policies, families = FACTORS["policy"], FACTORS["family"]
    uneven = ("left_padding", "different_lengths", "padded_chunks")
    expected = set(itertools.product(policies, ["assisted"], families))
    expected |= set(itertools.product(["mpcache"], uneven, families))
    expected |= set(itertools.product(policies, ["crop"], ["gemma3"]))
    assert set(impossible()) == expected


def test_in_the_product_settings_and_pairs_take_turns(product: list[Cell]) -> None:
    """But bits: at fewer `mpcache` is refused, and each such refusal is one cell more."""
    chosen = [(*cell[len(PRODUCT) :], scorer_of(cell)) for cell in product]
    settings = [*(FACTORS[name] for name in OTHERS), SCORERS]
    for (i, one), (j, other) in itertools.combinations(enumerate(settings), 2):
        counts = collections.Counter((cell[i], cell[j]) for cell in chosen)
        met = [counts[pair] for pair in itertools.product(one, other)]
        assert 0 < max(met) < 1.7 * min(met), (i, j)


def test_refusals_are_counted_and_named(product: list[Cell]) -> None:
    head, *lines, last = told(product)
    refused = [cell for cell in product if refused_as(cell) is not None]
    assert f"{len(product):,} cells of 756 of 756" in head
    assert (
        f"{len(product) - len(refused):,} answered as the oracle, {len(refused):,} refused" in head
    )
    assert sum(int(line.split()[0].replace(",", "")) for line in lines) == len(refused)
    named = {(line.split()[1].rstrip(":"), line.split("'")[1]) for line in lines}
    assert named == {(cell[0], refused_as(cell)) for cell in refused}
    assert "different_lengths on gemma3 with padding_only" in last


def test_shards_are_the_whole() -> None:
    def asked(shard: str | None) -> list[Cell]:
        return chosen_cells({"--matrix-shard": shard, "--whole-matrix": True}.get)

    shards = [asked(f"{place}/7") for place in range(1, 8)]
    assert sorted(itertools.chain(*shards)) == sorted(asked(None)) == sorted(all_cells())
