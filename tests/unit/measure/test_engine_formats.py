"""Fake quantisation against loops over single blocks that follow each format's definition."""

import numpy as np
import pytest
import torch
from tiny_models import tiny_model

from kvalloc.accounting.engine_formats import FORMATS
from kvalloc.measure.engine_formats import gguf_order, round_trip
from kvalloc.models.attention import probe_of
from kvalloc.models.rope import UNKNOWN
from kvalloc.runtime.quantization import rotated

IQ4_NL = np.float32([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
E2M1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def numbers(n_tokens=40, dim=64, heads=2, seed=0):
    """Return keys with a few large channels, and one block of zeros."""
    random = np.random.default_rng(seed)
    made = random.standard_normal((1, heads, n_tokens, dim)) * random.gamma(1, 2, dim)
    made[0, 0, 3] = 0
    return torch.from_numpy(made.astype(np.float32))


def hadamard(size):
    """Entry (i, j) is -1 to the number of ones that i and j share, over the root of the size."""
    ones = [[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    return np.array(ones) / np.sqrt(size)


def half(number):
    return np.float32(np.float16(number))


def q8_0(block):
    scale = np.float32(np.abs(block).max() / 127)
    return block if scale == 0 else np.rint(block / scale) * half(scale)


def signed(block, bits):
    largest = block[np.argmax(np.abs(block))]
    scale = largest / np.float32(-(2 ** (bits - 1)))
    if scale == 0:
        return block
    codes = np.minimum(np.trunc(block / scale + 2 ** (bits - 1) + 0.5), 2**bits - 1)
    return (codes - 2 ** (bits - 1)) * half(scale)


def minimum(block, bits, rounded=half):
    low, levels = block.min(), 2**bits - 1
    scale = (block.max() - low) / np.float32(levels)
    codes = np.trunc((block - low) / scale + 0.5) if scale else np.zeros_like(block)
    return np.minimum(codes, levels) * rounded(scale) + rounded(low)


def iq4_nl(block):
    scale = block[np.argmax(np.abs(block))] / -127
    if scale == 0:
        return block
    nearest = np.array([IQ4_NL[np.argmin(np.abs(IQ4_NL - one / scale))] for one in block])
    weights = block**2
    return nearest * half((weights * nearest * block).sum() / (weights * nearest**2).sum())


def mlx(block, bits):
    low, high, levels = block.min(), block.max(), 2**bits - 1
    scale = max((high - low) / levels, 1e-7)
    scale, edge = (scale, low) if abs(low) > abs(high) else (-scale, high)
    steps = np.rint(edge / scale)
    scale, bias = (edge / steps, edge) if steps else (scale, 0)
    return np.clip(np.rint((block - bias) / scale), 0, levels) * scale + bias


def kvtuner(block, bits):
    scale = max(block.max() - block.min(), 1e-5) / (2**bits - 1)
    zero = np.rint(block.min() / scale) + 2 ** (bits - 1)
    codes = np.clip(np.rint(block / scale - zero), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return (codes + zero) * scale


def exl3(block, bits):
    turned = hadamard(32) @ block
    scale, levels = np.abs(turned).max() + 1e-10, 2**bits
    codes = np.clip(np.floor((turned / scale + 1) * levels / 2), 0, levels - 1)
    return hadamard(32) @ (((2 * codes + 1) / levels - 1) * half(scale))


def e4m3(number, bits=3, least=-6, largest=448):
    """Round to some bits of mantissa; with a smallest exponent, and a largest number."""
    number = np.clip(np.asarray(number, dtype=np.float64), -largest, largest)
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(number), 1e-30))), least)
    step = 2.0 ** (exponent - bits)
    return np.rint(number / step) * step


def nvfp4(block, largest):
    whole = largest / (6 * 448)
    scale = e4m3(np.abs(block).max() / 6 / whole) * whole
    if scale == 0:
        return block * 0
    sizes = [E2M1[np.argmin(np.abs(E2M1 - abs(one) / scale))] for one in block]
    return np.sign(block) * np.array(sizes) * scale


ORACLES = {
    "q8_0": (q8_0, 32),
    "q5_1": (lambda block: minimum(block, 5), 32),
    "q5_0": (lambda block: signed(block, 5), 32),
    "q4_1": (lambda block: minimum(block, 4), 32),
    "q4_0": (lambda block: signed(block, 4), 32),
    "iq4_nl": (iq4_nl, 32),
    **{
        f"mlx_{bits}_{group}": (lambda block, bits=bits: mlx(block, bits), group)
        for bits, group in ((8, 64), (6, 64), (4, 32), (4, 64), (3, 64))
    },
    **{f"u{b}_token": (lambda one, b=b: minimum(one, b, np.float32), 64) for b in (8, 4)},
    **{f"kvt_{b}": (lambda one, b=b: kvtuner(one, b), 64) for b in (8, 4, 2)},
    **{f"exl3_{b}": (lambda one, b=b: exl3(one, b), 32) for b in range(2, 9)},
    "fp8": (e4m3, 64),
    "fp8_e5m2": (lambda block: e4m3(block, 2, -14, 57344), 64),
}


def by_blocks(function, rows, block):
    return np.stack([function(one) for one in rows.reshape(-1, block)]).reshape(rows.shape)


def turned_by(block, rows):
    blocks = rows.reshape(*rows.shape[:-1], -1, block)
    return (blocks @ hadamard(block)).reshape(rows.shape)


def compared(found, expected, scale):
    """Nearly all numbers agree; a tie in float32 may fall to either side by one step."""
    difference = np.abs(found - expected) / scale
    assert np.quantile(difference, 0.995) < 2e-3
    assert difference.mean() < 1e-3


@pytest.mark.parametrize("name", ORACLES)
def test_a_format_rounds_as_its_definition_says(name):
    made = numbers()
    function, block = ORACLES[name]
    given = made.numpy()
    if FORMATS[name].ggml:
        given = turned_by(64, given).astype(np.float32)
    expected = by_blocks(function, given, block)
    if FORMATS[name].ggml:
        expected = turned_by(64, expected)
    for keys in (True, False):
        found = round_trip(made, name, keys=keys)
        assert (found.shape, found.dtype) == (made.shape, made.dtype)
        compared(found.numpy(), expected, made.std().item())
    error = (round_trip(made, name, keys=True) - made).square().mean().sqrt() / made.std()
    assert 0 < error < 4 * 2.0 ** -FORMATS[name].code_bits or FORMATS[name].block == 0


def test_nvfp4_has_a_scale_of_the_tensor_and_one_of_each_block():
    made = numbers()
    largest = made.abs().max().item()
    expected = by_blocks(lambda block: nvfp4(block, largest), made.numpy(), 16)
    compared(round_trip(made, "nvfp4", keys=False).numpy(), expected, made.std().item())


@pytest.mark.parametrize("bits", [8, 4])
def test_a_block_by_channel_is_32_tokens_and_the_last_one_is_shorter(bits):
    made = numbers(40)
    expected = np.empty_like(made.numpy())
    for begin, end in ((0, 32), (32, 40)):
        rows = made.numpy()[:, :, begin:end].swapaxes(2, 3)
        rounded = by_blocks(lambda one: minimum(one, bits, np.float32), rows, end - begin)
        expected[:, :, begin:end] = rounded.swapaxes(2, 3)
    found = round_trip(made, f"u{bits}_channel", keys=True)
    compared(found.numpy(), expected, made.std().item())


def test_16_bits_and_no_tokens_are_left_alone():
    made = numbers()
    assert round_trip(made, "f16", keys=True) is made
    for name in FORMATS:
        assert round_trip(made[:, :, :0], name, keys=True).shape == (1, 2, 0, 64)


def test_ggml_turns_keys_in_the_largest_power_of_two_and_values_by_64():
    made = numbers(dim=128)
    for keys, block in ((True, 128), (False, 64)):
        given = turned_by(block, made.numpy()).astype(np.float32)
        expected = turned_by(block, by_blocks(q8_0, given, 32))
        found = round_trip(made, "q8_0", keys=keys).numpy()
        compared(found, expected, made.std().item())


def test_heads_of_no_multiple_of_64_are_not_turned_and_lie_in_the_order_of_gguf():
    made, order = numbers(dim=32 * 3), [*range(0, 96, 2), *range(1, 96, 2)]
    expected = np.empty_like(made.numpy())
    expected[..., order] = by_blocks(lambda one: signed(one, 4), made.numpy()[..., order], 32)
    found = round_trip(made, "q4_0", keys=True, order=order)
    compared(found.numpy(), expected, made.std().item())


@pytest.mark.parametrize("size", [32, 64, 128])
def test_the_turn_is_orthogonal_and_leaves_unrounded_attention_alone(size):
    matrix = rotated(torch.eye(size)).numpy()
    np.testing.assert_allclose(matrix, hadamard(size), atol=1e-6)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-6)
    keys, queries = (numbers(8, size, seed=seed)[0, 0] for seed in (1, 2))
    np.testing.assert_allclose(
        rotated(queries) @ rotated(keys).T, queries @ keys.T, rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize(("kind", "reorders"), [("llama", True), ("qwen2", False)])
def test_gguf_has_rotated_pairs_as_neighbours_in_models_of_the_llama_family(kind, reorders):
    model = tiny_model(kind)
    order = gguf_order(model, probe_of(model).rotations[0], 8)
    assert order == ([0, 4, 1, 5, 2, 6, 3, 7] if reorders else None)
    assert gguf_order(model, UNKNOWN, 8) is None
