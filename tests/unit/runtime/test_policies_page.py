"""docs/policies.md says what is there, and its example runs."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import torch
from scorer_oracle import make_states

from kvalloc.problem.registry import plugin_options
from kvalloc.runtime.policies import EvictionPolicy, policy_class, policy_names
from kvalloc.scorers import get_scorer, scorer_class, scorer_names

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


def test_the_example_is_a_policy() -> None:
    block = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    names: dict[str, Any] = {}
    exec(block.group(1), names)
    made: EvictionPolicy = names["EverySecond"](scorer=get_scorer("xkv", window=2))
    kept = made.keep(make_states(n_tokens=10), torch.full((1, 2), 7), sinks=1, window=2)
    assert kept[0, 1].nonzero()[:, 0].tolist() == [0, 1, 2, 4, 6, 8, 9]
