"""What fewer bits do to keys, values and attention output, against plain loops."""

import numpy as np
import pytest
import torch
from tiny_models import WordTokenizer, tiny_model, tiny_profile, words

from kvalloc.allocation.decision import solve
from kvalloc.models.attention import AttentionStates, intercept_attention
from kvalloc.runtime.quantization import output_fidelity, quantised_keys, quantised_values

TOKENIZER = WordTokenizer()


def _one_block(block, bits):
    """Numbers of one block, quantised one by one, with float16 scale and minimum."""
    low, high = float(block.min()), float(block.max())
    least = float(np.float16(low))
    scale = float(np.float16(np.float32(high - low) / np.float32(2**bits - 1)))
    if scale == 0:
        return np.full_like(block, least)
    steps = [min(max(round((float(x) - least) / scale), 0), 2**bits - 1) for x in block]
    return np.array([step * scale + least for step in steps])


def keys_by_loops(keys, bits):
    """Each channel over blocks of 64 tokens."""
    found = np.empty_like(keys)
    for start in range(0, keys.shape[0], 64):
        for channel in range(keys.shape[1]):
            part = slice(start, start + 64), channel
            found[part] = _one_block(keys[part], bits)
    return found


def values_by_loops(values, bits):
    """Each token over blocks of 64 channels; at 5 bits values have 4."""
    return keys_by_loops(values.T, 4 if bits == 5 else bits).T


def test_constant_and_huge_numbers_come_back():
    constant = torch.full((1, 1, 70, 5), 1.5)
    assert torch.equal(quantised_keys(constant, 4), constant)
    huge = torch.tensor([[[[1e6, -1e6, 0.0]]]])
    assert bool(torch.isfinite(quantised_values(huge, 4)).all())
    assert quantised_keys(huge, 16) is quantised_values(huge, 16) is huge
    half = torch.randn(1, 2, 9, 4).half()
    assert quantised_keys(half, 8).dtype == torch.float16


def _states(seed=0, *, tokens=90):
    torch.manual_seed(seed)
    return AttentionStates(
        layer=0,
        queries=torch.randn(2, 6, tokens, 8),
        keys=torch.randn(2, 2, tokens, 8),
        values=torch.randn(2, 2, tokens, 8),
        scaling=8**-0.5,
        mask=None,
    )


def _output(states, keys, values, at):
    """Attention output of the last 5 rows of one sample's second KV head, by hand."""
    tokens = keys.shape[0]
    rows = []
    for head in range(3, 6):
        for row in range(tokens - 5, tokens):
            query = states.queries[at, head, row].double().numpy()
            logits = keys[: row + 1] @ query * states.scaling
            weights = np.exp(logits - logits.max())
            rows.append(weights / weights.sum() @ values[: row + 1])
    return np.array(rows)


@pytest.mark.parametrize("bits", [8, 5, 4])
def test_fidelity_is_that_of_the_last_rows_output(bits):
    states = _states()
    found = output_fidelity(states, bits=bits, rows=5)
    assert found.shape == (2, 2)
    for at in range(2):
        keys = states.keys[at, 1].double().numpy()
        values = states.values[at, 1].double().numpy()
        plain = _output(states, keys, values, at)
        fewer = _output(states, keys_by_loops(keys, bits), values_by_loops(values, bits), at)
        expected = 1 - np.linalg.norm(fewer - plain) / np.linalg.norm(plain)
        assert float(found[at, 1]) == pytest.approx(expected, abs=5e-4 if bits == 8 else 5e-3)


def test_an_output_of_zero_is_kept_whole():
    states = _states()
    states.values.zero_()
    assert bool((output_fidelity(states, bits=4, rows=4) == 1).all())


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_profile_holds_what_was_measured(kind):
    model = tiny_model(kind)
    plain = tiny_profile(model)
    found = tiny_profile(model, bits=(4, 16, 8))
    np.testing.assert_array_equal(found.curves, plain.curves)
    assert plain.bit_widths is None
    assert plain.bit_fidelity is None
    assert found.bit_widths.tolist() == [16, 8, 4]
    full = list(found.shape.full_layers)
    decided = found.bit_fidelity[:, full]
    assert bool((decided[..., 0] == 1).all())
    assert bool((decided[..., 1] > decided[..., 2]).all())
    seen = {}

    def handler(states, compute):
        seen[states.layer] = output_fidelity(states, bits=4, rows=8)[0].double().numpy()
        return compute(states.mask)

    ids = TOKENIZER(words(300))["input_ids"]
    matched = 0
    for start in range(0, 300, 60):
        with torch.no_grad(), intercept_attention(model, handler):
            model(torch.tensor([ids[start : start + 60]]))
        piece = np.stack([seen[layer] for layer in full])
        matched += sum(np.allclose(piece, decided[s, ..., 2], atol=1e-6) for s in range(2))
    assert matched == 2
    told = solve(found, budget="25%", bits=(16, 8, 4))
    assert told.bits is not None
