"""The kernel for the CPU as a built file: which one is taken, and that all works without it."""

import ctypes
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from attention_cases import even_of
from cli_tools import run
from kernel_choice import needs_kernel

from kvalloc.accounting.costs import WIDTHS, Width
from kvalloc.runtime.attention import library
from kvalloc.runtime.attention.call import AttentionCall
from kvalloc.runtime.attention.cpu import CpuBackend
from kvalloc.runtime.attention.library import SWITCH, kernel_library
from kvalloc.runtime.attention.torch import TorchBackend
from kvalloc.runtime.kept import pack
from kvalloc.runtime.key_rounding import round_kept_keys

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def load_anew():
    kernel_library.cache_clear()
    yield
    kernel_library.cache_clear()


@pytest.fixture
def tree(tmp_path):
    """As much of the project as a build of it needs."""
    folder = tmp_path / "tree"
    skipped = shutil.ignore_patterns("__pycache__", "*.so", "*.txt")
    for name in ("kvalloc", "solvers", "profiles"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=skipped)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def attended(threads=1):
    generator = torch.Generator().manual_seed(0)
    kept, new = (torch.randn(2, 2, n, 16, generator=generator) for n in (700, 1))
    queries = torch.randn(2, 4, 1, 16, generator=generator)
    call = AttentionCall(queries=queries, keys=new, values=new, scaling=0.25)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return CpuBackend().attend(call, even_of(kept, kept))
    finally:
        torch.set_num_threads(before)


def copied_sources(folder):
    return [Path(shutil.copy(source, folder)) for source in library._SOURCES]


@needs_kernel
def test_its_threads_are_those_of_torch():
    """No second OpenMP library comes into the process, and their number changes nothing much."""
    before = library.openmp_libraries()
    alone = attended()
    torch.testing.assert_close(attended(threads=2), alone, rtol=1e-5, atol=1e-6)
    assert library.openmp_libraries() == before


@needs_kernel
def test_a_forked_process_goes_on_alone():
    """The threads that the parent has used are not there, and nobody waits for them."""
    expected = attended(threads=2)
    child = os.fork()
    if child == 0:
        try:
            same = torch.allclose(attended(threads=2), expected, rtol=1e-5, atol=1e-6)
            os._exit(0 if same else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(attended(threads=2), expected)


@needs_kernel
def test_without_an_openmp_library(monkeypatch):
    expected = attended(threads=2)
    kernel_library.cache_clear()
    kernel = kernel_library()
    assert isinstance(kernel, ctypes.CDLL)
    kernel.use_openmp(None, None, None, None)
    torch.testing.assert_close(attended(threads=2), expected, rtol=1e-5, atol=1e-6)


def test_the_switch(monkeypatch, tmp_path):
    monkeypatch.setenv(SWITCH, "0")
    assert CpuBackend().unavailable() == f"{SWITCH} is 0"
    kernel_library.cache_clear()
    monkeypatch.setenv(SWITCH, str(tmp_path / "none.so"))
    assert "none.so cannot be loaded" in str(CpuBackend().unavailable())


def test_where_it_was_not_built(monkeypatch, tmp_path):
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(library, "_SOURCES", copied_sources(tmp_path))
    assert "it was not built" in str(CpuBackend().unavailable())


@needs_kernel
def test_one_that_was_built_from_another_source_is_not_loaded(monkeypatch, tmp_path):
    """Its arguments may be others; and the right one is taken wherever it stands among them."""
    monkeypatch.delenv(SWITCH, raising=False)
    (built,) = library._SOURCES[0].parent.glob("_cpu.*so")
    *_, source = sources = copied_sources(tmp_path)
    (tmp_path / "_cpu.a.so").write_bytes(b"broken off")
    shutil.copy(built, tmp_path / "_cpu.b.so")
    monkeypatch.setattr(library, "_SOURCES", sources)
    assert CpuBackend().unavailable() is None
    kernel_library.cache_clear()
    source.write_text(source.read_text() + "\n")
    assert "_cpu.b.so was built from other sources" in str(CpuBackend().unavailable())


@pytest.mark.parametrize("path", library.built(), ids=lambda path: path.name.split(".")[0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_build_answers_as_torch_does(monkeypatch, path, dtype):
    """Also of vectors that do not fill registers; the fastest alone is in the other tests."""
    monkeypatch.setenv(SWITCH, str(path))
    keys, values, queries = (torch.randn(2, 2, 150, 40).to(dtype) for _ in range(3))
    call = AttentionCall(
        queries=queries[..., :3, :].repeat_interleave(3, dim=1),
        keys=keys[..., 140:, :],
        values=values[..., 140:, :],
        scaling=0.2,
    )
    plain = even_of(keys[..., :140, :], values[..., :140, :])
    monkeypatch.setitem(WIDTHS, 1, Width(keys=2, values=1, turned=True))  # as codes allow it
    packed = [replace(plain, parts=(pack(plain.parts[0], bits),)) for bits in sorted(WIDTHS)[:-1]]
    close = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for kept in (plain, *packed):
        answer, expected = (own.attend(call, kept) for own in (CpuBackend(), TorchBackend()))
        torch.testing.assert_close(answer, expected, atol=close, rtol=close)


@pytest.mark.parametrize("path", library.built(), ids=lambda path: path.name.split(".")[0])
@pytest.mark.parametrize("head_dim", [6, 64])
def test_every_build_rounds_keys_as_torch_does(monkeypatch, path, head_dim):
    """A number at the middle between two codes may become either."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 3, 150, head_dim, generator=generator)
    queries = torch.randn(2, 3, 9, 3, generator=generator)
    queries = queries @ torch.randn(2, 3, 3, head_dim, generator=generator)
    moments, counts = (queries.mT @ queries).double(), np.array([[150, 0, 70], [1, 64, 65]])
    rounded = []
    for switch in (str(path), "0"):
        monkeypatch.setenv(SWITCH, switch)
        kernel_library.cache_clear()
        assert isinstance(kernel_library(), str) == (switch == "0")
        rounded.append(keys.clone())
        round_kept_keys(rounded[-1], {4: counts, 8: counts * 0}, moments=moments)
    by_kernel, by_torch = (one - keys for one in rounded)
    assert ((by_kernel - by_torch).abs() < 1e-4).float().mean() > 0.95
    torch.testing.assert_close(by_kernel.norm(), by_torch.norm(), rtol=0.02, atol=0)


def test_a_wheel_is_built_where_there_is_no_compiler(tree, tmp_path):
    """And carries every build where there is one: `make wheel-test` looks."""
    command = "from setuptools.build_meta import build_wheel; build_wheel({!r})"
    done = subprocess.run(
        [sys.executable, "-c", command.format(str(tmp_path))],
        cwd=tree,
        env={**os.environ, "CC": "no-such-compiler"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


def test_the_command_line_says_what_is_missing(monkeypatch):
    monkeypatch.setenv(SWITCH, "0")
    ran = run("doctor", "--json")
    assert ran.code == 0
    findings = {one["name"]: one for one in ran.json["findings"]}
    assert SWITCH in findings["CPU kernel"]["advice"]
    assert findings["CPU kernel"]["state"] == "missing"
    if not torch.cuda.is_available():
        assert findings["CUDA kernel"]["result"] == "there is no CUDA device"
        assert not findings["CUDA kernel"]["advice"]
