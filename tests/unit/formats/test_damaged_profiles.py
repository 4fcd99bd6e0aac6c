"""Files that are half written, damaged, edited or of another kind; each with a way out."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from factories import make_budget_profile, make_scores
from hostile_files import with_stated, with_value
from refusals import refused

from kvalloc.allocation.decision import solve
from kvalloc.errors import InputError, KVAllocError
from kvalloc.files import atomic_write, check_writable
from kvalloc.formats.budget_profile import BudgetProfile

COUNTS = ("page_tokens", "batch", "context_tokens")

# --- writing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, KVAllocError])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, error: type[BaseException]
) -> None:
    target = tmp_path / "out.json"
    target.write_text("old", encoding="utf-8")

    def write_half() -> None:
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, function: str, error: OSError
) -> None:
    """The check before and the write after may disagree."""

    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(module, function, refuse)
    with pytest.raises(InputError, match=f"cannot write .*: {error.strerror}"):
        make_budget_profile([[20, 20]]).save(tmp_path / "out.json")
    assert os.listdir(tmp_path) == []


def test_a_target_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"missing does not exist; create it first"):
        check_writable(tmp_path / "missing" / "out.json")
    with pytest.raises(InputError, match="it is a folder; name a file in it"):
        make_scores().save(tmp_path)
    check_writable(tmp_path / "out.json")
    assert os.listdir(tmp_path) == []


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        make_budget_profile([[20, 20]]).save(tmp_path / "out.json")
    finally:
        os.umask(before)
    assert (tmp_path / "out.json").stat().st_mode & 0o777 == 0o640


# --- edited budget profiles: numbers that contradict each other; see test_hostile_files -----------


SIZES = ("head_dim", "sliding_window", "max_context_tokens", "vocab_size")


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("schema_version",), 2, "schema_version is 2, expected 1"),
        (("schema_version",), True, "schema_version is True, expected 1"),
        (("level",), "row", "level is row, expected"),
        (("length_rule",), "cubic", "length_rule is cubic, expected"),
        (("budgets", 0), [20], "budgets is rows of unequal length, expected rows of one"),
        (("budgets", 2), ..., r"budgets is int64 shaped \(2, 2\), expected int64 shaped \(3, 2\)"),
        (("budgets", 0, 0), 20.5, "budgets.0.0 is 20.5"),
        (("budgets", 0, 0), 4, "budgets is "),  # sinks and window are 5
        (("budgets", 0, 0), 41, "budgets is "),  # the context has 40
        (("budgets", 0, 0), 10**30, "budgets is "),
        (("shape", "layer_types"), ["full", "sliding", "full"], "content is "),
        (("shape", "n_query_heads"), 5, "content is "),
        *((("shape", name), -3, f"{name} is -3, expected >= 1") for name in SIZES),
        (("retained_bytes",), 1, "retained_bytes is 1, expected .* which follows"),
        (("retained_tokens",), 1, "retained_tokens is 1, expected .* which follows"),
        *(((name,), 2**63, "content is .*more than can be counted") for name in COUNTS),
    ],
)
def test_an_edited_budget_profile(
    tmp_path: Path, place: tuple[Any, ...], value: Any, words: str
) -> None:
    path = tmp_path / "p.json"
    solve(make_scores(), budget=0.5).save(path)
    sound = path.read_bytes()
    for sign in (False, True):
        path.write_bytes(with_stated(sound, with_value(json.loads(sound), place, value), sign=sign))
        assert re.search(words, str(refused(path, BudgetProfile.load)))


# --- a profile as a value ----------------------------------------------------------------------


def test_profiles_are_compared_by_value_and_say_what_they_are_in_one_line() -> None:
    one, same = make_budget_profile([[20, 20]]), make_budget_profile([[20, 20]])
    assert one == same
    assert hash(one) == hash(same)
    assert len({one, same, one.replace(batch=2)}) == 2
    assert one != one.replace(budgets=one.budgets + 1)
    assert one != one.digest
    assert "\n" not in repr(one)
    assert one.shape.model_id in repr(one)


def test_a_changed_copy_is_checked() -> None:
    profile = make_budget_profile([[20, 20]])
    assert profile.replace(objective=0.5).objective == 0.5
    with pytest.raises(InputError, match="budget profile: surprise is 1, expected no such field"):
        profile.replace(surprise=1)
    with pytest.raises(InputError, match=r"batch is 0, expected greater than or equal to 1"):
        profile.replace(batch=0)
    with pytest.raises(InputError, match=r"budgets is int32 shaped \(1, 2\), expected int64"):
        profile.replace(budgets=profile.budgets.astype("int32"))
    with pytest.raises(InputError, match="other_policies.0.sinks is -1"):
        profile.replace(other_policies=({**profile.policy.record(), "sinks": -1},))
    with pytest.raises(InputError, match=r"holds what JSON cannot hold"):
        profile.replace(requested={"value": float("nan")}).save("never.json")
