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
    BITS,
    BITS_PROFILE,
    DATA,
    DOCS,
    FORMATS,
    MEASURED,
    PROFILE,
    SCHEMAS,
    SCORES,
    SETS,
    VERSIONS,
    described,
    published_schema,
    schema_of,
)

import kvalloc
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.score_profile import ScoreProfile

WANTED = "if that is wanted, run tests/golden/make_golden.py and say why in the commit"


def decisions(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("scores", "path", "case", "asked"),
    [(scores, path, *one) for scores, path, cases in SETS for one in cases.items()],
)
def test_decisions(scores, path, case, asked):
    expected = decisions(path)[case]
    found = described(kvalloc.solve(scores, **asked))
    assert set(found) == set(expected)
    for name, value in expected.items():
        if isinstance(value, float):
            same = found[name] == pytest.approx(value, rel=1e-12)
        else:
            same = found[name] == value
        assert same, f"behaviour moved: {name} of {case} was {value}, is {found[name]}; {WANTED}"


WRITTEN = dict.fromkeys((SCORES, MEASURED, BITS), ScoreProfile)
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
        ("score_profile", SCORES),
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
