"""What every file says of its making."""

from __future__ import annotations

from kvalloc import files


def test_versions_name_what_is_installed_and_what_is_not():
    found = files.provenance("python", "numpy", "no-such-package")["versions"]
    assert list(found) == ["kvalloc", "python", "numpy", "no-such-package"]
    assert found["python"][0] == "3"
    assert found["numpy"][0].isdigit()
    assert found["no-such-package"] == "source"


def test_dates_are_those_of_utc(monkeypatch):
    from datetime import datetime, timedelta, timezone

    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            late = datetime(2026, 3, 1, 0, 30, tzinfo=timezone(timedelta(hours=2)))
            return late.astimezone(tz) if tz else late.replace(tzinfo=None)

    monkeypatch.setattr(files, "datetime", Clock)
    assert files.provenance()["created"] == "2026-02-28"
