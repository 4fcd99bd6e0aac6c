"""Registry of solvers, scorers and policies by name, from entry points."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar, get_type_hints

import numpy as np

from kvalloc.errors import InputError, SolverError, nearest, no_such
from kvalloc.problem.solver import Solver

SOLVERS = "kvalloc.solvers"
"""Entry-point group of solvers: each names a subclass of `kvalloc.problem.Solver`."""

SCORERS = "kvalloc.scorers"
"""Entry-point group of scorers: each names a subclass of `kvalloc.scorers.Scorer`."""

POLICIES = "kvalloc.policies"
"""Entry-point group of policies: each names a subclass of `EvictionPolicy`."""

ATTENTION = "kvalloc.attention"
"""Entry-point group of backends of attention: each names a subclass of `Backend`."""

T = TypeVar("T")


@cache
def _group(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in sorted(entry_points(group=group))}


def names(group: str) -> list[str]:
    """Return the sorted names of a group, without importing the plug-ins."""
    return sorted(_group(group))


def load(group: str, name: str, base: type[Any] = object) -> type[Any]:
    """Return the class registered under a name.

    Parameters
    ----------
    group : str
        `SOLVERS`, `SCORERS`, `POLICIES` or `ATTENTION`.
    name : str
        A solver may also be ``"module:Class"``, but not in a file.
    base : type

    Raises
    ------
    InputError
        If no plug-in has that name.
    SolverError
        If it cannot be imported, is no `base`, or has no name.
    """
    kind = {POLICIES: "policy"}.get(group, group.rsplit(".", 1)[-1].removesuffix("s"))
    points, way_out = _group(group), "reinstall or remove the package that provides it"
    point = points.get(name)
    module, colon, _ = name.partition(":")
    if point is None and group == SOLVERS and colon and module not in points:
        point = EntryPoint(name=name, value=name, group=group)
        way_out = "name a module that Python finds and a class in it, such as my_package.mine:Mine"
    if point is None:
        known = sorted(points) or ["none: is kvalloc installed, not only on the path?"]
        raise InputError(no_such(kind, name, known))
    shown = repr(name) if name == point.value else f"{name!r} ({point.value})"
    try:
        loaded = point.load()
    except Exception as error:  # a plug-in may fail in any way while it is imported
        raise SolverError(f"the {kind} {shown} cannot be loaded: {error}; {way_out}") from error
    if not isinstance(loaded, type) or not issubclass(loaded, base):
        what = "class" if base is object else f"subclass of {base.__module__}.{base.__qualname__}"
        raise SolverError(f"the {kind} {shown} is not a {what}")
    if issubclass(loaded, Solver) and not isinstance(getattr(loaded, "name", None), str):
        raise SolverError(f"the {kind} {shown} has no name; set the class attributes name, summary")
    return loaded


def read_named(text: str) -> tuple[str, dict[str, Any]]:
    """Return name and options of a plug-in, NAME or NAME:KEY=VALUE:KEY=VALUE.

    Raises
    ------
    InputError
        If an option lacks name or value, or comes twice.

    Examples
    --------
    >>> read_named("snapkv:window=4:pool=1")
    ('snapkv', {'window': '4', 'pool': '1'})
    """
    name, *pairs = re.split(r":(?=[^:=]*=)", text.strip())
    options: dict[str, Any] = {}
    for pair in pairs:
        key, value = (part.strip() for part in pair.split("=", 1))
        key = key.replace("-", "_")
        if not key or not value:
            raise InputError(f"{text!r} is not NAME or NAME:KEY=VALUE, such as snapkv:window=4")
        if key in options:
            raise InputError(f"{text!r} gives {key} twice; give it once")
        options[key] = value
    return name, options


def build(cls: type[T], options: Mapping[str, Any], *, what: str, **fixed: Any) -> T:
    """Make a plug-in with its `typed_options`.

    Parameters
    ----------
    cls : type
    options : mapping
    what : str
        Name in an error, such as ``"solver pyramid"``.
    **fixed
        Arguments that are no options.

    Raises
    ------
    InputError
        If an option is unknown or invalid.
    """
    typed = typed_options(cls, options, what=what) if options else {}
    try:
        return cls(**fixed, **typed)
    except (TypeError, ValueError) as error:
        raise InputError(f"{what} cannot be made with {typed}: {error}") from error


def typed_options(cls: type[Any], options: Mapping[str, Any], *, what: str) -> dict[str, Any]:
    """Return a plug-in's options, with texts converted to their types.

    Raises
    ------
    InputError
        If an option is unknown or its text not of its type.
    """
    known = plugin_options(cls)
    if unknown := sorted(options.keys() - known.keys()):
        choices = ", ".join(known) or "it has none"
        near = nearest(unknown[0], known)
        raise InputError(f"{what} has no option {unknown[0]!r}; {near}choose from: {choices}")
    return {
        name: _typed(name, value, known[name], what) if isinstance(value, str) else value
        for name, value in options.items()
    }


def _typed(name: str, text: str, option: inspect.Parameter, what: str) -> Any:
    from pydantic import PydanticUserError, TypeAdapter, ValidationError

    try:
        return TypeAdapter(option.annotation).validate_python(text)
    except PydanticUserError:  # of another type, or of an unknown one: the plug-in reads it
        return text
    except ValidationError as error:
        expected = error.errors()[0]["msg"].removeprefix("Input should be ")
        raise InputError(f"{what}: {name} is {text!r}, expected {expected}") from None


def solver_names() -> list[str]:
    """Return the registered names of solvers."""
    return names(SOLVERS)


def get_solver(name: str | Solver, **options: Any) -> Solver:
    """Return a solver, by name or unchanged.

    Parameters
    ----------
    name : str or Solver
        A name or ``"module:Class"``, also with options, see `read_named`.
    **options
        Options of the solver.

    Raises
    ------
    InputError
        If there is no such solver or option.
    SolverError
        If the plug-in is broken.
    """
    if isinstance(name, Solver):
        return name
    name, named = read_named(name)
    solver: Solver = build(load(SOLVERS, name, Solver), named | options, what=f"solver {name}")
    return solver


def options_of(solver: Solver) -> dict[str, Any]:
    """Return a solver's options from attributes of the same names, without defaults.

    Arrays become lists; for other values see `json_value`.
    """
    options: dict[str, Any] = {}
    for name, parameter in plugin_options(type(solver)).items():
        value = getattr(solver, name, parameter.default)
        if value is parameter.default:
            continue
        plain = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
        if plain != parameter.default:
            options[name] = json_value(plain)
    return options


def json_value(value: Any) -> Any:
    """Return a value, or its `repr` if JSON cannot hold it."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return repr(value)
    return value


def plugin_options(cls: type[Any]) -> dict[str, inspect.Parameter]:
    """Return a plug-in's options by name, without the scorer of a policy."""
    kind: Any = cls  # mypy takes no class for hashable
    return _plugin_options(kind)


@cache
def _plugin_options(cls: Any) -> dict[str, inspect.Parameter]:
    if cls.__init__ is object.__init__:
        return {}
    try:
        hints = get_type_hints(cls if is_dataclass(cls) else cls.__init__)
    except Exception:  # a plug-in's annotations may name what only a type checker sees
        hints = {}
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = (p for p in parameters if p.kind not in rest and p.name != "scorer")
    return {p.name: p.replace(annotation=hints.get(p.name, p.annotation)) for p in named}
