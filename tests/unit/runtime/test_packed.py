"""Entries at every number of bits: what is stored, to the byte, and what comes back."""

import numpy as np
import pytest
import torch
from attention_cases import packed_of, stored_of
from factories import make_shape
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_oracle import pieces_of, rounded

from kvalloc.accounting.costs import head_bytes
from kvalloc.errors import InputError
from kvalloc.runtime.kept import KeptEntries
from kvalloc.runtime.packed import LayerEntries
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
    stored = stored_of(counts, (head_dim, head_dim), dtype)
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
