"""Files that are half written, damaged, edited or of another kind; each with a way out."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from factories import make_budget_profile, make_scores, make_shape
from refusals import refused

from kvalloc.allocation.decision import solve
from kvalloc.errors import InputError, KVAllocError, ProfileFileError
from kvalloc.files import atomic_write, check_writable
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.score_profile import ScoreProfile

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


def test_a_failing_rename_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", no_space)
    with pytest.raises(InputError, match=r"cannot write .*out.json: No space left on device"):
        make_budget_profile([[20, 20]]).save(tmp_path / "out.json")
    assert os.listdir(tmp_path) == []


FULL_DISK = """
import resource, sys
sys.path.insert(0, {tests!r})
from factories import make_budget_profile, make_scores
from kvalloc.errors import KVAllocError
profile = make_scores() if {kind!r} == "scores" else make_budget_profile([[20] * 99] * 9)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    profile.save({path!r})
except KVAllocError as error:
    print("refused:", error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits of file sizes are POSIX")
@pytest.mark.parametrize("kind", ["scores", "budgets"])
def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path, kind: str) -> None:
    """The kernel's limit on file sizes stands in for a full disk: a real write fails half way."""
    tests = str(Path(__file__).resolve().parents[2] / "support")
    code = FULL_DISK.format(tests=tests, kind=kind, path=str(tmp_path / "out"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("refused: cannot write"), done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert os.listdir(tmp_path) == []


def test_a_target_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"missing does not exist; create it first"):
        check_writable(tmp_path / "missing" / "out.json")
    with pytest.raises(InputError, match="it is a folder; name a file in it"):
        make_scores().save(tmp_path)
    check_writable(tmp_path / "out.json")
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write all")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="no permission in the folder"):
        make_budget_profile([[20, 20]]).save(tmp_path / "out.json")
    tmp_path.chmod(0o700)


def test_a_folder_that_turns_read_only_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check before and the write after may disagree; the answer is the same kind of line."""
    import tempfile

    def refuse(**options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    with pytest.raises(InputError, match="cannot write .*: Permission denied"):
        make_budget_profile([[20, 20]]).save(tmp_path / "out.json")


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        make_budget_profile([[20, 20]]).save(tmp_path / "out.json")
    finally:
        os.umask(before)
    assert (tmp_path / "out.json").stat().st_mode & 0o777 == 0o640


# --- round trips -----------------------------------------------------------------------------


def test_a_score_profile_comes_back_bit_for_bit(tmp_path: Path) -> None:
    for seed in range(5):
        shape = make_shape(
            n_layers=2 + seed,
            layer_types=("full", "sliding") + ("full",) * seed,
            sliding_window=9,
            max_context_tokens=None if seed % 2 else 4096,
        )
        scores = make_scores(seed, shape=shape, n_samples=1 + seed, interpolation_error=1e-5 * seed)
        path = tmp_path / f"{seed}.safetensors"
        scores.save(path)
        loaded = ScoreProfile.load(path)
        assert loaded.digest == scores.digest
        for name in ("ranks", "curves", "masses", "sample_tokens"):
            mine, theirs = getattr(scores, name), getattr(loaded, name)
            assert mine.dtype == theirs.dtype
            assert mine.tobytes() == theirs.tobytes()
            assert not theirs.flags.writeable
        assert loaded.shape == shape
        assert loaded.interpolation_error == scores.interpolation_error
        again = tmp_path / "again.safetensors"
        loaded.save(again)
        assert again.read_bytes() == path.read_bytes()


# --- damaged budget profiles -----------------------------------------------------------------


@pytest.fixture(scope="module")
def budgets_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("budgets") / "p.json"
    solve(make_scores(), budget=0.5).save(path)
    return path.read_text(encoding="utf-8")


def edited(text: str, *keys: Any, value: Any, seal: bool) -> str:
    data = json.loads(text)
    place = data
    for key in keys[:-1]:
        place = place[key]
    if value is ...:
        del place[keys[-1]]
    else:
        place[keys[-1]] = value
    if seal:  # as an edit by somebody who knows how the digest is made
        data.pop("digest", None)
        raw = json.dumps(data, sort_keys=True).encode()
        data["digest"] = hashlib.sha256(raw).hexdigest()
    return json.dumps(data)


EDITS: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "missing field": (("policy",), ..., "policy"),
    "missing inner field": (("shape", "head_dim"), ..., "shape.head_dim"),
    "unknown field": (("surprise",), 1, "surprise"),
    "another version": (("schema_version",), 2, "schema_version"),
    "version as text": (("schema_version",), "1", "schema_version"),
    "no version": (("schema_version",), ..., "schema_version"),
    "another kind": (("kind",), "other", "kind"),
    "text for a number": (("context_tokens",), "40", "context_tokens"),
    "number for text": (("solver",), 5, "solver"),
    "fraction of an entry": (("budgets", 0, 0), 20.5, "budgets.0.0"),
    "null budget": (("budgets", 1, 1), None, "budgets.1.1"),
    "infinite objective": (("objective",), float("inf"), "objective"),
    "objective NaN": (("objective",), float("nan"), "objective"),
    "batch 0": (("batch",), 0, "batch"),
    "page 0": (("page_tokens",), 0, "page_tokens"),
    "unknown level": (("level",), "row", "level"),
    "unknown rule": (("length_rule",), "cubic", "length_rule"),
    "ragged": (("budgets", 0), [20], "budgets"),
    "too few layers": (("budgets", 2), ..., "budgets"),
    "no budgets": (("budgets",), [], "budgets"),
    "negative": (("budgets", 0, 0), -1, "budgets"),
    "below sinks and window": (("budgets", 0, 0), 4, "budgets"),
    "above the context": (("budgets", 0, 0), 41, "budgets"),
    "beyond int64": (("budgets", 0, 0), 10**30, "budgets"),
    "layers named wrongly": (("shape", "layer_types"), ["full"], "content"),
    "sliding without window": (("shape", "layer_types"), ["full", "sliding", "full"], "content"),
    "query heads": (("shape", "n_query_heads"), 5, "content"),
    "stated bytes": (("retained_bytes",), 1, "retained_bytes"),
    "stated full bytes": (("full_bytes",), 1, "full_bytes"),
    "stated tokens": (("retained_tokens",), 1, "retained_tokens"),
}


@pytest.mark.parametrize("seal", [False, True], ids=["plain", "resealed"])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_budget_profile(budgets_text: str, tmp_path: Path, edit: str, seal: bool) -> None:
    keys, value, field = EDITS[edit]
    path = tmp_path / "edited.json"
    path.write_text(edited(budgets_text, *keys, value=value, seal=seal), encoding="utf-8")
    assert refused(path, BudgetProfile.load).field == field


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("solver",), "magic"),
        (("created",), "1999-01-01"),
        (("requested", "value"), 0.1),
        (("policy", "scorer"), "snapkv"),
        (("shape", "model_id"), "other/model"),
        (("digest",), "0" * 64),
    ],
)
def test_an_edit_that_could_be_true_is_seen_by_the_digest(
    budgets_text: str, tmp_path: Path, keys: tuple[str, ...], value: object
) -> None:
    path = tmp_path / "edited.json"
    path.write_text(edited(budgets_text, *keys, value=value, seal=False), encoding="utf-8")
    error = refused(path, BudgetProfile.load)
    assert error.field == "digest"
    assert "edited or damaged" in error.expected


BROKEN = {
    "empty": b"",
    "blank": b"  \n",
    "binary": bytes(range(256)),
    "a list": b"[1, 2]",
    "a number": b"7",
    "text": b"budgets: 20",
    "another JSON": b'{"a": 1}',
    "deep": b"[" * 200_000,
    "long number": b'{"schema_version": ' + b"1" * 5000 + b"}",
    "a zip": b"PK\x03\x04" + bytes(100),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_no_budget_profile(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(BROKEN[kind])
    refused(path, BudgetProfile.load)


def test_a_budget_profile_cut_off_anywhere(budgets_text: str, tmp_path: Path) -> None:
    path = tmp_path / "cut.json"
    raw = budgets_text.rstrip().encode()
    for length in range(0, len(raw), 61):
        path.write_bytes(raw[:length])
        assert refused(path, BudgetProfile.load).field == "file"


@pytest.mark.parametrize("load", [BudgetProfile.load, ScoreProfile.load])
def test_no_file_and_a_folder(tmp_path: Path, load: Callable[[Path], object]) -> None:
    assert refused(tmp_path / "none.json", load).found == "missing"
    assert refused(tmp_path, load).found == "a folder"


def test_one_kind_given_for_the_other(tmp_path: Path, budgets_text: str) -> None:
    make_scores().save(tmp_path / "s.safetensors")
    (tmp_path / "b.json").write_text(budgets_text, encoding="utf-8")
    assert "budget profile" in refused(tmp_path / "s.safetensors", BudgetProfile.load).expected
    assert "score profile" in refused(tmp_path / "b.json", ScoreProfile.load).expected


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


def test_text_that_looks_like_a_table_comes_back(tmp_path: Path) -> None:
    profile = make_budget_profile([[20, 20]], detail="ROWS OF budgets", solver="ROWS OF ranks")
    profile.save(tmp_path / "p.json")
    assert BudgetProfile.load(tmp_path / "p.json").detail == "ROWS OF budgets"


@pytest.mark.parametrize("name", ["page_tokens", "batch", "context_tokens"])
def test_numbers_beyond_what_can_be_counted(budgets_text: str, tmp_path: Path, name: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(edited(budgets_text, name, value=2**63, seal=True), encoding="utf-8")
    assert "more than can be counted" in str(refused(path, BudgetProfile.load).found)


def test_control_characters_of_a_file_do_not_reach_the_terminal(
    budgets_text: str, tmp_path: Path
) -> None:
    path = tmp_path / "p.json"
    for keys, value in (
        (("level",), "\x1b[31mred\nsecond line"),
        (("\x1b]0;title\x07",), 1),
        (("shape", "layer_types"), ["full\x1b[1m", "full", "full"]),
        (("schema_version",), "\r\x1b[K"),
    ):
        text = edited(budgets_text, *keys, value=value, seal=True)
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ProfileFileError) as caught:
            BudgetProfile.load(path)
        assert str(caught.value).isprintable()
