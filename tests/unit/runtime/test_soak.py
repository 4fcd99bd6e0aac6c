"""Many calls over one model, the short form of `make soak`; see `soak_runs`."""

import random

import pytest
from soak_runs import SHAPES, Memory, Soak, wrong_answers

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("threads", [1, 4])
def test_many_calls_leave_nothing_and_answer_as_the_first(tmp_path, request, threads):
    """Ways and shapes at random, each first once alone: what comes before it changes no bit."""
    soak, draw = Soak.of("tiny", tmp_path), random.Random(threads)
    count = request.config.getoption("--soak-calls")
    known = [(draw.choice(list(soak.ways)), draw.choice(list(SHAPES))) for _ in range(count // 2)]
    expected = {call: soak.answer(*call) for call in known}
    before, held = soak.left_behind(), Memory()
    assert wrong_answers(soak, draw.choices(known, k=count), expected, threads) == []
    assert soak.left_behind() == before
    assert Memory().tensors == held.tensors


def test_a_history_that_matters_is_noticed(tmp_path):
    """An answer that another call changed, and a hook and a tensor that stay."""
    soak = Soak.of("tiny", tmp_path)
    call = ("layer", "one row")
    expected, before, held = {call: soak.answer(*call)}, soak.left_behind(), Memory()
    soak.model.lm_head.weight.data[0] += 1e-3
    handle = soak.model.model.register_forward_hook(lambda *_: None)
    kept = soak.model.lm_head.weight.detach()[:1]
    assert len(wrong_answers(soak, [call], expected, 1)) == 1
    assert {key for key, value in soak.left_behind().items() if before[key] != value} == {"hooks"}
    assert Memory().tensors > held.tensors
    handle.remove()
    del kept
