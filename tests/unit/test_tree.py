"""The tree as a whole: packages, rooms, what imports load, examples in docstrings."""

import doctest
import importlib
import json
import os
import pkgutil
import re
import tomllib
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest
from cli_tools import python
from packaging.requirements import Requirement

import kvalloc
from kvalloc.cli.doctor import RUN

# What the packaging says must be what the tree holds


ROOT = Path(__file__).resolve().parents[2]
LINKED = ("solvers", "profiles")


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def packages_in_the_tree():
    result = set()
    # Links are followed: kvalloc/solvers is how the tree shows the package kvalloc.solvers.
    for folder, _, files in os.walk(ROOT / "kvalloc", followlinks=True):
        if "__init__.py" in files:
            result.add(".".join(Path(folder).relative_to(ROOT).parts))
    return result


def test_every_package_is_listed(project):
    assert set(project["tool"]["setuptools"]["packages"]) == packages_in_the_tree()


def test_installed_version_is_this_tree():
    assert version("kvalloc") == kvalloc.__version__


def test_doctor_looks_at_all_that_running_a_model_needs(project):
    wanted = project["project"]["optional-dependencies"]["run"]
    assert {Requirement(text).name for text in wanted} == set(RUN)
    assert {"accelerate", "gguf"} < set(RUN)  # without which no .gguf file is read


def test_transformers_is_allowed_from_the_oldest_to_the_newest_that_is_tested(project):
    makefile, pinned, readme = (
        (ROOT / name).read_text("utf-8") for name in ("Makefile", "constraints.txt", "README.md")
    )
    versions = re.search(r"^VERSIONS \?= (.+)$", makefile, re.MULTILINE)[1].split()
    oldest, newest = (".".join(versions[at].split(".")[:2]) for at in (0, -1))
    major, minor = newest.split(".")
    allowed = f"transformers>={oldest},<{major}.{int(minor) + 1}"
    assert allowed in project["project"]["optional-dependencies"]["run"]
    assert f"\ntransformers=={versions[-1]}\n" in pinned
    assert f"transformers {oldest} to {newest}" in " ".join(readme.split())


@pytest.mark.parametrize("name", LINKED)
def test_links_are_relative_and_lead_to_the_folder(name):
    link = ROOT / "kvalloc" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == ROOT / name


@pytest.mark.parametrize("name", LINKED)
def test_folder_refuses_another_name(name):
    importlib.import_module(f"kvalloc.{name}")
    done = python(f"import {name}", cwd=ROOT)
    assert done.returncode == 1
    assert "ImportError" in done.stderr
    assert f"import kvalloc.{name}" in done.stderr


@pytest.mark.parametrize("group", ["kvalloc.solvers", "kvalloc.scorers", "kvalloc.policies"])
def test_entry_points_load_under_their_name(project, group):
    declared = project["project"]["entry-points"][group]
    installed = {point.name: point for point in entry_points(group=group)}
    for name, target in declared.items():
        assert installed[name].value == target
        assert installed[name].load().name == name


def test_every_solver_file_is_an_entry_point(project):
    declared = project["project"]["entry-points"]["kvalloc.solvers"].values()
    files = {f.stem for f in (ROOT / "solvers").glob("*.py") if not f.stem.startswith("_")}
    assert {target.split(":")[0].rpartition(".")[2] for target in declared} == files


def test_every_room_has_its_place_in_the_layers(project):
    contract = project["tool"]["importlinter"]["contracts"][0]
    placed = {f"kvalloc.{room}" for layer in contract["layers"] for room in layer.split(" | ")}
    rooms = {f"kvalloc.{f.parent.name}" for f in (ROOT / "kvalloc").glob("*/__init__.py")}
    modules = {f"kvalloc.{f.stem}" for f in (ROOT / "kvalloc").glob("[!_]*.py")}
    assert placed == (rooms | modules) - {"kvalloc.profiles"}


def test_texts_are_clean_and_in_one_role_each():
    texts = sorted((ROOT / "kvalloc" / "data" / "texts").glob("*.txt"))
    speakers = {"profile": set(), "haystack": set(), "heldout": set()}
    readme = (ROOT / "kvalloc" / "data" / "texts" / "README.md").read_text(encoding="utf-8")
    for file in texts:
        role, speaker, _year = file.stem.split("_")
        speakers[role].add(speaker)
        raw = file.read_bytes()
        assert not raw.startswith(b"\xef\xbb\xbf")
        assert b"\r" not in raw
        assert raw.endswith(b"\n")
        assert len(raw.decode("utf-8").split()) > 2000
        assert f"`{file.name}`" in readme
    assert all(speakers.values())
    assert len(set().union(*speakers.values())) == sum(map(len, speakers.values()))


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_every_file_that_a_page_for_maintainers_names_exists(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(r"`((?:[a-z]+/)+[a-z_]+\.py)`", text)
    assert [
        name for name in named if not any((ROOT / top / name).exists() for top in ("", "kvalloc"))
    ] == []


# Importing kvalloc must stay light: heavy libraries are imported where they are used


HEAVY = {
    *("gguf", "jinja2", "networkx", "ortools", "pandas", "pydantic", "scipy", "torch"),
    *("transformers", "vl_convert"),
}


def loaded_modules(code):
    """Return the modules that a fresh interpreter has loaded after `code`."""
    report = f"{code}\nimport sys, json; print(json.dumps(sorted(sys.modules)))"
    return {*json.loads(python(report, check=True).stdout.splitlines()[-1])}


def loaded_by(code, *, among):
    """Return which of the top-level modules `among` are loaded after `code`."""
    return {name.split(".")[0] for name in loaded_modules(code)} & among


def test_the_check_sees_a_heavy_import():
    assert loaded_by("import scipy", among=HEAVY) == {"scipy"}


def test_import_kvalloc_loads_nothing_heavy():
    assert loaded_by("import kvalloc", among=HEAVY) == set()


def test_what_needs_no_model_loads_no_torch_and_no_optimizer():
    code = (
        "from kvalloc import solve, load_profile, ScoreProfile, BudgetProfile, ModelShape\n"
        "import kvalloc.allocation.decision, kvalloc.formats.shipped_profiles\n"
        "import kvalloc.scorers, kvalloc.cli.main\n"
        "from kvalloc.problem.registry import get_solver; get_solver('greedy')"
    )
    assert loaded_by(code, among=HEAVY - {"pydantic"}) == set()


def test_the_help_imports_no_command():
    """Of kvalloc itself it needs no more than what starts every command."""
    code = "from kvalloc.cli.main import main; main(['--help'])"
    loaded = loaded_modules(code)
    ours = {name for name in loaded if name.startswith("kvalloc")}
    assert ours == {"kvalloc", "kvalloc.cli", "kvalloc.cli.main", "kvalloc.errors"}
    assert not {name.split(".")[0] for name in loaded} & (HEAVY | {"numpy"})


def test_a_page_and_a_picture_need_neither_torch_nor_an_optimizer():
    code = "import kvalloc.report.page, kvalloc.report.figure"
    assert loaded_by(code, among=HEAVY - {"pydantic"}) == {"vl_convert"}


# If it is shown, it runs: the examples in docstrings


MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(kvalloc.__path__, "kvalloc.")
    if not module.ispkg
    and not module.name.endswith(("__main__", "._cpu", "._cpu_avx512"))  # C, for ctypes
)

NEEDS = {"kvalloc.extensions.triton": "triton", "kvalloc.interop.lm_eval": "lm_eval"}
"""Modules of an extra that the test environment may lack."""


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    result = doctest.testmod(
        importlib.import_module(name),
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE,
    )
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples in {name} fail"
