"""Keys and values at fewer bits, against plain loops."""

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard

from kvalloc.runtime.quantization import quantised_keys, quantised_values


def _one_block(block, bits):
    """Numbers of one block, quantised one by one, with float16 scale and minimum."""
    low, high = float(block.min()), float(block.max())
    least = float(np.float16(low))
    scale = float(np.float16(np.float32(high - low) / np.float32(2**bits - 1)))
    steps = [min(max(round((float(x) - least) / scale), 0), 2**bits - 1) for x in block]
    return np.array([step * scale + least for step in steps])


def keys_by_loops(keys, bits):
    """Each channel over blocks of 64 tokens."""
    rounded = np.empty_like(keys)
    for start in range(0, keys.shape[0], 64):
        for channel in range(keys.shape[1]):
            part = slice(start, start + 64), channel
            rounded[part] = _one_block(keys[part], bits)
    return rounded


@pytest.mark.parametrize(
    ("bits", "key_bits", "value_bits", "dim", "turned"),
    [(8, 8, 8, 8, False), (5, 5, 4, 8, True), (4, 4, 4, 8, True), (3, 4, 3, 8, True),
     (5, 5, 4, 6, False), (4, 4, 4, 6, False)],
)  # fmt: skip
def test_every_number_is_rounded_within_its_block(bits, key_bits, value_bits, dim, turned):
    torch.manual_seed(0)
    keys, values = torch.randn(2, 1, 1, 90, dim)
    expected = keys_by_loops(keys[0, 0].double().numpy(), key_bits)
    np.testing.assert_allclose(quantised_keys(keys, bits)[0, 0], expected, atol=2e-3)
    # each token over blocks of 64 channels, turned below 8 bits where they are a power of two
    turn = hadamard(dim) / dim**0.5 if turned else np.eye(dim)
    expected = keys_by_loops((values[0, 0].double().numpy() @ turn).T, value_bits).T @ turn
    np.testing.assert_allclose(quantised_values(values, bits)[0, 0], expected, atol=2e-3)


def test_constant_and_huge_numbers_come_back():
    constant = torch.full((1, 1, 70, 5), 1.5)
    assert torch.equal(quantised_keys(constant, 4), constant)
    huge = torch.tensor([[[[1e6, -1e6, 0.0]]]])
    assert bool(torch.isfinite(quantised_values(huge, 4)).all())
    assert quantised_keys(huge, 16) is quantised_values(huge, 16) is huge
    half = torch.randn(1, 2, 9, 4).half()
    assert quantised_keys(half, 8).dtype == torch.float16
