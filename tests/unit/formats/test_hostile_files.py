"""Hostile files of every kind: each is refused in one clear line or read; see `hostile_files`."""

import itertools
import os
import random
import shutil
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from cli_tools import refused, run, succeed
from factories import (
    make_bits,
    make_budget_profile,
    make_evaluation,
    make_losses,
    make_row,
    make_scores,
)
from hostile_files import (
    OF_EACH_TYPE,
    STRINGS,
    Tensors,
    by_chance,
    changed_bytes,
    changed_value,
    one_clear_line,
    outcomes,
    places,
    refusal,
    stated_by,
    with_stated,
    with_value,
)
from hypothesis import given

from kvalloc.allocation.decision import solve
from kvalloc.errors import InputError, KVAllocError, ProfileFileError
from kvalloc.files import checkpoint_folder
from kvalloc.formats import record
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.evaluation import Evaluation
from kvalloc.formats.fitted import FittedModel, FittedSurrogate
from kvalloc.formats.record import kind_of
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.formats.shipped_profiles import load_file, load_profile, load_scores
from kvalloc.interop.exporting import TARGETS
from kvalloc.interop.target import ExportTarget
from kvalloc.measure.checkpoint import Checkpoint
from kvalloc.prompts.tasks.longbench import read_records
from kvalloc.prompts.texts import read_prompts, read_texts

pytestmark = pytest.mark.fuzz

SCORES = make_scores(context_tokens=24, sinks=2, window=3)
PROFILE = solve(SCORES, budget="50%", solver="greedy")
REQUESTS = (
    {"budget": "50%", "cap": "0-1=1KiB", "max_tokens": 20, "min_tokens": 6},
    {"target_retention": 0.9, "level": "head", "max_distinct": 3},
    {"budget_tokens": 12, "page": 4},
)
LINES = (
    b'{"prompt": "a b c", "answer": "d", "task": "t"}\n{"text": "e f"}\n',
    b'{"context": "a b", "input": "c?", "answers": ["d"], "all_classes": ["x"]}',
    b'{"messages": [{"role": "user", "content": "hi"}], "question_after": "?", "answer": "x"}',
)
JOB = {"scorer": "xkv", "context_tokens": 40, "versions": {"torch": "2"}}
LOSSES = np.array([0.5, 0.25, 0.0])
EXPORTS = tuple(name for name, one in TARGETS.items() if type(one).read is not ExportTarget.read)


def loaded(kind, *, then=bool):
    """Return a reader of a record that saves it again, loads that, and uses it."""

    def read(path):
        found, again = kind.load(path), path.with_name("again")
        found.save(again)
        assert kind.load(again) == found
        assert repr(found)
        with suppress(KVAllocError):
            then(found)
        return found

    return read


def use_budgets(profile):
    for tokens in (1, profile.context_tokens, 2 * profile.context_tokens + 1):
        profile.budgets_for(tokens)
        profile.retained_bytes_at(tokens)


def read_any_lines(path):
    """Read prompts for profiling, for an evaluation, and as running text."""
    refusals = []
    for read in (read_prompts, read_records, lambda one: read_texts([one])):
        try:
            read(path)
        except KVAllocError as error:
            refusals.append(error)
    if len(refusals) == 3:
        raise refusals[0]
    return None


def checkpoint(output):
    """Write the folder of a killed job beside an output."""
    with Checkpoint(output, JOB, resume=False) as kept:
        kept.save("piece", {"losses": LOSSES})
    return checkpoint_folder(output)


def continued(name):
    """Return a reader of a killed job's folder, one file of which is the changed one."""

    def read(path):
        output = path.with_name("of.safetensors")
        folder = checkpoint(output)
        (folder / name).write_bytes(path.read_bytes())
        try:
            with Checkpoint(output, JOB, resume=True) as kept:
                result = kept.load("piece", {"losses": (3,)})
            if result is None:
                raise InputError("the piece is measured again")
            np.testing.assert_equal(result["losses"], LOSSES)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    return read


FITTED = Path(__file__).parents[2] / "golden" / "data" / "version_1" / "fitted.safetensors"
COMMANDS = {
    "budget profile": (
        *("verify {} {scores}", "report {} -o {out}.svg"),
        *("report {} {scores} -o {out}.html", "inspect {} --json", "compare {} --budget 50%"),
        *("export {} --to csv -o {out}", "export {}", "export {} --to vllm -o {out}"),
    ),
    "score profile": (
        *("verify {budgets} {}", "solve {} --budget 50% -o {out}", "report {} -o {out}.html"),
        *("solve {} --target-retention 0.9 --json", "compare {} --budget 50%", "frontier {}"),
        *("report {} -o {out}.svg", "export {} --to csv -o {out}", "merge {} {part} -o {out}"),
    ),
    "evaluation": ("report {} -o {out}.html", "report {} -o {out}.svg", "inspect {} --json"),
    "fitted file": ("solve {} --budget 50% -o {out}", "inspect {}", "inspect {} --json"),
}


def commanded(path):
    """Run one of the commands that read such a file, by what it says it is."""
    SCORES.save(path.with_name("scores"))
    SCORES.replace(shard=(2, 2)).save(path.with_name("part"))
    PROFILE.save(path.with_name("budgets"))
    names = {name: path.with_name(name) for name in ("scores", "part", "budgets", "out")}
    choices = ("inspect {}", *COMMANDS.get(kind_of(path), ("verify {} {scores}",)))
    line = random.Random(path.read_bytes()).choice(choices)
    ran = run(*line.format(path, **names).split())
    assert ran.code in (0, 2) or (ran.code == 1 and line.startswith("verify")), ran
    assert "\x1b" not in ran.out + ran.err
    if ran.code == 2:
        assert ran.err.count("\n") == 1, ran.err
        raise KVAllocError(ran.err)
    return ran


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")

    def made(*records):
        files = [folder / str(number) for number in range(len(records))]
        for file, one in zip(files, records, strict=True):
            one.save(file)
        return tuple(file.read_bytes() for file in files)

    part = SCORES.replace(shard=(1, 2))
    surrogate = FittedModel.load(FITTED).surrogate
    scores = made(SCORES, make_losses(), make_bits(), part)
    decided = [solve(SCORES, **one) for one in REQUESTS]
    decided += [solve(make_losses(), target_loss=0.5), solve(make_bits(), budget="30%", bits="8,4")]
    budgets = made(PROFILE, make_budget_profile([[10, 17]]), *decided)
    evaluation = made(make_evaluation(make_row("full"), make_row()))
    job = checkpoint(folder / "of.safetensors")
    manifest, piece = ((job / name).read_bytes() for name in ("manifest.json", "piece.safetensors"))
    use_scores = partial(solve, budget="50%", solver="greedy")
    whole = {
        "score profile": (scores, loaded(ScoreProfile, then=use_scores)),
        "budget profile": (budgets, loaded(BudgetProfile, then=use_budgets)),
        "surrogate": (made(surrogate), loaded(FittedSurrogate)),
        "fitted file": ((FITTED.read_bytes(),), loaded(FittedModel)),
        "evaluation": (evaluation, loaded(Evaluation)),
        "prompts": (LINES, read_any_lines),
        "manifest": ((manifest,), continued("manifest.json")),
        "piece": ((piece,), continued("piece.safetensors")),
        "commands": ((*scores, *budgets, *evaluation, FITTED.read_bytes()), commanded),
    }
    for name in EXPORTS:
        out = folder / name
        TARGETS[name].write(PROFILE, out)
        samples = [file.read_bytes() for file in (sorted(out.iterdir()) if out.is_dir() else [out])]
        for place, sample in enumerate(samples):
            whole[f"{name} {place}"] = (sample,), imported(name, samples, place)
    return whole


def imported(name, samples, place):
    """Return a reader of budgets in another engine's file, or in one of the files of a folder."""

    def read(path):
        if len(samples) == 1:
            return TARGETS[name].read(path, PROFILE)
        folder = path.with_name("folder")
        folder.mkdir(exist_ok=True)
        files = ("config.json", "full_attention_heads.tsv")
        for number, (file, content) in enumerate(zip(files, samples, strict=True)):
            (folder / file).write_bytes(path.read_bytes() if number == place else content)
        return TARGETS[name].read(folder, PROFILE)

    return read


def test_files_made_by_chance_are_refused_or_read(kinds, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    count = request.config.getoption("--hostile-files")
    result = Counter()
    for name, kind in kinds.items():
        few = 4 if name == "commands" else 1
        result += outcomes(name, kind, tmp_path / "hostile", max(10, count // few))
    assert result["refused"] > result.total() / 2
    assert result["read"] > result.total() / 20


FREE = {"parameters", "scorer_parameters", "target_parameters", "solver_options", "requested"}
FREE |= {"settings"}
"""Fields that hold any plain values."""


RECORDS = ["budget profile", "evaluation", "score profile", "surrogate"]


@pytest.mark.parametrize("name", RECORDS)
def test_every_field_that_is_dropped_or_of_another_type_is_named(kinds, tmp_path, name):
    ((sound, *_), read), path = kinds[name], tmp_path / "p"
    stated = stated_by(sound)
    fields = [place for place in places(stated) if not any(isinstance(k, int) and k for k in place)]
    for place, new in itertools.product(fields, (..., *OF_EACH_TYPE)):
        changed, field = with_value(stated, place, new), ".".join(map(str, place))
        path.write_bytes(with_stated(sound, changed))
        error = refusal(read, path)
        if not isinstance(error, ProfileFileError):
            assert new != [[]] or {*place} & {*FREE, "digest"}, field
            continue
        assert one_clear_line(error, path) is None
        follows = place[0] == "shape" and error.field in ("content", "budgets", "layer_types")
        follows |= error.field == "gap"  # of objective and bound
        follows |= isinstance(new, float | int) and not isinstance(new, bool)
        named = field.startswith(error.field) or error.field.startswith(field)
        assert named or follows, (field, new, str(error))


@pytest.mark.parametrize("name", RECORDS)
def test_what_is_read_under_the_old_digest_is_equal(kinds, tmp_path, name, request):
    """White space and the order of keys may differ."""
    ((sound, *_), read), path = kinds[name], tmp_path / "p"
    stated = stated_by(sound)
    edited = changed_value(stated).map(partial(with_stated, sound, sign=False))

    @by_chance(request.config.getoption("--hostile-files"))
    @given(changed_bytes(sound) | edited)
    def read_edited(content):
        path.write_bytes(content)
        with suppress(ProfileFileError):
            assert read(path).digest == stated["digest"]

    read_edited()


@pytest.mark.parametrize("load", [load_profile, load_scores, load_file, read_prompts])
def test_names_that_no_file_can_have(load):
    for name in ("x" * 5000 + "/p.json", *(one for one in STRINGS if not os.path.exists(one))):
        with pytest.raises(KVAllocError):
            load(name)
        with pytest.raises(KVAllocError):
            load_profile(Path(name))


def test_a_pipe_is_no_profile_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "p.json")
    assert kind_of(tmp_path / "p.json") == ""
    for load in (BudgetProfile.load, ScoreProfile.load):
        with pytest.raises(ProfileFileError, match="file is no plain file"):
            load(tmp_path / "p.json")


def test_files_that_would_take_all_memory(tmp_path, monkeypatch):
    make_scores().save(tmp_path / "s.safetensors")
    file = Tensors.parse((tmp_path / "s.safetensors").read_bytes())
    table, size = file.table(), 2**37 // 96
    curves = {**table["curves"], "shape": [2, 3, 2, size], "data_offsets": [0, size * 96]}
    file.arrays.clear()
    (tmp_path / "huge").write_bytes(
        file.pack({"curves": curves, "__metadata__": table["__metadata__"]})
    )
    os.truncate(tmp_path / "huge", (tmp_path / "huge").stat().st_size + size * 96)
    with pytest.raises(ProfileFileError, match="all but .* of them holes"):
        ScoreProfile.load(tmp_path / "huge")
    monkeypatch.setattr(record, "LARGEST_JSON_BYTES", 100)
    make_budget_profile([[10, 17]]).save(tmp_path / "p.json")
    with pytest.raises(ProfileFileError, match=r"file is of .* bytes, expected at most 100"):
        BudgetProfile.load(tmp_path / "p.json")


@pytest.mark.parametrize(
    "requested",
    [
        {"value": "x"},
        {"value": 1e308, "bytes": 10**18},
        {"target": ["budget"]},
        {"cap": "/etc/passwd"},
        {"bytes": "x", "value": -1},
    ],
    ids=str,
)
def test_what_was_asked_for_is_shown_or_verified_only_where_it_can_be_read(tmp_path, requested):
    decided = solve(make_scores(), budget="50%", solver="greedy")
    changed = decided.replace(requested={**decided.requested, **requested})
    sound, path, scores = (tmp_path / name for name in ("sound.json", "p.json", "s.safetensors"))
    decided.save(sound)
    changed.save(path)
    make_scores().save(scores)
    said = "not recorded in a form that can be read"
    assert said in succeed("inspect", path).out
    succeed("report", path, "-o", tmp_path / "r.html")
    assert said in (tmp_path / "r.html").read_text(encoding="utf-8")
    line = refused(tmp_path, "verify", path, scores)
    assert line.startswith(f"error: {path} states a request that is not what 'kvalloc solve'")


def test_a_table_that_pyarrow_cannot_read(tmp_path, monkeypatch):
    def refuse(path):
        raise NotImplementedError("Integers with more than 64 bits not implemented")

    monkeypatch.setattr(pytest.importorskip("pyarrow.parquet"), "read_table", refuse)
    with pytest.raises(InputError, match="is no table of budgets .*: Integers with more"):
        TARGETS["parquet"].read(tmp_path / "x", make_budget_profile([[10, 17]] * 3))
