"""Entries at every number of bits: what is stored, to the byte, and what comes back."""

import numpy as np
import packing_loop
import pytest
import torch
from attention_cases import kept_of, packed_of, stored_of
from factories import make_shape
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_oracle import pieces_of, rounded

from kvalloc.accounting.costs import head_bytes
from kvalloc.errors import InputError
from kvalloc.runtime.kept import KeptEntries
from kvalloc.runtime.packed import NO_COLUMN, LayerEntries
from kvalloc.runtime.quantization import rotated

BATCH, HEADS = 2, 3


def stored_in(entries):
    """Bytes of the storages."""
    return sum(tensor.untyped_storage().nbytes() for tensor in entries.tensors())


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
    counts, bits, head_dim, dtype
):
    if head_dim & (head_dim - 1):
        bits = [max(width, 4) for width in bits]
    table, widths = np.array(counts, dtype=np.int64), np.array(bits)
    stored = stored_of(counts, (head_dim, head_dim), dtype, biased=False)
    entries = packed_of(stored, table, bits)
    shape = make_shape(head_dim=head_dim, dtype_bytes=torch.empty(0, dtype=dtype).element_size())
    assert stored_in(entries) == int(head_bytes(table, widths[None], shape).sum())
    assert np.array_equal(entries.lengths, table)
    assert all((widths[list(part.heads)] == part.bits).all() for part in entries.parts)
    pieces, swapped = pieces_of(entries), pieces_of(entries.rows(torch.tensor([1, 0, 1])))
    for row, head in np.ndindex(*table.shape):
        keys, values = rounded(*stored[row, head][:2], bits[head])
        for own in (pieces[row, head], swapped[1 - row, head]):
            assert torch.equal(own.keys, keys)
            assert torch.equal(own.values, values)
            assert own.positions.tolist() == list(range(table[row, head]))


@pytest.mark.parametrize("bits", [8, 5, 4, 3])
def test_sinks_are_rounded_once_however_often_the_entries_beside_them_change(bits):
    """What is attended to most would else lose a little whenever anything is rounded anew."""
    torch.manual_seed(bits)
    lengths, places = np.array([[100]]), torch.arange(100, dtype=torch.int32)

    def packed(keys, values, before=None):
        entries = KeptEntries(keys=keys, values=values, positions=places, lengths=lengths)
        found = LayerEntries.packed(entries, np.array([bits]), before)
        return found, found.numbers().parts[0]

    keys, values = torch.rand(100, 64), torch.rand(100, 64)
    keys[50], keys[51] = -0.9, 1.4  # the least and the largest leave
    before, first = packed(keys, values)
    now = first
    for _ in range(3):
        stays = torch.cat([torch.arange(4), 4 + torch.randperm(46)[:30]])
        keys, values = (
            torch.cat([own[stays], torch.rand(66, 64)]) for own in (now.keys, now.values)
        )
        anew = packed(keys, values)[1]
        before, now = packed(keys, values, before)
        assert (anew.keys[:4] != first.keys[:4]).any()
        assert torch.equal(now.keys[:4], first.keys[:4])
        torch.testing.assert_close(now.values[:4], first.values[:4])


def test_three_bits_are_for_powers_of_two():
    with pytest.raises(InputError, match="3 bits for heads of 6 numbers, expected a power of two"):
        rotated(torch.zeros(1, 6))


@settings(deadline=None, max_examples=50)
@given(
    counts=counts_strategy,
    bits=st.sampled_from([[16, 8, 3], [5, 16, 4], [4, 4, 4], [16, 16, 16]]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    biased=st.booleans(),
    n_new=st.integers(1, 130),
    order=st.permutations(range(BATCH)),
    seed=st.integers(0, 99),
)
def test_more_entries_behind_and_rows_taken_apart_and_joined_are_what_a_loop_stores(
    counts, bits, dtype, biased, n_new, order, seed
):
    """Bit for bit, of each head what it keeps of the new ones; all rows, heads and widths."""
    torch.manual_seed(seed)
    table, widths = np.array(counts, dtype=np.int64), np.array(bits)
    stored = stored_of(counts, (8, 8), dtype, biased=biased)
    entries = packed_of(stored, table, bits)
    keys, values = torch.randn(2, BATCH, HEADS, n_new, 8).to(dtype)
    columns = torch.arange(600, 600 + n_new, dtype=torch.int32)
    kept = torch.rand(BATCH, HEADS, n_new) < torch.rand(BATCH, HEADS, 1) * 1.5 - 0.2
    added = kept_of(keys, values, columns, kept, kept.sum(dim=2).numpy())
    more = entries.with_more(added)
    rows = [more.rows(torch.tensor([row])) for row in order]
    again = LayerEntries.joined(rows, np.argsort(order))
    shape = make_shape(head_dim=8, dtype_bytes=dtype.itemsize)
    for one in (more, again):
        stored_bytes = head_bytes(one.lengths, widths[None], shape, biased=biased)
        assert stored_in(one) == int(stored_bytes.sum())
    padded, half = more.padded()[2], dtype == torch.float32
    pieces_of_more, pieces_of_again = pieces_of(more), pieces_of(again)
    for row, head in np.ndindex(*table.shape):
        new, width = kept[row, head].nonzero()[:, 0], bits[head]
        own_keys, own_values, bias = stored[row, head]
        places = [*range(len(own_keys)), *columns[new].tolist()]
        behind = keys[row, head, new], values[row, head, new]
        for one, pieces in ((more, pieces_of_more), (again, pieces_of_again)):
            piece = pieces[row, head]
            assert piece.positions.tolist() == places
            assert (piece.bias is None) == (bias is None)
            if bias is not None:
                expected = torch.cat([bias, torch.zeros(len(new))])
                assert torch.equal(piece.bias, expected)
            if width == 16:
                numbers = piece.keys, piece.values
                for ours, *both in zip(numbers, (own_keys, own_values), behind, strict=True):
                    expected = torch.cat(both)
                    assert torch.equal(ours, expected.half().to(dtype) if half else expected)
                continue
            part = next(part for part in one.parts if part.bits == width)
            loop = packing_loop.pack_segment(own_keys, own_values, width)
            loop = packing_loop.longer_segment(loop, *behind, width)
            found = packing_loop.stored_of_part(part, row, part.heads.index(head))
            for ours, theirs in zip(found, loop, strict=True):
                assert np.array_equal(ours, theirs)
        ends = [NO_COLUMN] * (padded.shape[2] - len(places))
        assert padded[row, head].tolist() == [*places, *ends]
        assert torch.equal(more.padded()[2], padded)
