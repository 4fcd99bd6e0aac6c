"""Attention over kept entries by the definition in float64, and cases for every backend.

Run as a program it tries the Triton kernel: on ``cuda``, or on the CPU in Triton's interpreter,
which has to be asked for by TRITON_INTERPRET=1 before the kernel is defined.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import IntArray
from kvalloc.accounting.costs import WIDTHS
from kvalloc.runtime.attention.call import AttentionCall
from kvalloc.runtime.kept import KeptEntries, Segment
from kvalloc.runtime.packed import LayerEntries

HALF_A_STEP = {torch.float16: 2**-11, torch.bfloat16: 2**-8}

#: Keys, values and logit bias (or None) of each row and KV head.
Stored: TypeAlias = dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor | None]]


def stored_of(
    counts: Any, dims: tuple[int, int], dtype: torch.dtype, *, biased: bool, device: str = "cpu"
) -> Stored:
    """Random entries, with channels of very different size; counts (batch, n_kv_heads)."""
    sizes = [torch.logspace(-1, 0.5, dim) for dim in dims]
    found: Stored = {}
    for place in np.ndindex(*np.shape(counts)):
        count = int(np.asarray(counts)[place])
        keys, values = ((torch.randn(count, len(s)) * s).to(device, dtype) for s in sizes)
        found[place] = keys, values, (torch.randn(count) * 3).to(device) if biased else None
    return found


def piece_of(stored: Stored) -> Any:
    """As storage asks for them."""

    def piece(row: int, head: int) -> Segment:
        keys, values, bias = stored[row, head]
        places = torch.arange(len(keys), dtype=torch.int32, device=keys.device)
        return Segment(keys, values, places, bias)

    return piece


def ragged_of(stored: Stored, counts: IntArray) -> KeptEntries:
    """Stored without padding."""
    piece = piece_of(stored)
    return KeptEntries.of(
        [[piece(b, h) for h in range(counts.shape[1])] for b in range(len(counts))]
    )


def even_of(keys: Tensor, values: Tensor, bias: Tensor | None = None) -> KeptEntries:
    """Of dense ones, (batch, n_kv_heads, n_entries, ...), as many of each head."""
    n_entries = keys.shape[2]
    return KeptEntries(
        keys=keys.reshape(-1, keys.shape[-1]),
        values=values.reshape(-1, values.shape[-1]),
        positions=torch.arange(n_entries, dtype=torch.int32).repeat(keys.shape[0] * keys.shape[1]),
        lengths=np.full(keys.shape[:2], n_entries),
        bias=None if bias is None else bias.reshape(-1),
    )


def packed_of(stored: Stored, counts: IntArray, bits: list[int]) -> LayerEntries:
    """Stored at so many bits a KV head."""
    return LayerEntries.packed(counts.shape, piece_of(stored), np.array(bits, dtype=np.int64))


def unpacked(entries: LayerEntries, counts: IntArray) -> Stored:
    """The numbers that packed entries stand for."""
    pieces = {place: entries.piece(*place) for place in np.ndindex(*counts.shape)}
    return {place: (one[0], one[1], one[3]) for place, one in pieces.items()}


def call_of(
    counts: Any,
    dims: tuple[int, int],
    dtype: torch.dtype,
    *,
    group: int = 2,
    n_new: int = 1,
    before: int = 3,
    extras: bool = False,
    sharpness: float = 1.0,
    device: str = "cpu",
) -> AttentionCall:
    """Random queries and tokens after the entries; extras are padding, a cap and sink logits."""
    batch, heads = np.shape(counts)
    n_following = n_new + before

    def random(*shape: int) -> Tensor:
        return torch.randn(shape).to(device, dtype)

    return AttentionCall(
        queries=(random(batch, heads * group, n_new, dims[0]) * sharpness).to(dtype),
        keys=random(batch, heads, n_following, dims[0]),
        values=random(batch, heads, n_following, dims[1]),
        scaling=dims[0] ** -0.5,
        visible=(torch.rand(batch, n_following) > 0.4).to(device) if extras else None,
        softcap=3.0 if extras else None,
        sink_logits=torch.randn(heads * group).to(device) if extras else None,
    )


def by_definition(call: AttentionCall, stored: Stored) -> tuple[Tensor, float]:
    """Softmax over each head's own entries and what follows them; and the largest logit's size."""
    batch, n_query_heads, n_new, _ = call.queries.shape
    n_kv_heads, n_following, value_dim = call.values.shape[1:]
    group = n_query_heads // n_kv_heads
    out = torch.empty(batch, n_new, n_query_heads, value_dim, dtype=torch.float64)
    largest = 1.0
    place = n_following - n_new + torch.arange(n_new)[:, None]
    column = torch.arange(n_following)
    for row, head in np.ndindex(batch, n_query_heads):
        kept_keys, kept_values, bias = stored[row, head // group]
        keys = torch.cat([kept_keys, call.keys[row, head // group]]).cpu().double()
        values = torch.cat([kept_values, call.values[row, head // group]]).cpu().double()
        logits = call.queries[row, head].cpu().double() @ keys.T * call.scaling
        if call.softcap is not None:
            logits = call.softcap * torch.tanh(logits / call.softcap)
        if bias is not None:
            logits[:, : len(bias)] += bias.cpu()
        largest = max(largest, float(logits.abs().max()))
        shown = column <= place
        if call.visible is not None:
            shown &= call.visible[row % len(call.visible)].cpu() | (column == place)
        logits[:, len(kept_keys) :].masked_fill_(~shown, float("-inf"))
        if call.sink_logits is not None:
            sink = call.sink_logits[head].cpu().double().expand(n_new, 1)
            logits, values = torch.cat([logits, sink], 1), torch.cat([values, 0 * values[:1]])
        out[row, :, head] = logits.softmax(-1) @ values
    return out, largest


def check(found: Tensor, call: AttentionCall, stored: Stored) -> None:
    """A logit's error in float32 grows with its size, and a weight's with that of its logit."""
    expected, largest = by_definition(call, stored)
    assert found.dtype == call.queries.dtype
    assert found.is_contiguous()
    assert found.shape == expected.shape
    worst = (found.double() - expected).abs().max()
    assert worst <= 1e-6 * largest + HALF_A_STEP.get(found.dtype, 0.0) * float(expected.abs().max())


def triton_cases(
    halves: tuple[torch.dtype, ...],
) -> Iterator[tuple[IntArray, int, int, int, int, int, bool, torch.dtype, int]]:
    """Entries of each head, bits, head_dim, group, new and older tokens, extras, type, programs.

    Among the lengths of segments are none, less than a block of columns, whole blocks, and several
    tiles; so are those of what followed. One program makes tiles as long as they can be, so many
    that they are as short as they can be.
    """
    skewed, even = np.array([[2 * 128 + 67, 128, 0], [3, 64, 5 * 128 + 127]]), np.full((2, 2), 263)
    types = itertools.cycle((torch.float32, *halves))
    for counts, (n_new, before), extras, programs in itertools.product(
        (skewed, even), ((1, 0), (1, 600), (5, 3)), (False, True), (1, 99)
    ):
        yield counts, 16, 24 if extras else 64, 3, n_new, before, extras, next(types), programs
    yield skewed, 16, 16, 5, 27, 3, True, torch.float32, 2  # several blocks of query rows
    for bits, dim, group, n_new, extras, programs in (
        (8, 32, 1, 1, False, 1),
        (4, 32, 3, 5, True, 99),
        (8, 64, 3, 1, True, 99),
        (4, 64, 3, 1, False, 2),
        (8, 128, 2, 5, True, 1),
        (4, 128, 2, 1, True, 1),
        (4, 80, 1, 2, False, 1),
        (8, 24, 2, 2, False, 2),
        (5, 64, 3, 5, True, 99),
        (5, 80, 2, 1, False, 2),
        (3, 64, 3, 1, True, 2),
        (3, 16, 1, 2, False, 99),
    ):
        for dtype in (torch.float32, *(halves if dim == 64 else ())):
            yield skewed, bits, dim, group, n_new, 3, extras, dtype, programs


def check_triton(device: str) -> dict[torch.dtype, float]:
    """The largest error of the Triton kernels in each type; raises where it is too large."""
    from kvalloc.runtime.attention.backends import attend
    from kvalloc.runtime.attention.triton import TritonBackend, triton_attention
    from kvalloc.runtime.quantization import rotated

    # Triton's interpreter has no bfloat16 (it multiplies the raw bits).
    halves = (torch.float16, torch.bfloat16) if device == "cuda" else (torch.float16,)
    worst: dict[torch.dtype, float] = {}

    def answer(call: AttentionCall, kept: KeptEntries, programs: int) -> Tensor:
        """The kernel's, where values are turned as the cache asks for it."""
        if not WIDTHS[kept.bits].turned:
            return triton_attention(call, kept, programs=programs)
        numbers = {"queries": call.queries.float(), "keys": call.keys.float()}
        turned = replace(call, **numbers, values=rotated(call.values))
        found = triton_attention(turned, kept, programs=programs)
        return rotated(found).to(call.queries.dtype)

    def compare(found: Tensor, call: AttentionCall, stored: Stored) -> None:
        expected, _ = by_definition(call, stored)
        assert found.dtype == call.queries.dtype
        assert found.shape == expected.shape
        assert found.is_contiguous()
        error = (found.cpu().double() - expected).abs().max().item()
        worst[found.dtype] = max(worst.get(found.dtype, 0.0), error)
        assert error < (1e-5 if found.dtype == torch.float32 else 2e-2), (call, error)

    for counts, bits, dim, group, n_new, before, extras, dtype, programs in triton_cases(halves):
        stored = stored_of(counts, (dim, dim), dtype, biased=extras, device=device)
        call = call_of(
            counts, (dim, dim), dtype, group=group, n_new=n_new, before=before, extras=extras,
            device=device,
        )  # fmt: skip
        entries = packed_of(stored, counts, [bits] * counts.shape[1])
        found = answer(call, entries.parts[0], programs)
        compare(found, call, unpacked(entries, counts))
        if n_new > 1:  # as models give them: cut from larger tensors, tokens before heads
            given = {"queries": call.queries, "keys": call.keys, "values": call.values}
            wide = {name: torch.cat([one, one], dim=-1) for name, one in given.items()}
            cut = {
                name: one.transpose(1, 2).contiguous().transpose(1, 2)[..., :dim]
                for name, one in wide.items()
            }
            again = answer(replace(call, **cut), entries.parts[0], programs)
            assert torch.equal(again, found)

    # heads of every width in one layer, on the way that the cache takes on this device
    counts = np.array([[2 * 128 + 67, 128, 0], [3, 64, 5 * 128 + 127]])
    for extras in (False, True):
        stored = stored_of(counts, (64, 64), torch.float32, biased=extras, device=device)
        call = call_of(counts, (64, 64), torch.float32, group=3, extras=extras, device=device)
        entries = packed_of(stored, counts, [16, 5, 8])
        compare(attend(call, entries.parts), call, unpacked(entries, counts))
        assert device == "cpu" or TritonBackend().refusal(call, entries.parts[0]) is None
    return worst


if __name__ == "__main__":
    torch.manual_seed(0)
    print(check_triton(sys.argv[1]))
