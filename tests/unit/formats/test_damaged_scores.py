"""Score profiles that are damaged, edited or half there; each with a way out."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import struct
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
    make_shape,
    make_shared_scores,
)
from refusals import refused
from safetensors import safe_open
from safetensors.numpy import save_file

from kvalloc.errors import InputError, ProfileFileError
from kvalloc.formats.score_profile import ScoreProfile

ARRAYS = ("ranks", "curves", "masses", "sample_tokens")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, dict[str, Any], Any]:
    path = tmp_path_factory.mktemp("stored") / "s.safetensors"
    make_scores().save(path)
    with safe_open(str(path), framework="numpy") as handle:
        header = json.loads(handle.metadata()["kvalloc"])
        arrays = {name: handle.get_tensor(name) for name in ARRAYS}
    return path.read_bytes(), header, arrays


def write_sealed(path: Path, header: dict[str, Any], arrays: dict[str, Any]) -> None:
    """As a careful stranger would: values of their own under a digest that fits."""
    header.pop("digest", None)
    hasher = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in ARRAYS:
        if name in arrays:
            hasher.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
            hasher.update(arrays[name].tobytes())
    header["digest"] = hasher.hexdigest()
    save_file(arrays, path, metadata={"kvalloc": json.dumps(header, sort_keys=True)})


HEADERS: dict[str, tuple[str, Any, str]] = {
    "another version": ("schema_version", 1, "schema_version"),
    "no version": ("schema_version", ..., "schema_version"),
    "no sinks": ("sinks", ..., "sinks"),
    "no shape": ("shape", ..., "shape"),
    "unknown field": ("surprise", 1, "surprise"),
    "context as text": ("context_tokens", "40", "context_tokens"),
    "context as fraction": ("context_tokens", 40.0, "context_tokens"),
    "context too small": ("context_tokens", 5, "context_tokens"),
    "context of another size": ("context_tokens", 41, "ranks"),
    "sinks null": ("sinks", None, "sinks"),
    "sinks negative": ("sinks", -2, "sinks"),
    "scorer a number": ("scorer", 5, "scorer"),
    "parameters a list": ("scorer_parameters", [1], "scorer_parameters"),
    "no versions": ("versions", ..., "versions"),
    "no text": ("text_digest", ..., "text_digest"),
    "versions a number": ("versions", 5, "versions"),
    "error NaN": ("interpolation_error", float("nan"), "interpolation_error"),
    "error as text": ("interpolation_error", "small", "interpolation_error"),
    "another kind": ("kind", "kvalloc.budget_profile", "file"),
    "unknown kind": ("kind", "kvalloc.profile", "kind"),
    "window of sliding layers as text": (
        "shape",
        {**make_shape().to_dict(), "sliding_window": "9"},
        "shape.sliding_window",
    ),
    "shape as text": ("shape", "x", "shape"),
    "shape empty": ("shape", {}, "shape.model_id"),
}


@pytest.mark.parametrize("edit", HEADERS)
def test_an_edited_score_profile_header(stored: Any, tmp_path: Path, edit: str) -> None:
    _, header, arrays = copy.deepcopy(stored)
    name, value, field = HEADERS[edit]
    if value is ...:
        del header[name]
    else:
        header[name] = value
    path = tmp_path / "edited.safetensors"
    write_sealed(path, header, arrays)
    assert refused(path, ScoreProfile.load).field == field


def changed(array: Any, *index: int, value: float) -> Any:
    array = array.copy()
    array[index] = value
    return array


def convex(curves: Any) -> Any:
    return np.broadcast_to(np.linspace(0, 1, 36) ** 2, curves.shape).copy()


CONTENT: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "NaN": (
        "curves",
        lambda c: changed(c, 0, 1, 1, 5, value=np.nan),
        "not finite at head 1, rank 5 in sample 0, layer 1",
    ),
    "infinite": ("curves", lambda c: changed(c, 0, 0, 0, 5, value=np.inf), "not finite"),
    "above 1": ("curves", lambda c: changed(c, 0, 0, 0, 30, value=1.5), "within 0..1"),
    "below 0": ("curves", lambda c: changed(c, 0, 0, 0, 0, value=-0.5), "within 0..1"),
    "falling": ("curves", lambda c: changed(c, 1, 0, 0, 20, value=0.0), "falling in sample 1"),
    "not concave": ("curves", convex, "not concave in sample 0"),
    "not all": ("curves", lambda c: c * 0.9, "not 1 when everything is kept"),
    "other shape": (
        "curves",
        lambda c: c[:, :2].copy(),
        r"curves is float64 shaped \(2, 2, 2, 36\)",
    ),
    "flat array": (
        "curves",
        lambda c: c.ravel(),
        r"curves is float64 shaped \(432,\), expected float64 with 4",
    ),
    "no samples": ("curves", lambda c: c[:0], "curves is float64 shaped"),
    "masses of another shape": ("masses", lambda m: m[:1].copy(), "masses is float64 shaped"),
    "negative masses": ("masses", lambda m: -m, "masses is negative or not finite"),
    "masses NaN": ("masses", lambda m: m * np.nan, "masses is negative or not finite"),
    "ranks falling": ("ranks", lambda r: r[::-1].copy(), "ranks is 35..0"),
    "ranks repeated": ("ranks", lambda r: r.clip(1) - 1, "ranks is 0..34"),
    "ranks as floats": ("ranks", lambda r: r.astype(float), "ranks is float64"),
    "ranks unsigned": ("ranks", lambda r: r.astype(np.uint64), "ranks is uint64"),
    "no ranks": ("ranks", lambda r: r[:0], "ranks is shaped"),
    "too few samples": ("sample_tokens", lambda s: s[:1].copy(), "sample_tokens is int64 shaped"),
    "samples as floats": ("sample_tokens", lambda s: s.astype(float), "sample_tokens is float64"),
}


@pytest.mark.parametrize("edit", CONTENT)
def test_a_score_profile_of_values_that_cannot_be(stored: Any, tmp_path: Path, edit: str) -> None:
    _, header, arrays = copy.deepcopy(stored)
    name, change, words = CONTENT[edit]
    arrays[name] = change(arrays[name])
    path = tmp_path / "edited.safetensors"
    write_sealed(path, header, arrays)
    error = refused(path, ScoreProfile.load)
    assert error.field == name
    assert re.search(words, str(error)), error
    # In memory the same fault is an InputError: measuring code is held to it too.
    if name in ("curves", "masses"):
        with pytest.raises(InputError, match=words):
            make_scores(curves=arrays["curves"], masses=arrays["masses"])


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_missing(stored: Any, tmp_path: Path, name: str) -> None:
    _, header, arrays = copy.deepcopy(stored)
    del arrays[name]
    path = tmp_path / "edited.safetensors"
    write_sealed(path, header, arrays)
    error = refused(path, ScoreProfile.load)
    assert (error.field, error.found) == (name, "missing")


@pytest.mark.parametrize("text", ["{", "[1]", "7", "", "[" * 200_000, "9" * 5000])
def test_a_header_that_is_no_object(stored: Any, tmp_path: Path, text: str) -> None:
    path = tmp_path / "edited.safetensors"
    save_file(stored[2], path, metadata={"kvalloc": text})
    assert refused(path, ScoreProfile.load).field == "header"


def test_another_safetensors_file(stored: Any, tmp_path: Path) -> None:
    save_file({"weight": np.zeros(3)}, tmp_path / "model.safetensors")
    assert refused(tmp_path / "model.safetensors", ScoreProfile.load).field == "header"


@pytest.mark.parametrize(
    ("name", "dtype", "field"),
    [
        ("masses", "I64", "masses"),
        ("ranks", "F64", "ranks"),
        ("curves", "U64", "curves"),
        ("curves", "BF16", "file"),  # numpy has no such types
        ("curves", "F8_E4M3", "file"),
    ],
)
def test_an_array_relabelled_as_of_another_type(stored, tmp_path, name, dtype, field):
    """The same bytes under another type: the digest covers the type, and fields have one each."""
    raw = stored[0]
    size = struct.unpack("<Q", raw[:8])[0]
    head = json.loads(raw[8 : 8 + size])
    head[name]["dtype"] = dtype
    head[name]["shape"][-1] *= {"BF16": 4, "F8_E4M3": 8}.get(dtype, 1)
    text = json.dumps(head).encode()
    path = tmp_path / "relabelled.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])
    assert refused(path, ScoreProfile.load).field == field


def test_a_score_profile_cut_off_anywhere(stored: Any, tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    for length in range(0, len(stored[0]), 97):
        path.write_bytes(stored[0][:length])
        assert refused(path, ScoreProfile.load).field == "file"


def test_a_bit_flipped_anywhere_is_seen(stored: Any, tmp_path: Path) -> None:
    """No single damaged byte loads as if nothing had happened."""
    raw, rng = stored[0], np.random.default_rng(0)
    path = tmp_path / "flipped.safetensors"
    for place in sorted({*rng.integers(0, len(raw), 150).tolist(), 0, 7, 8, len(raw) - 1}):
        broken = bytearray(raw)
        broken[place] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(broken)
        try:
            loaded: ScoreProfile | None = ScoreProfile.load(path)
        except ProfileFileError:
            loaded = None
        # White space and the order of the file's own header may differ without harm.
        assert loaded is None or loaded.digest == stored[1]["digest"]


# --- what else a score profile may hold --------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "changes"),
    [
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


IN_MEMORY: dict[Any, list[tuple[Callable[[ScoreProfile], dict[str, Any]], str]]] = {
    make_losses: [
        (
            edit("losses", lambda a: a.__setitem__((1, 2, 1, 0), np.nan)),
            "score profile: losses is not finite in sample 1, layer 2, head 1, level 0",
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
        (edit("loss_stderr", lambda a: -a), "score profile: loss.*>= 0"),
        (edit("loss_stderr", lambda a: a[:, :, :1]), "score profile: loss.*shaped"),
    ],
    make_choices: [
        (drop("other_losses", "other_loss_stderr"), "one without"),
        (lambda s: {"loss_policies": ()}, "one without the other"),
        (drop("losses", "loss_tokens", "loss_stderr"), "losses of the scorer's own"),
        (edit("other_losses", lambda a: a[..., 1:]), "other_losses is float64"),
        (edit("other_losses", lambda a: a[:, :, :, 1:]), "other_losses is"),
        (edit("other_losses", lambda a: a[..., ::-1].copy()), "other_losses is not 0 where"),
        (edit("other_losses", lambda a: a * np.nan), "head 0, policy 0, level 0"),
        (edit("other_loss_stderr", lambda a: -a), "other_loss_stderr is neg"),
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
            "not rising and concave",
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
