"""Build what a release consists of, so that anyone who builds the commit gets the same bytes.

    python .ci/release.py dist     # the wheel and the source archive of the commit, into dist/
    python .ci/release.py          # build both twice, elsewhere and later, and compare

From the files of the commit alone, by the setuptools and the compiler that are here: times are the
commit's, owners nobody's, and the kernel knows no folder. Another compiler makes another kernel;
the source archive, and of the wheel all else, are the same then, too.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from wheel_test import ROOT, run


def git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout


def build(folder: Path, out: Path) -> list[Path]:
    """The source archive and the wheel of the commit, by way of a folder."""
    epoch = int(git("log", "-1", "--format=%ct"))
    os.umask(0o022)  # the wheel holds the modes of what is built
    with tarfile.open(fileobj=io.BytesIO(git("archive", "HEAD"))) as tree:
        tree.extractall(folder / "tree", filter="data")
    # Without debugging information, in which folders stand.
    environment = {"SOURCE_DATE_EPOCH": str(epoch), "PYTHONHASHSEED": "0", "CFLAGS": "-g0"}
    options = (sys.executable, "-m", "build", "--no-isolation", "--outdir", out)
    run((*options, "--sdist", folder / "tree"), cwd=folder, quiet=True, **environment)
    (source,) = out.glob("*.tar.gz")
    settle(source, epoch)
    with tarfile.open(source) as archive:
        archive.extractall(folder / "source", filter="data")
    (unpacked,) = (folder / "source").iterdir()
    run((*options, "--wheel", unpacked), cwd=folder, quiet=True, **environment)
    return sorted(out.iterdir())


def settle(archive: Path, epoch: int) -> None:
    """Write a source archive anew: in order, nobody's, and of one time."""
    held = io.BytesIO()
    with tarfile.open(archive) as old, tarfile.open(fileobj=held, mode="w") as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isreg() else None)
    with archive.open("wb") as file:
        file.write(gzip.compress(held.getvalue(), mtime=epoch))


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def contents(wheel: Path) -> dict[str, str]:
    """What a wheel holds, by the digest of each file."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: digest(archive.read(name)) for name in archive.namelist()}


def compare(first: list[Path], second: list[Path]) -> list[str]:
    """What differs, in words."""
    found = []
    for one, other in zip(first, second, strict=True):
        same = one.name == other.name and one.read_bytes() == other.read_bytes()
        if same:
            continue
        inside = ""
        if one.suffix == ".whl":
            a, b = contents(one), contents(other)
            differing = sorted(name for name in {*a, *b} if a.get(name) != b.get(name))
            inside = f": {', '.join(differing) or 'times, modes or order'}"
        found.append(f"{one.name} differs{inside}")
    return found


def main() -> None:
    if git("status", "--porcelain", "--untracked-files=no").strip():
        raise SystemExit("release: there are changes that are not committed; commit them first")
    with tempfile.TemporaryDirectory(prefix="kvalloc-release-") as made:
        places = [Path(made, "here"), Path(made, "a longer name", "elsewhere")]
        if sys.argv[1:]:
            places = places[:1]
        builds = []
        for number, place in enumerate(places):
            place.mkdir(parents=True)
            os.umask((0o027, 0o077)[number])  # as people have it
            builds.append(build(place, place / "out"))
        if sys.argv[1:]:
            target = Path(sys.argv[1])
            target.mkdir(parents=True, exist_ok=True)
            builds[0] = [Path(shutil.copy(file, target)) for file in builds[0]]
        elif differing := compare(*builds):
            raise SystemExit(f"release: {'; '.join(differing)}")
        for file in builds[0]:
            print(f"{digest(file.read_bytes())}  {file.name}")
    print("built" if sys.argv[1:] else "built twice: the same bytes")


if __name__ == "__main__":
    main()
