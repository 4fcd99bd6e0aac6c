"""docs/policies.md says what is there."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from kvalloc.problem.registry import plugin_options
from kvalloc.runtime.policies import policy_class, policy_names
from kvalloc.scorers import scorer_class, scorer_names

PAGE = Path(__file__).parents[3] / "docs" / "policies.md"


def rows() -> dict[str, list[str]]:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if "| `" in line]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {row[0].strip("| `"): row[1:] for row in cells}


def test_every_policy_and_scorer_has_a_row() -> None:
    kinds = {name: row[0] for name, row in rows().items()}
    expected = {
        **dict.fromkeys(scorer_names(), "scorer"),
        **dict.fromkeys(policy_names(), "policy"),
    }
    assert kinds == expected


def test_parameters_and_defaults_are_those_of_the_code() -> None:
    for name, row in rows().items():
        cls: type[Any] = policy_class(name) if row[0] == "policy" else scorer_class(name)
        options = {key: option for key, option in plugin_options(cls).items() if key != "scorer"}
        stated = dict(
            re.match(r"(\w+)(?:=(\S+))?$", text).groups()  # type: ignore[union-attr]
            for text in re.findall(r"`([a-z_]+(?:=[^`]*)?)`", row[3])
            if text.partition("=")[0] in options
        )
        assert stated.keys() == options.keys(), name
        for key, option in options.items():
            assert option.default is not inspect.Parameter.empty
            wanted = None if option.default is None else str(option.default)
            found = stated[key]
            assert (found or "none").lower() == (wanted or "none").lower(), (name, key)
