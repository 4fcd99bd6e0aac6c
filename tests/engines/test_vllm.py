"""vLLM loses what kvalloc predicts, if numbers are rounded as on CUDA: `make test-engines-vllm`.

Its kernel for CPUs cuts numbers towards zero, and loses several times as much.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_runs import Row, Subject, check_means, check_order, compared, run_engine

from kvalloc.allocation.engine_choice import choose
from kvalloc.interop.engines import write_choice
from kvalloc.measure.engine_formats import round_trip

TYPES = ("fp8", "fp8_e5m2")
WHOLE, ROUNDED = ("f16", "f16"), ("fp8", "fp8")
ENDS = "fp8, but five layers at each end"
SOLVED = "fp8, but as many layers, solved"
CUT = "cut by the CPU: "


def test_kernel_for_cpus_cuts_numbers(tmp_path: Path) -> None:
    # a release that rounds needs no "nearest" in the job below
    numbers = np.random.default_rng(0).standard_t(3, (224, 64)).astype(np.float32)
    for name, theirs in run_engine("vllm", numbers, tmp_path).items():
        assert (np.abs(theirs) <= np.abs(numbers)).all(), name
        heads = torch.from_numpy(np.concatenate([numbers, theirs]))[None, None]
        ours, same = round_trip(heads, name, keys=True)[0, 0].numpy().reshape(2, *numbers.shape)
        np.testing.assert_array_equal(same, theirs, err_msg=name)
        assert 0.4 < (ours == theirs).mean() < 0.6, name


@pytest.fixture(scope="module")
def rows(engine_model: str, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    subject, folder = Subject(engine_model, "vllm"), tmp_path_factory.mktemp("vllm")
    n_layers = subject.losses.shape.n_layers
    caches = {name: [(name, name)] * n_layers for name in TYPES}
    caches[ENDS] = [WHOLE] * 5 + [ROUNDED] * (n_layers - 10) + [WHOLE] * 5
    choice = choose(subject.losses, "vllm", bits=subject.bits(caches[ENDS]))
    write_choice(choice, folder / "vllm.json")
    caches[SOLVED] = [*choice.pairs]
    settings: dict[str, dict[str, Any]] = {name: {"kv_cache_dtype": name} for name in TYPES}
    skipped = [str(layer) for layer in range(n_layers) if caches[ENDS][layer] == WHOLE]
    settings[ENDS] = {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": skipped}
    settings[SOLVED] = json.loads((folder / "vllm.json").read_text(encoding="utf-8"))
    for name, setting in [*settings.items()]:
        settings[CUT + name], settings[name] = setting, {**setting, "nearest": True}
        caches[CUT + name] = caches[name]
    job = {"model": str(subject.folder), "reference": {"kv_cache_dtype": "auto"}}
    found = run_engine("vllm", {**job, "tokens": subject.tokens, "settings": settings}, folder)
    return compared(subject, caches, found, apart=CUT)


def test_losses_are_predicted(rows: list[Row]) -> None:
    check_means(rows)


def test_order_is_predicted(rows: list[Row]) -> None:
    check_order([row for row in rows if row.is_judged])
    check_order([row for row in rows if not row.is_judged])


def test_solved_layers_lose_less_than_the_ends(rows: list[Row]) -> None:
    by_name = {row.setting: row for row in rows}
    for cut in ("", CUT):
        assert by_name[cut + SOLVED].bits <= by_name[cut + ENDS].bits
        assert by_name[cut + SOLVED].engine_mean < by_name[cut + ENDS].engine_mean
