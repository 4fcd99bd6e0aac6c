"""Importing kvalloc must stay light: heavy libraries are imported where they are used."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {
    *("gguf", "jinja2", "networkx", "ortools", "pandas", "pydantic", "scipy", "torch"),
    *("transformers", "vl_convert"),
}


def loaded_modules(code: str) -> set[str]:
    """Return the modules that a fresh interpreter has loaded after `code`."""
    report = f"{code}\nimport sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", report], check=True, capture_output=True, text=True, timeout=120
    )
    return {*json.loads(done.stdout.splitlines()[-1])}


def loaded_by(code: str, *, among: set[str]) -> set[str]:
    """Return which of the top-level modules `among` are loaded after `code`."""
    return {name.split(".")[0] for name in loaded_modules(code)} & among


def test_the_check_sees_a_heavy_import() -> None:
    assert loaded_by("import scipy", among=HEAVY) == {"scipy"}


def test_import_kvalloc_loads_nothing_heavy() -> None:
    assert loaded_by("import kvalloc", among=HEAVY) == set()


@pytest.mark.parametrize(
    "code",
    [
        "from kvalloc import solve, load_profile, ScoreProfile, BudgetProfile, ModelShape",
        "import kvalloc.allocation.decision, kvalloc.formats.shipped_profiles",
        "import kvalloc.problem.registry",
        "from kvalloc.problem.registry import get_solver; get_solver('greedy')",
        "import kvalloc.scorers",
        "import kvalloc.cli.main",
    ],
)
def test_what_needs_no_model_loads_no_torch_and_no_optimizer(code: str) -> None:
    assert loaded_by(code, among=HEAVY - {"pydantic"}) == set()


def test_the_help_imports_no_command() -> None:
    """Of kvalloc itself it needs no more than what starts every command."""
    code = "from kvalloc.cli.main import main; main(['--help'])"
    loaded = loaded_modules(code)
    ours = {name for name in loaded if name.startswith("kvalloc")}
    assert ours == {"kvalloc", "kvalloc.cli", "kvalloc.cli.main", "kvalloc.errors"}
    assert not {name.split(".")[0] for name in loaded} & (HEAVY | {"numpy"})


def test_a_page_and_a_picture_need_neither_torch_nor_an_optimizer() -> None:
    code = "import kvalloc.report.page, kvalloc.report.figure"
    assert loaded_by(code, among=HEAVY - {"pydantic"}) == {"vl_convert"}
