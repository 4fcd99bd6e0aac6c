"""Compiling on first use: what is kept, shared and refused, and that all works without it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_tools import run

from kvalloc.runtime.attention import c_library, cpu
from kvalloc.runtime.attention.c_library import SWITCH, compiled

SOURCE = "int answer(void) { return 42; }\n"
LOAD = """
import sys
import sysconfig
from pathlib import Path
from kvalloc.runtime.attention.c_library import compiled
found = compiled(Path(sys.argv[1]))
assert found.library is not None, found.reason
assert found.library.answer() == 42
"""

needs_compiler = pytest.mark.skipif(
    cpu.unavailable() is not None, reason=f"no kernel here: {cpu.unavailable()}"
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
    monkeypatch.setattr(c_library, "_compile", None)
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
    before = c_library.openmp_libraries()
    library = compiled(source).library
    assert library is not None
    assert library.answer() in (1, 4)  # one thread where no second is to be had
    if before:
        assert c_library.openmp_libraries() == before


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
    (tmp_path / "more.h").write_text("int answer(void) { return forty_two; }\n")
    source.write_text('#include "more.h"\n')
    found = compiled(source)
    assert found.library is None
    assert "the C compiler" in found.reason
    assert "forty_two" in found.reason
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
    (tmp_path / "other" / f"kvalloc-{os.getuid()}").chmod(0o700)
    folder.chmod(0o700)
    folder.parent.chmod(0o777)  # where another could take its place
    compiled.cache_clear()
    assert compiled(source).library is not None
    assert not kept(folder)


@needs_compiler
def test_nothing_is_made_in_the_home_of_another(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("KVALLOC_CACHE", str(home / "cache"))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "other"))
    real = Path.stat

    def of_another(path: Path, **options: Any) -> os.stat_result:
        found = real(path, **options)
        return os.stat_result((*found[:4], 12345, *found[5:])) if path == home else found

    monkeypatch.setattr(Path, "stat", of_another)
    assert compiled(source).library is not None
    assert not list(home.iterdir())
    assert kept(tmp_path / "other")


@needs_compiler
def test_what_is_made_is_for_its_user_alone(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where new folders are for the group, as with a umask of 002."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "other"))
    before = os.umask(0o002)
    try:
        assert compiled(source).library is not None
    finally:
        os.umask(before)
    for folder in (tmp_path / "cache", tmp_path / "cache" / "compiled"):
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not (tmp_path / "other").exists()  # one folder is enough


@needs_compiler
@pytest.mark.parametrize("left", [0, 100])
def test_what_broke_off_is_made_again(
    source: Path, tmp_path: Path, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = c_library._compile

    def broken_off(source: Path, target: Path, *rest: Any) -> None:
        real(source, target, *rest)
        target.write_bytes(target.read_bytes()[:left])

    monkeypatch.setattr(c_library, "_folders", lambda: iter([tmp_path / "cache"]))
    monkeypatch.setattr(c_library, "_compile", broken_off)
    assert compiled(source).library is None
    assert len(kept(tmp_path / "cache")) == 1
    monkeypatch.setattr(c_library, "_compile", real)
    compiled.cache_clear()
    library = compiled(source).library
    assert library is not None
    assert library.answer() == 42
    assert len(kept(tmp_path / "cache")) == 1


@needs_compiler
def test_from_where_no_program_runs(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "other"))
    real = os.statvfs

    def mounted(path: Path) -> Any:
        flags = real(path).f_flag
        no_programs = os.ST_NOEXEC if (tmp_path / "cache") in (path, *path.parents) else 0
        return SimpleNamespace(f_flag=flags | no_programs)

    monkeypatch.setattr(os, "statvfs", mounted)
    assert compiled(source).library is not None
    assert not kept(tmp_path / "cache")
    assert kept(tmp_path / "other")


@needs_compiler
@pytest.mark.parametrize("name", ["two words", "-dash", "@at", "ü", "a\nb", "it's $HOME"])
def test_folders_of_any_name(
    source: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative ones too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVALLOC_CACHE", name)
    assert compiled(source).library is not None, compiled(source).reason
    assert kept(tmp_path / name)


@needs_compiler
def test_without_a_home(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(c_library, "cache_folder", nowhere)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    assert compiled(source).library is not None
    assert kept(tmp_path / f"kvalloc-{os.getuid()}")


@needs_compiler
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("cc 'unfinished", "CC is no command (No closing quotation)"),
        ("false", "the C compiler false failed (exit code 1)"),
        ("true", "made nothing"),
    ],
)
def test_a_strange_compiler(
    source: Path, command: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", command)
    found = compiled(source)
    assert found.library is None
    assert said in found.reason


@pytest.mark.parametrize(
    ("installed", "chosen"),
    [
        (("clang", "gcc", "cc"), "gcc"),
        (("clang", "cc"), "cc"),
        (("clang", "theirs"), "theirs"),
        (("clang",), "clang"),
    ],
)
def test_which_compiler(
    installed: tuple[str, ...], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What clang makes calls another OpenMP library than that of most torch wheels."""
    monkeypatch.setattr(shutil, "which", lambda name: name if name in installed else None)
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: "theirs -pthread")
    monkeypatch.delenv("CC", raising=False)
    assert c_library._compiler()[0] == chosen
    monkeypatch.setenv("CC", "clang -v")
    assert c_library._compiler() == ("clang", "-v")


@needs_compiler
def test_a_compiler_with_options_and_strange_words(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says need not be text; it has nothing to read from."""
    wrapper = tmp_path / "my cc"
    wrapper.write_text("#!/bin/sh\ncat\nprintf '\\377' >&2\nexec cc \"$@\"\n")
    wrapper.chmod(0o700)
    monkeypatch.setenv("CC", f"'{wrapper}' -O1")
    assert compiled(source).library is not None, compiled(source).reason


def test_a_compiler_that_does_not_end(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it started ends with it."""
    wrapper = tmp_path / "slow"
    wrapper.write_text(f"#!/bin/sh\nsleep 321 &\necho $! > '{tmp_path}/started'\nwait\n")
    wrapper.chmod(0o700)
    monkeypatch.setenv("CC", str(wrapper))
    monkeypatch.setattr(c_library, "_SECONDS", 0.5)
    found = compiled(source)
    assert found.library is None
    assert "was not done after" in found.reason
    assert not kept(tmp_path / "cache")
    started = int((tmp_path / "started").read_text())
    until = time.monotonic() + 5
    while _runs(started) and time.monotonic() < until:
        time.sleep(0.01)
    assert not _runs(started)


def _runs(process: int) -> bool:
    with suppress(OSError):
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX"
    return False


@needs_compiler
def test_several_processes_at_once(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOAD, str(source)]
    running = [subprocess.Popen(command) for _ in range(2)]
    assert [one.wait() for one in running] == [0, 0]
    assert len(kept(tmp_path / "cache")) == 1


def test_the_command_line_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    compiled.cache_clear()
    try:
        ran = run("doctor", "--json")
    finally:
        compiled.cache_clear()
    assert ran.code == 0
    findings = {one["name"]: one for one in ran.json["findings"]}
    assert SWITCH in findings["CPU kernel"]["advice"]
    assert not findings["CPU kernel"]["core"]
