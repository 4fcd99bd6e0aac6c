"""Many calls over one model leave nothing, and answer as each does in a process of its own."""

import json
import random
import subprocess
import sys

import pytest
import soak_runs
import torch
from soak_runs import SHAPES, Soak, resident_bytes

pytestmark = pytest.mark.soak


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


MODELS = ["tiny", pytest.param("demo", marks=pytest.mark.model)]


@pytest.fixture(scope="module", params=MODELS)
def runs(request, tmp_path_factory):
    """Calls over a model, ways and shapes by chance, and what each answers in its own process."""
    name, draw = request.param, random.Random(0)
    count = request.config.getoption("--soak-calls") // {"tiny": 1, "demo": 40}[name]
    if count < 2:
        pytest.skip("the demo's model takes --soak-calls 80 and more")
    fitted = tmp_path_factory.mktemp("fitted") / "s.safetensors"
    soak = Soak(name, fitted)
    known = sorted({(draw.choice([*soak.ways]), draw.choice([*SHAPES])) for _ in range(count // 2)})
    command = [sys.executable, soak_runs.__file__, name, fitted, json.dumps(known)]
    alone = subprocess.run(command, capture_output=True, text=True, check=True)
    return name, count, soak, dict(zip(known, json.loads(alone.stdout), strict=True))


@pytest.mark.parametrize("threads", [1, 4])
def test_many_calls_leave_nothing_and_answer_as_alone(runs, threads):
    """What comes before a call changes no bit of its answer."""
    name, count, soak, expected = runs
    drawn = random.Random(threads).choices([*expected], k=count)
    soak.answer("layer", "one row")  # attention is registered once for a process
    assert soak.differing([*expected], expected, threads) == set()
    before, resident = soak.left_behind(), resident_bytes()
    assert soak.differing(drawn, expected, threads) == set()
    assert soak.left_behind() == before
    growth = resident_bytes() / resident - 1
    row = {"what": f"{name}, {threads} threads: resident memory", "figure": f"{growth:+.2%}"}
    print(f"\n{json.dumps({**row, 'note': f'after {count} calls'})}")
    assert growth < 0.02 or count < 50  # of a few calls, what an allocator keeps shows


def test_a_history_that_matters_is_noticed(tmp_path):
    """An answer that another call changed, and a hook and a tensor that stay."""
    soak = Soak("tiny", tmp_path / "s.safetensors")
    call = ("layer", "one row")
    expected, before = {call: soak.answer(*call)}, soak.left_behind()
    soak.model.lm_head.weight.data[0] += 1e-3
    handle = soak.model.model.register_forward_hook(lambda *_: None)
    kept = soak.model.lm_head.weight.detach()[:1]
    assert len(soak.differing([call], expected, 1)) == 1
    after = soak.left_behind()
    assert {key for key in before if before[key] != after[key]} == {"hooks", "tensors"}
    handle.remove()
    del kept
