"""Entries at every number of bits: what is stored, to the byte, and what comes back."""

import numpy as np
import pytest
import torch
from attention_cases import flat_of, packed_of, stored_of
from factories import make_shape
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_oracle import pieces_of, rounded

from kvalloc.accounting.costs import head_bytes
from kvalloc.errors import InputError
from kvalloc.runtime.kept import NO_COLUMN, pack
from kvalloc.runtime.quantization import rotated

BATCH, HEADS = 2, 3


def tables(each):
    """A number for each row and head."""
    several = st.lists(each, min_size=BATCH * HEADS, max_size=BATCH * HEADS)
    return several.map(lambda own: np.array(own).reshape(BATCH, HEADS))


@settings(deadline=None, max_examples=25)
@given(
    counts=tables(st.integers(0, 270)),
    bits=tables(st.sampled_from([16, 8, 5, 4, 3])),
    head_dim=st.sampled_from([4, 8, 9, 64, 80]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 999),
)
def test_what_comes_back_is_what_was_measured_and_takes_the_accounts_bytes(
    counts, bits, head_dim, dtype, seed
):
    torch.manual_seed(seed)
    if head_dim & (head_dim - 1):
        bits = np.maximum(bits, 4)
    stored = {  # none so near 0 that its channel, and with it all heads, has scales in bfloat16
        at: (keys + keys.sign() * 0.01, values)
        for at, (keys, values) in stored_of(counts, (head_dim, head_dim), dtype).items()
    }
    kept = packed_of(stored, counts, bits)
    shape = make_shape(head_dim=head_dim, dtype_bytes=dtype.itemsize)
    size = sum(own.untyped_storage().nbytes() for own in kept.tensors())
    assert size == int(head_bytes(counts, bits, shape).sum())
    assert np.array_equal(kept.lengths, counts)
    assert all((bits.flat[part.segments] == part.bits).all() for part in kept.parts)
    pieces, swapped = pieces_of(kept), pieces_of(kept.select(np.array([1, 0, 1])))
    for row, head in np.ndindex(*counts.shape):
        keys, values = rounded(*stored[row, head], bits[row, head])
        for own in (pieces[row, head], swapped[1 - row, head]):
            assert torch.equal(own.keys, keys)
            assert torch.equal(own.values, values)
            assert own.positions.tolist() == list(range(counts[row, head]))
    dense = kept.padded(np.array([1]))
    for head, count in enumerate(counts[1]):
        own = pieces[1, head]
        for found, expected in zip(dense, (own.keys, own.values, own.positions), strict=True):
            assert torch.equal(found[0, head, :count], expected)
        assert (dense[2][0, head, count:] == NO_COLUMN).all()


@pytest.mark.parametrize("bits", [8, 5, 4, 3])
def test_sinks_are_rounded_once_however_often_the_entries_beside_them_change(bits):
    """What is attended to most would else lose a little whenever anything is rounded anew."""
    torch.manual_seed(bits)

    def packed(keys, values, before=()):
        found = pack(flat_of({(0, 0): (keys, values)}, np.array([[100]])), bits, before)
        return [found], found.unpacked((keys, values))

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
