"""What was typed, as values: a score profile from its path, options of plug-ins, a time limit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, get_args

from kvalloc.errors import InputError, nearest


def _shipped(*kinds: str) -> list[str]:
    from kvalloc.formats import shipped_profiles as shipped

    return [name for kind in kinds for name in getattr(shipped, f"shipped_{kind}")()]


def _plugins(*groups: str) -> list[str]:
    from kvalloc.problem import registry

    return [name for group in groups for name in registry.names(f"kvalloc.{group}")]


def _keys(table: str) -> list[str]:
    return [*resolve_name(table)]


_PICKING = partial(_plugins, "policies", "scorers")
NAMES: dict[str, Callable[[], Sequence[str]]] = {
    "model": lambda: ["demo"],
    **dict.fromkeys(("profile", "first", "second"), partial(_shipped, "profiles")),
    "scores": partial(_shipped, "scores"),
    **dict.fromkeys(("file", "files"), partial(_shipped, "scores", "profiles")),
    "surrogate": partial(_shipped, "surrogates"),
    "solver": partial(_plugins, "solvers"),
    "scorer": partial(_plugins, "scorers"),
    **dict.fromkeys(("policy", "policies", "loss_policies"), _PICKING),
    "tasks": partial(_keys, "kvalloc.prompts.tasks:TASKS"),
    "metric": partial(_keys, "kvalloc.prompts.metrics:METRICS"),
    "to": partial(_keys, "kvalloc.interop.exporting:TARGETS"),
    "dtype": lambda: ["float32", "bfloat16", "float16"],
}
"""What there is of each kind, by the parameter that takes its name; nothing loads torch."""


def make_folder(folder: Path) -> None:
    """Make the folder of ``--output-dir`` where there is none.

    Raises
    ------
    InputError
        If it is a file, or cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise InputError(f"{folder} is a file; name a folder with --output-dir") from None
    except OSError as error:
        raise InputError(f"cannot make the folder {folder}: {error.strerror}") from error


def solver_options(name: str, pairs: list[str]) -> dict[str, Any]:
    """Return the options of a solver as `typed_options` reads them.

    Raises
    ------
    InputError
        If there is no such solver, or as `typed_options`.
    SolverError
        If the solver cannot be loaded.
    """
    from kvalloc.problem.registry import SOLVERS, load, plugin_options

    known = plugin_options(load(SOLVERS, name))
    return typed_options("solver", name, known, pairs, example="beta=10")


def typed_options(
    kind: str, name: str, known: dict[str, inspect.Parameter], pairs: list[str], *, example: str
) -> dict[str, Any]:
    """Return the options of a plug-in from ``KEY=VALUE`` texts, each of the type that it takes.

    Parameters
    ----------
    kind, name : str
        What the plug-in is and how it is called; ``--KIND-option`` is named in errors.
    known : dict of inspect.Parameter
        Its options, see `kvalloc.problem.registry.plugin_options`.
    pairs : list of str
        As typed.
    example : str
        Of a pair.

    Returns
    -------
    dict

    Raises
    ------
    InputError
        If there is no such option, a text is not ``KEY=VALUE``, or its value is not of the
        option's type.
    """
    flag = f"--{kind}-option"
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key:
            raise InputError(f"{flag} {pair!r} is not KEY=VALUE, such as {example}")
        if key not in known:
            choices = ", ".join(known) or "it has none"
            near = nearest(key, known)
            raise InputError(f"{kind} {name} has no option {key!r}; {near}choose from: {choices}")
        if key in options:
            raise InputError(f"{flag} {key} is given twice; give it once")
        options[key] = _value(flag, name, key, text.strip(), known[key])
    return options


def _value(flag: str, name: str, key: str, text: str, option: inspect.Parameter) -> Any:
    kind = option.annotation
    # "float | None" takes a number, too
    kind = next((part for part in get_args(kind) if part in (bool, int, float, str)), kind)
    if kind not in (bool, int, float, str) and option.default is not inspect.Parameter.empty:
        kind = type(option.default)
    try:
        if kind is bool:
            return {"true": True, "yes": True, "false": False, "no": False}[text.lower()]
        if kind in (int, float, str):
            return kind(text)
    except (KeyError, ValueError):
        expected = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise InputError(f"{flag} {key} of {name} is {text!r}, expected {expected}") from None
    return text
