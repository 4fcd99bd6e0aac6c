"""ik_llama.cpp loses what kvalloc predicts, with types of their own for the layers at the ends."""

from __future__ import annotations

import pytest
from engine_runs import Row, Subject, check_means, check_order, compared, run_engine
from float_gguf import write_float_gguf

from kvalloc.accounting.engine_formats import ENGINES
from kvalloc.allocation.engine_choice import choose
from kvalloc.interop.engines import SYNTAX

BITS = 5.5
SOLVED, UNIFORM = f"solved for {BITS} bits", f"the best pair for all layers in {BITS} bits"


@pytest.fixture(scope="module")
def rows(engine_model: str, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    # kvalloc turns K and V as llama.cpp does: one file serves both engines
    subject, folder = Subject(engine_model, "llama"), tmp_path_factory.mktemp("ik")
    weights = folder / "float32.gguf"
    write_float_gguf(subject.weights, weights)
    solved = choose(subject.losses, "ik_llama.cpp", bits=BITS)
    fitting = [one for one in ENGINES["ik_llama.cpp"].pairs if subject.bits([one]) <= BITS]
    keys, values = uniform = min(fitting, key=lambda one: subject.predicted([one]).mean)
    settings = {
        SOLVED: SYNTAX["ik_llama.cpp"].line(solved),
        UNIFORM: f"-ctk {keys} -ctv {values} -khad -vhad",
        "all at q4_0": "-ctk q4_0 -ctv q4_0 -khad -vhad",
    }
    caches = {SOLVED: solved.pairs, UNIFORM: [uniform], "all at q4_0": [("q4_0", "q4_0")]}
    job = {"model": str(weights), "reference": "-ctk f16 -ctv f16", "tokens": subject.tokens}
    found = run_engine("ik", {**job, "settings": settings}, folder)
    weights.unlink()
    return compared(subject, caches, found, engine="ik")


def test_losses_are_predicted(rows: list[Row]) -> None:
    check_means(rows)


def test_order_is_predicted(rows: list[Row]) -> None:
    check_order(rows)


def test_solved_ends_lose_less_than_uniform_layers(rows: list[Row]) -> None:
    by_name = {row.setting: row for row in rows}
    solved, uniform = by_name[SOLVED], by_name[UNIFORM]
    assert max(solved.bits, uniform.bits) <= BITS
    assert solved.engine_mean <= 0.6 * uniform.engine_mean
