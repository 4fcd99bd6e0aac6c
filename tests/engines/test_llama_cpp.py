"""llama.cpp rounds as kvalloc rounds, and loses what kvalloc predicts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_runs import Row, Subject, check_means, check_order, compared, run_engine
from float_gguf import write_float_gguf

from kvalloc.accounting.engine_formats import FORMATS
from kvalloc.measure.engine_formats import round_trip

PAIRS = [
    ("q8_0", "q8_0"),
    ("q8_0", "q5_1"),
    ("q8_0", "q4_0"),
    ("q5_1", "q5_1"),
    ("q5_0", "q5_0"),
    ("iq4_nl", "iq4_nl"),
    ("q4_0", "q8_0"),
    ("q4_0", "q4_0"),
]


def test_numbers_come_back_as_from_ggml(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).standard_t(3, (500, 32)).astype(np.float32)
    numbers[7] = 0.0
    theirs = run_engine("llama", numbers, tmp_path)
    assert set(theirs) == {name for name, format in FORMATS.items() if format.ggml}
    heads = torch.from_numpy(numbers)[None, None]  # of 32 numbers: ggml does not turn them
    for name, expected in theirs.items():
        ours = round_trip(heads, name, keys=True)[0, 0].numpy()
        same = np.isclose(ours, expected, rtol=1e-6, atol=0).all(axis=1)
        # iq4_nl's scale is fitted: sums in another order may round it to the next float16
        assert same.mean() >= (0.99 if name == "iq4_nl" else 1), name
        np.testing.assert_allclose(ours, expected, rtol=2**-10, err_msg=name)


@pytest.fixture(scope="module")
def rows(engine_model: str, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    subject, folder = Subject(engine_model, "llama"), tmp_path_factory.mktemp("llama")
    weights = folder / "float32.gguf"
    write_float_gguf(subject.weights, weights)
    settings = {f"-ctk {keys} -ctv {values}": (keys, values) for keys, values in PAIRS}
    job = {"model": str(weights), "reference": ["f32", "f32"], "tokens": subject.tokens}
    found = run_engine("llama", {**job, "settings": settings}, folder)
    weights.unlink()
    caches = {name: [pair] for name, pair in settings.items()}
    return compared(subject, caches, found)


def test_losses_are_predicted(rows: list[Row]) -> None:
    check_means(rows)


def test_order_is_predicted(rows: list[Row]) -> None:
    check_order(rows)
