"""The Triton kernel over packed entries, in its interpreter on the CPU.

Against the numbers that the codes stand for: by the definition in float64, and on the way that
unpacks them first. A process of its own, as in test_ragged_kernel.py.
"""

from __future__ import annotations

from test_ragged_kernel import check, needs_triton

CHECK = """
import functools
import sys
import numpy as np
import torch
from kvalloc.runtime.packed import PackedEntries
from kvalloc.runtime.packed_attention import (
    Asked, kernel_part, packed_attention, unpacked_attention,
)
from kvalloc.runtime.ragged_kernel import kernel_attention

torch.manual_seed(0)
DEVICE = "cuda" if "cuda" in sys.argv else "cpu"
# Triton's interpreter has no bfloat16 (it multiplies the raw bits).
HALVES = (torch.float16, torch.bfloat16) if DEVICE == "cuda" else (torch.float16,)
COUNTS = np.array([[2 * 128 + 67, 128, 0], [3, 64, 5 * 128 + 127]])


def made(widths, head_dim, dtype, biased):
    def piece(row, head):
        n = int(COUNTS[row, head])
        keys, values = torch.randn(2, n, head_dim, device=DEVICE)
        keys = keys * torch.logspace(-2, 0.5, head_dim, device=DEVICE) + 1
        bias = torch.rand(n, device=DEVICE) * 3 if biased else None
        every = torch.arange(n, device=DEVICE)
        return keys.to(dtype), values.to(dtype), every.int(), bias, every

    return PackedEntries.collect(COUNTS, piece, np.array(widths))


def asked_of(head_dim, group, n_new, dtype, extras):
    following = n_new + 4
    keys, values = torch.randn(2, 2, 3, following, head_dim, device=DEVICE).to(dtype)
    options = {}
    if extras:
        options["visible"] = torch.rand(2, following, device=DEVICE) > 0.4
        options["softcap"] = 3.0
        options["sink_logits"] = torch.randn(3 * group, device=DEVICE)
    queries = torch.randn(2, 3 * group, n_new, head_dim, device=DEVICE).to(dtype)
    return Asked(queries=queries, keys=keys, values=values, scaling=head_dim**-0.5, **options)


def by_definition(asked, entries):
    group = asked.queries.shape[1] // 3
    n_new, following = asked.queries.shape[2], asked.keys.shape[2]
    found = torch.empty(2, n_new, 3 * group, asked.values.shape[-1], dtype=torch.float64)
    column = torch.arange(following)
    place = torch.arange(following - n_new, following)[:, None]
    for row, head in np.ndindex(2, 3):
        piece = (None if t is None else t.cpu() for t in entries.piece(row, head))
        keys, values, _, bias, _ = piece
        keys = torch.cat([keys, asked.keys[row, head].cpu()]).double()
        values = torch.cat([values, asked.values[row, head].cpu()]).double()
        hidden = column > place
        if asked.visible is not None:
            hidden = hidden | (~asked.visible[row].cpu() & (column != place))
        for query in range(head * group, (head + 1) * group):
            logits = asked.queries[row, query].cpu().double() @ keys.T * asked.scaling
            if asked.softcap is not None:
                logits = asked.softcap * torch.tanh(logits / asked.softcap)
            n_kept = len(keys) - following
            if bias is not None:
                logits[:, :n_kept] += bias
            logits[:, n_kept:][hidden] = float("-inf")
            shown = values
            if asked.sink_logits is not None:
                own = asked.sink_logits[query].cpu().double().expand(n_new, 1)
                logits = torch.cat([logits, own], dim=1)
                shown = torch.nn.functional.pad(values, (0, 0, 0, 1))
            found[row, :, query] = logits.softmax(-1) @ shown
    return found


# bits, head_dim, group, new tokens, all options and a bias, type, splits
CASES = [
    (8, 32, 1, 1, False, torch.float32, 1),
    (4, 32, 3, 5, True, torch.float32, 3),
    (8, 64, 3, 1, True, torch.float32, 3),
    (4, 64, 3, 1, False, torch.float32, 2),
    (8, 128, 2, 5, True, torch.float32, 1),
    (4, 128, 2, 1, True, torch.float32, 1),
    (4, 80, 1, 2, False, torch.float32, 1),
    (8, 24, 2, 2, False, torch.float32, 2),
    *((bits, 64, 3, 1, extras, half, 2) for bits, extras in ((8, True), (4, False))
      for half in HALVES),
]
for bits, head_dim, group, n_new, extras, dtype, splits in CASES:
    entries = made([bits] * 3, head_dim, dtype, extras)
    (part,) = entries.parts
    assert part.aligned
    asked = asked_of(head_dim, group, n_new, dtype, extras)
    found = kernel_part(asked, part, functools.partial(kernel_attention, splits=splits))
    other = unpacked_attention(asked, part)
    assert found.dtype == dtype and found.shape == other.shape
    expected = by_definition(asked, entries)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert (found.cpu() - expected).abs().max() < tolerance, (bits, head_dim, extras, dtype)
    assert (found.float() - other.float()).abs().max() < 2 * tolerance

# heads of every width in one layer, on the way that the cache takes on this device
for extras in (False, True):
    entries = made([16, 4, 8], 64, torch.float32, extras)
    asked = asked_of(64, 3, 1, torch.float32, extras)
    found = packed_attention(
        asked.queries, entries, asked.keys, asked.values, scaling=asked.scaling,
        visible=asked.visible, softcap=asked.softcap, sink_logits=asked.sink_logits,
    )
    assert (found.cpu() - by_definition(asked, entries)).abs().max() < 1e-5
print("equal")
"""


@needs_triton
def test_packed_entries_are_read_as_they_are_stored() -> None:
    assert "equal" in check(script=CHECK, TRITON_INTERPRET="1")
