"""What every file says of its making."""

from __future__ import annotations

import os

import pytest

from kvalloc import files

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


def test_dates_are_those_of_utc(monkeypatch):
    from datetime import datetime, timedelta, timezone

    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            late = datetime(2026, 3, 1, 0, 30, tzinfo=timezone(timedelta(hours=2)))
            return late.astimezone(tz) if tz else late.replace(tzinfo=None)

    monkeypatch.setattr(files, "datetime", Clock)
    assert files.provenance()["created"] == "2026-02-28"
