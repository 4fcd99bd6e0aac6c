"""Every policy, in every arrival, in every mode of eviction, against the oracle.

`make test` runs a selection in which any two settings (a policy and an arrival, an arrival and a
mode, ...) meet at least once, policies and arrivals in a cell that is answered; `make test-matrix`
the product of the three, each with every setting of all else, or as many cells of the whole as it
is asked for.
"""

import itertools

import pytest
from cell_choice import PRODUCT, chosen_cells, covering_cells, product_cells
from cli_tools import python
from kernel_choice import WITH, kernel_choice
from other_attention import attention_on_cpu
from runtime_cells import FACTORS, answers_as_the_oracle, comparable, refusal

from kvalloc.runtime.attention.cpu import CpuBackend

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


ABSENT = """
import sys
from importlib import metadata
from pathlib import Path

all_points = metadata.entry_points


def entry_points(**selected):
    points = all_points(**selected)
    if not selected:
        return points
    core = [point for point in points if not point.value.startswith("kvalloc.extensions")]
    return metadata.EntryPoints(core)


metadata.entry_points = entry_points
sys.modules["kvalloc.extensions"] = None

import torch
from cell_choice import covering_cells
from kernel_choice import WITH
from other_attention import attention_on_cpu
from runtime_cells import answers_as_the_oracle, refusal

torch.set_num_threads(1)
cells = [
    cell
    for cell in covering_cells()
    if WITH in cell and not {"saved", "assisted"} & set(cell) and refusal(cell) is None
]
for cell in cells[::2]:
    with attention_on_cpu(cell[5]):
        answers_as_the_oracle(cell, Path())
print(len(cells[::2]), "cells")
"""
"""What runs as where the room of the extensions, and their entry points, are not installed."""


def test_the_core_answers_without_its_extensions():
    done = python(ABSENT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[0]) >= 20


def test_the_kernel_is_called_where_it_is_asked_for(tmp_path):
    """A question after head-level budgets goes through it, and without it answers all the same."""
    if CpuBackend().unavailable() is not None:
        pytest.skip(f"no kernel here: {CpuBackend().unavailable()}")
    what = ("score", "question_of_5", "immediate", "llama")
    settings = (*what, "head", "sdpa", "float32", "16_bits")
    for name in FACTORS["kernel"]:
        with kernel_choice(name) as calls:
            answers_as_the_oracle((*settings, name), tmp_path)
        assert set(calls) == ({5} if name == WITH else set())


def test_any_two_settings_meet():
    cells = covering_cells()
    assert len(cells) < 260
    assert all(map(comparable, cells))
    for (i, one), (j, other) in itertools.combinations(enumerate(FACTORS.values()), 2):
        assert {(cell[i], cell[j]) for cell in cells} == set(itertools.product(one, other))
    answered = {cell[:2] for cell in cells if refusal(cell) is None}
    assert answered == set(itertools.product(*list(FACTORS.values())[:2])) - UNEVEN


def test_the_product_leaves_nothing_out():
    """All triples meet every setting of all else, and are answered but for what cannot be.

    That is chunks of what merges early; with `mpcache` rows of different length, and drafts.
    """
    cells, n_of_triple = product_cells(), len(PRODUCT)
    assert all(map(comparable, cells))
    modes, chunks = FACTORS["mode"], ("chunks", "padded_chunks")
    impossible = {(*pair, mode) for pair in UNEVEN for mode in modes}
    impossible |= set(itertools.product(["merge"], chunks, ["immediate"]))
    triples = set(itertools.product(*(FACTORS[name] for name in PRODUCT)))
    assert {cell[:n_of_triple] for cell in cells if refusal(cell) is None} == triples - impossible
    for place, settings in list(enumerate(FACTORS.values()))[n_of_triple:]:
        met = {(*cell[:n_of_triple], cell[place]) for cell in cells}
        assert met == {(*triple, setting) for triple in triples for setting in settings}
