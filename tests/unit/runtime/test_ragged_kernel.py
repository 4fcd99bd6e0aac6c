"""The Triton kernel, in its interpreter on the CPU: against the plain computation.

A process of its own, since Triton reads TRITON_INTERPRET when the kernel is defined.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

CHECK = """
import functools
import itertools
import numpy as np
import torch
from kvalloc.models.attention import AttentionStates
from kvalloc.runtime.even_attention import even_kernel_attention
from kvalloc.runtime.ragged import BLOCK_TOKENS, RaggedEntries
from kvalloc.runtime.ragged_attention import ragged_attention
from kvalloc.runtime.ragged_kernel import kernel_attention

torch.manual_seed(0)
DEVICE = "cuda" if "cuda" in __import__("sys").argv else "cpu"
worst = {}
counts = np.array([[2 * BLOCK_TOKENS + 3, BLOCK_TOKENS], [0, 5]])
# Triton's interpreter has no bfloat16 (it multiplies the raw bits).
halves = (torch.float16, torch.bfloat16) if DEVICE == "cuda" else (torch.float16,)
cases = itertools.product((1, 5), (False, True), (torch.float32, *halves), (1, 3))
for n_new, extras, dtype, splits in cases:
    head_dim, group, following = (24 if extras else 64), 3, n_new + 4

    def piece(row, head):
        n = int(counts[row, head])
        keys, values = torch.randn(2, n, head_dim, device=DEVICE).to(dtype)
        bias = torch.rand(n, device=DEVICE) if extras else None
        every = torch.arange(n, device=DEVICE)
        return keys, values, every.int(), bias, every

    entries = RaggedEntries.collect(counts, piece, biased=extras)
    queries = torch.randn(2, 2 * group, n_new, head_dim, device=DEVICE).to(dtype)
    keys, values = torch.randn(2, 2, 2, following, head_dim, device=DEVICE).to(dtype)
    options = {"scaling": head_dim**-0.5}
    if extras:
        options["visible"] = torch.rand(2, following, device=DEVICE) > 0.4
        options["softcap"] = 3.0
        options["sink_logits"] = torch.randn(2 * group, device=DEVICE)
    found = kernel_attention(queries, entries, keys, values, splits=splits, **options)
    assert found.dtype == dtype
    asked, new_keys, new_values = (t.cpu().float() for t in (queries, keys, values))
    on_cpu = RaggedEntries(
        keys=entries.keys.cpu().float(), values=entries.values.cpu().float(),
        positions=entries.positions.cpu(), lengths=counts,
        bias=None if entries.bias is None else entries.bias.cpu(),
    )
    options = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    expected = ragged_attention(asked, on_cpu, new_keys, new_values, **options)
    error = (found.cpu().float() - expected).abs().max().item()
    worst[dtype] = max(worst.get(dtype, 0.0), error)
    assert torch.isfinite(found).all()

# Segments of equal length, no multiple of a block, and the latest tokens apart.
for extras, dtype, splits in itertools.product((False, True), (torch.float32, *halves), (1, 3)):
    kept = torch.randn(2, 2, 2, 2 * BLOCK_TOKENS + 7, 24, device=DEVICE).to(dtype)
    latest = torch.randn(2, 2, 2, 5, 24, device=DEVICE).to(dtype)
    queries = torch.randn(2, 6, 1, 24, device=DEVICE).to(dtype)
    softcap = 3.0 if extras else None
    sinks = torch.randn(6, device=DEVICE) if extras else None
    states = AttentionStates(
        layer=0, queries=queries, keys=latest[0], values=latest[1], scaling=0.2, mask=None,
        softcap=softcap, sink_logits=sinks,
    )
    bias = torch.rand(2, 2, BLOCK_TOKENS + 2, device=DEVICE) * 3 if extras else None
    kernel = functools.partial(kernel_attention, splits=splits)
    found = even_kernel_attention(states, tuple(kept), kernel, bias=bias)
    assert found.dtype == dtype and found.shape == (2, 1, 6, 24)
    keys, values = torch.cat([kept, latest], dim=3).double().repeat_interleave(3, dim=2)
    logits = queries.double() @ keys.transpose(2, 3) * 0.2
    if extras:
        logits = softcap * torch.tanh(logits / softcap)
        logits[..., : bias.shape[-1]] += bias.repeat_interleave(3, dim=1)[:, :, None]
        own = sinks.double().view(1, 6, 1, 1).expand(2, -1, -1, -1)
        logits = torch.cat([logits, own], dim=-1)
        values = torch.nn.functional.pad(values, (0, 0, 0, 1))
    expected = (logits.softmax(-1) @ values).transpose(1, 2)
    worst[dtype] = max(worst[dtype], (found.double() - expected).abs().max().item())
assert worst[torch.float32] < 1e-5, worst
assert all(worst[half] < 2e-2 for half in halves), worst
print(worst)
"""


def check(*arguments: str, script: str = CHECK, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


@needs_triton
def test_the_kernel_in_the_interpreter_equals_the_plain_computation() -> None:
    assert "float32" in check(TRITON_INTERPRET="1")
