"""Every way to attend to kept entries, against the definition in float64."""

import importlib.util
import os
import platform
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import attention_cases
import numpy as np
import pytest
import torch
from attention_cases import (
    HALF_A_STEP,
    call_of,
    check,
    cut,
    even_of,
    exact_numbers,
    packed_of,
    smaller,
    stored_of,
    tailed,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_choice import needs_kernel
from live_storage import peak_bytes

from kvalloc.errors import UnsupportedModelError
from kvalloc.extensions import triton as by_triton
from kvalloc.extensions.triton import TritonBackend
from kvalloc.runtime.attention import backends
from kvalloc.runtime.attention import torch as by_torch
from kvalloc.runtime.attention.backends import attend, chosen
from kvalloc.runtime.attention.call import AttentionCall
from kvalloc.runtime.attention.cpu import MOST_ROWS, CpuBackend, cpu_attention
from kvalloc.runtime.attention.torch import TorchBackend
from kvalloc.runtime.kept import WORK_BYTES

BACKENDS = [pytest.param("kernel", marks=needs_kernel), "torch"]
LENGTHS = st.sampled_from([0, 1, 5, 63, 64, 65, 127, 128, 129, 300, 700, 3000])


@st.composite
def cases(draw, turned):
    """A call, and entries of each row and head."""
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    each = st.just(draw(LENGTHS)) if draw(st.booleans()) else LENGTHS
    counts = np.array([[draw(each) for _ in range(heads)] for _ in range(batch)])
    value_dims = [64, 8] if turned else [64, 8, 9, 80]  # a power of two can be turned
    dims = draw(st.sampled_from([64, 128, 8, 7, 24, 65])), draw(st.sampled_from(value_dims))
    torch.manual_seed(draw(st.integers(0, 99)))
    call = call_of(
        counts,
        dims,
        draw(st.sampled_from([torch.float32, *HALF_A_STEP])),
        group=draw(st.integers(1, 5)),
        n_new=draw(st.sampled_from([1, 1, 2, 7, 51])),
        before=draw(st.sampled_from([0, 1, 66])),
        extras=True,
        sharpness=draw(st.sampled_from([0.1, 1, 20])),
    )
    for name in ("starts", "softcap", "sink_logits"):
        if draw(st.booleans()):
            call = replace(call, **{name: None})
    call = cut(call) if draw(st.booleans()) else call
    return call, counts


def answer(backend, call, kept, *, threads=2, scratch=1 << 20):
    kernel = partial(cpu_attention, threads=threads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_torch, "SCRATCH_NUMBERS", scratch)
        return kernel(call, kept) if backend == "kernel" else TorchBackend().attend(call, kept)


@pytest.mark.parametrize(
    "widths",
    [[16], [8], [5], [4], [3], [2], [16, 8, 4], [3, 16, 5], [[8, 4, 16], [16, 8, 4]],
     [(8, 5)], [(16, 8, 4), 3, (5, 4)], [[8, (5, 16), (4, 2)], [(8, 4), 4, (16, 5, 3)]]],
)  # fmt: skip
@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=35, deadline=None)
@given(
    data=st.data(), threads=st.sampled_from([1, 2, 3, 7, 64]),
    scratch=st.sampled_from([1, 1 << 12, 1 << 14, 1 << 20]), exact=st.booleans(),
)  # fmt: skip
def test_any_call_over_any_entries_is_answered_by_the_definition(
    backend, widths, data, threads, scratch, exact
):
    call, counts = data.draw(cases(turned=any(bits in str(widths) for bits in "32")))
    by_row = isinstance(widths[0], list)
    bits = widths if by_row else (3 if len(widths) == 1 else 1) * widths
    dims = int(call.keys.shape[-1]), int(call.values.shape[-1])
    stored = stored_of(counts, dims, call.queries.dtype)
    if by_row:  # both kinds of scales are in one layer
        stored = smaller(stored, [1])
    kept = packed_of(stored, counts, bits)
    if exact and backend == "torch":  # float64 over entries of another type, as autocast mixes them
        wide = (states.double() for states in (call.queries, call.keys, call.values))
        call = replace(call, **dict(zip(("queries", "keys", "values"), wide, strict=True)))
    if backend == "torch" and data.draw(st.booleans()):
        n_new = call.queries.shape[2]
        call = replace(
            call, sees=(torch.rand(len(counts), n_new, n_new) < 0.5) | torch.eye(n_new).bool()
        )
    found = answer(backend, call, kept, threads=threads, scratch=scratch)
    check(found, call, exact_numbers(stored, counts, bits))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_triton_kernel(device):
    """In a process of its own: Triton reads TRITON_INTERPRET when the kernel is defined."""
    changes = {"TRITON_INTERPRET": "1"} if device == "cpu" else {}
    paths = [str(Path(attention_cases.__file__).parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, attention_cases.__file__, device],
        env={**os.environ, **changes, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "float32" in done.stdout


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_triton_kernel_compiles_for_a_gpu_that_is_not_here(monkeypatch, tmp_path):
    """The interpreter takes what the compiler refuses, such as None where it wants a tensor.

    Tensor cores multiply in half precision. What it notes of the entries is counted with what is
    stored.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from kvalloc.extensions import triton_kernels

    compiled = []

    def compile_only(kernel, grid, *arguments, **constants):
        found = getattr(triton_kernels, kernel).warmup(*arguments, grid=grid, **constants)
        compiled.append((kernel, "mma.sync.aligned.m16n8k16.row.col.f32.bf16" in found.asm["ptx"]))

    device = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", device)
    monkeypatch.setattr(by_triton, "_launch", compile_only)
    counts = np.array([[100, 70]])
    stored = stored_of(counts, (128, 128), torch.bfloat16)
    call = call_of(counts, (128, 128), torch.bfloat16, n_new=5, extras=True)
    call = tailed(replace(call, starts=None))  # of padding a byte a token is read
    kept = packed_of(stored, counts, [(5, 3), 3])
    before = sum(one.nbytes for one in kept.tensors())
    by_triton.triton_attention(call, kept, programs=264)
    noted = sum(one.nbytes for one in kept.tensors()) - before
    assert noted == WORK_BYTES * 2 * counts.size  # all heads have as many pieces
    assert compiled == [("read_tile", True), ("add_tiles", False)]


def test_triton_leaves_codes_that_it_cannot_read_to_torch(monkeypatch):
    monkeypatch.setattr(by_triton, "_installed", lambda: True)
    call = SimpleNamespace(
        queries=SimpleNamespace(is_cuda=True, shape=(9,)), values=SimpleNamespace(shape=(9,))
    )
    for bits, said in (
        (5, "values of 9 numbers at 5 bits end in half a word"),
        (8, "values of 9 numbers at 8 bits end in half a word"),
    ):
        kept = SimpleNamespace(parts=[SimpleNamespace(bits=bits)])
        assert said in str(TritonBackend().refusal(call, kept))


# Memory of torch's operations


@pytest.mark.parametrize("bits", [4, 16])
def test_the_scratch_over_other_types_is_bounded(bits):
    """Entries at fewer bits or in half precision become float32 a few segments at a time."""
    counts = np.array([[1000, 1000, 1000]] * 4)
    stored = stored_of(counts, (16, 16), torch.float16)
    kept = packed_of(stored, counts, [bits] * 3)
    call = call_of(counts, (16, 16), torch.float16, n_new=2)
    peak = peak_bytes(lambda: answer("torch", call, kept, scratch=1))
    assert peak <= 5 * int(counts.sum()) * 2 * 16 * 4 // 12


# The CPU's kernel alone


def misfits():
    """Changes of a call, then of what is kept at 16 and at 4 bits, which do not fit the rest."""
    torch.manual_seed(0)
    random, half = torch.randn, torch.randn(2, 4, 2, 8).half()
    yield from ({"queries": random(2, heads, 2, 8)} for heads in (1, 3, 5, 800))
    yield from ({"queries": random(*shape)} for shape in ((1, 4, 2, 8), (2, 4, 6, 8), (2, 4, 2, 4)))
    yield from ({"keys": random(*shape)} for shape in ((2, 4, 5, 8), (2, 1, 5, 8), (2, 2, 5, 16)))
    yield from ({"values": random(*shape)} for shape in ((2, 2, 4, 8), (1, 2, 5, 8), (2, 2, 5, 16)))
    both = {"queries": random(2, 8, 2, 8), "keys": random(2, 4, 5, 8), "values": random(2, 4, 5, 8)}
    yield from (both, {"queries": half}, {"queries": half.to("meta", torch.float32)})
    yield from ({"sink_logits": random(2)}, {"starts": torch.tensor([0])})
    for part in (0, 1):
        yield from ((part, {name: cut_short}) for name in ("keys", "values", "lengths"))
        yield from ((part, {name: lambda own: own.double()}) for name in ("keys", "values"))
        yield from ((part, {name: narrower}) for name in ("keys", "values"))
        yield part, {"keys": lambda own: own.repeat(1, 2)[:, ::2]}
        yield part, {"segments": lambda own: own ^ 1}
    yield from ((1, {"key_scales": change}) for change in (cut_short, narrower, lambda own: None))


def cut_short(own):
    return own[:-1]


def narrower(own):
    return own[..., : own.shape[-1] // 2].contiguous()


@needs_kernel
@pytest.mark.parametrize("change", [*misfits()])
def test_c_is_handed_nothing_that_does_not_fit(change):
    counts = np.array([[70, 5], [64, 1]])
    call = call_of(counts, (8, 8), torch.float32, n_new=2)
    kept = packed_of(stored_of(counts, (8, 8), torch.float32), counts, [16, 4])
    cpu_attention(call, kept, threads=1)
    if isinstance(change, dict):
        call = replace(call, **change)
    else:
        part, changes = change
        parts = list(kept.parts)
        changes = {name: own(getattr(parts[part], name)) for name, own in changes.items()}
        parts[part] = replace(parts[part], **changes)
        kept = replace(kept, parts=tuple(parts))
    with pytest.raises(UnsupportedModelError, match="fit together|keeps others") as caught:
        cpu_attention(call, kept, threads=1)
    assert "\n" not in str(caught.value)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_of_half_precision_is_read_exactly(dtype):
    """A token that sees itself alone answers with its own value, infinity and all."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    values = every[~every.isnan()]
    dim = next(n for n in range(1024, 0, -1) if values.numel() % n == 0)
    values = values.view(-1, 1, 1, dim)
    assert torch.equal(own_value(values), values)


@needs_kernel
@pytest.mark.skipif(platform.machine() != "x86_64", reason="read by an instruction of x86-64")
def test_small_numbers_of_half_precision_also_where_subnormal_ones_are_flushed():
    """Scales of codes are often that small; as float32 they are not subnormal."""
    values = torch.arange(1, 1024, dtype=torch.int16).view(torch.float16).view(1, 1, 1, -1)
    assert torch.set_flush_denormal(True)
    try:
        found = own_value(values)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(found, values)


def own_value(values):
    queries = torch.ones(len(values), 1, 1, 8, dtype=values.dtype)
    nothing = even_of(queries[:, :, :0], values[:, :, :0])
    call = AttentionCall(queries=queries, keys=queries, values=values, scaling=1.0)
    return cpu_attention(call, nothing, threads=1)


@needs_kernel
def test_what_it_does_not_answer():
    queries, keys = torch.randn(1, 6, 1, 8), torch.randn(1, 2, 3, 8)

    def backend(queries, *given):
        call = AttentionCall(queries=queries, keys=given[0], values=given[1], scaling=1.0)
        return chosen(call, even_of(*given[-2:])).name

    assert backend(queries, keys, keys) == "CPU kernel"
    assert backend(queries.double(), keys.double(), keys.double()) == "torch"
    many = torch.randn(1, 6, MOST_ROWS // 3 + 1, 8)
    assert backend(many, keys, keys) == "torch"
    assert backend(many[:, :, 1:], keys, keys) == "CPU kernel"
    for place in range(5):
        given = [queries, keys, keys, keys, keys]
        given[place] = given[place].bfloat16()
        assert backend(*given) == ("CPU kernel" if place > 2 else "torch")
        given[place] = given[place].float().requires_grad_()
        assert backend(*given) == "torch"
        with torch.no_grad():
            assert backend(*given) == "CPU kernel"


def test_why_a_backend_is_not_used_is_logged_once(caplog):
    states = torch.randn(1, 2, 3, 8, dtype=torch.float64)
    call = AttentionCall(queries=states, keys=states, values=states, scaling=1.0)
    backends._log_once.cache_clear()
    with caplog.at_level("INFO", logger=backends.__name__):
        for _ in range(3):
            attend(call, even_of(states, states))
    assert caplog.messages == [
        "the CUDA kernel does not serve attention: the entries are not on CUDA",
        "the CPU kernel does not serve attention: it does not read torch.float64",
    ]


@needs_kernel
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_default_type_is_not_its_own(default):
    """What it writes into has the size that it writes, whatever new tensors are by default."""
    call = call_of(np.zeros((2, 2)), (16, 16), torch.float32)
    entries = even_of(torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16))
    expected = CpuBackend().attend(call, entries)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found = CpuBackend().attend(call, entries)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(found, expected)


def test_gradients_of_values_alone():
    """As where only the values' projection is trained: queries need no gradient there."""
    call = call_of(np.zeros((1, 2)), (8, 8), torch.float32, before=0)
    call.values.requires_grad_()
    found = attend(call, even_of(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)))
    (gradient,) = torch.autograd.grad(found.sum(), call.values)
    assert float(gradient.abs().min()) > 0
