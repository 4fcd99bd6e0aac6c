"""Profiles that are half written, damaged, edited or of another kind; each with a way out."""

import json
import os
import re
import tempfile

import numpy as np
import pytest
from factories import make_bits, make_budget_profile, make_losses, make_scores
from hostile_files import with_stated, with_value
from refusals import refused

from kvalloc.allocation.decision import solve
from kvalloc.errors import InputError, KVAllocError
from kvalloc.files import atomic_write, check_writable
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.score_profile import ScoreProfile

COUNTS = ("page_tokens", "batch", "context_tokens")

# --- writing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, KVAllocError])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, error):
    target = tmp_path / "out.json"
    target.write_text("old", encoding="utf-8")

    def write_half():
        with atomic_write(target) as temporary:
            temporary.write_text("half", encoding="utf-8")
            raise error("stop")

    with pytest.raises(error):
        write_half()
    assert target.read_text(encoding="utf-8") == "old"
    assert os.listdir(tmp_path) == ["out.json"]


@pytest.mark.parametrize(
    ("module", "function", "error"),
    [
        (os, "replace", OSError(28, "No space left on device")),
        (tempfile, "mkdtemp", PermissionError(13, "Permission denied")),
    ],
)
def test_a_write_that_the_system_refuses_is_one_clear_line(
    tmp_path, monkeypatch, module, function, error
):
    """The check before and the write after may disagree."""

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(module, function, refuse)
    with pytest.raises(InputError, match=f"cannot write .*: {error.strerror}"):
        make_budget_profile([[20, 20]]).save(tmp_path / "out.json")
    assert os.listdir(tmp_path) == []


def test_a_target_that_cannot_be_written_is_refused_before_any_work(tmp_path):
    with pytest.raises(InputError, match=r"missing does not exist; create it first"):
        check_writable(tmp_path / "missing" / "out.json")
    with pytest.raises(InputError, match="it is a folder; name a file in it"):
        make_scores().save(tmp_path)
    check_writable(tmp_path / "out.json")
    assert os.listdir(tmp_path) == []


def test_permissions_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        make_budget_profile([[20, 20]]).save(tmp_path / "out.json")
    finally:
        os.umask(before)
    assert (tmp_path / "out.json").stat().st_mode & 0o777 == 0o640


# --- edited budget profiles: numbers that contradict each other; see test_hostile_files -----------


OF_SHAPE = ("head_dim", "sliding_window", "max_context_tokens", "vocab_size")


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("schema_version",), 2, "schema_version is 2, expected 1"),
        (("budgets", 0), [20], "budgets is rows of unequal length, expected rows of one"),
        (("budgets", 2), ..., r"budgets is int64 shaped \(2, 2\), expected int64 shaped \(3, 2\)"),
        (("budgets", 0, 0), 4, "budgets is "),  # sinks and window are 5
        (("budgets", 0, 0), 41, "budgets is "),  # the context has 40
        (("shape", "layer_types"), ["full", "sliding", "full"], "content is "),
        (("shape", "n_query_heads"), 5, "content is "),
        *((("shape", name), -3, f"{name} is -3, expected >= 1") for name in OF_SHAPE),
        (("retained_bytes",), 1, "retained_bytes is 1, expected .* which follows"),
        (("retained_tokens",), 1, "retained_tokens is 1, expected .* which follows"),
        *(((name,), 2**63, "content is .*more than can be counted") for name in COUNTS),
    ],
)
def test_an_edited_budget_profile(tmp_path, place, value, words):
    path = tmp_path / "p.json"
    solve(make_scores(), budget=0.5).save(path)
    sound = path.read_bytes()
    for sign in (False, True):
        path.write_bytes(with_stated(sound, with_value(json.loads(sound), place, value), sign=sign))
        assert re.search(words, str(refused(path, BudgetProfile.load)))


# --- a profile as a value ----------------------------------------------------------------------


def test_profiles_are_compared_by_value_and_say_what_they_are_in_one_line():
    one, same = make_budget_profile([[20, 20]]), make_budget_profile([[20, 20]])
    assert one == same
    assert hash(one) == hash(same)
    assert len({one, same, one.replace(batch=2)}) == 2
    assert one != one.replace(budgets=one.budgets + 1)
    assert one != one.digest
    assert "\n" not in repr(one)
    assert one.shape.model_id in repr(one)


def test_a_changed_copy_is_checked():
    profile = make_budget_profile([[20, 20]])
    assert profile.replace(objective=0.5).objective == 0.5
    with pytest.raises(InputError, match=r"budgets is int32 shaped \(1, 2\), expected int64"):
        profile.replace(budgets=profile.budgets.astype("int32"))
    with pytest.raises(InputError, match="policy.sinks is -1"):
        profile.replace(policy={**profile.policy.record(), "sinks": -1})
    with pytest.raises(InputError, match=r"holds what JSON cannot hold"):
        profile.replace(requested={"value": float("nan")}).save("never.json")


# Score profiles that are damaged, edited or half there; each with a way out


def edit(name, change):
    """The field of a profile changed in place, or made anew."""

    def edited(scores):
        array = np.array(getattr(scores, name))
        new = change(array)
        return {name: array if new is None else new}

    return edited


def at(name, index, value):
    return edit(name, lambda array: array.__setitem__(index, value))


def convex(curves):
    return np.broadcast_to(np.linspace(0, 1, 36) ** 2, curves.shape).copy()


MAKERS = (make_scores, make_losses, make_bits)
WRONG = {
    "none": lambda a: None,
    "other type": lambda a: a.astype(np.float32 if a.dtype == float else np.int32),
    "flat": lambda a: a.ravel()[None],
    "first left out": lambda a: a[..., 1:],
    "last left out": lambda a: a[:-1],
    "NaN": lambda a: a * np.nan,
    "below zero": lambda a: -a - 1,
}
SIZES = {"ranks", "curves", "masses", "loss_tokens", "loss_bits"}
"""Arrays by which others are sized: one of those may be named in their place."""


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("make", MAKERS)
def test_every_array_is_checked_in_type_shape_and_range(make, wrong):
    scores = make()
    for name in ScoreProfile.model_fields:
        array = getattr(scores, name)
        if not isinstance(array, np.ndarray):
            continue
        with pytest.raises(InputError, match="score profile: " if name in SIZES else name):
            scores.replace(**{name: WRONG[wrong](array)})


SEMANTIC = {
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
        (at("losses", (1, 2, 1, 0, 0), np.nan), r"losses is not finite at \[1, 2, 1, 0, 0\]"),
        (edit("loss_tokens", lambda a: a - 1), "loss.*to the context of 40"),
        (edit("loss_tokens", lambda a: a.clip(12)), r"rising from at least 5 \(sinks and window\)"),
        (edit("losses", lambda a: a[..., ::-1].copy()), "loss.*not 0 where"),
        (edit("losses", lambda a: -a), "loss.*what is lost, above 0"),
    ],
    make_bits: [
        (
            lambda s, given=given: {"loss_bits": np.array(given)},
            "16, then some of 8, 5, 4, 3, 2, 853, 85, 53, 532, 52 once",
        )
        for given in ([16, 8, 6], [16, 8, 8], [8, 16, 4])
    ],
}


@pytest.mark.parametrize(
    ("make", "changes", "words"), [(m, *row) for m, rows in SEMANTIC.items() for row in rows]
)
def test_what_cannot_be_is_refused(make, changes, words):
    scores = make()
    with pytest.raises(InputError, match=words):
        scores.replace(**changes(scores))


def test_an_error_of_whoever_reads_a_file_is_not_about_the_file(tmp_path):
    make_scores().save(tmp_path / "s.safetensors")
    with pytest.raises(ValueError, match="mine"), ScoreProfile.opened(tmp_path / "s.safetensors"):
        raise ValueError("mine")
