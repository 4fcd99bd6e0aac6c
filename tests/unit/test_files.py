"""Files that are written whole, and what every file says of its making."""

import errno
import os
import re
import stat
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from cli_tools import files_in, full_disk, run
from factories import make_budget_profile, make_evaluation, make_row, make_scores, part_of

from kvalloc import files
from kvalloc.errors import InputError, ProfileFileError
from kvalloc.formats.merging import merge
from kvalloc.interop.exporting import export
from kvalloc.report.figure import plot
from kvalloc.report.page import write_report

fcntl = pytest.importorskip("fcntl")


def test_versions_name_what_is_installed_and_what_is_not():
    result = files.provenance("python", "numpy", "no-such-package")["versions"]
    assert list(result) == ["kvalloc", "python", "numpy", "no-such-package"]
    assert result["python"][0] == "3"
    assert result["numpy"][0].isdigit()
    assert result["no-such-package"] == "source"


WRITING = """
import pathlib, sys
from kvalloc import files
target = pathlib.Path(sys.argv[1])
with files.atomic_write(target) as file:
    with files.temporary_beside(target.parent, ".x-") as folder:
        (folder / "inside").touch()
        print(file.parent.name, folder.name, sep="\\n", flush=True)
        sys.stdin.read()
"""


def test_what_a_killed_process_has_left_goes_and_what_a_living_one_has_stays(tmp_path):
    target, others = tmp_path / "s.json", {".s.json.abc.tmp", ".s.jsonabcd1234.tmp", "s.json.tmp"}
    for name in others:
        (tmp_path / name).touch()
    command = [sys.executable, "-c", WRITING, str(target)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        left = {other.stdout.readline().decode().strip() for _ in range(2)}
        for alive in (True, False):
            if not alive:
                other.kill()
                other.wait()
            assert left <= {*os.listdir(tmp_path)}
            with files.atomic_write(target) as temporary:
                temporary.write_text(f"alive: {alive}")
            with files.temporary_beside(tmp_path, ".x-") as folder:
                assert folder.is_dir()
            assert target.read_text() == f"alive: {alive}"
            expected = {"s.json", *others, *(left if alive else ())}
            assert {*os.listdir(tmp_path)} == expected


def test_a_writer_that_replaces_its_file_keeps_its_lock(tmp_path):
    """As safetensors does: another process at work beside it must not take it for one left."""
    from safetensors.numpy import save_file

    with files.atomic_write(tmp_path / "x") as ours:
        save_file({"a": np.zeros(3)}, ours)
        with files.atomic_write(tmp_path / "x") as theirs:
            save_file({"a": np.ones(3)}, theirs)
        assert ours.exists()
    assert os.listdir(tmp_path) == ["x"]


def test_a_temporary_file_that_was_taken_for_one_left_is_made_again(tmp_path, monkeypatch):
    """Between its making and its lock another process may have deleted it."""
    made, make = [], files.tempfile.mkdtemp

    def lost_once(**asked):
        made.append(make(**asked))
        if len(made) == 1:
            os.rmdir(made[0])
        return made[-1]

    monkeypatch.setattr(files.tempfile, "mkdtemp", lost_once)
    with files.atomic_write(tmp_path / "x") as temporary:
        temporary.write_text("whole")
    assert len(made) == 2
    assert files_in(tmp_path) == {"x": b"whole"}


def refused(number):
    def refuse(*_):
        raise OSError(number, "as this system does")

    return refuse


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (files, "_fcntl", None),
        (fcntl, "flock", refused(errno.ENOSYS)),
        (files.os, "listdir", refused(errno.EACCES)),
    ],
)
def test_what_a_system_does_not_let_one_do_is_left_out(tmp_path, monkeypatch, module, name, value):
    """No locks, on Windows and on some network file systems; a folder that may not be read.

    Then nothing of others is deleted.
    """
    (tmp_path / ".x.abcd1234.tmp").touch()
    with monkeypatch.context() as patch:
        patch.setattr(module, name, value)
        with files.atomic_write(tmp_path / "x") as temporary:
            temporary.write_text("whole")
    assert files_in(tmp_path) == {".x.abcd1234.tmp": b"", "x": b"whole"}


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


STREAMS = (
    *("budget profile", "evaluation", "report.html", "picture.png", "picture.svg"),
    *("csv", "solve"),
)
PLAIN = "score profile", "merge", "parquet", "lu-kv"


def writer(name, folder):
    """Return what writes a file: a function, or for "solve" a command."""
    scores, decided = make_scores(), make_budget_profile([[10, 17], [12, 12], [9, 30]])
    folder.mkdir()
    scores.save(s := folder / "s.safetensors")
    decided.save(p := folder / "p.json")
    parts = [folder / f"part-{place}" for place in range(2)]
    for number, part in enumerate(parts, 1):
        part_of(scores, number, 2).save(part)

    def solve(output):
        assert run("solve", s, "--budget", "50%", "--solver", "greedy", "-o", output).code == 0

    known = {
        "budget profile": decided.save,
        "evaluation": make_evaluation(make_row()).save,
        "score profile": scores.save,
        "report.html": partial(write_report, [s, p]),
        "picture.png": partial(plot, [p]),
        "picture.svg": partial(plot, [p]),
        "merge": partial(merge, parts),
        "solve": solve,
    }
    return known.get(name) or partial(export, decided, name)


@pytest.mark.parametrize("name", [*STREAMS, *PLAIN])
def test_a_link_is_written_through(tmp_path, name):
    """To a file that is there; of one that is not, two ways of writing are enough."""
    write, link = writer(name, tmp_path / "of"), tmp_path / f"output{Path(name).suffix}"
    target = tmp_path / "elsewhere" / "file"
    target.parent.mkdir()
    link.symlink_to(Path("elsewhere") / "file")
    for before in (None, "before") if name in ("budget profile", "score profile") else ("before",):
        if before is not None:
            target.write_text(before)
        write(link)
        assert link.is_symlink()
        assert link.samefile(target)
        assert len(target.read_bytes()) > 10
    assert {*os.listdir(tmp_path)} == {"of", "elsewhere", link.name}
    assert os.listdir(target.parent) == ["file"]


def special_file(path, kind):
    """Make a FIFO, a device or a socket; a FIFO where this user may not make the others."""
    try:
        os.mknod(path, kind | 0o666, os.makedev(1, 3))  # the number of the null device
        open(path, "wb").close() if kind == stat.S_IFCHR else None  # not on every file system
    except OSError:
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    return path.lstat().st_mode


@pytest.mark.parametrize("name", STREAMS)
def test_what_is_read_as_a_stream_is_written_into_a_fifo(tmp_path, name):
    write, fifo = writer(name, tmp_path / "of"), tmp_path / f"output{Path(name).suffix}"
    write(fifo)
    whole, result = fifo.read_bytes(), []
    fifo.unlink()
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: result.append(fifo.read_bytes()), daemon=True)
    reader.start()
    write(fifo)
    reader.join(60)
    assert stat.S_ISFIFO(fifo.lstat().st_mode)
    numbered = re.compile(rb"gradient_\d+")  # counted by what draws, picture by picture
    assert [len(numbered.sub(b"", one)) for one in result] == [len(numbered.sub(b"", whole))]
    assert {*os.listdir(tmp_path)} == {"of", fifo.name}


def test_a_device_is_written_into_and_stays(tmp_path):
    path = tmp_path / "p.json"
    mode = special_file(path, stat.S_IFCHR)
    reader = threading.Thread(target=path.read_bytes, daemon=True)
    reader.start()
    make_budget_profile([[10, 17]]).save(path)
    reader.join(60)
    assert path.lstat().st_mode == mode
    assert os.listdir(tmp_path) == ["p.json"]


@pytest.mark.parametrize("kind", [stat.S_IFIFO, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFSOCK])
@pytest.mark.parametrize("name", PLAIN)
def test_what_needs_a_plain_file_refuses_any_other(tmp_path, name, kind):
    write, path, link = writer(name, tmp_path / "of"), tmp_path / "s", tmp_path / "link"
    mode = special_file(path, kind)
    link.symlink_to(path)
    for output in (path, link):
        with pytest.raises(InputError, match=r"cannot write .*: it is a \w+.*, expected a plain"):
            write(output)
    assert path.lstat().st_mode == mode
    assert {*os.listdir(tmp_path)} == {"of", "s", "link"}


def test_what_only_looks_temporary_stays(tmp_path):
    """A file, a link and a FIFO under names of folders in which files are being written."""
    names = [f".x.{number:08}.tmp" for number in range(3)]
    (tmp_path / names[0]).touch()
    (tmp_path / names[1]).symlink_to("elsewhere")
    os.mkfifo(tmp_path / names[2])
    with files.atomic_write(tmp_path / "x") as temporary:
        temporary.write_text("whole")
    files.delete_file(tmp_path / names[1])
    assert {*os.listdir(tmp_path)} == {"x", *names}


def test_a_link_that_leads_nowhere_is_refused_and_named_as_one(tmp_path):
    (tmp_path / "p.json").touch()
    for name, target, said in (
        ("loop", "loop", "symbolic links"),
        ("gone", "no/file", "folder .*no does not exist"),
    ):
        (link := tmp_path / name).symlink_to(target)
        with pytest.raises(InputError, match=rf"cannot write .*{name}: .*{said}"):
            make_scores().save(link)
        assert link.is_symlink()
        assert files.near_file(link) == f"it is a link to {target}, which leads nowhere; "
    assert files.near_file(tmp_path / "q.json") == f"the nearest is '{tmp_path / 'p.json'}'; "
    with pytest.raises(ProfileFileError, match="which leads nowhere"):
        merge([tmp_path / "loop"] * 2, tmp_path / "out.safetensors")
