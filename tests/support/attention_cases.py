"""Attention over kept entries by the definition in float64, and cases for every backend.

Run as a program it tries the Triton kernel: on ``cuda``, or on the CPU in Triton's interpreter,
which has to be asked for by TRITON_INTERPRET=1 before the kernel is defined.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import IntArray
from kvalloc.accounting.costs import WIDTHS, Width
from kvalloc.runtime.attention.call import AttentionCall
from kvalloc.runtime.kept import Kept, Part, joined, packed

HALF_A_STEP = {torch.float16: 2**-11, torch.bfloat16: 2**-8}

#: Keys and values of each row and KV head.
Stored: TypeAlias = dict[tuple[int, ...], tuple[Tensor, Tensor]]


def stored_of(
    counts: Any, dims: tuple[int, int], dtype: torch.dtype, *, device: str = "cpu"
) -> Stored:
    """Random entries, with channels of very different size; counts (batch, n_kv_heads)."""
    sizes = [torch.logspace(-1, 0.5, dim) for dim in dims]
    stored: Stored = {}
    for place in np.ndindex(*np.shape(counts)):
        count = int(np.asarray(counts)[place])
        keys, values = ((torch.randn(count, len(s)) * s).to(device, dtype) for s in sizes)
        stored[place] = keys, values
    return stored


def flat_of(stored: Stored, counts: IntArray) -> Part:
    """As storage takes them, tokens from 0 on."""
    keys, values = zip(*(stored[place] for place in np.ndindex(*counts.shape)), strict=True)
    device = keys[0].device
    places = [torch.arange(count, dtype=torch.int32, device=device) for count in counts.flat]
    return Part(
        keys=torch.cat(keys),
        values=torch.cat(values),
        tokens=torch.cat(places),
        segments=np.arange(counts.size),
        lengths=counts.ravel(),
    ).compact(int(counts.max(initial=0)))


def smaller(stored: Stored, rows: Iterable[int]) -> Stored:
    """With numbers of some rows that are so small that their scales are bfloat16."""
    return {
        at: (keys * 1e-6, values * 1e-6) if at[0] in rows else (keys, values)
        for at, (keys, values) in stored.items()
    }


def layer_of(parts: Sequence[Part], counts: IntArray, like: Part) -> Kept:
    """A layer of these parts; the model's numbers are of the types of ``like``."""
    rows, heads = counts.shape
    return Kept(parts=tuple(parts), rows=rows, heads=heads, like=(like.keys[:0], like.values[:0]))


def even_of(keys: Tensor, values: Tensor) -> Kept:
    """Of dense ones, (batch, n_kv_heads, n_entries, ...), as many of each head."""
    counts = np.full(keys.shape[:2], keys.shape[2])
    part = flat_of(
        {place: (keys[place], values[place]) for place in np.ndindex(*counts.shape)}, counts
    )
    return layer_of([part], counts, part)


def widths_of(counts: IntArray, bits: Any) -> dict[tuple[int, ...], IntArray]:
    """The width of each entry of a row and head; ``bits`` as of `packed_of`."""
    rows = bits if isinstance(bits[0], list | np.ndarray) else [bits] * len(counts)
    rng, found = np.random.default_rng(0), {}
    for (row, head), count in np.ndenumerate(counts):
        own = rows[row][head]
        found[row, head] = rng.choice(own if isinstance(own, tuple) else [own], count)
    return found


def counted(widths: Sequence[IntArray]) -> tuple[dict[int, IntArray], Tensor]:
    """Counts and widths as `packed` takes them, of the widths of each segment's entries."""
    every = np.concatenate(widths)
    counts = {
        bits: np.array([(own == bits).sum() for own in widths])
        for bits in np.unique(every).tolist()
    }
    return counts or {16: np.zeros(len(widths), np.int64)}, torch.from_numpy(every)


def packed_of(stored: Stored, counts: IntArray, bits: Any) -> Kept:
    """Stored at so many bits a KV head; or a row and head, each row packed by itself.

    A tuple is several widths of one head: each entry has one of them.
    """
    numbers, widths = flat_of(stored, counts), [*widths_of(counts, bits).values()]
    by_row = isinstance(bits[0], list | np.ndarray)
    together = np.split(np.arange(counts.size), len(counts) if by_row else 1)
    parts = []
    for own in together:
        by_width, width_of = counted([widths[segment] for segment in own])
        some = replace(numbers.taken(own), width_of=width_of.to(numbers.keys.device))
        parts += packed(some, by_width)
    return layer_of(joined(parts), counts, numbers)


def with_widths(cache: Any, *bits: int) -> None:
    """Store the kept entries of a cache at some widths, which each head takes by turns."""
    for store in cache.stores.values():
        (whole,) = joined([part.unpacked(store.kept.like) for part in store.kept.parts])
        widths = np.split(np.resize(bits, len(whole.positions)), whole.spans.ends[:-1])
        counts, width_of = counted(widths)
        parts = packed(replace(whole, width_of=width_of), counts)
        store.kept = replace(store.kept, parts=tuple(parts))


def unpacked(kept: Kept) -> Stored:
    """The numbers that packed entries stand for."""
    keys, values, _ = kept.padded(np.arange(kept.rows))
    return {at: (keys[at][:n], values[at][:n]) for at, n in np.ndenumerate(kept.lengths)}


def exact_numbers(stored: Stored, counts: IntArray, bits: Any) -> Stored:
    """The numbers that codes stand for, which are not rounded to half precision once more."""
    wide = {place: (keys.float(), values.float()) for place, (keys, values) in stored.items()}
    exact, whole = (unpacked(packed_of(own, counts, bits)) for own in (wide, stored))
    found = {}
    for place, widths in widths_of(counts, bits).items():
        is_half = torch.from_numpy(widths == 16)[:, None]
        pairs = zip(whole[place], exact[place], strict=True)
        found[place] = tuple(torch.where(is_half, own.float(), other) for own, other in pairs)
    return found


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
        starts=torch.randint(n_following + 1, (batch,)).to(device) if extras else None,
        softcap=3.0 if extras else None,
        sink_logits=torch.randn(heads * group).to(device) if extras else None,
    )


def by_definition(call: AttentionCall, stored: Stored) -> tuple[Tensor, Tensor]:
    """Softmax over each head's own entries and what follows them; and how far rounding goes.

    The second is of the output's shape, in unit roundoffs of what the numbers are computed in: to
    first order, with one of the products' size for each logit, one of the capped logit, and one of
    what is summed.
    """
    batch, n_query_heads, n_new, _ = call.queries.shape
    n_kv_heads, n_following, value_dim = call.values.shape[1:]
    group = n_query_heads // n_kv_heads
    out = torch.empty(batch, n_new, n_query_heads, value_dim, dtype=torch.float64)
    rounding = torch.empty_like(out)
    place = n_following - n_new + torch.arange(n_new)[:, None]
    column = torch.arange(n_following)
    for row, head in np.ndindex(batch, n_query_heads):
        kept_keys, kept_values = stored[row, head // group]
        keys = torch.cat([kept_keys, call.keys[row, head // group]]).cpu().double()
        values = torch.cat([kept_values, call.values[row, head // group]]).cpu().double()
        queries = call.queries[row, head].cpu().double() * call.scaling
        logits, errors = queries @ keys.T, queries.abs() @ keys.abs().T
        if call.softcap is not None:
            capped = torch.tanh(logits / call.softcap)
            logits, errors = call.softcap * capped, errors * (1 - capped**2)
        errors += logits.abs()
        shown = column <= place
        if call.sees is not None:
            shown = torch.nn.functional.pad(call.sees[row].cpu(), (n_following - n_new, 0), value=1)
        if call.starts is not None:
            shown &= (column >= call.starts[row].cpu()) | (column == place)
        logits[:, len(kept_keys) :].masked_fill_(~shown, float("-inf"))
        if call.sink_logits is not None:
            sink = call.sink_logits[head].cpu().double().expand(n_new, 1)
            logits, values = torch.cat([logits, sink], 1), torch.cat([values, 0 * values[:1]])
            errors = torch.cat([errors, sink.abs()], 1)
        weights = logits.softmax(-1)
        result, moved = weights @ values, weights * errors
        out[row, :, head] = result
        sums = (moved + weights) @ values.abs()
        rounding[row, :, head] = sums + moved.sum(-1, keepdim=True) * result.abs()
    return out, rounding


def check(output: Tensor, call: AttentionCall, stored: Stored) -> None:
    """Each number is as near to the definition as float32 and its own type bring it.

    Turned values mix the errors of all channels, so the largest of them counts for each.
    """
    expected, rounding = by_definition(call, stored)
    assert output.dtype == call.queries.dtype
    assert output.is_contiguous()
    assert output.shape == expected.shape
    least = torch.finfo(output.dtype).tiny  # below it a type's steps get no smaller
    step = HALF_A_STEP.get(output.dtype, 0.0) * expected.abs().amax(-1, keepdim=True).clamp(least)
    allowed = 8 * 2**-24 * rounding.amax(-1, keepdim=True) + step
    assert ((output.double() - expected).abs() <= allowed).all()


def cut(call: AttentionCall) -> AttentionCall:
    """As models give them: views of larger tensors, tokens before heads; one row's keys for all."""
    batch = len(call.queries)

    def view(states: Tensor) -> Tensor:
        wide = torch.cat([states, states], dim=-1).transpose(1, 2).contiguous()
        return wide.transpose(1, 2)[..., : states.shape[-1]]

    sinks = call.sink_logits
    return replace(
        call,
        queries=view(call.queries),
        keys=view(call.keys[:1]).expand(batch, -1, -1, -1),
        values=view(call.values),
        sink_logits=None if sinks is None else torch.stack([sinks, sinks], dim=1).double()[:, 0],
    )


def tailed(call: AttentionCall) -> AttentionCall:
    """As a cache gives it: what followed in a tail, with room behind that holds no numbers."""
    keys, values = (
        torch.nn.functional.pad(one, (0, 0, 0, 70), value=math.nan)
        for one in (call.keys, call.values)
    )
    tokens = int(call.keys.shape[2])
    return replace(call, keys=keys[:, :, :tokens], values=values[:, :, :tokens])


def triton_cases(
    halves: tuple[torch.dtype, ...],
) -> Iterator[tuple[IntArray, Any, int, int, int, int, bool, torch.dtype, int]]:
    """Entries of each head, bits, head_dim, group, new and older tokens, extras, type, programs.

    Among the lengths of segments are none, less than a block of columns, whole blocks, and several
    tiles; so are those of what followed. One program makes tiles as long as they can be, so many
    that they are as short as they can be.
    """
    skewed, even = np.array([[2 * 128 + 67, 128, 0], [3, 64, 5 * 128 + 127]]), np.full((2, 2), 263)
    types = itertools.cycle((torch.float32, *halves))
    for counts, (n_new, before), extras, programs in itertools.product(
        (skewed, even), ((1, 0), (1, 600), (5, 3)), (False, True), (1, 12)
    ):
        if len(halves) == 1 and extras is not (programs > 1):  # the interpreter is slow
            continue
        dim, bits = 24 if extras else 64, [16] * counts.shape[1]
        yield counts, bits, dim, 3, n_new, before, extras, next(types), programs
    yield skewed, [16] * 3, 16, 5, 27, 3, True, torch.float32, 2  # several blocks of query rows
    for bits, dim, group, n_new, extras, programs in (
        ([8, 4, 16], 32, 1, 1, False, 1),
        ([4, 5, 3], 64, 3, 5, True, 12),
        ([8, 3, 5], 64, 3, 1, True, 99),
        ([3, 8, 4], 128, 2, 1, True, 1),
        ([4, 5, 8], 80, 1, 2, False, 2),
        ([8, 8, 8], 24, 2, 2, False, 2),
        ([3, 16, 5], 16, 1, 2, False, 12),
        ([[8, 4, 16], [16, 8, 4]], 64, 2, 2, True, 12),
        ([(8, 4), (16, 5, 3), 1], 64, 3, 1, True, 12),
        ([(4, 2), 8, (2, 1)], 32, 2, 2, True, 12),
        ([[(8, 5), (16, 4), 3], [(4, 3), 8, (16, 8, 5)]], 32, 1, 2, False, 1),
    ):
        for dtype in (torch.float32, *(halves if dim == 64 else ())):
            yield skewed, bits, dim, group, n_new, 3, extras, dtype, programs


def check_triton(device: str) -> dict[torch.dtype, float]:
    """The largest error of the Triton kernels in each type; raises where it is too large."""
    from kvalloc.extensions.triton import TritonBackend, triton_attention

    WIDTHS[1] = Width(keys=2, values=1, turned=True)  # which codes allow, and which has no use
    # Triton's interpreter has no bfloat16 (it multiplies the raw bits).
    halves = (torch.float16, torch.bfloat16) if device == "cuda" else (torch.float16,)
    worst: dict[torch.dtype, float] = {}
    for counts, bits, dim, group, n_new, before, extras, dtype, programs in triton_cases(halves):
        stored = stored_of(counts, (dim, dim), dtype, device=device)
        by_row = isinstance(bits[0], list)
        if bits == [8, 8, 8] or by_row:  # all scales, or those of a row, are bfloat16
            stored = smaller(stored, range(by_row, 2))
        call = call_of(
            counts, (dim, dim), dtype, group=group, n_new=n_new, before=before, extras=extras,
            device=device,
        )  # fmt: skip
        kept = packed_of(stored, counts, bits)
        for one in (tailed(call), cut(call)) if n_new > 1 else (tailed(call),):
            result = triton_attention(one, kept, programs=programs)
            expected, _ = by_definition(one, unpacked(kept))
            assert result.dtype == dtype
            assert result.shape == expected.shape
            assert result.is_contiguous()
            error = (result.cpu().double() - expected).abs().max().item()
            worst[dtype] = max(worst.get(dtype, 0.0), error)
            assert error < (1e-5 if dtype == torch.float32 else 2e-2), (bits, one, error)
            if device == "cuda":  # it is what the cache takes here
                assert TritonBackend().refusal(one, kept) is None
    return worst


if __name__ == "__main__":
    torch.manual_seed(0)
    print(check_triton(sys.argv[1]))
