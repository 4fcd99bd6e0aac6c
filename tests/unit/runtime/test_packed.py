"""Entries at every number of bits: what is stored, to the byte, and what comes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import packed_of, stored_of
from factories import make_shape
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_oracle import rounded

from kvalloc.accounting.costs import stored_bytes
from kvalloc.errors import InputError
from kvalloc.runtime.packed import LayerEntries
from kvalloc.runtime.quantization import rotated

BATCH, HEADS = 2, 3


def stored_in(entries: LayerEntries) -> int:
    """Bytes of the storages."""
    return sum(tensor.untyped_storage().nbytes() for tensor in entries.tensors())


def of_one_head(keys: torch.Tensor, values: torch.Tensor, bits: int) -> LayerEntries:
    return packed_of({(0, 0): (keys, values, None)}, np.array([[len(keys)]]), [bits])


counts_strategy = st.lists(
    st.lists(st.integers(0, 270), min_size=HEADS, max_size=HEADS), min_size=BATCH, max_size=BATCH
)


@settings(deadline=None, max_examples=25)
@given(
    counts=counts_strategy,
    bits=st.lists(st.sampled_from([16, 8, 5, 4, 3]), min_size=HEADS, max_size=HEADS),
    head_dim=st.sampled_from([4, 8, 9, 64, 80]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_what_comes_back_is_what_was_measured_and_takes_the_accounts_bytes(
    counts: Any, bits: list[int], head_dim: int, dtype: torch.dtype
) -> None:
    if head_dim & (head_dim - 1):
        bits = [max(width, 4) for width in bits]
    table, widths = np.array(counts, dtype=np.int64), np.array(bits)
    stored = stored_of(counts, (head_dim, head_dim), dtype, biased=False)
    entries = packed_of(stored, table, bits)
    shape = make_shape(head_dim=head_dim, dtype_bytes=torch.empty(0, dtype=dtype).element_size())
    assert stored_in(entries) == int(stored_bytes(table, widths[None], shape).sum())
    assert np.array_equal(entries.lengths, table)
    assert np.array_equal(entries.bits, widths)
    swapped = entries.rows(torch.tensor([1, 0, 1]))
    for row, head in np.ndindex(*table.shape):
        keys, values = rounded(*stored[row, head][:2], bits[head])
        for one, place in ((entries, row), (swapped, 1 - row)):
            own = one.piece(place, head)
            assert torch.equal(own[0], keys)
            assert torch.equal(own[1], values)
            assert own[2].tolist() == list(range(table[row, head]))


def test_four_bits_by_hand() -> None:
    """Channel by channel for keys: 16 equal steps from the least to the largest number."""
    keys = torch.tensor([[0.0, -3.0], [15.0, 0.0], [7.4, 12.0]])
    values = torch.tensor([[0.0, 30.0], [1.0, 1.0], [-1.0, 0.0]])
    entries = of_one_head(keys, values, 4)
    found = entries.piece(0, 0)
    assert found[0].tolist() == [[0.0, -3.0], [15.0, 0.0], [7.0, 12.0]]
    assert found[1][1].tolist() == [1.0, 1.0]
    assert found[1][0].tolist() == [0.0, 30.0]
    codes = entries.parts[0]
    assert codes.keys.tolist() == [[0], [15 + 16 * 3], [7 + 16 * 15]]


def test_three_bits_by_hand() -> None:
    """Keys at 4 bits; of values, turned by Hadamard's matrix, eight codes in three bytes."""
    sign = torch.tensor([[1.0, 1], [1, -1]])
    matrix = torch.kron(torch.kron(sign, sign), sign) / 8**0.5
    turned = torch.tensor([[0.0, 7, 1, 2, 3, 4, 5, 6], [0, 14, 2, 4, 6, 8, 10, 12]])
    values = turned @ matrix
    assert torch.allclose(rotated(values), turned, atol=1e-5)
    assert torch.allclose(rotated(rotated(values)), values, atol=1e-5)
    keys = torch.arange(16.0).view(2, 8)
    entries = of_one_head(keys, values, 3)
    codes = entries.parts[0]
    assert codes.keys.shape == (2, 4)
    word = sum(code << 3 * place for place, code in enumerate([0, 7, 1, 2, 3, 4, 5, 6]))
    for row in codes.values.tolist():
        assert row[:3] == [word & 255, word >> 8 & 255, word >> 16]
        assert len(row) == 3 + 4
    assert torch.allclose(entries.piece(0, 0)[1], values, atol=1e-2)
    with pytest.raises(InputError, match="3 bits for heads of 6 numbers, expected a power of two"):
        rotated(torch.zeros(1, 6))


def test_five_bits_by_hand() -> None:
    """Eight codes of a key in five bytes; values as at 4 bits, not turned."""
    codes = [0, 31, 1, 17, 2, 30, 5, 9]
    keys = torch.tensor([codes, [31, 0, 31, 31, 31, 0, 31, 31], [0, 31, 0, 0, 0, 31, 0, 0]])
    values = torch.tensor([[0.0, 15, 1, 2, 3, 4, 5, 6]]).expand(3, 8)
    entries = of_one_head(keys.float(), values, 5)
    (stored,) = entries.parts
    word = sum(code << 5 * place for place, code in enumerate(codes))
    assert stored.keys[0].tolist() == list(word.to_bytes(5, "little"))
    assert stored.values[0, :4].tolist() == [240, 33, 67, 101]
    assert stored.values.shape == (3, 4 + 4)
    assert torch.equal(entries.piece(0, 0)[0], keys.float())
    assert torch.equal(entries.piece(0, 0)[1], values)


@settings(deadline=None, max_examples=25)
@given(
    counts=counts_strategy,
    bits=st.sampled_from([[16, 8, 3], [5, 16, 4]]),
    added=st.integers(1, 130),
    removed=st.integers(0, 40),
)
def test_more_entries_behind_and_fewer_again(
    counts: Any, bits: list[int], added: int, removed: int
) -> None:
    """Whole blocks stay bit for bit; a block that was not full is rounded once more."""
    table, widths = np.array(counts, dtype=np.int64), np.array(bits)
    entries = packed_of(stored_of(counts, (8, 8), torch.float32, biased=False), table, bits)
    first = 600
    keys, values = torch.randn(2, BATCH, HEADS, added, 8)
    columns = torch.arange(first, first + added, dtype=torch.int32)
    shown = torch.ones(BATCH, added, dtype=torch.bool)
    shown[1, 0] = False
    more = entries.and_then(keys, values, columns, shown)
    cut = more.before(first + added - removed)
    shape = make_shape(head_dim=8, dtype_bytes=4)
    for one in (more, cut):
        assert stored_in(one) == int(stored_bytes(one.lengths, widths[None], shape).sum())
    for row, head in np.ndindex(*table.shape):
        before, after = entries.piece(row, head), more.piece(row, head)
        count = int(table[row, head])
        full = count // 64 * 64
        new = shown[row].nonzero()[:, 0]
        assert torch.equal(after[0][:full], before[0][:full])
        assert torch.equal(after[1][:count], before[1])
        exact = torch.cat([before[0], keys[row, head, new]])
        expected = rounded(exact[full:], values[row, head, new], int(widths[head]))
        assert torch.equal(after[0][full:], expected[0])
        assert torch.equal(after[1][count:], expected[1])
        assert after[2].tolist() == [*before[2].tolist(), *columns[new].tolist()]
        kept = int((after[2] < first + added - removed).sum())
        for ours, theirs in zip(cut.piece(row, head)[:3], after[:3], strict=True):
            assert torch.equal(ours, theirs[:kept])
