"""ik_llama.cpp loses what kvalloc predicts, with types of their own for the layers at the ends."""

from __future__ import annotations

import pytest
from engine_runs import Row, Subject, check_means, check_order, compared, run_engine
from float_gguf import write_float_gguf

from kvalloc.allocation.engine_choice import choose
from kvalloc.interop.engines import SYNTAX

TURNED = "-khad -vhad"
UNIFORM = {f"-ctk {name} -ctv {name} {TURNED}": [(name, name)] for name in ("q5_0", "q4_0")}
SOLVED_BITS = 5.4
"""All layers at `q4_0` or `iq4_nl` are the best of what one pair for all has in these bytes."""


@pytest.fixture(scope="module")
def rows(engine_model: str, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    # kvalloc turns K and V as llama.cpp does: one file serves both engines
    subject, folder = Subject(engine_model, "llama"), tmp_path_factory.mktemp("ik")
    weights = folder / "float32.gguf"
    write_float_gguf(subject.weights, weights)
    choice = choose(subject.losses, "ik_llama.cpp", bits=SOLVED_BITS)
    line = SYNTAX["ik_llama.cpp"].line(choice)
    caches = {**UNIFORM, line[line.index("-ctk") :]: [*choice.pairs]}
    job = {"model": str(weights), "reference": "-ctk f16 -ctv f16", "tokens": subject.tokens}
    found = run_engine("ik", {**job, "settings": {name: name for name in caches}}, folder)
    weights.unlink()
    return compared(subject, caches, found, engine="ik")


def test_losses_are_predicted(rows: list[Row]) -> None:
    check_means(rows)


def test_order_is_predicted(rows: list[Row]) -> None:
    check_order(rows)


def test_solved_ends_lose_less_than_uniform_layers(rows: list[Row]) -> None:
    solved = next(row for row in rows if row.setting not in UNIFORM)
    assert solved.bits <= SOLVED_BITS
    best = min(
        row.engine_mean for row in rows if row.setting in UNIFORM and row.bits <= SOLVED_BITS
    )
    assert solved.engine_mean <= 0.6 * best
