"""Files that were made to do harm: refused in one line, or read; see `hostile_files`."""

from __future__ import annotations

import itertools
import json
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import hostile_files
import numpy as np
import pytest
from cli_tools import refused, run
from factories import make_budget_profile, make_evaluation, make_row, make_scores, make_shape
from pydantic import ValidationError
from safetensors.numpy import save_file

from kvalloc.allocation.decision import solve
from kvalloc.allocation.request import read_weights
from kvalloc.errors import InputError, KVAllocError, ProfileFileError
from kvalloc.formats import record
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.reading import load_file
from kvalloc.formats.record import first_fault, kind_of
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.formats.shipped_profiles import load_profile, load_scores
from kvalloc.interop.exporting import TARGETS
from kvalloc.prompts.texts import read_prompts

pytestmark = pytest.mark.fuzz


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, hostile_files.Kind]:
    return hostile_files.make_kinds(tmp_path_factory.mktemp("sound"), models=False)


def test_files_made_by_chance_are_refused_or_read(
    kinds: dict[str, hostile_files.Kind],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    count = 8 * request.config.getoption("--hostile-files")
    monkeypatch.chdir(tmp_path)
    found = hostile_files.run_many(
        kinds, tmp_path, 0, itertools.count(), lambda so_far: so_far.by_kind.total() < count
    )
    assert found.crashes == []
    assert {kind for kind, outcome in found.by_kind if outcome == "refused"} == {*kinds}
    assert sum(found.by_kind[kind, "read"] for kind in kinds) > 80


def test_the_guard_notices_what_must_not_be(tmp_path: Path) -> None:
    guard = hostile_files.GUARD
    guard.begin(tmp_path)
    acts: tuple[Any, ...] = (
        lambda: Path("/etc/hostname").exists() and open("/etc/hostname").close(),
        lambda: os.system("true"),
        lambda: (tmp_path.parent / "outside").mkdir(),
        lambda: socket.create_connection(("127.0.0.1", 9), timeout=1),
    )
    try:
        for act in acts:
            guard.note = ""
            with suppress(OSError):
                act()
            assert guard.note, act
        guard.note = ""
        (tmp_path / "inside").write_text("")
        assert not guard.note
    finally:
        guard.on = False


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "\ud800", "x" * 5000 + "/p.json"])
@pytest.mark.parametrize("load", [load_profile, load_scores, load_file, read_prompts])
def test_names_that_no_file_can_have(name: str, load: Any) -> None:
    with pytest.raises(KVAllocError):
        load(name)
    with pytest.raises(KVAllocError):
        load_profile(Path(name))


def test_a_pipe_is_no_profile_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.json")
    assert stat.S_ISFIFO((tmp_path / "p.json").stat().st_mode)
    assert kind_of(tmp_path / "p.json") == ""
    for load in (BudgetProfile.load, ScoreProfile.load):
        with pytest.raises(ProfileFileError, match="file is no plain file"):
            load(tmp_path / "p.json")


def test_files_that_would_take_all_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_scores().save(tmp_path / "s.safetensors")
    whole = (tmp_path / "s.safetensors").read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    n_bytes = 2**37
    header["curves"] |= {"shape": [2, 3, 2, n_bytes // 96], "data_offsets": [0, n_bytes // 96 * 96]}
    for name in [one for one in header if one not in ("curves", "__metadata__")]:
        del header[name]
    text = json.dumps(header).encode()
    with open(tmp_path / "huge.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + n_bytes // 96 * 96)
    with pytest.raises(ProfileFileError, match="all but .* of them holes"):
        ScoreProfile.load(tmp_path / "huge.safetensors")
    monkeypatch.setattr(record, "LARGEST_JSON_BYTES", 100)
    make_budget_profile([[10, 17]]).save(tmp_path / "p.json")
    with pytest.raises(ProfileFileError, match=r"file is of .* bytes, expected at most 100"):
        BudgetProfile.load(tmp_path / "p.json")


MANY = 1000


@pytest.mark.parametrize("field", ["budgets", "bits", "unit_policies"])
@pytest.mark.parametrize(
    "table",
    [
        *([1] * MANY, [[1] * MANY], [[1, 2]] * MANY, [[[1] * MANY, 2]], [[1, {"a": [1] * MANY}]]),
        *([[]] * MANY, {"a": [1] * MANY}, "1" * MANY, [["1" * MANY], [1]]),
    ],
    ids=lambda table: str(table)[:20],
)
def test_a_table_of_wrong_lengths_is_handed_to_no_validator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, table: Any
) -> None:
    handed: list[int] = []
    path = tmp_path / "p.json"
    path.write_text(json.dumps({**make_budget_profile([[10, 17]]).record(), field: table}))
    monkeypatch.setattr(BudgetProfile, "model_validate_json", lambda text: handed.append(len(text)))
    with pytest.raises(ProfileFileError, match=rf"p.json: {field} is .*, expected 1 x 2 numbers"):
        BudgetProfile.load(path)
    assert handed == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("share_groups", [1] * MANY),
        ("share_groups", [[2, 3]] * MANY),
        ("share_groups", [["x"] * MANY]),
        ("other_policies", [1] * MANY),
        ("versions", dict.fromkeys(map(str, range(2 * MANY)), 1)),
        ("shape", {**make_shape(n_layers=1).to_dict(), "layer_types": ["full"] * MANY}),
        ("shape", {**make_shape(n_layers=1).to_dict(), "layer_types": [1] * MANY}),
    ],
)
def test_the_first_wrong_item_of_many_ends_the_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: Any
) -> None:
    faults, path = [1], tmp_path / "p.json"
    path.write_text(json.dumps({**make_budget_profile([[10, 17]]).record(), field: value}))

    def counted(error: ValidationError) -> Any:
        faults.append(error.error_count())
        return first_fault(error)

    monkeypatch.setattr(record, "first_fault", counted)
    with pytest.raises(ProfileFileError):
        BudgetProfile.load(path)
    assert max(faults) == 1


def test_a_file_is_parsed_twice_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for its kind, where that is not known, and once to be read."""
    parsed: list[int] = []
    profile = make_budget_profile([[10, 17]]).replace(requested={"value": [1] * MANY})
    profile.save(tmp_path / "p.json")
    size = (tmp_path / "p.json").stat().st_size
    parse = record.from_json

    def counted(content: bytes) -> Any:
        parsed.append(len(content))
        return parse(content)

    monkeypatch.setattr(record, "from_json", counted)
    assert BudgetProfile.load(tmp_path / "p.json") == profile
    assert parsed == [size]
    assert load_file(tmp_path / "p.json") == profile
    assert parsed == [size] * 3


def test_half_a_surrogate_pair_in_a_header(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    save_file({"curves": np.zeros(1)}, path, metadata={"kvalloc": "@@@@@@"})
    path.write_bytes(path.read_bytes().replace(b"@@@@@@", b"\\ud800"))
    for load in (ScoreProfile.load, load_file):
        with pytest.raises(ProfileFileError):
            load(path)
    assert run("inspect", path).code == 2


def test_a_long_name_of_a_field_is_told_short(tmp_path: Path) -> None:
    make_budget_profile([[10, 17]]).save(tmp_path / "p.json")
    stated = json.loads((tmp_path / "p.json").read_bytes())
    (tmp_path / "p.json").write_text(json.dumps({**stated, "x" * 10_000: 1}))
    with pytest.raises(ProfileFileError, match="xxx") as caught:
        BudgetProfile.load(tmp_path / "p.json")
    assert len(str(caught.value)) < 500


def test_a_window_below_one_token() -> None:
    for window in (0, -1, -(10**30)):
        with pytest.raises(InputError, match="sliding_window is .*, expected >= 1"):
            make_shape(sliding_window=window)


@pytest.mark.parametrize(
    "requested",
    [
        {"value": "x"},
        {"value": {"a": [1]}},
        {"value": 1e308, "bytes": 10**18},
        {"value": None},
        {"target": "budget_tokens", "value": 1.5},
        {"target": "memory", "value": 1e308},
        {"target": "loss", "value": [1]},
        {"target": "moon"},
        {"target": ["budget"]},
        {"weights": "/etc/passwd"},
        {"cap": {"0": 1}},
        {"max_tokens": 1.5},
        {"max_distinct": True},
        {"objective": ["loss"]},
        {"cost": {}},
        {"share_groups": [[]]},
        {"share_groups": "x"},
        {"bytes": "x", "value": -1},
    ],
    ids=str,
)
def test_what_was_asked_for_is_shown_or_verified_only_where_it_can_be_read(
    tmp_path: Path, requested: dict[str, Any]
) -> None:
    decided = solve(make_scores(), budget="50%", solver="greedy")
    changed = decided.replace(requested={**decided.requested, **requested})
    sound, path, scores = (tmp_path / name for name in ("sound.json", "p.json", "s.safetensors"))
    decided.save(sound)
    changed.save(path)
    make_scores().save(scores)
    said = "not recorded in a form that can be read"
    for command in (["inspect", path], ["report", path, "-o", tmp_path / "r.html"]):
        ran = run(*command)
        assert ran.code == 0, ran
    assert said in run("inspect", path).out
    assert said in (tmp_path / "r.html").read_text(encoding="utf-8")
    assert run("diff", sound, path).code in (0, 1)
    line = refused(tmp_path, "verify", path, scores)
    assert line.startswith(f"error: {path} states a request that is not what 'kvalloc solve'")


def test_what_a_file_states_freely_is_shown_as_far_as_it_can_be(tmp_path: Path) -> None:
    profile = make_budget_profile([[10, 17]])
    for granted in ("x", {}, [1], 10**400):
        profile.replace(requested={"bytes": granted}).save(tmp_path / "p.json")
        assert run("inspect", tmp_path / "p.json").code == 0
    make_evaluation(make_row()).replace(prompts=({"no": "name"},)).save(tmp_path / "e.json")
    assert run("inspect", tmp_path / "e.json").code == 0


def test_a_table_that_pyarrow_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise NotImplementedError("Integers with more than 64 bits not implemented")

    monkeypatch.setattr(pytest.importorskip("pyarrow.parquet"), "read_table", refuse)
    with pytest.raises(InputError, match="is no table of budgets .*: Integers with more"):
        TARGETS["parquet"].read(tmp_path / "x", make_budget_profile([[10, 17]] * 3))


def test_a_weight_that_no_float_holds(tmp_path: Path) -> None:
    (tmp_path / "w.json").write_text(f"[1, 1{'0' * 400}]")
    with pytest.raises(InputError, match="no table of numbers"):
        read_weights(tmp_path / "w.json")


@pytest.mark.parametrize(
    ("target", "content"),
    [
        ("lu-kv", b""),
        ("lu-kv", b"\x93NUMPY\x01\x00\x0a\x00{'descr\x00':("),
        ("csv", b"layer,head,tokens\n0\n"),
        ("duo-attention", b"[" * 100_000),
        ("duo-attention", None),
        ("duo-attention", b'{"sink_size": 1e999, "recent_size": 1}'),
    ],
)
def test_files_of_other_engines(tmp_path: Path, target: str, content: bytes | None) -> None:
    path = tmp_path / "x"
    if target == "duo-attention":
        path.mkdir()
        (path / "full_attention_heads.tsv").write_text("1\t1\n" * 3 if content else "\n")
        (path / "config.json").write_bytes(content or b'{"sink_size": 1, "recent_size": 1}')
    else:
        path.write_bytes(content or b"")
    with pytest.raises(InputError, match=str(path)):
        TARGETS[target].read(path, make_budget_profile([[10, 17]] * 3))
