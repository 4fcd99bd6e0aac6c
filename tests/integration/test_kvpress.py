"""The real kvpress, where it is installed: in the environment that `make peers` makes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("kvpress", reason="kvpress has an environment of its own: make peers")

import torch
from tiny_models import VOCABULARY, tiny_model
from transformers import DynamicCache

from kvalloc.cli.main import main
from kvalloc.interop.kvpress import KvpressMethod, make_press, read_peer_name

EVICTING = (
    "SnapKV", "PyramidKV", "StreamingLLM", "TOVA", "ExpectedAttention", "KeyDiff",
    "CriticalKV(SnapKV)",
)  # fmt: skip
HIDING = ("AdaKV(SnapKV)", "CriticalAdaKV(SnapKV)", "AdaKV(ExpectedAttention)")
N_PROMPT = 180


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def prompt():
    return tuple(torch.randint(2, VOCABULARY, (N_PROMPT,)).tolist())


@pytest.mark.parametrize("name", [*EVICTING, *HIDING])
@pytest.mark.parametrize("share", [50, 20])
def test_what_we_run_is_what_kvpress_runs(model, prompt, name, share):
    """Its own way: the press around the prefill, then one token at a time with positions."""
    answer = (7, 11, 90, 3)
    method = KvpressMethod(name=read_peer_name(f"kvpress:{name}@{share}%"))
    reduced = method.compress(model, prompt)
    press = make_press(method.name)
    press.compression_ratio = 1 - (round(share / 100 * N_PROMPT) + 0.01) / N_PROMPT
    cache, rows = DynamicCache(), []
    with torch.inference_mode():
        with press(model):
            model.model(input_ids=torch.tensor([prompt]), past_key_values=cache)
        for place, token in enumerate(answer):
            output = model(
                input_ids=torch.tensor([[token]]),
                past_key_values=cache,
                position_ids=torch.tensor([[N_PROMPT + place]]),
            )
            rows.append(output.logits[0])
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    ours = reduced.feed(answer, last=len(answer))
    torch.testing.assert_close(ours, torch.cat(rows), rtol=1e-3, atol=1e-3)
    assert reduced.kept_bytes / (3 * 2 * N_PROMPT * 64) == pytest.approx(share / 100, abs=0.01)
    assert (reduced.stored_bytes > reduced.kept_bytes) == (name in HIDING)


@pytest.mark.model
def test_the_command_with_a_peer(capsys):
    command = ["eval", "demo", "--peer", "kvpress:TOVA@20%", "--peer", "kvpress:KVzip@20%"]
    assert main([*command, "--tasks", "pairs", "--samples", "1", "--context", "300", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == ["full", "kvpress:TOVA@20%", "kvpress:KVzip@20%"]
    tova, kvzip = rows["kvpress:TOVA@20%"], rows["kvpress:KVzip@20%"]
    assert tova["retained_bytes"] == tova["kept_bytes"]
    assert tova["kept_bytes"] / tova["full_bytes"] == pytest.approx(0.2, abs=0.002)
    assert kvzip["kept_bytes"] / kvzip["full_bytes"] == pytest.approx(0.2, abs=0.002)
    assert kvzip["retained_bytes"] >= kvzip["full_bytes"]


def test_the_benchmark_decodes_beside_presses():
    """At the same kept share SnapKV stores what we store, and AdaKV the whole prompt."""
    script = Path(__file__).parents[2] / "benchmarks" / "bench_runtime.py"
    sizes = ["--shape", "tiny", "--dtype", "float32", "--context", "300", "--batch", "2"]
    asked = ["--decode-rounds", "2", "--only", "peers", "--json"]
    command = [sys.executable, str(script), *sizes, *asked]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    rows = json.loads(ran.stdout)["rows"]
    assert len(rows) == 4
    full = 300 * 4 * 2 * 2 * 32 * 4  # tokens, layers, heads, K and V, numbers, bytes
    for row in rows:
        assert row["ratio"] > 0
        assert row["rounds"] == 2
        assert row["peer_kept_share"] == pytest.approx(0.2, abs=0.001)
        share = 1.0 if "AdaKV" in row["name"] else 0.2
        assert row["peer_stored_bytes"] / full == pytest.approx(share, abs=0.001)
        assert row["stored_bytes"] / full == pytest.approx(0.2, abs=0.01)
