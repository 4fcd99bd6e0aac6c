"""Finished pieces survive, whole or not at all, in a folder that one process owns."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from cli_tools import files_in

from kvalloc.errors import InputError, ProfileFileError
from kvalloc.files import checkpoint_folder
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.measure.checkpoint import Checkpoint, check_output

JOB = {"scorer": "xkv", "context_tokens": 100, "versions": {"torch": "2"}}
ARRAYS = {"curves": np.random.default_rng(0).random((2, 3, 5)), "masses": np.arange(3)}
RESULT = SimpleNamespace(save=lambda path: None)


@pytest.fixture
def output(tmp_path):
    return tmp_path / "s.safetensors"


def begun(output, job=JOB):
    """A job that was left with one finished piece."""
    with Checkpoint(output, job, resume=False) as kept:
        kept.save("piece", ARRAYS)
    return checkpoint_folder(output)


def test_a_piece_comes_back_bit_for_bit(output):
    folder = begun(output)
    assert folder == output.with_name("s.safetensors.partial")
    with Checkpoint(output, dict(JOB), resume=True) as kept:
        arrays = kept.load("piece")
        assert arrays.keys() == ARRAYS.keys()
        assert all(arrays[name].tobytes() == ARRAYS[name].tobytes() for name in ARRAYS)
        assert kept.load("other") is None
        kept.finish(RESULT)
    assert not folder.exists()


def test_a_job_without_a_finished_piece_leaves_nothing(output):
    with pytest.raises(KeyboardInterrupt) as error, Checkpoint(output, JOB, resume=True):
        raise KeyboardInterrupt
    assert str(error.value) == ""
    assert not list(output.parent.iterdir())


def test_a_piece_of_other_shapes_is_none(output):
    begun(output)
    with Checkpoint(output, JOB, resume=True) as kept:
        assert kept.load("piece", {"curves": (2, 3, 5), "masses": (3,)}) is not None
        assert kept.load("piece", {"curves": (2, 3, 5)}) is None
        assert kept.load("piece", {"curves": (2, 3, 5), "masses": (4,)}) is None
        kept.save("piece", {"masses": np.array([np.nan])})
        assert kept.load("piece", {"masses": (1,)}) is None


@pytest.mark.parametrize("left", [("lock",), ("manifest.json",), ("manifest.json", "lock"), ()])
def test_a_folder_without_pieces_is_no_unfinished_work(output, left):
    """A kill before the first piece, or while what is done is deleted, leaves such a one."""
    folder = checkpoint_folder(output)
    (folder / ".piece.safetensors.abcd1234.tmp" / "piece.safetensors").mkdir(parents=True)
    for name in left:
        (folder / name).write_text('{"kind": "kvalloc.unfinished", "of": "another job"}')
    check_output(output, resume=False)
    with Checkpoint(output, JOB, resume=False) as kept:
        kept.save("piece", ARRAYS)
    with Checkpoint(output, JOB, resume=True) as kept:
        assert kept.load("piece") is not None
        kept.finish(RESULT)
    assert not list(output.parent.iterdir())


def test_files_of_others_stay(output):
    (begun(output) / "mine.txt").write_text("mine")
    with Checkpoint(output, JOB, resume=True) as kept:
        kept.finish(RESULT)
    assert files_in(checkpoint_folder(output)) == {"mine.txt": b"mine"}


LINK = object()


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    "theirs",
    [
        {"mine.txt": "mine"},
        {"mine.safetensors": "mine"},
        {"manifest.json": '{"name": "an extension of a browser"}'},
        {"manifest.json": "[]", "piece.safetensors": "mine", "lock": "mine"},
        {"manifest.json": "{", ".a.tmp": "mine"},
        {"lock": LINK},
        LINK,
        "a file",
    ],
)
def test_a_folder_that_kvalloc_did_not_make_is_refused_and_stays(output, theirs, resume):
    output.with_name("other").mkdir()
    (output.with_name("other") / "lock").write_text("mine")

    def put(path, content):
        if isinstance(content, dict):
            path.mkdir()
            for name, inside in content.items():
                put(path / name, inside)
        elif content is LINK:
            path.symlink_to(output.with_name("other"))
        else:
            path.write_text(content)

    put(checkpoint_folder(output), theirs)
    before = _looks(output.parent)
    for work in (
        lambda: check_output(output, resume=resume),
        lambda: Checkpoint(output, JOB, resume=resume).__enter__(),
    ):
        with pytest.raises(InputError, match=r"partial .*expected a folder that kvalloc made"):
            work()
    assert _looks(output.parent) == before


def _looks(folder):
    """Kind, place on the disk and size of all that is in a folder."""
    every = {path: path.lstat() for path in folder.rglob("*")}
    return {path: (one.st_mode, one.st_ino, one.st_size) for path, one in every.items()}


def test_an_interruption_says_how_to_go_on(output):
    with (
        pytest.raises(KeyboardInterrupt, match="what was finished is in .*and resume=True"),
        Checkpoint(output, JOB, resume=False) as kept,
    ):
        kept.save("piece", ARRAYS)
        raise KeyboardInterrupt
    with pytest.raises(
        ProfileFileError, match=r"not finished \(s.safetensors.partial\), go on with"
    ):
        ScoreProfile.load(output)


def test_unfinished_work_is_neither_overwritten_nor_mixed_up(output):
    folder = begun(output)
    before = files_in(folder)
    for job, resume, said in (
        (JOB, False, "unfinished work; go on with resume=True, or delete"),
        ({**JOB, "context_tokens": 200}, True, "begun with context_tokens 100, now it is 200"),
    ):
        with pytest.raises(InputError, match=said), Checkpoint(output, job, resume=resume):
            pass
    with pytest.raises(InputError, match="unfinished work"):
        check_output(output, resume=False)
    check_output(output, resume=True)
    assert files_in(folder) == before
    (folder / "manifest.json").write_text("{")
    with (
        pytest.raises(InputError, match=r"no manifest of kvalloc"),
        Checkpoint(output, JOB, resume=True),
    ):
        pass


def test_another_process_is_refused_and_touches_nothing(output):
    """While one works; and not any more when it was killed."""
    code = (
        "import sys; from kvalloc.measure.checkpoint import Checkpoint\n"
        f"with Checkpoint({str(output)!r}, {JOB!r}, resume=False) as kept:\n"
        "    kept.save('piece', {}); print('begun', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"begun\n"
        before = files_in(output.parent)
        for resume in (False, True):
            with (
                pytest.raises(
                    InputError,
                    match=rf"another process \({other.pid}\) is at work in .*wait for it",
                ),
                Checkpoint(output, JOB, resume=resume),
            ):
                pass
            with pytest.raises(InputError, match=rf"process \({other.pid}\) is at work"):
                check_output(output, resume=resume)
        assert files_in(output.parent) == before
        other.kill()
    with Checkpoint(output, JOB, resume=True) as kept:
        assert kept.load("piece") is not None
