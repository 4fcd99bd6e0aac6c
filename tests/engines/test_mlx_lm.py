"""mlx-lm loses what kvalloc predicts, with a cache of its own kind for each layer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_runs import (
    Row,
    Subject,
    check_means,
    check_order,
    compared,
    run_engine,
    run_texts_apart,
)

from kvalloc.accounting.engine_formats import FORMATS
from kvalloc.allocation.engine_choice import choose
from kvalloc.interop.engines import write_choice
from kvalloc.measure.engine_formats import round_trip

SOLVED_BITS = 6
SOLVED = f"solved for {SOLVED_BITS} bits"
"""All layers at `mlx_4_32` are the best of what one setting for all has in these bytes."""


def test_numbers_come_back_as_from_mlx(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).standard_t(3, (200, 64)).astype(np.float32)
    theirs = run_engine("mlx", numbers, tmp_path)
    heads = torch.from_numpy(numbers)[None, None]
    assert set(theirs) >= {name for name in FORMATS if name.startswith("mlx")}
    for name in {*theirs} & {*FORMATS}:
        ours = round_trip(heads, name, keys=True)[0, 0].numpy()
        largest = np.abs(numbers).max(axis=1, keepdims=True)
        np.testing.assert_allclose(ours / largest, theirs[name] / largest, atol=1e-6, err_msg=name)


def by_thirds(n_layers: int) -> list[tuple[str, str]]:
    """Return 16, 8 and 4 bits in the first, second and last third of the layers."""
    names = ("f16", "mlx_8_64", "mlx_4_64")
    return [(names[3 * layer // n_layers],) * 2 for layer in range(n_layers)]


def stored(pairs: list[tuple[str, str]]) -> list[list[int]]:
    """Return bits and group of each layer."""
    return [[FORMATS[key].code_bits, FORMATS[key].block or 64] for key, _ in pairs]


@pytest.fixture(scope="module")
def rows(engine_model: str, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    subject, folder = Subject(engine_model, "mlx"), tmp_path_factory.mktemp("mlx")
    n_layers = subject.losses.shape.n_layers
    choice = choose(subject.losses, "mlx-lm", bits=SOLVED_BITS)
    write_choice(choice, folder / "layers.json")
    exported = json.loads((folder / "layers.json").read_text(encoding="utf-8"))["layers"]
    caches = {
        "thirds of the layers at 16, 8, 4 bits": by_thirds(n_layers),
        "all at mlx_4_32": [("mlx_4_32", "mlx_4_32")] * n_layers,
        SOLVED: [*choice.pairs],
    }
    settings = {name: stored(pairs) for name, pairs in caches.items()}
    settings[SOLVED] = [
        [16, 64] if one is None else [one["bits"], one["group_size"]] for one in exported
    ]
    job = {"model": str(subject.folder), "reference": stored([("f16", "f16")] * n_layers)}
    job |= {"tokens": subject.tokens, "settings": settings}
    found = run_texts_apart("mlx", job, folder)
    return compared(subject, caches, found)


def test_losses_are_predicted(rows: list[Row]) -> None:
    check_means(rows)


def test_order_is_predicted(rows: list[Row]) -> None:
    check_order(rows)


def test_solved_layers_lose_less_than_uniform_ones(rows: list[Row]) -> None:
    by_name = {row.setting: row for row in rows}
    solved = by_name.pop(SOLVED)
    assert solved.bits <= SOLVED_BITS
    uniform = [row for name, row in by_name.items() if name.startswith("all")]
    best = min(row.engine_mean for row in uniform if row.bits <= SOLVED_BITS)
    assert solved.engine_mean <= 0.6 * best
