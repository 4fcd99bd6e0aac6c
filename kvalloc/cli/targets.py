"""The options that ``solve`` and ``compare`` share: what to reach, and within which limits."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import typer

from kvalloc.allocation.request import TARGETS, RequestOptions
from kvalloc.errors import InputError, ProfileFileError, nearest

if TYPE_CHECKING:
    from kvalloc.formats.score_profile import ScoreProfile

Scores = Annotated[
    Path, typer.Argument(metavar="SCORES", help="A score profile that 'kvalloc profile' wrote.")
]


BESIDE_TARGET = tuple(
    name
    for name in RequestOptions.__annotations__
    if name not in {kind.keyword for kind in TARGETS}
)
"""Options of a request but its target."""

F = TypeVar("F", bound=Callable[..., None])


def takes(options: type, *, only: Collection[str] = ()) -> Callable[[F], F]:
    """Give a command a flag for each field of a ``TypedDict``, which reach it as ``**asked``.

    A flag is named, typed and grouped as the field is, and its help and default are those of the
    numpydoc docstring. What was not typed is None.

    Parameters
    ----------
    options : type
        Whose fields are ``Annotated`` with `kvalloc.units.Option`; the others get no flag.
    only : collection of str
        Some of the fields; all by default.

    Returns
    -------
    callable
        Decorates a function with ``**asked: Unpack[options]``.
    """
    helps = _helps(options)
    hints = get_type_hints(options, include_extras=True)
    shown = [name for name, hint in hints.items() if get_origin(hint) is Annotated]
    flags = {name: _flag(name, hints[name], *helps[name]) for name in only or shown}

    def decorate(command: F) -> F:
        known = get_type_hints(command, include_extras=True)
        own = [
            one.replace(annotation=known[one.name])
            for one in inspect.signature(command).parameters.values()
            if one.kind is not one.VAR_KEYWORD
        ]
        first = sum(one.default is one.empty for one in own)
        added = [
            inspect.Parameter(
                name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=None,
                annotation=flag,
            )
            for name, flag in flags.items()
        ]
        described: Any = command
        described.__signature__ = inspect.Signature([*own[:first], *added, *own[first:]])
        described.__annotations__ = {**known, **flags}
        return command

    return decorate


def _helps(options: type) -> dict[str, tuple[str, str]]:
    """Help and default of each parameter that a numpydoc docstring describes."""
    _, _, section = (inspect.getdoc(options) or "").partition("Parameters\n----------\n")
    found = re.findall(r"^(\w+) : (.*)\n((?: +.*(?:\n|$))+)", section, re.MULTILINE)
    return {
        name: (
            re.sub(r"`(\w+)`", lambda other: _flag_name(other[1]), " ".join(text.split())),
            kind.partition(", default ")[2].strip('"'),
        )
        for name, kind, text in found
    }


def _flag_name(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _flag(name: str, hint: Any, text: str, default: str) -> Any:
    """The annotation that makes typer show a field as a flag."""
    union, shown = get_args(hint)
    first, *others = get_args(union) if get_origin(union) in (Union, UnionType) else (union,)
    metavar, typed = shown.metavar, first
    if get_origin(first) is Literal:
        metavar, typed = metavar or "|".join(get_args(first)), str
    elif get_origin(first) is Sequence:
        text, typed = f"{text} Can be repeated.", list[str]
    elif str in others:
        typed = str
    if default:
        text = f"{text.rstrip('.')}; {default} by default."
    names = [_flag_name(name)] if typed is bool else []
    return Annotated[
        typed | None,
        typer.Option(
            *names,
            metavar=metavar or None,
            help=text,
            min=shown.least,
            rich_help_panel=shown.group,
            show_default=False,
        ),
    ]


Average = Annotated[
    str,
    typer.Option(
        metavar="curves|allocations",
        help="Solve once on the mean curves, or solve every sample and average the budgets.",
    ),
]
TimeLimit = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Stop a solver after so long with the best it has."),
]


def load_scores(path: Path) -> ScoreProfile:
    """The score profile in a file.

    Raises
    ------
    ProfileFileError
        If the file is not a sound score profile; says so where it is a budget profile instead.
    """
    from kvalloc.formats.score_profile import ScoreProfile

    if path.is_file() and os.access(path, os.R_OK):
        with open(path, "rb") as handle:
            if handle.read(64).lstrip()[:1] == b"{":  # safetensors begin with eight bytes of length
                raise ProfileFileError(
                    path,
                    field="file",
                    found="JSON, as a budget profile is",
                    expected="a score profile written by 'kvalloc profile'",
                    way_out="name the *.safetensors file that the budgets were decided from",
                )
    return ScoreProfile.load(path)


def check_time_limit(seconds: float | None) -> None:
    """Refuse a limit that is not a positive number.

    Raises
    ------
    InputError
    """
    if seconds is not None and not 0 < seconds < float("inf"):
        raise InputError(f"--time-limit is {seconds:g} s, expected a number above 0")


def solver_options(name: str, pairs: list[str]) -> dict[str, Any]:
    """The options of a solver from ``KEY=VALUE`` texts, each of the type that the solver takes.

    Parameters
    ----------
    name : str
        A registered solver.
    pairs : list of str
        As typed.

    Returns
    -------
    dict

    Raises
    ------
    InputError
        If there is no such solver or option, a text is not ``KEY=VALUE``, or its value is not of
        the option's type.
    SolverError
        If the solver cannot be loaded.
    """
    from kvalloc.problem.registry import SOLVERS, load

    known = plugin_options(load(SOLVERS, name))
    return typed_options("solver", name, known, pairs, example="beta=10")


def typed_options(
    kind: str, name: str, known: dict[str, inspect.Parameter], pairs: list[str], *, example: str
) -> dict[str, Any]:
    """The options of a plug-in from ``KEY=VALUE`` texts, each of the type that it takes.

    Parameters
    ----------
    kind, name : str
        What the plug-in is and how it is called; ``--KIND-option`` is named in errors.
    known : dict of inspect.Parameter
        Its options, see `plugin_options`.
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


def plugin_options(cls: type[Any]) -> dict[str, inspect.Parameter]:
    """The options that a solver or scorer is made with, by name.

    Returns
    -------
    dict of inspect.Parameter
        Their annotations resolved where that is possible.
    """
    if cls.__init__ is object.__init__:
        return {}
    try:
        hints = get_type_hints(cls if is_dataclass(cls) else cls.__init__)
    except Exception:  # a plug-in's annotations may name what only a type checker sees
        hints = {}
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    named = (p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    return {p.name: p.replace(annotation=hints.get(p.name, p.annotation)) for p in named}


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
