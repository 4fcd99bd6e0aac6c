"""Answers and files as they were: a difference here says that behaviour moved."""

import json
import pkgutil
import sys
from pathlib import Path

import jsonschema
import pytest
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).parent))

from make_golden import (
    BITS_PROFILE,
    DATA,
    DECISIONS,
    DOCS,
    FORMATS,
    PROFILE,
    SCHEMAS,
    SETS,
    VERSIONS,
    decide,
    described,
    is_as_made,
    published_schema,
    registered,
    schema_of,
)

from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.score_profile import ScoreProfile

WANTED = "if that is wanted, run tests/golden/make_golden.py and say why in the commit"


def decisions(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("golden", "case"), [(each, case) for each in SETS for case in each.cases])
def test_decisions(golden, case):
    expected = decisions(golden.decisions)[case]
    found = described(decide(golden, case), golden.fields)
    assert set(found) == set(expected)
    for name, value in expected.items():
        if isinstance(value, float):
            same = found[name] == pytest.approx(value, rel=golden.tolerance)
        else:
            same = found[name] == value
        assert same, f"behaviour moved: {name} of {case} was {value}, is {found[name]}; {WANTED}"


@pytest.mark.parametrize("golden", SETS, ids=lambda golden: golden.scores.stem)
def test_the_scores_are_what_the_factories_make(golden):
    assert is_as_made(golden), f"behaviour moved: {golden.scores.name}; {WANTED}"


def test_every_case_is_golden():
    for path in {golden.decisions for golden in SETS}:
        cases = [case for golden in SETS if golden.decisions == path for case in golden.cases]
        assert sorted(decisions(path)) == sorted(cases)


def test_greedy_and_ilp_agree():
    found = decisions(DECISIONS)
    for case, decision in found.items():
        if case.startswith("ilp"):
            other = found[case.replace("ilp", "greedy")]
            assert decision["objective"] == pytest.approx(other["objective"], rel=1e-12)


WRITTEN = dict.fromkeys((each.scores for each in SETS), ScoreProfile)
WRITTEN |= dict.fromkeys((PROFILE, BITS_PROFILE), BudgetProfile)


@pytest.mark.parametrize("file", WRITTEN, ids=lambda file: file.stem)
def test_a_file_is_read_and_written_as_it_was(file, tmp_path):
    WRITTEN[file].load(file).save(tmp_path / "again")
    same = (tmp_path / "again").read_bytes() == file.read_bytes()
    assert same, f"behaviour moved: the file format of {WRITTEN[file].NAME}s; {WANTED}"


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_published_schemas(name):
    expected = json.loads((DOCS / f"{name}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(expected)
    assert published_schema(name) == expected, f"behaviour moved: the JSON Schema; {WANTED}"


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("score_profile", SETS[0].scores),
        ("fitted_file", DOCS.parent / "profiles" / "smollm2-135m-instruct.fitted.safetensors"),
        ("budget_profile", PROFILE),
        ("budget_profile", BITS_PROFILE),
    ],
)
def test_files_follow_their_schema(name, file):
    if file.suffix == ".json":
        stated = json.loads(file.read_text(encoding="utf-8"))
    else:
        with safe_open(file, "numpy") as opened:
            stated = json.loads(opened.metadata()["kvalloc"])
    schema = json.loads((DOCS / f"{name}.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(stated, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**stated, "surprise": 1}, schema)


REGISTRY = json.loads(VERSIONS.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "version"), [(name, version) for name in REGISTRY for version in REGISTRY[name]]
)
def test_a_file_of_every_version_is_read(name, version):
    reader, method, _ = FORMATS[name]
    assert getattr(pkgutil.resolve_name(reader), method)(DATA / REGISTRY[name][version]["file"])


@pytest.mark.parametrize("name", FORMATS)
def test_a_schema_changes_with_its_version_alone(name):
    version, digest = schema_of(name)
    known = REGISTRY[name].get(version, {})
    raise_it = "raise its schema_version" if known.get("released") else "before a release"
    assert known.get("schema") == digest, f"the schema of a {name} moved: {raise_it}; {WANTED}"


def test_what_has_come_out_stays():
    """The script that writes the registry refuses another schema, and keeps older versions."""
    name = "evaluation"
    version, digest = schema_of(name)
    out = {"file": "evaluation.json", "schema": digest, "released": "0.1.0"}
    old, never = {**out, "schema": "x"}, {**out, "released": None}
    kept = registered({name: {"1": old, "2": never, version: out}})[name]
    assert kept == {"1": old, version: out}
    with pytest.raises(SystemExit, match=r"than kvalloc 0\.1\.0 .*raise its schema_version"):
        registered({name: {version: old}})
