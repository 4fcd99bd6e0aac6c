"""Answers and files as they were: a difference here says that behaviour moved."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from make_core_golden import (
    CASES,
    CHOICE_CASES,
    CHOICE_DECISIONS,
    CHOICE_PROFILE,
    CHOICES,
    DECISIONS,
    MEASURED,
    MEASURED_CASES,
    PROFILE,
    SCHEMA,
    SCORES,
    SHARED,
    SHARED_CASES,
    SHARED_DECISIONS,
    decide,
    decide_choice,
    decide_measured,
    decide_shared,
    described,
    described_choice,
    described_shared,
)

from kvalloc.formats.budget_profile import BudgetProfile, budget_profile_schema
from kvalloc.formats.score_profile import ScoreProfile

WANTED = "if that is wanted, run tests/golden/make_core_golden.py and say why in the commit"


@pytest.fixture(scope="module")
def scores() -> ScoreProfile:
    return ScoreProfile.load(SCORES)


@pytest.fixture(scope="module")
def decisions() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DECISIONS.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("case", CASES)
def test_decisions(scores: ScoreProfile, decisions: dict[str, Any], case: str) -> None:
    _check_same(described(decide(scores, case)), decisions[case], case)


@pytest.mark.parametrize("case", MEASURED_CASES)
def test_decisions_from_losses_bits_and_other_costs(decisions: dict[str, Any], case: str) -> None:
    measured = ScoreProfile.load(MEASURED)
    _check_same(described(decide_measured(measured, case)), decisions[case], case)


def _check_same(found: dict[str, Any], expected: dict[str, Any], case: str) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        if isinstance(value, float):  # sums may differ in the last digit from machine to machine
            same = found[name] == pytest.approx(value, rel=1e-12)
        else:
            same = found[name] == value
        assert same, f"behaviour moved: {name} of {case} was {value}, is {found[name]}; {WANTED}"


@pytest.mark.parametrize("case", SHARED_CASES)
def test_decisions_for_layers_that_share_and_for_workloads(case: str) -> None:
    expected = json.loads(SHARED_DECISIONS.read_text(encoding="utf-8"))[case]
    found = described_shared(decide_shared(ScoreProfile.load(SHARED), case))
    for name, value in expected.items():
        # Bounds over weights of workloads come from a linear program, good to its tolerance.
        exact = not isinstance(value, float)
        same = found[name] == value if exact else found[name] == pytest.approx(value, rel=1e-8)
        assert same, f"behaviour moved: {name} of {case} was {value}, is {found[name]}; {WANTED}"


@pytest.mark.parametrize("case", CHOICE_CASES)
def test_decisions_of_budgets_and_policies(case: str) -> None:
    expected = json.loads(CHOICE_DECISIONS.read_text(encoding="utf-8"))[case]
    found = described_choice(decide_choice(ScoreProfile.load(CHOICES), case))
    _check_same(found, expected, case)


def test_the_score_file_with_joint_curves_is_written_as_it_was(tmp_path: Path) -> None:
    ScoreProfile.load(SHARED).save(tmp_path / "again.safetensors")
    same = (tmp_path / "again.safetensors").read_bytes() == SHARED.read_bytes()
    assert same, f"behaviour moved: the score profile's file format; {WANTED}"


def test_every_case_is_golden(decisions: dict[str, Any]) -> None:
    assert set(decisions) == {*CASES, *MEASURED_CASES}


def test_greedy_and_ilp_agree(decisions: dict[str, Any]) -> None:
    for case, decision in decisions.items():
        if case.startswith("ilp"):
            other = decisions[case.replace("ilp", "greedy")]
            assert decision["objective"] == pytest.approx(other["objective"], rel=1e-12)


@pytest.mark.parametrize("file", [SCORES, MEASURED, CHOICES], ids=lambda file: file.stem)
def test_the_score_file_of_version_1_is_written_as_it_was(file: Path, tmp_path: Path) -> None:
    ScoreProfile.load(file).save(tmp_path / "again.safetensors")
    same = (tmp_path / "again.safetensors").read_bytes() == file.read_bytes()
    assert same, f"behaviour moved: the score profile's file format; {WANTED}"


@pytest.mark.parametrize("file", [PROFILE, CHOICE_PROFILE], ids=lambda file: file.stem)
def test_the_budget_file_of_version_1_is_read_and_written_as_it_was(
    file: Path, tmp_path: Path
) -> None:
    profile = BudgetProfile.load(file)
    profile.save(tmp_path / "again.json")
    again = (tmp_path / "again.json").read_text(encoding="utf-8")
    same = again == file.read_text(encoding="utf-8")
    assert same, f"behaviour moved: the budget profile's file format; {WANTED}"


def test_the_published_schema() -> None:
    expected = json.loads(SCHEMA.read_text(encoding="utf-8"))
    assert budget_profile_schema() == expected, f"behaviour moved: the JSON Schema; {WANTED}"


@pytest.mark.parametrize("file", [PROFILE, CHOICE_PROFILE], ids=lambda file: file.stem)
def test_the_golden_budget_file_follows_the_schema(file: Path) -> None:
    import jsonschema

    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema.validate(json.loads(file.read_text(encoding="utf-8")), schema)
