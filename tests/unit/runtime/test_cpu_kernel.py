"""The CPU's kernel, against the definition in float64."""

from __future__ import annotations

import platform
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvalloc.models.attention import AttentionStates
from kvalloc.runtime import cpu_kernel
from kvalloc.runtime.compiling import Compiled
from kvalloc.runtime.cpu_kernel import MOST_ROWS, cpu_attention
from kvalloc.runtime.even_attention import EvenEntries, apart_attention, even_kernel_attention
from kvalloc.runtime.kernels import kernel_for
from kvalloc.runtime.packed import PackedEntries
from kvalloc.runtime.packed_attention import Asked, kernel_part
from kvalloc.runtime.ragged import RaggedEntries

pytestmark = pytest.mark.skipif(
    cpu_kernel.unavailable() is not None, reason=f"no kernel here: {cpu_kernel.unavailable()}"
)

HALF_A_STEP = {torch.float16: 2**-11, torch.bfloat16: 2**-8}
LENGTHS = st.sampled_from([0, 1, 5, 63, 64, 65, 127, 128, 129, 300, 700])


def by_definition(
    asked: Asked, stored: dict[tuple[int, int], tuple[Any, Any, Any]]
) -> tuple[torch.Tensor, float]:
    """Softmax over each head's own entries and what follows them; and the largest logit's size."""
    batch, n_query_heads, n_new, _ = asked.queries.shape
    n_kv_heads, n_following, value_dim = asked.values.shape[1:]
    group = n_query_heads // n_kv_heads
    out = torch.empty(batch, n_new, n_query_heads, value_dim, dtype=torch.float64)
    largest = 1.0
    for row, head in np.ndindex(batch, n_query_heads):
        kept_keys, kept_values, bias = stored[row, head // group]
        keys = torch.cat([kept_keys, asked.keys[row, head // group]]).double()
        values = torch.cat([kept_values, asked.values[row, head // group]]).double()
        logits = asked.queries[row, head].double() @ keys.T * asked.scaling
        if asked.softcap is not None:
            logits = asked.softcap * torch.tanh(logits / asked.softcap)
        if bias is not None:
            logits[:, : len(bias)] += bias
        largest = max(largest, float(logits.abs().max()))
        place = n_following - n_new + torch.arange(n_new)[:, None]
        column = torch.arange(n_following)
        shown = column <= place
        if asked.visible is not None:
            shown &= asked.visible[row] | (column == place)
        logits[:, len(kept_keys) :].masked_fill_(~shown, float("-inf"))
        if asked.sink_logits is not None:
            sink = asked.sink_logits[head].double().expand(n_new, 1)
            logits, values = torch.cat([logits, sink], 1), torch.cat([values, 0 * values[:1]])
        out[row, :, head] = logits.softmax(-1) @ values
    return out, largest


@st.composite
def cases(
    draw: Any, *, one_token: bool = False
) -> tuple[Asked, np.ndarray[Any, Any], dict[str, Any]]:
    """What is asked, how many entries each head keeps, and the rest of a case."""
    batch, heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    key_dim, value_dim = (draw(st.sampled_from([64, 128, 8, 7, 24, 65])) for _ in range(2))
    n_new = 1 if one_token else draw(st.sampled_from([1, 1, 2, 7, 51]))
    following = n_new + draw(st.sampled_from([0, 1, 66]))
    counts = [[draw(LENGTHS) for _ in range(heads)] for _ in range(batch)]
    dtype, sharpness = (
        draw(st.sampled_from([torch.float32, *HALF_A_STEP])),
        draw(st.sampled_from([0.1, 1, 20])),
    )
    torch.manual_seed(draw(st.integers(0, 99)))
    asked = Asked(
        queries=(torch.randn(batch, heads * group, n_new, key_dim) * sharpness).to(dtype),
        keys=torch.randn(batch, heads, following, key_dim).to(dtype),
        values=torch.randn(batch, heads, following, value_dim).to(dtype),
        scaling=key_dim**-0.5,
        visible=None if one_token or draw(st.booleans()) else torch.rand(batch, following) > 0.4,
        softcap=draw(st.sampled_from([None, 3.0])),
        sink_logits=torch.randn(heads * group) if draw(st.booleans()) else None,
    )
    rest = {"biased": draw(st.booleans()), "threads": draw(st.integers(1, 4))}
    return asked, np.array(counts), rest


def made(asked: Asked, counts: np.ndarray[Any, Any], biased: bool) -> dict[tuple[int, int], Any]:
    """Keys, values and bias of each head's entries."""
    dtype, dims = asked.queries.dtype, (asked.keys.shape[-1], asked.values.shape[-1])
    return {
        place: (
            torch.randn(int(counts[place]), dims[0]).to(dtype),
            torch.randn(int(counts[place]), dims[1]).to(dtype),
            torch.randn(int(counts[place])) * 3 if biased else None,
        )
        for place in np.ndindex(*counts.shape)
    }


def piece_of(stored: dict[tuple[int, int], Any]) -> Any:
    def piece(row: int, head: int) -> Any:
        keys, values, bias = stored[row, head]
        every = torch.arange(len(keys))
        return keys, values, every.int(), bias, every

    return piece


def check(found: torch.Tensor, asked: Asked, stored: dict[tuple[int, int], Any]) -> None:
    """A logit's error in float32 grows with its size, and a weight's with that of its logit."""
    expected, largest = by_definition(asked, stored)
    assert found.dtype == asked.queries.dtype
    assert found.is_contiguous()
    assert found.shape == expected.shape
    worst = (found.double() - expected).abs().max()
    rounded = 0.0 if found.dtype == torch.float32 else HALF_A_STEP[found.dtype]
    assert worst <= 1e-6 * largest + rounded * float(expected.abs().max())


def options(asked: Asked) -> dict[str, Any]:
    return {name: getattr(asked, name) for name in ("scaling", "visible", "softcap", "sink_logits")}


@settings(max_examples=120, deadline=None)
@given(case=cases())
def test_entries_of_different_number(case: Any) -> None:
    asked, counts, rest = case
    stored = made(asked, counts, rest["biased"])
    entries = RaggedEntries.collect(counts, piece_of(stored), biased=rest["biased"])
    found = cpu_attention(
        asked.queries,
        entries,
        asked.keys,
        asked.values,
        threads=rest["threads"],
        **options(asked),
    )
    check(found, asked, stored)


@settings(max_examples=120, deadline=None)
@given(case=cases(), bits=st.sampled_from([8, 4]))
def test_entries_at_fewer_bits(case: Any, bits: int) -> None:
    asked, counts, rest = case
    stored = made(asked, counts, rest["biased"])
    entries = PackedEntries.collect(
        counts, piece_of(stored), np.full(counts.shape[1], bits, dtype=np.int64)
    )
    (part,) = entries.parts
    found = kernel_part(asked, part, partial(cpu_attention, threads=rest["threads"]))
    # the codes and scales are the same; the numbers are not rounded to half precision once more
    wide = {place: (one[0].float(), one[1].float(), one[2]) for place, one in stored.items()}
    same = PackedEntries.collect(counts, piece_of(wide), np.full(counts.shape[1], bits))
    pieces = {place: same.piece(*place) for place in stored}
    rounded = {place: (one[0], one[1], one[3]) for place, one in pieces.items()}
    check(found, asked, rounded)


@settings(max_examples=60, deadline=None)
@given(case=cases(one_token=True), n_kept=LENGTHS, unbiased=st.integers(0, 70) | st.none())
def test_entries_of_equal_number_and_the_latest_apart(
    case: Any, n_kept: int, unbiased: int | None
) -> None:
    """Biased are the first entries; the tokens that joined them since then have no bias."""
    asked, counts, _ = case
    stored = made(asked, np.full_like(counts, n_kept), biased=True)
    kept = [
        torch.stack([one[i] for one in stored.values()]).view(*counts.shape, n_kept, dim)
        for i, dim in enumerate((asked.keys.shape[-1], asked.values.shape[-1]))
    ]
    bias = None
    if unbiased is not None:
        bias = torch.stack([one[2] for one in stored.values()]).view(*counts.shape, n_kept)
        bias = bias[..., : max(n_kept - unbiased, 0)]
    states = AttentionStates(
        layer=0,
        queries=asked.queries,
        keys=asked.keys,
        values=asked.values,
        scaling=asked.scaling,
        mask=None,
        softcap=asked.softcap,
        sink_logits=asked.sink_logits,
    )
    found = even_kernel_attention(states, (kept[0], kept[1]), cpu_attention, bias=bias)
    added = {
        place: (keys, values, None if bias is None else bias[place])
        for place, (keys, values, _) in stored.items()
    }
    check(found, asked, added)
    chosen = apart_attention(states, (kept[0], kept[1]), bias=bias)
    assert chosen is not None
    assert torch.equal(chosen, found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_of_half_precision_is_read_exactly(dtype: torch.dtype) -> None:
    """A token that sees itself alone answers with its own value, infinity and all."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    values = every[~every.isnan()]
    dim = next(n for n in range(1024, 0, -1) if values.numel() % n == 0)
    values = values.view(-1, 1, 1, dim)
    batch = values.shape[0]
    entries = EvenEntries.of(values[:, :, :0, :8].contiguous(), values[:, :, :0].contiguous())
    queries = torch.ones(batch, 1, 1, 8, dtype=dtype)
    found = cpu_attention(queries, entries, queries, values, scaling=1.0)
    assert torch.equal(found, values)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="read by an instruction of x86-64")
def test_small_numbers_of_half_precision_also_where_subnormal_ones_are_flushed() -> None:
    """Scales of codes are often that small; as float32 they are not subnormal."""
    values = torch.arange(1, 1024, dtype=torch.int16).view(torch.float16).view(1, 1, 1, -1)
    entries = EvenEntries.of(values[:, :, :0, :8].contiguous(), values[:, :, :0].contiguous())
    queries = torch.ones(1, 1, 1, 8, dtype=torch.float16)
    assert torch.set_flush_denormal(True)
    try:
        found = cpu_attention(queries, entries, queries, values, scaling=1.0, threads=1)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(found, values)


@pytest.mark.parametrize("offset", [0.0, 300.0, -300.0])
def test_logits_far_from_zero_and_weights_of_nothing(offset: float) -> None:
    """The largest logit is taken off first; what is too small to count is 0, not a number."""
    keys = torch.tensor([offset, offset + 1, offset - 200.0, offset + 1]).view(1, 1, 4, 1)
    values = torch.tensor([1.0, 2.0, 1e30, 4.0]).view(1, 1, 4, 1)
    entries = EvenEntries.of(keys, values)
    latest = torch.full((1, 1, 1, 1), offset), torch.full((1, 1, 1, 1), 5.0)
    found = cpu_attention(torch.ones(1, 1, 1, 1), entries, *latest, scaling=1.0)
    weights = torch.tensor([0.0, 1.0, 1.0, 0.0]).softmax(0)
    expected = (weights * torch.tensor([1.0, 2.0, 4.0, 5.0])).sum()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("counts", [[[0, 300, 0]], [[300, 0, 700]], [[0, 0, 0]]])
def test_a_head_without_any_entry_ends_and_leaves_the_others_alone(counts: list[list[int]]) -> None:
    """No caller asks so, since a token sees itself: without one softmax is that of nothing."""
    table = np.array(counts)
    asked = Asked(
        queries=torch.randn(1, 3, 1, 16),
        keys=torch.randn(1, 3, 0, 16),
        values=torch.randn(1, 3, 0, 16),
        scaling=0.25,
    )
    stored = made(asked, table, biased=False)
    entries = RaggedEntries.collect(table, piece_of(stored), biased=False)
    found = cpu_attention(
        asked.queries, entries, asked.keys, asked.values, scaling=0.25, threads=2
    )[0, 0]
    for head, count in enumerate(counts[0]):
        if not count:
            assert found[head].isnan().all()
            continue
        keys, values, _ = stored[0, head]
        exact = (asked.queries[0, head].double() @ keys.double().T * 0.25).softmax(-1)
        assert (found[head] - (exact @ values.double())[0]).abs().max() < 1e-6


def test_threads_share_entries_and_say_the_same() -> None:
    """One long head among empty ones: all threads read it."""
    counts = np.array([[0, 5000, 0, 3]])
    torch.manual_seed(0)
    asked = Asked(
        queries=torch.randn(1, 8, 1, 16),
        keys=torch.randn(1, 4, 2, 16),
        values=torch.randn(1, 4, 2, 16),
        scaling=0.25,
    )
    stored = made(asked, counts, biased=False)
    entries = RaggedEntries.collect(counts, piece_of(stored), biased=False)
    for threads in (1, 2, 3, 7, 64):
        found = cpu_attention(
            asked.queries, entries, asked.keys, asked.values, scaling=0.25, threads=threads
        )
        check(found, asked, stored)


def test_what_it_does_not_answer() -> None:
    queries, keys = torch.randn(1, 6, 1, 8), torch.randn(1, 2, 3, 8)
    assert kernel_for(queries, keys, keys) is cpu_attention
    assert kernel_for(queries.double(), keys.double(), keys.double()) is None
    many = torch.randn(1, 6, MOST_ROWS // 3 + 1, 8)
    assert kernel_for(many, keys, keys) is None
    assert kernel_for(many[:, :, 1:], keys, keys) is cpu_attention
    for place in range(4):
        given = [queries, keys, keys, keys]
        given[place] = given[place].bfloat16()
        assert kernel_for(*given) is None
        given[place] = given[place].float().requires_grad_()
        assert kernel_for(*given) is None
        with torch.no_grad():
            assert kernel_for(*given) is cpu_attention


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_default_type_is_not_its_own(default: torch.dtype) -> None:
    """What it writes into has the size that it writes, whatever new tensors are by default."""
    torch.manual_seed(0)
    asked = Asked(
        queries=torch.randn(2, 4, 1, 16),
        keys=torch.randn(2, 2, 2, 16),
        values=torch.randn(2, 2, 2, 16),
        scaling=0.25,
    )
    entries = EvenEntries.of(torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16))
    given = asked.queries, entries, asked.keys, asked.values
    expected = cpu_attention(*given, scaling=0.25)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found = cpu_attention(*given, scaling=0.25)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(found, expected)


def test_gradients_of_values_alone() -> None:
    """As where only the values' projection is trained: queries need no gradient there."""
    torch.manual_seed(0)
    queries, keys = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 1, 8)
    kept = torch.randn(2, 1, 2, 5, 8)
    values = torch.randn(1, 2, 1, 8, requires_grad=True)
    states = AttentionStates(
        layer=0, queries=queries, keys=keys, values=values, scaling=0.3, mask=None
    )
    found = apart_attention(states, (kept[0], kept[1]))
    assert found is not None
    (gradient,) = torch.autograd.grad(found.sum(), values)
    assert float(gradient.abs().min()) > 0


@pytest.mark.parametrize("by_head", [False, True])
def test_autocast_mixes_types(
    tiny: ModuleType, by_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions turn queries and keys in float32, but values stay as they were projected."""
    model = tiny.tiny_model("qwen3")
    profile = tiny.make_profile(model, 60, 0.4)
    profile = tiny.by_head(profile) if by_head else profile

    def answers() -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            cache = profile.cache(model)
            model(tiny.prompt(60, 2), past_key_values=cache)
            tokens = [tiny.prompt(1, 2, seed=step) for step in range(3)]
            found = [model(token, past_key_values=cache).logits for token in tokens]
        return torch.cat(found)

    found = answers()
    monkeypatch.setattr(cpu_kernel, "compiled", lambda source: Compiled(reason="a test wants none"))
    assert torch.equal(found, answers())


def test_tensors_that_are_cut_from_others() -> None:
    """Their numbers do not stand one after the other, or one row stands for all."""
    torch.manual_seed(0)
    whole = torch.randn(2, 5, 3, 60)
    queries = torch.randn(2, 2, 6, 16).transpose(1, 2)
    asked = Asked(
        queries=queries,
        keys=whole[:1, :, :, 7:23].transpose(1, 2).expand(2, -1, -1, -1),
        values=whole[..., 30:54].transpose(1, 2),
        scaling=0.25,
        visible=torch.tensor([[True, False, True, True, True]]),
        sink_logits=torch.randn(6, 2, dtype=torch.float64)[:, 0],
    )
    counts = np.array([[3, 0, 70], [128, 1, 9]])
    stored = made(asked, counts, biased=True)
    entries = RaggedEntries.collect(counts, piece_of(stored), biased=True)
    found = cpu_attention(queries, entries, asked.keys, asked.values, **options(asked))
    assert asked.visible is not None
    check(found, replace(asked, visible=asked.visible.expand(2, -1)), stored)
