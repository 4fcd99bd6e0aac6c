"""Entries at 16, 8 and 4 bits: what is stored, to the byte, and what comes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from factories import make_shape
from hypothesis import given, settings
from hypothesis import strategies as st

from kvalloc.accounting.stored_bytes import stored_bytes
from kvalloc.runtime import packed_attention as module
from kvalloc.runtime import packed_decoding as decoding
from kvalloc.runtime.packed import PackedEntries
from kvalloc.runtime.packed_attention import Asked, packed_attention, unpacked_attention
from kvalloc.runtime.quantization import quantised_keys, quantised_values
from kvalloc.runtime.ragged import RaggedEntries
from kvalloc.runtime.ragged_attention import ragged_attention

BATCH, HEADS = 2, 3


def numbers(counts: Any, head_dim: int, dtype: torch.dtype, seed: int = 0) -> dict[Any, Any]:
    """Keys and values of each row and head, with channels of very different size."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for row, head in np.ndindex(*np.shape(counts)):
        count = int(counts[row][head])
        keys, values = torch.randn(2, count, head_dim, generator=generator)
        keys = keys * torch.logspace(-2, 1, head_dim)
        found[row, head] = keys.to(dtype), values.to(dtype)
    return found


def piece_of(found: dict[Any, Any], biased: bool = False) -> Any:
    def piece(row: int, head: int) -> Any:
        keys, values = found[row, head]
        every = torch.arange(keys.shape[0])
        bias = (every % 5).float() if biased else None
        return keys, values, (2 * every).int(), bias, every

    return piece


def rounded(found: dict[Any, Any], row: int, head: int, bits: int) -> tuple[Any, Any]:
    """As the measuring side rounds them."""
    keys, values = (one[None, None] for one in found[row, head])
    return quantised_keys(keys, bits)[0, 0], quantised_values(values, bits)[0, 0]


counts_strategy = st.lists(
    st.lists(st.integers(0, 270), min_size=HEADS, max_size=HEADS), min_size=BATCH, max_size=BATCH
)


@settings(deadline=None, max_examples=25)
@given(
    counts=counts_strategy,
    bits=st.lists(st.sampled_from([16, 8, 4]), min_size=HEADS, max_size=HEADS),
    head_dim=st.sampled_from([8, 9, 64, 80]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_what_comes_back_is_what_was_measured_and_takes_the_accounts_bytes(
    counts: Any, bits: list[int], head_dim: int, dtype: torch.dtype
) -> None:
    found, widths = numbers(counts, head_dim, dtype), np.array(bits)
    table = np.array(counts, dtype=np.int64)
    entries = PackedEntries.collect(table, piece_of(found), widths)
    shape = make_shape(head_dim=head_dim, dtype_bytes=torch.empty(0, dtype=dtype).element_size())
    stored = sum(tensor.untyped_storage().nbytes() for tensor in entries.tensors())
    assert stored == int(stored_bytes(table, widths[None], shape).sum())
    assert np.array_equal(entries.lengths, table)
    assert np.array_equal(entries.bits, widths)
    swapped = entries.rows(torch.tensor([1, 0, 1]))
    for row, head in np.ndindex(*table.shape):
        keys, values = rounded(found, row, head, bits[head])
        for one, place in ((entries, row), (swapped, 1 - row)):
            own = one.piece(place, head)
            assert torch.equal(own[0], keys)
            assert torch.equal(own[1], values)
            assert own[2].tolist() == list(range(0, 2 * int(table[row, head]), 2))
    limits = (1, 3000, 1 << 20)
    for part in entries.parts:
        for limit in limits:
            seen = 0
            for rows, places in part.runs(limit):
                some = part.numbers(rows, places)
                for row, place in np.ndindex(*some.lengths.shape):
                    head = part.heads[places][place]
                    own = entries.piece(rows.start + row, head)
                    start, end, rest, rest_end = some.spans[row * some.lengths.shape[1] + place]
                    for tensor, expected in ((some.keys, own[0]), (some.values, own[1])):
                        joined = torch.cat([tensor[start:end], tensor[rest:rest_end]])
                        assert torch.equal(joined, expected)
                    seen += 1
            assert seen == BATCH * len(part.heads)


def test_four_bits_by_hand() -> None:
    """Channel by channel for keys: 16 equal steps from the least to the largest number."""
    keys = torch.tensor([[0.0, -3.0], [15.0, 0.0], [7.4, 12.0]])
    values = torch.tensor([[0.0, 30.0], [1.0, 1.0], [-1.0, 0.0]])
    every = torch.arange(3)
    entries = PackedEntries.collect(
        np.array([[3]]), lambda row, head: (keys, values, every.int(), None, every), np.array([4])
    )
    found = entries.piece(0, 0)
    assert found[0].tolist() == [[0.0, -3.0], [15.0, 0.0], [7.0, 12.0]]
    assert found[1][1].tolist() == [1.0, 1.0]
    assert found[1][0].tolist() == [0.0, 30.0]
    codes = entries.parts[0].codes
    assert codes.keys.tolist() == [[0], [15 + 16 * 3], [7 + 16 * 15]]


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("scratch", [1, 1 << 14, 1 << 23])
@pytest.mark.parametrize("widths", [[4, 4, 4], [16, 8, 4], [8, 16, 8]])
def test_attention_is_that_over_the_rounded_entries(
    monkeypatch: pytest.MonkeyPatch, widths: list[int], scratch: int, biased: bool
) -> None:
    monkeypatch.setattr(module, "SCRATCH_NUMBERS", scratch)
    counts = np.array([[300, 64, 5], [128, 200, 0]])
    found = numbers(counts, 16, torch.float32)
    entries = PackedEntries.collect(counts, piece_of(found, biased), np.array(widths))
    plain = RaggedEntries.collect(counts, lambda row, head: entries.piece(row, head), biased=biased)
    generator = torch.Generator().manual_seed(1)
    for n_new in (1, 7):
        queries = torch.randn(BATCH, 2 * HEADS, n_new, 16, generator=generator)
        keys, values = torch.randn(2, BATCH, HEADS, n_new + 3, 16, generator=generator)
        visible = torch.ones(BATCH, n_new + 3, dtype=torch.bool)
        visible[1, 1] = False
        for options in (
            {},
            {"visible": visible, "softcap": 5.0, "sink_logits": torch.arange(2.0 * HEADS)},
        ):
            one = packed_attention(queries, entries, keys, values, scaling=0.3, **options)
            other = ragged_attention(queries, plain, keys, values, scaling=0.3, **options)
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("without_kernel")
def test_the_scratch_of_attention_is_bounded(
    peak_bytes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = np.array([[1000, 1000, 1000]] * 4)
    found = numbers(counts, 16, torch.float32)
    entries = PackedEntries.collect(counts, piece_of(found), np.array([4, 4, 4]))
    queries = torch.randn(4, 6, 2, 16)
    keys, values = torch.randn(2, 4, 3, 2, 16)
    whole = int(counts.sum()) * 2 * 16 * 4
    peaks = []
    for scratch in (1000 * 2 * 16, 1 << 23):
        monkeypatch.setattr(module, "SCRATCH_NUMBERS", scratch)
        attended = peak_bytes(lambda: packed_attention(queries, entries, keys, values, scaling=0.3))
        peaks.append(attended)
    assert peaks[0] <= 5 * whole // 12 < whole < peaks[1]


@pytest.mark.usefixtures("without_kernel")
def test_one_token_has_still_less_scratch(peak_bytes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few blocks' codes as floats: entries are a quarter of the keys alone as numbers."""
    counts = np.array([[1024, 1024, 1024]] * 4)
    found = numbers(counts, 64, torch.float32)
    entries = PackedEntries.collect(counts, piece_of(found), np.array([4, 4, 4]))
    queries = torch.randn(4, 3, 1, 64)
    keys, values = torch.randn(2, 4, 3, 1, 64)
    monkeypatch.setattr(decoding, "SCRATCH_NUMBERS", 4 * 128 * 64)
    # without the layout that is found out once
    packed_attention(queries, entries, keys, values, scaling=0.3)
    attended = peak_bytes(lambda: packed_attention(queries, entries, keys, values, scaling=0.3))
    assert 4 * 128 * 64 * 4 < attended < int(counts.sum()) * 64 * 4 // 4


@settings(deadline=None, max_examples=40)
@given(
    counts=counts_strategy,
    bits=st.sampled_from([8, 4]),
    head_dim=st.sampled_from([9, 10, 32, 64, 80, 128]),
    group=st.integers(1, 3),
    biased=st.booleans(),
    blocks=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
    offset=st.sampled_from([0.0, 5.0]),
)
def test_one_token_asks_codes_and_hears_what_the_numbers_say(
    counts: Any,
    bits: int,
    head_dim: int,
    group: int,
    biased: bool,
    blocks: int,
    dtype: torch.dtype,
    offset: float,
) -> None:
    found = numbers(counts, head_dim, dtype)
    found = {place: (keys + offset, values - offset) for place, (keys, values) in found.items()}
    entries = PackedEntries.collect(np.array(counts), piece_of(found, biased), np.full(HEADS, bits))
    (part,) = entries.parts
    generator = torch.Generator().manual_seed(group)
    queries = torch.randn(BATCH, group * HEADS, 1, head_dim, generator=generator).to(dtype)
    latest = torch.randn(2, BATCH, HEADS, blocks, head_dim, generator=generator).to(dtype)
    near = {"atol": 2e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.02}
    scaling = head_dim**-0.5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "SCRATCH_NUMBERS", blocks * 128 * head_dim)
        one = decoding.packed_decoding(queries, part, *latest, scaling=scaling)
    asked = Asked(queries=queries, keys=latest[0], values=latest[1], scaling=scaling)
    torch.testing.assert_close(one, unpacked_attention(asked, part), **near)
    exact = torch.empty(BATCH, 1, group * HEADS, head_dim, dtype=torch.float64)
    for row, head in np.ndindex(BATCH, HEADS):
        keys, values, _, bias, _ = entries.piece(row, head)
        own = slice(head * group, (head + 1) * group)
        stored = torch.cat([keys, latest[0, row, head]]).double()
        logits = queries[row, own, 0].double() @ stored.T * scaling
        if bias is not None:
            logits[:, : len(bias)] += bias
        stored = torch.cat([values, latest[1, row, head]]).double()
        exact[row, 0, own] = logits.softmax(-1) @ stored
    torch.testing.assert_close(one.double(), exact, **near)


@settings(deadline=None, max_examples=25)
@given(counts=counts_strategy, added=st.integers(1, 130), removed=st.integers(0, 40))
def test_more_entries_behind_and_fewer_again(counts: Any, added: int, removed: int) -> None:
    """Whole blocks stay bit for bit; a block that was not full is rounded once more."""
    table, widths = np.array(counts, dtype=np.int64), np.array([16, 8, 4])
    found = numbers(counts, 8, torch.float32)
    entries = PackedEntries.collect(table, piece_of(found), widths)
    first = 600
    keys, values = torch.randn(2, BATCH, HEADS, added, 8)
    columns = torch.arange(first, first + added, dtype=torch.int32)
    shown = torch.ones(BATCH, added, dtype=torch.bool)
    shown[1, 0] = False
    more = entries.and_then(keys, values, columns, shown)
    cut = more.before(first + added - removed)
    shape = make_shape(head_dim=8, dtype_bytes=4)
    for one in (more, cut):
        stored = sum(tensor.untyped_storage().nbytes() for tensor in one.tensors())
        assert stored == int(stored_bytes(one.lengths, widths[None], shape).sum())
    for row, head in np.ndindex(*table.shape):
        before, after = entries.piece(row, head), more.piece(row, head)
        count = int(table[row, head])
        full = count // 64 * 64
        new = shown[row].nonzero()[:, 0]
        assert torch.equal(after[0][:full], before[0][:full])
        assert torch.equal(after[1][:count], before[1])
        exact = torch.cat([before[0], keys[row, head, new]])
        expected = quantised_keys(exact[None, None, full:], int(widths[head]))[0, 0]
        assert torch.equal(after[0][full:], expected)
        expected = quantised_values(values[None, None, row, head, new], int(widths[head]))[0, 0]
        assert torch.equal(after[1][count:], expected)
        assert after[2].tolist() == [*before[2].tolist(), *columns[new].tolist()]
        kept = int((after[2] < first + added - removed).sum())
        for ours, theirs in zip(cut.piece(row, head)[:3], after[:3], strict=True):
            assert torch.equal(ours, theirs[:kept])
