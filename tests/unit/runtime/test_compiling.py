"""Compiling on first use: what is kept, shared and refused, and that all works without it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvalloc.runtime import compiling, cpu_kernel
from kvalloc.runtime.compiling import SWITCH, compiled

SOURCE = "int answer(void) { return 42; }\n"

needs_compiler = pytest.mark.skipif(
    cpu_kernel.unavailable() is not None, reason=f"no kernel here: {cpu_kernel.unavailable()}"
)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVALLOC_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(SWITCH, raising=False)
    path = tmp_path / "answer.c"
    path.write_text(SOURCE)
    compiled.cache_clear()
    return path


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@needs_compiler
def test_compiled_once_and_loaded_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = compiled(source).library
    assert library is not None
    assert library.answer() == 42
    (name,) = kept(tmp_path / "cache")
    assert name.endswith(".so")
    compiled.cache_clear()
    monkeypatch.setattr(compiling, "_compile", None)
    assert compiled(source).library is not None
    monkeypatch.undo()
    monkeypatch.setenv("KVALLOC_CACHE", str(tmp_path / "cache"))
    source.write_text(SOURCE.replace("42", "43"))
    compiled.cache_clear()
    library = compiled(source).library
    assert library is not None
    assert library.answer() == 43
    assert len(kept(tmp_path / "cache")) == 2


@needs_compiler
def test_its_threads_are_those_of_torch(source: Path) -> None:
    """No second OpenMP library comes into the process."""
    source.write_text(
        "#include <omp.h>\nint answer(void) {\n  int n = 0;\n"
        "#pragma omp parallel num_threads(2) reduction(+ : n)\n  n += omp_get_num_threads();\n"
        "  return n;\n}\n"
    )
    before = compiling.openmp_libraries()
    library = compiled(source).library
    assert library is not None
    assert library.answer() in (1, 4)  # one thread where no second is to be had
    if before:
        assert compiling.openmp_libraries() == before


def test_the_switch(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    assert compiled(source).library is None
    assert SWITCH in compiled(source).reason


def test_without_a_compiler(source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    found = compiled(source)
    assert found.library is None
    assert "no C compiler" in found.reason
    assert not kept(tmp_path / "cache")


@needs_compiler
def test_a_file_that_does_not_compile(source: Path, tmp_path: Path) -> None:
    source.write_text("int answer(void) { return forty_two; }\n")
    found = compiled(source)
    assert found.library is None
    assert "the C compiler failed" in found.reason
    assert "answer.c" in found.reason
    assert not kept(tmp_path / "cache")


@needs_compiler
def test_a_folder_that_others_can_write_to_is_not_trusted(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache" / "compiled"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "other"))
    assert compiled(source).library is not None
    assert not kept(folder)
    assert kept(tmp_path / "other")
    compiled.cache_clear()
    (tmp_path / "other" / f"kvalloc-{os.getuid()}").chmod(0o777)
    found = compiled(source)
    assert found.library is None
    assert "KVALLOC_CACHE" in found.reason


def test_the_command_line_says_what_is_missing(tmp_path: Path) -> None:
    command = shutil.which("kvalloc", path=str(Path(sys.executable).parent))
    assert command is not None
    done = subprocess.run(
        [command, "doctor", "--json"],
        env={**os.environ, SWITCH: "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    findings = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    assert SWITCH in findings["CPU kernel"]["advice"]
    assert not findings["CPU kernel"]["core"]
