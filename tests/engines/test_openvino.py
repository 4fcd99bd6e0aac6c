"""OpenVINO loses what kvalloc predicts; GenAI reads the GGUF file, the prompt comes in steps."""

from __future__ import annotations

import json

import pytest
from engine_runs import Row, Subject, check_means, check_order, compared, run_engine
from float_gguf import write_float_gguf

from kvalloc.allocation.engine_choice import choose
from kvalloc.interop.engines import write_choice

STEP = 1
"""Tokens a step: they see their own keys and values unrounded."""

PAIRS = [("u8_token", "u8_token"), ("u4_token", "u4_token")]

SOLVED = "solved for 7 bits"
"""Keys at `u8_token`, values at `u4_token`. By channel, a graph without paged attention crashes."""


def properties(keys: str, values: str) -> dict[str, str]:
    """Return what `compile_model` takes."""
    found = {"KEY_CACHE_PRECISION": keys, "VALUE_CACHE_PRECISION": values}
    return found | {"KEY_CACHE_QUANT_MODE": "BY_TOKEN"}


@pytest.fixture(scope="module")
def rows(engine_model: str, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    subject, folder = Subject(engine_model, "openvino"), tmp_path_factory.mktemp("openvino")
    weights = folder / "float16.gguf"  # OpenVINO would round weights of four bits once more
    write_float_gguf(subject.weights, weights, half=True)
    caches = {f"{keys}, {values}": [(keys, values)] for keys, values in PAIRS}
    settings = {
        name: properties(*(one.partition("_")[0] for one in pairs[0]))
        for name, pairs in caches.items()
    }
    choice = choose(subject.losses, "openvino", bits=7)
    write_choice(choice, folder / "openvino.json")
    assert not any(key.endswith("channel") for key, _ in choice.pairs)
    caches[SOLVED] = [*choice.pairs]
    exported = json.loads((folder / "openvino.json").read_text(encoding="utf-8"))
    settings[SOLVED] = exported
    job = {"model": str(weights), "reference": properties("f32", "f32"), "step": STEP}
    found = run_engine("openvino", {**job, "tokens": subject.tokens, "settings": settings}, folder)
    weights.unlink()
    return compared(subject, caches, found)


def test_losses_are_predicted(rows: list[Row]) -> None:
    check_means(rows)


def test_order_is_predicted(rows: list[Row]) -> None:
    check_order(rows)
