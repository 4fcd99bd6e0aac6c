"""Finished samples survive, whole or not at all."""

import numpy as np
import pytest

from kvalloc.errors import InputError
from kvalloc.measure.checkpoint import Checkpoint, MeasuredSample, checkpoint_folder

JOB = {"scorer": "xkv", "context_tokens": 100, "versions": {"torch": "2"}}
SHAPE = (2, 3, 5)


def sample(seed: int = 0) -> MeasuredSample:
    rng = np.random.default_rng(seed)
    return MeasuredSample(
        curves=rng.random(SHAPE), masses=rng.random(SHAPE[:2]), interpolation_error=rng.random()
    )


def test_a_sample_comes_back_bit_for_bit(tmp_path):
    Checkpoint(tmp_path / "x", JOB, resume=False).save(3, sample())
    kept = Checkpoint(tmp_path / "x", dict(JOB), resume=True)
    found = kept.load(3, SHAPE)
    assert found is not None
    assert np.array_equal(found.curves, sample().curves)
    assert np.array_equal(found.masses, sample().masses)
    assert found.interpolation_error == sample().interpolation_error
    assert kept.load(2, SHAPE) is None
    kept.remove()
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("content", [b"", b"\0" * 100, None])
def test_a_damaged_sample_is_none(tmp_path, content):
    kept = Checkpoint(tmp_path / "x", JOB, resume=False)
    kept.save(0, sample())
    file = tmp_path / "x" / "sample_00000.safetensors"
    file.write_bytes(file.read_bytes()[:-8] if content is None else content)
    assert kept.load(0, SHAPE) is None
    kept.save(0, sample())
    assert kept.load(0, (2, 3, 6)) is None


def test_an_unfinished_job_is_not_overwritten(tmp_path):
    Checkpoint(tmp_path / "x", JOB, resume=False)
    with pytest.raises(InputError, match="unfinished measurement; go on with resume=True"):
        Checkpoint(tmp_path / "x", JOB, resume=False)


def test_another_job_is_refused_with_what_differs(tmp_path):
    Checkpoint(tmp_path / "x", JOB, resume=False)
    with pytest.raises(InputError, match="begun with context_tokens 100, now it is 200"):
        Checkpoint(tmp_path / "x", {**JOB, "context_tokens": 200}, resume=True)
    (tmp_path / "x" / "manifest.json").write_text("{")
    with pytest.raises(InputError, match="manifest.json cannot be read"):
        Checkpoint(tmp_path / "x", JOB, resume=True)


def test_resume_without_anything_starts(tmp_path):
    kept = Checkpoint(tmp_path / "x", JOB, resume=True)
    assert kept.load(0, SHAPE) is None


def test_a_folder_that_cannot_be_made(tmp_path):
    with pytest.raises(InputError, match="cannot create the folder"):
        Checkpoint(tmp_path / "no" / "x", JOB, resume=False)


def test_the_folder_stands_beside_the_output(tmp_path):
    folder = checkpoint_folder(tmp_path / "s.safetensors")
    assert folder == tmp_path / "s.safetensors.partial"
