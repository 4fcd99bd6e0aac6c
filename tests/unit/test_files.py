"""Files that are written whole, and what every file says of its making."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cli_tools import files_in, full_disk
from factories import make_scores

from kvalloc import files
from kvalloc.errors import InputError
from kvalloc.measure.checkpoint import Checkpoint

fcntl = pytest.importorskip("fcntl")


def test_versions_name_what_is_installed_and_what_is_not():
    found = files.provenance("python", "numpy", "no-such-package")["versions"]
    assert list(found) == ["kvalloc", "python", "numpy", "no-such-package"]
    assert found["python"][0] == "3"
    assert found["numpy"][0].isdigit()
    assert found["no-such-package"] == "source"


def test_what_is_flushed_is_open_for_writing(tmp_path, monkeypatch):
    """As Windows wants it, which refuses to flush what was opened for reading."""

    def flush(handle: int) -> None:
        assert fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY

    monkeypatch.setattr(os, "fsync", flush)
    with files.atomic_write(tmp_path / "x") as temporary:
        temporary.write_text("whole", encoding="utf-8")
    assert (tmp_path / "x").read_text(encoding="utf-8") == "whole"


WRITING = """
import pathlib, sys
from kvalloc import files
target = pathlib.Path(sys.argv[1])
with files.atomic_write(target) as file:
    with files.temporary_beside(target.parent, ".x-", folder=True) as folder:
        (folder / "inside").touch()
        print(file.name, folder.name, sep="\\n", flush=True)
        sys.stdin.read()
"""


def test_what_a_killed_process_has_left_goes_and_what_a_living_one_has_stays(
    tmp_path: Path,
) -> None:
    target, others = tmp_path / "s.json", {".s.json.abc.tmp", ".s.jsonabcd1234.tmp", "s.json.tmp"}
    for name in others:
        (tmp_path / name).touch()
    command = [sys.executable, "-c", WRITING, str(target)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        left = {other.stdout.readline().decode().strip() for _ in range(2)}
        for alive in (True, False):
            if not alive:
                other.kill()
                other.wait()
            assert left <= {*os.listdir(tmp_path)}
            with files.atomic_write(target) as temporary:
                temporary.write_text(f"alive: {alive}")
            with files.temporary_beside(tmp_path, ".x-", folder=True) as folder:
                assert folder.is_dir()
            assert target.read_text() == f"alive: {alive}"
            expected = {"s.json", *others, *(left if alive else ())}
            assert {*os.listdir(tmp_path)} == expected


def test_a_temporary_file_that_was_taken_for_one_left_is_made_again(tmp_path, monkeypatch):
    """Between its making and its lock another process may have deleted it."""
    made, make = [], files.tempfile.mkstemp

    def lost_once(**asked):
        made.append(make(**asked))
        if len(made) == 1:
            os.unlink(made[0][1])
        return made[-1]

    monkeypatch.setattr(files.tempfile, "mkstemp", lost_once)
    with files.atomic_write(tmp_path / "x") as temporary:
        temporary.write_text("whole")
    assert len(made) == 2
    assert files_in(tmp_path) == {"x": b"whole"}


@pytest.mark.parametrize("lockless", [False, True])
def test_without_locks_nothing_of_others_is_deleted(tmp_path, monkeypatch, lockless):
    """On Windows, and on network file systems that have none."""

    def refuse(handle: int, how: int) -> None:
        raise OSError(38, "Function not implemented")

    if lockless:
        monkeypatch.setattr(files, "_fcntl", None)
    else:
        monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / ".x.abcd1234.tmp").touch()
    with files.atomic_write(tmp_path / "x") as temporary:
        temporary.write_text("whole")
    assert files_in(tmp_path) == {".x.abcd1234.tmp": b"", "x": b"whole"}


def test_a_folder_that_may_be_written_to_and_not_read(tmp_path, monkeypatch):
    def refuse(folder: Path) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files.os, "listdir", refuse)
    with files.atomic_write(tmp_path / "x") as temporary:
        temporary.write_text("whole")
    assert (tmp_path / "x").read_text() == "whole"


def test_two_that_write_one_output_leave_one_of_them_whole(tmp_path):
    target = tmp_path / "x"
    with files.atomic_write(target) as one, files.atomic_write(target) as other:
        one.write_text("one" * 1000)
        other.write_text("other" * 1000)
    assert files_in(tmp_path) == {"x": b"one" * 1000}


def test_a_full_disk_leaves_what_was_there(tmp_path):
    (tmp_path / "x").write_text("before")
    with (
        full_disk(),
        pytest.raises(InputError, match=r"cannot write .*x: File too large"),
        files.atomic_write(tmp_path / "x") as temporary,
    ):
        temporary.write_bytes(bytes(1000))
    assert files_in(tmp_path) == {"x": b"before"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB; skipped where this user may not mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)]
    try:
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("this user may not mount a file system")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    output, piece = small_disk / "s.safetensors", {"losses": np.arange(2000.0)}
    with Checkpoint(output, {"of": "this"}, resume=False) as kept:
        kept.save("first", piece)
        before = files_in(small_disk)
        for name in ("second", "first"):
            with pytest.raises(InputError, match=r"cannot write .*: No space left on device"):
                kept.save(name, {"losses": np.zeros(10_000)})
        assert files_in(small_disk) == before
        assert np.array_equal(kept.load("first")[0]["losses"], piece["losses"])
    with pytest.raises(InputError, match=r"cannot write .*s.safetensors: .*No space"):
        make_scores(context_tokens=2000).save(output)
    assert files_in(small_disk) == before
    (small_disk / "rest").write_bytes(bytes(2**16 - 2**15))
    with (
        pytest.raises(InputError, match=r"(cannot write|cannot lock|cannot create) .*: No space"),
        Checkpoint(small_disk / "other", {"of": "x" * 40_000}, resume=False),
    ):
        pass
    assert not (small_disk / "other.partial").exists()


def test_a_disk_that_is_read_only(small_disk: Path) -> None:
    (small_disk / "s.json").write_text("before")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with (
        pytest.raises(InputError, match="cannot write .*no permission in the folder"),
        files.atomic_write(small_disk / "s.json"),
    ):
        pass
    with pytest.raises(InputError, match="cannot write"):
        Checkpoint(small_disk / "s.safetensors", {}, resume=False)
    assert files_in(small_disk) == {"s.json": b"before"}


def test_a_clock_that_goes_backwards_changes_nothing(tmp_path: Path) -> None:
    """Nothing compares times: files may come from the future, and from before they were begun."""
    output = tmp_path / "s.safetensors"
    for place, when in enumerate((4e9, 0.0, 2e9)):
        with Checkpoint(output, {"of": "this"}, resume=True) as kept:
            assert [kept.holds(f"piece-{n}") for n in range(3)] == [n < place for n in range(3)]
            kept.save(f"piece-{place}", {"losses": np.arange(3.0)})
        for file in (*tmp_path.rglob("*"), tmp_path):
            os.utime(file, (when, when))
    with Checkpoint(output, {"of": "this"}, resume=True) as kept:
        kept.finish()
    assert not list(tmp_path.iterdir())


def test_dates_are_those_of_utc(monkeypatch):
    from datetime import datetime, timedelta, timezone

    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            late = datetime(2026, 3, 1, 0, 30, tzinfo=timezone(timedelta(hours=2)))
            return late.astimezone(tz) if tz else late.replace(tzinfo=None)

    monkeypatch.setattr(files, "datetime", Clock)
    assert files.provenance()["created"] == "2026-02-28"
