"""What the packaging says must be what the tree holds."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import kvalloc
from kvalloc.cli.doctor import RUN

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("solvers", "profiles")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def packages_in_the_tree() -> set[str]:
    result = set()
    # Links are followed: kvalloc/solvers is how the tree shows the package kvalloc.solvers.
    for folder, _, files in os.walk(ROOT / "kvalloc", followlinks=True):
        if "__init__.py" in files:
            result.add(".".join(Path(folder).relative_to(ROOT).parts))
    return result


def test_every_package_is_listed(project: dict[str, Any]) -> None:
    assert set(project["tool"]["setuptools"]["packages"]) == packages_in_the_tree()


def test_installed_version_is_this_tree() -> None:
    assert version("kvalloc") == kvalloc.__version__


def test_doctor_looks_at_all_that_running_a_model_needs(project: dict[str, Any]) -> None:
    wanted = project["project"]["optional-dependencies"]["run"]
    assert {Requirement(text).name for text in wanted} == set(RUN)
    assert {"accelerate", "gguf"} < set(RUN)  # without which no .gguf file is read


@pytest.mark.parametrize("name", LINKED)
def test_links_are_relative_and_lead_to_the_folder(name: str) -> None:
    link = ROOT / "kvalloc" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == ROOT / name


@pytest.mark.parametrize("name", LINKED)
def test_folder_refuses_another_name(name: str) -> None:
    importlib.import_module(f"kvalloc.{name}")
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "ImportError" in done.stderr
    assert f"import kvalloc.{name}" in done.stderr


@pytest.mark.parametrize("group", ["kvalloc.solvers", "kvalloc.scorers", "kvalloc.policies"])
def test_entry_points_load_under_their_name(project: dict[str, Any], group: str) -> None:
    declared = project["project"]["entry-points"][group]
    installed = {point.name: point for point in entry_points(group=group)}
    for name, target in declared.items():
        assert installed[name].value == target
        assert installed[name].load().name == name


def test_every_solver_file_is_an_entry_point(project: dict[str, Any]) -> None:
    declared = project["project"]["entry-points"]["kvalloc.solvers"].values()
    files = {f.stem for f in (ROOT / "solvers").glob("*.py") if not f.stem.startswith("_")}
    assert {target.split(":")[0].rpartition(".")[2] for target in declared} == files


def test_every_room_has_its_place_in_the_layers(project: dict[str, Any]) -> None:
    contract = project["tool"]["importlinter"]["contracts"][0]
    placed = {f"kvalloc.{room}" for layer in contract["layers"] for room in layer.split(" | ")}
    rooms = {f"kvalloc.{f.parent.name}" for f in (ROOT / "kvalloc").glob("*/__init__.py")}
    modules = {f"kvalloc.{f.stem}" for f in (ROOT / "kvalloc").glob("[!_]*.py")}
    assert placed == (rooms | modules) - {"kvalloc.profiles"}


def test_texts_are_clean_and_in_one_role_each() -> None:
    texts = sorted((ROOT / "kvalloc" / "data" / "texts").glob("*.txt"))
    speakers: dict[str, set[str]] = {"profile": set(), "haystack": set(), "heldout": set()}
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


def test_every_room_is_explained() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rooms = {f.parent.name for f in (ROOT / "kvalloc").glob("*/__init__.py")}
    assert {room for room in rooms if f"| `{room}/`" not in text} == {"data", "profiles"}
    named = re.findall(r"`((?:[a-z]+/)+[a-z_]+\.py)`", text)
    assert [
        name for name in named if not any((ROOT / top / name).exists() for top in ("", "kvalloc"))
    ] == []
