"""Every policy, in every arrival, in every mode of eviction, against the oracle.

`make test` runs a selection in which any two settings (a policy and an arrival, an arrival and a
mode, ...) meet at least once, policies and arrivals in a cell that is answered; `make test-matrix`
the product of the three, each with every setting of all else, or as many cells of the whole as it
is asked for.
"""

import collections
import itertools

import pytest
from cell_choice import (
    OTHERS,
    PRODUCT,
    chosen_cells,
    covering_cells,
    impossible,
    product_cells,
    refused_as,
)
from kernel_choice import WITH, kernel_choice
from other_attention import attention_on_cpu
from runtime_cells import (
    FACTORS,
    answers_as_the_oracle,
    comparable,
)

from kvalloc.runtime.attention import cpu

UNEVEN = set(
    itertools.product(
        ["mpcache"],
        ["left_padding", "different_lengths", "padded_chunks", "padded_turns", "assisted"],
    )
)
"""What is refused in all modes: a policy, and arrivals with rows of different length or drafts."""


def pytest_generate_tests(metafunc):
    if "cell" in metafunc.fixturenames:
        cells = chosen_cells(metafunc.config.getoption)
        metafunc.parametrize("cell", cells, ids=["-".join(cell) for cell in cells])


@pytest.fixture
def attention(cell):
    """Of flash attention what its masks ask for, see other_attention.py."""
    name = cell[list(FACTORS).index("attention")]
    with attention_on_cpu(name):
        yield name


def test_the_cache_answers_as_the_oracle(cell, attention, tmp_path):
    kernel = cell[list(FACTORS).index("kernel")]
    with kernel_choice(kernel) as calls:
        answers_as_the_oracle(cell, tmp_path)
    assert kernel == WITH or not calls


def test_the_kernel_is_called_where_it_is_asked_for(tmp_path):
    """A question after head-level budgets goes through it, and without it answers all the same."""
    if cpu.unavailable() is not None:
        pytest.skip(f"no kernel here: {cpu.unavailable()}")
    what = ("score", "question_of_5", "immediate", "llama")
    settings = (*what, "head", "sdpa", "float32", "16_bits")
    for name in FACTORS["kernel"]:
        with kernel_choice(name) as calls:
            answers_as_the_oracle((*settings, name), tmp_path)
        assert set(calls) == ({5} if name == WITH else set())


def test_any_two_settings_meet():
    cells = covering_cells()
    assert len(cells) < 170
    assert all(map(comparable, cells))
    for (i, one), (j, other) in itertools.combinations(enumerate(FACTORS.values()), 2):
        assert {(cell[i], cell[j]) for cell in cells} == set(itertools.product(one, other))
    answered = {cell[:2] for cell in cells if refused_as(cell) is None}
    assert answered == set(itertools.product(*list(FACTORS.values())[:2])) - UNEVEN


@pytest.fixture(scope="module")
def product():
    return product_cells()


def test_the_product_leaves_nothing_out(product):
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


def test_what_is_impossible_is_known():
    """Chunks of what merges early; with `mpcache` rows of different length, and drafts."""
    chunks = ("chunks", "padded_chunks")
    expected = {(*pair, mode) for pair in UNEVEN for mode in FACTORS["mode"]}
    expected |= set(itertools.product(["merge"], chunks, ["immediate"]))
    assert set(impossible()) == expected
