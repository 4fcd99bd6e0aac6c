"""A fitted file: its parts belong together, and its error lies between those that were measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from factories import make_losses
from safetensors import safe_open
from safetensors.numpy import save_file

from kvalloc.errors import ProfileFileError
from kvalloc.formats.fitted import FittedModel, mean_scores
from kvalloc.formats.score_profile import ShareError

FILE = Path(__file__).parents[2] / "golden" / "data" / "version_1" / "fitted.safetensors"


def test_the_error_lies_between_those_measured() -> None:
    scores = FittedModel.load(FILE).scores
    errors = [
        ShareError(share=share, predicted=0.01, loss=loss, prompts=8)
        for share, loss in ((0.05, 0.02), (0.2, 0.005))
    ]
    scores = scores.replace(errors=tuple(errors))
    ratios = [scores.error_at(share) for share in (0.01, 0.05, 0.1, 0.2, 0.6)]
    assert ratios == pytest.approx([2, 2, 1, 0.5, 0.5])
    assert scores.replace(errors=()).error_at(0.1) is None


def test_the_mean_of_the_samples_is_what_is_solved() -> None:
    scores = make_losses()
    mean = mean_scores(scores)
    assert mean.n_samples == 1
    assert mean.losses is not None
    assert scores.losses is not None
    assert mean.losses[0] == pytest.approx(scores.losses.mean(axis=0))
    at = np.isin(scores.ranks, mean.ranks)
    assert mean.curves[0] == pytest.approx(scores.curves.mean(axis=0)[..., at])


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    fitted, path = FittedModel.load(FILE), tmp_path / "own.safetensors"
    other = fitted.scores.replace(shape=replace(fitted.shape, model_id="another"))
    parts = {**fitted.parts, "scores": other.header()}
    fitted.replace(scores=other, parts=parts).save(path)
    with pytest.raises(ProfileFileError, match=r"scores.shape is another model's"):
        FittedModel.load(path)
    fitted.replace(parts={"surrogate": fitted.parts["surrogate"]}).save(path)
    with pytest.raises(ProfileFileError, match="parts is surrogate, expected surrogate, scores"):
        FittedModel.load(path)
    with safe_open(FILE, "numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        save_file({**arrays, "more": np.zeros(2)}, path, metadata=file.metadata())
    with pytest.raises(ProfileFileError, match="more is an array, expected no such array"):
        FittedModel.load(path)
