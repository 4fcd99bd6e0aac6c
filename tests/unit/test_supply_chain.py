"""What kvalloc is built from and with: pinned, under licences that are allowed, the same bytes."""

import importlib.util
import io
import tarfile
import zipfile

import licences
import pytest
import release


def test_all_that_is_installed_is_pinned_allowed_and_listed():
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("not the environment that 'make' installs")
    assert licences.faults() == []


def test_which_licences_are_allowed():
    for one in ("MIT AND PSF-2.0", "GPL-3.0-only OR MIT", "Apache-2.0 WITH LLVM-exception"):
        assert licences.allowed(one)
    for one in ("MIT AND GPL-3.0-only", "AGPL-3.0-or-later", "none stated"):
        assert not licences.allowed(one)


def archive(path, names, time, mode):
    with tarfile.open(path, "w:gz") as made:
        for name in names:
            member = tarfile.TarInfo(name)
            member.mtime, member.uname, member.uid, member.mode = time, "somebody", 1000, mode
            member.size = len(name)
            made.addfile(member, io.BytesIO(name.encode()))
    return path


def test_an_archive_of_another_day_and_owner_is_the_same(tmp_path):
    first = archive(tmp_path / "a.tar.gz", ["p/one", "p/two"], 1_700_000_000, 0o644)
    second = archive(tmp_path / "b.tar.gz", ["p/two", "p/one"], 1_700_009_999, 0o600)
    assert first.read_bytes() != second.read_bytes()
    for path in (first, second):
        release.settle(path, 1_600_000_000)
    assert first.read_bytes() == second.read_bytes()
    with tarfile.open(first) as result:
        assert result.getnames() == ["p/one", "p/two"]
        assert result.extractfile("p/two").read() == b"p/two"
        assert {member.mtime for member in result} == {1_600_000_000}


def test_what_differs_between_two_builds_is_named(tmp_path):
    for folder, text in (("a", "x"), ("b", "y")):
        (tmp_path / folder).mkdir()
        with zipfile.ZipFile(tmp_path / folder / "k.whl", "w") as wheel:
            wheel.writestr("same", "z")
            wheel.writestr("other", text)
    first, second = ([tmp_path / folder / "k.whl"] for folder in "ab")
    assert release.compare(first, first) == []
    assert release.compare(first, second) == ["k.whl differs: other"]
