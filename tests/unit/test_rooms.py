"""No room names one above it, by import (`make imports`) or by a string."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LAYERS = next(
    one["layers"]
    for one in PROJECT["tool"]["importlinter"]["contracts"]
    if one["type"] == "layers" and one["containers"] == ["kvalloc"]
)
HEIGHT = {room: -row for row, layer in enumerate(LAYERS) for room in layer.split(" | ")}
GROUPS = {*PROJECT["project"]["entry-points"]}


def strings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Every string of a module that is no docstring."""
    texts = {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Expr)}
    for one in ast.walk(tree):
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and id(one) not in texts:
            yield one


def climbs(room: str, source: str) -> list[str]:
    """The strings of a module of a room that name a room above it."""
    result = [one.value for one in strings(ast.parse(source)) if one.value not in GROUPS]
    above = {one for one in HEIGHT if HEIGHT[one] > HEIGHT[room]}
    named = {text: re.findall(r"\bkvalloc[./](\w+)", text) for text in result}
    return [text for text, rooms in named.items() if above & {*rooms}]


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[parts[0] == "kvalloc"].removesuffix(".py")


def test_no_string_names_a_room_above() -> None:
    every = [*(ROOT / "kvalloc").rglob("*.py"), *(ROOT / "solvers").rglob("*.py")]
    paths = [path for path in sorted(every) if room_of(path) in HEIGHT]
    assert {room_of(path) for path in paths} == {*HEIGHT}
    result = {path: climbs(room_of(path), path.read_text(encoding="utf-8")) for path in paths}
    assert {str(path): texts for path, texts in result.items() if texts} == {}


@pytest.mark.parametrize(
    ("source", "climbing"),
    [
        ('import_module("kvalloc.report.notebook")', True),
        ('where = "kvalloc.runtime", "make_cache"', True),
        ('f"kvalloc.online.{name}"', True),
        ('names("kvalloc.solvers")', False),  # a group of entry points
        ('"kvalloc.budget_profile", "kvalloc.apply(model)"', False),
        ('"""See `kvalloc.runtime`."""', False),
    ],
)
def test_the_check_sees_what_it_should(source: str, climbing: bool) -> None:
    assert bool(climbs("formats", source)) == climbing
