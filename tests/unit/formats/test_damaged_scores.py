"""Score profiles that are damaged, edited or half there; each with a way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import (
    make_choices,
    make_loss_bits,
    make_losses,
    make_scores,
    make_shared_scores,
)

from kvalloc.errors import InputError
from kvalloc.formats.score_profile import ScoreProfile


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (make_scores, [{"text_digest": "1" * 64}]),
        (make_losses, [{"losses": lambda a: a * 1.001}]),
        (
            lambda: make_losses(per="layer"),
            [dict.fromkeys(("loss_tokens", "loss_bits", "losses"))],
        ),
        (make_choices, [{"loss_policies": lambda p: (p[0].replace(label="t"), p[1])}]),
        (make_loss_bits, [{"loss_bits": np.array([16, 4, 8])}]),
        (make_shared_scores, [{"shared_runs": None, "shared_curves": None}]),
    ],
)
def test_all_is_saved_loaded_and_part_of_the_digest(make, changes, tmp_path):
    scores = make()
    scores.save(tmp_path / "s.safetensors")
    again = ScoreProfile.load(tmp_path / "s.safetensors")
    assert again.digest == scores.digest
    again.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "s.safetensors").read_bytes()
    for name in ScoreProfile.model_fields:
        mine, theirs = getattr(scores, name), getattr(again, name)
        np.testing.assert_equal(theirs, mine)
        if isinstance(theirs, np.ndarray):
            assert not theirs.flags.writeable, name
    for change in changes:
        new = {k: v(getattr(scores, k)) if callable(v) else v for k, v in change.items()}
        assert scores.replace(**new).digest != scores.digest


def edit(name: str, change: Any) -> Callable[[ScoreProfile], dict[str, Any]]:
    """The field of a profile changed in place, or made anew."""

    def edited(scores: ScoreProfile) -> dict[str, Any]:
        array = np.array(getattr(scores, name))
        new = change(array)
        return {name: array if new is None else new}

    return edited


def drop(*names: str) -> Callable[[ScoreProfile], dict[str, Any]]:
    return lambda scores: dict.fromkeys(names)


def at(name: str, index: tuple[int, ...], value: float) -> Callable[[ScoreProfile], dict[str, Any]]:
    return edit(name, lambda array: array.__setitem__(index, value))


def convex(curves: Any) -> Any:
    return np.broadcast_to(np.linspace(0, 1, 36) ** 2, curves.shape).copy()


MAKERS = (make_scores, make_losses, make_loss_bits, make_shared_scores)
WRONG: dict[str, Callable[[Any], Any]] = {
    "none": lambda a: None,
    "other type": lambda a: a.astype(np.float32 if a.dtype == float else np.int32),
    "flat": lambda a: a.ravel()[None],
    "first left out": lambda a: a[..., 1:],
    "last left out": lambda a: a[:-1],
    "NaN": lambda a: a * np.nan,
    "below zero": lambda a: -a - 1,
}
SIZES = {"ranks", "curves", "masses", "loss_tokens", "loss_bits", "shared_runs"}
"""Arrays by which others are sized: one of those may be named in their place."""


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("make", MAKERS)
def test_every_array_is_checked_in_type_shape_and_range(make: Any, wrong: str) -> None:
    scores = make()
    for name in ScoreProfile.model_fields:
        array = getattr(scores, name)
        if not isinstance(array, np.ndarray):
            continue
        with pytest.raises(InputError, match="score profile: " if name in SIZES else name):
            scores.replace(**{name: WRONG[wrong](array)})


SEMANTIC: dict[Any, list[tuple[Callable[[ScoreProfile], dict[str, Any]], str]]] = {
    make_scores: [
        (at("curves", (0, 1, 1, 5), np.nan), r"curves is not finite at \[0, 1, 1, 5\]"),
        (at("curves", (0, 0, 0, 30), 1.5), "curves.*within 0..1"),
        (at("curves", (1, 0, 0, 20), 0.0), "falling in sample 1"),
        (edit("curves", convex), "not concave in sample 0"),
        (edit("curves", lambda c: c * 0.9), "not whole where everything is kept in sample 0"),
        (edit("ranks", lambda r: r[::-1].copy()), "ranks is 35..0"),
        (at("sample_tokens", (1,), 0), "sample_tokens is 0..40, expected numbers within 1..inf"),
    ],
    make_losses: [
        (at("losses", (1, 2, 1, 0, 0, 0), np.nan), r"losses is not finite at \[1, 2, 1, 0, 0, 0\]"),
        (edit("loss_tokens", lambda a: a - 1), "loss.*to the context of 40"),
        (edit("loss_tokens", lambda a: a.clip(12)), r"rising from at least 5 \(sinks and window\)"),
        (edit("losses", lambda a: a[..., ::-1].copy()), "loss.*not 0 where"),
        (edit("losses", lambda a: -a), "loss.*what is lost, above 0"),
    ],
    make_choices: [
        (drop("losses", "loss_tokens", "loss_bits"), "losses that it belongs to"),
        (lambda s: {"loss_policies": (s.loss_policies[0],) * 2}, "'tova' twice"),
        (
            lambda s: {"loss_policies": (s.loss_policies[0].replace(window=9), s.loss_policies[1])},
            "tova with 2 sinks and a window of 9",
        ),
    ],
    make_loss_bits: [
        (lambda s, given=given: {"loss_bits": np.array(given)}, "16, then some of 8, 5, 4, 3 once")
        for given in ([16, 8, 6], [16, 8, 8], [8, 16, 4])
    ],
    make_shared_scores: [
        (edit("shared_runs", lambda a: a + [[-1, 0]]), "runs of 2 to 4"),
        (edit("shared_runs", lambda a: a[:1].repeat(7, axis=0)), "twice"),
        (edit("shared_curves", lambda a: a * 1.2), "no more than the layers keep apart"),
        (edit("shared_curves", lambda a: a * 0.9), "not whole"),
        (
            at("shared_curves", (0, 0, 0, 5), 0.0),
            "shared_curves is falling in sample 0, layers 2-3",
        ),
    ],
}


@pytest.mark.parametrize(
    ("make", "changes", "words"), [(m, *row) for m, rows in SEMANTIC.items() for row in rows]
)
def test_what_cannot_be_is_refused(make, changes, words):
    scores = make()
    with pytest.raises(InputError, match=words):
        scores.replace(**changes(scores))


def test_an_error_of_whoever_reads_a_file_is_not_about_the_file(tmp_path: Path) -> None:
    make_scores().save(tmp_path / "s.safetensors")
    with pytest.raises(ValueError, match="mine"), ScoreProfile.opened(tmp_path / "s.safetensors"):
        raise ValueError("mine")
