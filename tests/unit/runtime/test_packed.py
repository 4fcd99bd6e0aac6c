"""Entries at every number of bits: what is stored, to the byte, and what comes back."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_cases import counted, flat_of, packed_of, stored_of, widths_of
from factories import make_shape
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_choice import WITH, WITHOUT, kernel_choice
from runtime_oracle import rounded
from scipy.linalg import hadamard
from tiny_models import equal_budgets, tiny_model

import kvalloc
from kvalloc.accounting.costs import WIDTHS, head_bytes
from kvalloc.errors import InputError, UnsupportedRequestError
from kvalloc.models.names import cache_keyword
from kvalloc.runtime.kept import NO_COLUMN, added, extended, joined, pack, packed
from kvalloc.runtime.key_rounding import round_kept_keys
from kvalloc.runtime.quantization import (
    quantised_keys,
    quantised_values,
    rotated,
)

BATCH, HEADS = 2, 3


def tables(each):
    """One for each row and head."""
    rows = st.lists(st.lists(each, min_size=HEADS, max_size=HEADS), min_size=BATCH, max_size=BATCH)
    return rows.map(lambda own: own if isinstance(own[0][0], tuple) else np.array(own))


@settings(deadline=None, max_examples=25)
@given(
    counts=tables(st.integers(0, 270)),
    bits=tables(st.sampled_from([(16,), (8,), (5,), (4,), (3,), (2,), (8, 4), (16, 5, 2)])),
    head_dim=st.sampled_from([4, 8, 9, 64, 80]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 999),
)
def test_what_comes_back_is_what_was_measured_and_takes_the_accounts_bytes(
    counts, bits, head_dim, dtype, seed
):
    torch.manual_seed(seed)
    least = 4 if head_dim & (head_dim - 1) else 2
    bits = [[tuple(max(width, least) for width in own) for own in row] for row in bits]
    stored = {  # none so near 0 that its channel, and with it all heads, has scales in bfloat16
        at: (keys + keys.sign() * 0.01, values)
        for at, (keys, values) in stored_of(counts, (head_dim, head_dim), dtype).items()
    }
    kept = packed_of(stored, counts, bits)
    shape = make_shape(head_dim=head_dim, dtype_bytes=dtype.itemsize)
    size = sum(own.untyped_storage().nbytes() for own in kept.tensors())
    widths = widths_of(counts, bits)
    sizes = [(np.count_nonzero(own == one), one) for own in widths.values() for one in {*own}]
    assert size == sum(int(head_bytes(*each, shape)) for each in sizes)
    assert np.array_equal(kept.lengths, counts)
    both = kept, kept.select(np.array([1, 0, 1]))
    dense, swapped = (own.padded(np.arange(own.rows)) for own in both)
    alone = kept.padded(np.array([1]), 2)
    for (row, head), count in np.ndenumerate(counts):
        expected = [torch.empty(count, head_dim, dtype=dtype) for _ in range(2)]
        for width in {*widths[row, head]}:
            own = torch.from_numpy(widths[row, head] == width)
            numbers = [one[own] for one in stored[row, head]]
            for found, one in zip(expected, rounded(*numbers, width), strict=True):
                found[own] = one
        of_head = [(dense, row, head), (swapped, 1 - row, head)]
        for found, at, place in [*of_head, *[(alone, 0, 0)] * ((row, head) == (1, 2))]:
            keys, values, positions = (one[at, place] for one in found)
            assert torch.equal(keys[:count], expected[0])
            assert torch.equal(values[:count], expected[1])
            assert positions[:count].tolist() == [*range(count)]
            assert (positions[count:] == NO_COLUMN).all()


@settings(deadline=None, max_examples=10)
@given(
    counts=tables(st.integers(0, 150)), more=tables(st.integers(0, 150)), seed=st.integers(0, 99)
)
def test_new_entries_stand_behind_those_of_their_width(counts, more, seed):
    """Their values are rounded by themselves; keys in blocks, the last one of which is filled.

    Positions of 2 bytes come back, also beyond 65,536.
    """
    torch.manual_seed(seed)
    stored = stored_of(counts + more, (8, 8), torch.float32)
    bits = [[(8, 4), 5, (16, 3)], [(16, 8, 5), (4, 3), 16]]
    numbers, expected = flat_of(stored, counts + more), packed_of(stored, counts + more, bits)
    numbers = replace(numbers, tokens=numbers.positions * 700).compact(300 * 700)
    widths = [*widths_of(counts + more, bits).values()]
    ends = numbers.spans.ends
    cuts = [
        np.split(np.arange(end - own.size, end), [n])
        for end, own, n in zip(ends, widths, counts.flat, strict=True)
    ]
    parts = []
    for which in range(2):
        places = np.concatenate([cut[which] for cut in cuts])
        part = replace(
            numbers,
            keys=numbers.keys[places],
            values=numbers.values[places],
            tokens=numbers.positions[places],
            pages=None,
            lengths=np.array([len(cut[which]) for cut in cuts]),
        ).compact(300 * 700)
        own = np.split(np.concatenate(widths)[places], part.lengths.cumsum()[:-1])
        by_width, width_of = counted(own)
        parts.append((replace(part, width_of=width_of), by_width))
    kept = replace(expected, parts=tuple(joined(added(packed(*parts[0]), *parts[1]))))
    every = np.arange(BATCH)
    found, exact = kept.padded(every), expected.padded(every)
    assert all(part.tokens.dtype == torch.int16 for part in kept.parts)
    last = torch.tensor(NO_COLUMN, dtype=torch.int32)
    assert torch.equal(found[2], exact[2].mul(700).where(exact[2] < last, last))
    assert torch.equal(kept.select(np.array([1, 0])).padded(every)[2], found[2].flip(0))
    assert torch.equal(found[1], exact[1])
    whole = packed_of(stored, counts + more, [16] * HEADS).padded(every)[0]
    lost, least = (found[0] - whole).norm(), (exact[0] - whole).norm()
    assert lost <= 1.5 * least + 1e-3


@pytest.mark.parametrize("bits", [8, 5, 4, 3, 2])
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


@settings(deadline=None, max_examples=12)
@given(
    counts=tables(st.integers(1, 150)),
    mixed=st.booleans(),
    bits=st.sampled_from([8, 5, 3]),
    seed=st.integers(0, 999),
    kernel=st.sampled_from([WITH, WITHOUT]),
)
def test_keys_are_rounded_for_the_queries_that_read_them(counts, mixed, bits, seed, kernel):
    """Each channel takes what is best of it once those before it have lost what they have lost."""
    rng, dim = np.random.default_rng(seed), 6
    n = int(counts.max())
    keys = rng.normal(size=(BATCH, HEADS, n, dim)) * 10 ** rng.uniform(-1, 1, dim)
    keys = keys.astype(np.float32).astype(np.float64)
    queries = rng.normal(size=(BATCH, HEADS, 20, 2)) @ rng.normal(size=(BATCH, HEADS, 2, dim))
    moments = np.swapaxes(queries, 2, 3) @ queries / 20
    width_of = rng.permuted(np.arange(n) % 2, axis=0) * (bits == 3) * mixed
    width_of = np.broadcast_to(np.where(width_of, 8, bits), keys.shape[:3])
    behind = np.arange(n) >= counts[..., None]
    by_width = {width: ((width_of == width) & ~behind).sum(axis=2) for width in {8, bits}}
    found = torch.from_numpy(keys).float()
    of = torch.from_numpy(np.where(behind, 0, width_of)) if mixed else None
    with kernel_choice(kernel):
        round_kept_keys(found, by_width, of, torch.from_numpy(moments))
    for row, head in np.ndindex(BATCH, HEADS):
        damped = moments[row, head] / moments[row, head].diagonal().mean() + np.eye(dim)
        order = (-damped.diagonal()).argsort(kind="stable")
        for width in by_width:
            its = np.flatnonzero((width_of[row, head] == width) & ~behind[row, head])
            for first in range(0, len(its), 64):
                block = its[first : first + 64]
                exact = keys[row, head, block]
                offsets = found[row, head, block].double().numpy() - exact
                scale = np.ptp(exact, axis=0) / (2 ** WIDTHS[width].keys - 1)
                for place, channel in enumerate(order):
                    before, rest = order[:place], order[place:]
                    system = damped[np.ix_(rest, rest)]
                    aim = -np.linalg.solve(
                        system, damped[np.ix_(rest, before)] @ offsets[:, before].T
                    )
                    least, most = exact[:, channel].min(), exact[:, channel].max()
                    wanted = exact[:, channel] + (aim[0] if place else 0)
                    back = exact[:, channel] + offsets[:, channel]
                    is_end = (exact[:, channel] == least) | (exact[:, channel] == most)
                    off = np.abs(back - wanted.clip(least, most))[~is_end]
                    assert (off <= scale[channel] * 0.6).all()
                    assert not offsets[is_end, channel].any()
    again = found.clone()
    round_kept_keys(again, by_width, of)
    np.testing.assert_allclose(again, found, atol=2e-3 * np.abs(keys).max())
    assert np.array_equal(found[torch.from_numpy(behind)], keys[behind].astype(np.float32))


def test_queries_in_a_plane_see_a_third_of_what_rounding_alone_loses():
    torch.manual_seed(4)
    queries = torch.randn(1, 2, 90, 3) @ torch.randn(1, 2, 3, 32)
    keys, counts = torch.randn(1, 2, 200, 32), {3: np.array([[200, 130]])}
    alone, together = keys.clone(), keys.clone()
    round_kept_keys(alone, counts)
    round_kept_keys(together, counts, moments=(queries.mT @ queries / 90).double())
    lost = [(queries @ (one - keys).mT).square().sum() for one in (alone, together)]
    assert lost[1] < lost[0] / 3


@pytest.mark.parametrize("lost", [float("inf"), float("nan")])
@pytest.mark.parametrize("kernel", [WITH, WITHOUT])
def test_queries_that_overflow_leave_each_key_rounded_alone(lost, kernel):
    torch.manual_seed(4)
    keys, counts = torch.randn(1, 2, 200, 32), {3: np.array([[200, 130]])}
    alone, together = keys.clone(), keys.clone()
    round_kept_keys(alone, counts)
    moments = torch.eye(32).double().repeat(1, 2, 1, 1)
    moments[0, 1, 3, 3] = lost
    with kernel_choice(kernel):
        round_kept_keys(together, counts, moments=moments)
    lost = [(one - keys)[0, 1].square().sum() for one in (alone, together)]
    assert lost[1] <= lost[0]  # ends of ranges are exact, and nothing else is farther
    assert (together - keys)[0, 1].abs().max() <= (alone - keys)[0, 1].abs().max()


def test_three_bits_are_for_powers_of_two():
    with pytest.raises(InputError, match="3 bits for heads of 6 numbers, expected a power of two"):
        rotated(torch.zeros(1, 6))


# Numbers against plain loops, and of any size


def _by_codes(block, least, scale, bits):
    """Numbers of one block, quantised one by one."""
    steps = [min(max(round((float(x) - least) / scale), 0), 2**bits - 1) for x in block]
    return np.array([step * scale + least for step in steps])


def _one_block(block, bits, steps=None):
    """By scale and minimum, or around 0 by the step that has the least squared error of three."""
    levels, low, high = 2**bits - 1, float(block.min()), float(block.max())
    found = [(low, (high - low) / levels)]
    if steps is not None:
        scales = np.sqrt((block**2).mean()) * steps * np.array([0.85, 1, 1.2])
        found = [(-scale * levels / 2, scale) for scale in scales]
    errors = [((_by_codes(block, *one, bits) - block) ** 2).sum() for one in found]
    least, scale = (float(np.float16(one)) for one in found[np.argmin(errors)])
    return _by_codes(block, least if steps is None else -scale * levels / 2, scale, bits)


def keys_by_loops(keys, bits, steps=None):
    """Each channel over blocks of 64 tokens."""
    rounded = np.empty_like(keys)
    for start in range(0, keys.shape[0], 64):
        for channel in range(keys.shape[1]):
            part = slice(start, start + 64), channel
            rounded[part] = _one_block(keys[part], bits, steps)
    return rounded


@pytest.mark.parametrize(
    ("bits", "key_bits", "value_bits", "dim", "turned"),
    [(8, 8, 8, 8, False), (5, 5, 4, 8, True), (4, 4, 4, 8, True), (3, 4, 3, 8, True),
     (2, 3, 2, 8, True), (5, 5, 4, 6, False), (4, 4, 4, 6, False)],
)  # fmt: skip
def test_every_number_is_rounded_within_its_block(bits, key_bits, value_bits, dim, turned):
    keys, values = torch.randn(2, 1, 1, 90, dim)
    expected = keys_by_loops(keys[0, 0].double().numpy(), key_bits)
    np.testing.assert_allclose(quantised_keys(keys, bits)[0, 0], expected, atol=2e-3)
    # each token over blocks of 64 channels, turned below 8 bits where they are a power of two
    turn = hadamard(dim) / dim**0.5 if turned else np.eye(dim)
    steps = {4: 0.3352, 3: 0.586, 2: 0.9957}[value_bits] if turned else None
    expected = keys_by_loops((values[0, 0].double().numpy() @ turn).T, value_bits, steps).T @ turn
    np.testing.assert_allclose(quantised_values(values, bits)[0, 0], expected, atol=2e-3)


def test_constant_and_huge_numbers_come_back():
    constant = torch.full((1, 1, 70, 5), 1.5)
    assert torch.equal(quantised_keys(constant, 4), constant)
    huge = torch.tensor([[[[1e6, -1e6, 0.0]]]])
    assert bool(torch.isfinite(quantised_values(huge, 4)).all())
    assert quantised_keys(huge, 16) is quantised_values(huge, 16) is huge
    half = torch.randn(1, 2, 9, 4).half()
    assert quantised_keys(half, 8).dtype == torch.float16


SCALED = {
    "large values": ("v", "o", 2.0**16, slice(None)),
    "small values": ("v", "o", 2.0**-20, slice(None)),
    "tiny values": ("v", "o", 2.0**-66, slice(None)),
    "large keys": ("k", "q", 2.0**19, slice(None)),
    "small keys": ("k", "q", 2.0**-27, slice(None)),
    "small keys of one head": ("k", "q", 2.0**-23, slice(16)),
    "large values of one head": ("v", "o", 2.0**23, slice(16)),
    "small values of one head": ("v", "o", 2.0**-27, slice(16, 32)),
    "small channels of keys": ("k", "q", 2.0**-30, [3, 11]),  # which a rotation turns together
}
"""What is multiplied, what is divided, by how much, and where: none changes what the model says."""


def scaled_model(case=None, dtype=torch.float32):
    model = tiny_model("llama", num_attention_heads=2, num_key_value_heads=2, head_dim=16)
    for layer in model.model.layers[:1] if case else ():
        of, by, factor, channels = SCALED[case]
        parts = {name: getattr(layer.self_attn, f"{name}_proj").weight.data for name in "qkvo"}
        parts[of][channels] *= factor
        (parts[by].T if by == "o" else parts[by])[channels] /= factor
    return model.to(dtype)


def answers(model, bits, folder=None):
    """Logits behind a prompt whose entries have so many bits, None as they are, and the cache."""
    ids = torch.arange(2, 202)[None] * 7 % 96
    profile = equal_budgets(model, 90, context_tokens=150)
    if bits is not None:
        profile = profile.replace(bits=np.full(profile.budgets.shape, bits))
    cache = kvalloc.make_cache(model, profile)
    with torch.no_grad():
        model(ids[:, :150], **cache_keyword(model, cache))
        if folder is not None:
            kvalloc.save_cache(cache, folder / "cache.safetensors")
            cache = kvalloc.load_cache(folder / "cache.safetensors", model)
        parts = [ids[:, 150:156], *ids[:, 156:170].split(1, dim=1)]
        logits = [model(part, **cache_keyword(model, cache)).logits for part in parts]
    return torch.cat(logits, dim=1), cache


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("case", SCALED)
def test_the_size_of_numbers_changes_no_answer(case, bits, tmp_path):
    """float16 holds 6e-8 to 65,504; where numbers lie outside, their scales are bfloat16."""
    (exact, _), (ordinary, same) = answers(scaled_model(), None), answers(scaled_model(), bits)
    lost = (ordinary - exact).norm()
    for kernel in (WITH, WITHOUT):
        with kernel_choice(kernel):
            found, cache = answers(scaled_model(case), bits, tmp_path)
        assert cache.retained_bytes == same.retained_bytes
        kinds = {part.key_scales.dtype for part in cache.layers[0].kept.parts if bits < 16}
        assert kinds <= {torch.bfloat16}
        # a file of 16 bits holds numbers of 8 instead of 11
        assert (found - exact).norm() < (0.02 * exact.norm() if bits == 16 else 1.3 * lost)


def test_numbers_of_bfloat16_beyond_float16_and_what_is_no_number():
    exact, _ = answers(scaled_model(), None)
    found, _ = answers(scaled_model("large values", torch.bfloat16), 8)
    rounded, _ = answers(scaled_model(None, torch.bfloat16), 8)
    assert (found - exact).norm() < 1.3 * (rounded - exact).norm()
    model = scaled_model()
    model.model.layers[1].self_attn.v_proj.weight.data[3] = 1e38
    with pytest.raises(UnsupportedRequestError, match="infinite or NaN"):
        answers(model, 8)


@pytest.mark.parametrize("factor", [1e6, 1e-7])
def test_rows_and_entries_beside_ordinary_ones(factor):
    counts = np.array([[70, 9], [70, 9]])
    ordinary = stored_of(counts, (64, 64), torch.float32)
    scaled = {at: [own * factor ** at[0] for own in both] for at, both in ordinary.items()}

    def check(kept, rows, skipped=0):
        for (row, head), count in np.ndenumerate(counts):
            own = slice(skipped * count, skipped * count + count)
            found = [numbers[row, head, own] for numbers in kept.padded(np.arange(2))[:2]]
            for numbers, expected in zip(found, scaled[rows[row], head], strict=True):
                assert (numbers - expected).abs().max() < 0.02 * expected.abs().max()

    kept = packed_of(scaled, counts, [[8, 8], [8, 8]])
    assert [part.key_scales.dtype for part in kept.parts] == [torch.float16, torch.bfloat16]
    check(kept.select(np.array([1, 0])), [1, 0])
    if factor > 1:
        (part,) = packed_of(ordinary, counts, [8, 8]).parts
        check(replace(kept, parts=(extended(part, flat_of(scaled, counts)),)), [0, 1], skipped=1)
