"""Many calls over one model leave nothing, and answer as each does in a process of its own."""

import json
import random
import subprocess
import sys

import pytest
import soak_runs
from soak_runs import SHAPES, Soak, resident_bytes

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """Draw calls over a model, and let a process of its own answer each."""
    draw, count = random.Random(0), request.config.getoption("--soak-calls")
    fitted = tmp_path_factory.mktemp("fitted") / "s.safetensors"
    soak = Soak(fitted)
    known = sorted({(draw.choice([*soak.ways]), draw.choice([*SHAPES])) for _ in range(count // 2)})
    command = [sys.executable, soak_runs.__file__, fitted, json.dumps(known)]
    alone = subprocess.run(command, capture_output=True, text=True, check=True)
    return count, soak, dict(zip(known, json.loads(alone.stdout), strict=True))


@pytest.mark.parametrize("threads", [1, 4])
def test_many_calls_leave_nothing_and_answer_as_alone(runs, threads):
    """What comes before a call changes no bit of its answer."""
    count, soak, expected = runs
    drawn = random.Random(threads).choices([*expected], k=count)
    soak.answer("layer", "one row")  # attention is registered once for a process
    assert soak.differing([*expected], expected, threads) == set()
    before, resident = soak.left_behind(), resident_bytes()
    assert soak.differing(drawn, expected, threads) == set()
    assert soak.left_behind() == before
    growth = resident_bytes() / resident - 1
    row = {"what": f"{threads} threads: resident memory", "figure": f"{growth:+.2%}"}
    print(f"\n{json.dumps({**row, 'note': f'after {count} calls'})}")
    assert growth < 0.02 or count < 50  # of a few calls, what an allocator keeps shows
