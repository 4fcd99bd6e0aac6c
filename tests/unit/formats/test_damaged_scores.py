"""Score profiles that are damaged, edited or half there; each with a way out."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import (
    make_bits,
    make_choices,
    make_loss_bits,
    make_losses,
    make_scores,
    make_shared_scores,
)
from hostile_files import Tensors
from refusals import refused

from kvalloc.errors import InputError
from kvalloc.formats.score_profile import ScoreProfile


def stating(**values: Any) -> Callable[[Tensors], None]:
    return lambda file: file.stated.update(values)


def typed(name: str, dtype: str) -> Callable[[Tensors], None]:
    return lambda file: file.arrays.update({name: (dtype, file.arrays[name][1])})


def without(name: str) -> Callable[[Tensors], Any]:
    return lambda file: file.arrays.pop(name)


def with_nan(file: Tensors) -> None:
    file.numbers("curves")[0, 1, 1, 5] = np.nan


def no_object(file: Tensors) -> None:
    file.stated = [1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (stating(schema_version=1), "schema_version is 1, expected"),
        (stating(kind="kvalloc.budget_profile"), "file is a budget profile"),
        (stating(kind="kvalloc.profile"), "kind is kvalloc.profile"),
        (stating(context_tokens=40.0), "context_tokens is 40.0"),
        (stating(context_tokens=5), "context_tokens is 5"),
        (stating(context_tokens=41), "ranks is "),
        (no_object, "header is "),
        *((without(name), f"{name} is missing, expected") for name in ("ranks", "curves")),
        (typed("masses", "I64"), "masses is int64"),
        (typed("ranks", "F64"), "ranks is float64"),
        (with_nan, r"curves is not finite at \[0, 1, 1, 5\], expected finite"),
    ],
)
def test_an_edited_score_profile(
    tmp_path: Path, change: Callable[[Tensors], Any], words: str
) -> None:
    """One edit of each sort, signed again; test_hostile_files makes the others."""
    path = tmp_path / "s.safetensors"
    make_scores().save(path)
    file = Tensors.parse(path.read_bytes())
    change(file)
    path.write_bytes(file.signed().pack())
    assert re.search(words, str(refused(path, ScoreProfile.load)))


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (make_scores, [{"text_digest": "1" * 64}]),
        (make_losses, [{"loss_stderr": None}, {"losses": lambda a: a * 1.001}]),
        (lambda: make_losses(per="layer"), [{"loss_stderr": None}]),
        (make_bits, [{"bit_widths": None, "bit_fidelity": None}]),
        (make_choices, [{"loss_policies": lambda p: (p[0].replace(label="t"), p[1])}]),
        (
            make_choices,
            [dict.fromkeys(("other_losses", "other_loss_stderr")) | {"loss_policies": ()}],
        ),
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


IN_MEMORY: dict[Any, list[tuple[Callable[[ScoreProfile], dict[str, Any]], str]]] = {
    make_scores: [
        (at("curves", (0, 1, 1, 5), np.nan), r"curves is not finite at \[0, 1, 1, 5\]"),
        (at("curves", (0, 0, 0, 5), np.inf), "curves is not finite"),
        (at("curves", (0, 0, 0, 30), 1.5), "curves.*within 0..1"),
        (at("curves", (0, 0, 0, 0), -0.5), "curves.*within 0..1"),
        (at("curves", (1, 0, 0, 20), 0.0), "falling in sample 1"),
        (edit("curves", convex), "not concave in sample 0"),
        (edit("curves", lambda c: c * 0.9), "not whole where everything is kept in sample 0"),
        (edit("curves", lambda c: c[:, :2]), r"curves is float64 shaped \(2, 2, 2, 36\)"),
        (
            edit("curves", lambda c: c.ravel()),
            r"curves is float64 shaped \(432,\), expected float64 with 4",
        ),
        (edit("curves", lambda c: c[:0]), "curves is float64 shaped"),
        (edit("masses", lambda m: m[:1]), "masses is float64 shaped"),
        (edit("masses", lambda m: -m), "masses is -.*, expected numbers within 0..inf"),
        (edit("masses", lambda m: m * np.nan), "masses is not finite"),
        (edit("ranks", lambda r: r[::-1].copy()), "ranks is 35..0"),
        (edit("ranks", lambda r: r.clip(1) - 1), "ranks is 0..34"),
        (edit("ranks", lambda r: r.astype(float)), "ranks is float64"),
        (edit("ranks", lambda r: r.astype(np.uint64)), "ranks is uint64"),
        (edit("ranks", lambda r: r[:0]), "ranks is shaped"),
        (edit("sample_tokens", lambda s: s[:1]), "sample_tokens is int64 shaped"),
        (edit("sample_tokens", lambda s: s.astype(float)), "sample_tokens is float64"),
    ],
    make_losses: [
        (
            edit("losses", lambda a: a.__setitem__((1, 2, 1, 0), np.nan)),
            r"score profile: losses is not finite at \[1, 2, 1, 0\]",
        ),
        (edit("loss_tokens", lambda a: a[::-1].copy()), "score profile: loss.*rising"),
        (edit("loss_tokens", lambda a: a - 1), "score profile: loss.*to the context of 40"),
        (
            edit("loss_tokens", lambda a: np.array([4, 7, 12, 20, 40])),
            r"score profile: loss.*rising from at least 5 \(sinks and window\)",
        ),
        (edit("losses", lambda a: a[..., ::-1].copy()), "score profile: loss.*not 0 where"),
        (edit("losses", lambda a: -a), "score profile: loss.*what is lost, above 0"),
        (edit("loss_tokens", lambda a: a.astype(float)), "score profile: loss.*int64"),
        (edit("losses", lambda a: a.astype(np.float32)), "score profile: loss.*float64"),
        (edit("losses", lambda a: a[:, :1]), "score profile: loss.*shaped"),
        (edit("losses", lambda a: a[..., 1:]), "score profile: loss.*shaped"),
        (drop("losses"), "score profile: loss.*one without the other"),
        (drop("loss_tokens"), "score profile: loss.*one without the other"),
        (edit("loss_stderr", lambda a: -a), "score profile: loss.*within 0..inf"),
        (edit("loss_stderr", lambda a: a[:, :, :1]), "score profile: loss.*shaped"),
    ],
    make_choices: [
        (drop("other_losses", "other_loss_stderr"), "one without"),
        (lambda s: {"loss_policies": ()}, "one without the other"),
        (drop("losses", "loss_tokens", "loss_stderr"), "losses of the scorer's own"),
        (edit("other_losses", lambda a: a[..., 1:]), "other_losses is float64"),
        (edit("other_losses", lambda a: a[:, :, :, 1:]), "other_losses is"),
        (edit("other_losses", lambda a: a[..., ::-1].copy()), "other_losses is not 0 where"),
        (
            edit("other_losses", lambda a: a * np.nan),
            r"other_losses is not finite at \[0, 0, 0, 0, 0\]",
        ),
        (edit("other_loss_stderr", lambda a: -a), "other_loss_stderr is -.*within 0..inf"),
        (lambda s: {"loss_policies": (s.loss_policies[0],) * 2}, "'tova' twice"),
        (
            lambda s: {"loss_policies": (s.loss_policies[0].replace(window=9), s.loss_policies[1])},
            "tova with 2 sinks and a window of 9",
        ),
    ],
    make_loss_bits: [
        (drop("loss_bits"), "other_losses is float64 shaped"),
        (drop("bit_widths", "bit_fidelity"), r"loss_bits is int64 \[16, 8, 4\], expected 16, then"),
        (edit("loss_bits", lambda a: a[1:]), r"loss_bits is int64 \[8, 4\]"),
        (lambda s: {"loss_bits": np.array([16, 8, 5])}, "some of bit_widths"),
        (lambda s: {"loss_bits": np.array([16, 8, 8])}, "some of bit_widths"),
        (drop("losses", "loss_tokens", "loss_stderr"), "one without the other: loss_bits"),
        (edit("other_losses", lambda a: a[:, :, :, ::-1].copy()), "other_losses is not 0 where"),
    ],
    make_bits: [
        (edit("bit_fidelity", lambda a: a * np.nan), "not finite"),
        (edit("bit_fidelity", lambda a: a * 2), "within 0..1"),
        (edit("bit_fidelity", lambda a: a - 0.5), "within 0..1|not 1 at 16"),
        (edit("bit_fidelity", lambda a: a * 0.5), "not 1 at 16 bits"),
        (edit("bit_fidelity", lambda a: a[..., :2]), "bit_fidelity is float64 shaped"),
        (edit("bit_fidelity", lambda a: a.astype(np.float32)), "float32"),
        (drop("bit_fidelity"), "one without the other"),
        (lambda s: {"bit_widths": np.array([16, 8, 8])}, "bit_widths"),
        (lambda s: {"bit_widths": np.array([16, 8, 6])}, "bit_widths"),
        (lambda s: {"bit_widths": np.array([[16, 8, 4]])}, "bit_widths"),
    ],
    make_shared_scores: [
        (drop("shared_runs"), "one without the other"),
        (edit("shared_runs", lambda a: a.astype(np.int32)), "int32"),
        (edit("shared_runs", lambda a: a + [[-1, 0]]), "runs of 2 to 4"),
        (edit("shared_runs", lambda a: a[:1].repeat(7, axis=0)), "twice"),
        (edit("shared_curves", lambda a: a[:, :-1].copy()), "shared_curves"),
        (edit("shared_curves", lambda a: a.fill(np.nan)), "not finite"),
        (edit("shared_curves", lambda a: a * 1.2), "no more than the layers keep apart"),
        (edit("shared_curves", lambda a: a * 0.9), "not whole"),
        (
            edit("shared_curves", lambda a: a[0, 0, 0].__setitem__(5, 0.0)),
            "shared_curves is falling in sample 0, layers 2-3",
        ),
    ],
}


@pytest.mark.parametrize(
    ("make", "changes", "words"), [(m, *row) for m, rows in IN_MEMORY.items() for row in rows]
)
def test_what_cannot_be_is_refused(make, changes, words):
    scores = make()
    with pytest.raises(InputError, match=words):
        scores.replace(**changes(scores))


def test_an_error_of_whoever_reads_a_file_is_not_about_the_file(tmp_path: Path) -> None:
    make_scores().save(tmp_path / "s.safetensors")
    with pytest.raises(ValueError, match="mine"), ScoreProfile.opened(tmp_path / "s.safetensors"):
        raise ValueError("mine")
