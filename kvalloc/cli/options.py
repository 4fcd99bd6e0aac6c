"""Flags of commands, derived from what a command takes; and what several commands take alike."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Annotated, Any, Literal, TypedDict, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from kvalloc.cli.output import printing
from kvalloc.cli.values import NAMES
from kvalloc.errors import InputError
from kvalloc.units import Option, described

T = TypeVar("T")

SOLVING, MODEL, ENGINE = "Solver", "Model", "Where it runs"
"""Headings in the help."""


def parse_seconds(text: str) -> float:
    """Read a time limit.

    Raises
    ------
    InputError
        If it is not a positive number.
    """
    with suppress(ValueError):
        if 0 < (seconds := float(text)) < inf:
            return seconds
    raise InputError(f"--time-limit is {text} s, expected a number above 0")


class Common:
    """What several commands take.

    Parameters
    ----------
    model : str
        A hub id, a local folder, a .gguf file, or 'demo'.
    scores : Path
        A score profile that 'kvalloc profile' wrote, or a shipped one's name.
    profile : str
        A budget profile, or a shipped one's name.
    solver : str
        Solver, or module:Class, with its options after colons, such as ilp:gap=0.001; see 'kvalloc
        list solvers'.
    average : str
        Solve once on the mean curves, or solve every sample and average the budgets.
    time_limit : float
        Of a solver, by default 60; its best so far counts.
    fitted : Path
        What 'kvalloc fit' wrote for the model, instead of the file that is found for it.
    allow_other_model : bool
        Accept a profile or fitted file of another model of the same sizes.
    resume : bool
        Resume the unfinished work of a killed command.
    json : bool
        Print JSON on stdout; progress stays on stderr.
    quiet : bool
        Print only results and errors.
    verbose : bool
        Print each step on stderr, with its time.
    """


COMMON = {
    "solver": Option("NAME", SOLVING),
    "average": Option("curves|allocations", SOLVING),
    "time_limit": Option("SECONDS", SOLVING, parser=parse_seconds),
    "fitted": Option("FILE", MODEL),
    "allow_other_model": Option("", MODEL),
}
"""How the help shows some of them."""


class ModelFlags(TypedDict, total=False):
    """How a model is loaded; see `kvalloc.cli.progress.load`.

    Parameters
    ----------
    dtype : str, default float32
        Of weights and cache: float32, bfloat16 or float16.
    device : str
        Such as cuda:0, or auto to spread a large model over all there are; the CPU by default.
    """

    dtype: Annotated[str, Option("NAME", MODEL)]
    device: Annotated[str, Option("NAME", MODEL)]


class EngineFlags(TypedDict, total=False):
    """Where a model runs; see `kvalloc.cli.progress.running`.

    Parameters
    ----------
    engine : {"local", "ray"}, default local
        In this process, or in workers of a Ray cluster that load the model each.
    address : str
        With ray: of a cluster, HOST:PORT or auto; one is started on this machine by default.
    workers : int
        With ray: how many; as many as the cluster has GPUs, else as its CPUs allow, by default.
    threads : int
        CPU threads, with ray of each worker. The same number gives the same bits everywhere.
    """

    engine: Annotated[Literal["local", "ray"], Option("", ENGINE)]
    address: Annotated[str, Option("HOST:PORT", ENGINE)]
    workers: Annotated[int, Option("N", ENGINE, least=1)]
    threads: Annotated[int, Option("N", ENGINE, least=1)]


HELP_ALL = "--help-all"
_KEYWORD = inspect.Parameter.KEYWORD_ONLY

RARE = frozenset(
    {
        *("min_tokens", "max_tokens", "page", "share_groups", "max_distinct"),
        *("cap", "loss_policies", "measure_prompts", "average"),
        *("shard", "share_length", "fairness"),
        *("chunk", "lengths", *EngineFlags.__annotations__),
        *("peer", "plain_bits", "metric", "turns", "answer_tokens"),
        *("decode_every", "seed", "recompute"),
        *("fitted", "allow_other_model"),
    }
)
"""Options that few need, by name: only ``--help-all`` shows them."""

_ALSO = {"output": ("-o",), "quiet": ("-q",), "verbose": ("-v",)}
_ALWAYS = ("json", "quiet", "verbose")
"""Other names of flags."""


def takes(
    *options: type, only: Mapping[type, Collection[str]] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function: an argument or a flag for everything that it takes.

    Every command gets ``--json``, ``--quiet`` and ``--verbose``, which `kvalloc.cli.output` knows.

    A flag is named, typed and grouped as its parameter or field is; its help and its default are
    those of a numpydoc docstring: the function's own, or `Common`'s, or that of ``options``. A
    parameter that is not keyword-only is an argument; one without a default is required.

    Parameters
    ----------
    *options : type
        A ``TypedDict`` or a dataclass each. Its fields that are ``Annotated`` with
        `kvalloc.units.Option` get flags too, and those that were typed reach the function by name.
    only : mapping of type to collection of str
        Of which of them only some fields are taken.

    Returns
    -------
    callable
        Decorates the function.
    """
    fields: dict[str, Any] = {}
    common = _helps(Common)
    for kind in options:
        helps, hints = common | _helps(kind), get_type_hints(kind, include_extras=True)
        every = [name for name, hint in hints.items() if get_origin(hint) is Annotated]
        shown = (only or {}).get(kind, every)
        fields |= {name: _flag(name, hints[name], helps) for name in shown}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        helps = common | _helps(command)
        hints = get_type_hints(command, include_extras=True)
        parameters = inspect.signature(command).parameters.values()
        named = {one.name: one for one in parameters if one.kind is not one.VAR_KEYWORD}
        required = {name for name, one in named.items() if one.default is one.empty}
        places = {name for name, one in named.items() if one.kind is not _KEYWORD}
        flags = {name: _flag(name, hints[name], helps, argument=name in places) for name in named}
        first = {name: flags[name] for name in named if name in required | places}
        always = {name: _flag(name, bool, helps) for name in _ALWAYS}
        defaults = {name: one.default for name, one in named.items()} | dict.fromkeys(always, False)

        @functools.wraps(command)
        def run(**values: Any) -> None:
            printed = {name: values.pop(name) for name in _ALWAYS}
            typed = {n: value for n, value in values.items() if n in named or value is not None}
            with printing(**printed):
                command(**typed)

        shown: Any = run
        shown.__annotations__ = {**first, **fields, **flags, **always}
        keyword = functools.partial(inspect.Parameter, kind=_KEYWORD)
        shown.__signature__ = inspect.Signature(
            [
                keyword(name, default=defaults.get(name), annotation=flag)
                for name, flag in shown.__annotations__.items()
            ]
        )
        return run

    return decorate


def from_typed(kind: type[T], typed: Mapping[str, Any]) -> T:
    """Make a dataclass or a ``TypedDict`` of those of its fields that were typed."""
    return kind(**{name: typed[name] for name in kind.__annotations__ if name in typed})


def _helps(documented: object) -> dict[str, tuple[str, str]]:
    """Return help and default of each parameter or field that a numpydoc docstring describes."""
    return {
        name: (
            re.sub(r"`(\w+)`", lambda other: _flag_name(other[1]), " ".join(text.split())),
            kind.partition(", default ")[2].strip('"'),
        )
        for name, (kind, text) in described(documented).items()
    }


def _flag_name(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _flag(
    name: str, hint: Any, helps: Mapping[str, tuple[str, str]], *, argument: bool = False
) -> Any:
    """Return the annotation that makes typer show a parameter or field."""
    shown, (text, default) = COMMON.get(name, Option()), helps[name]
    if get_origin(hint) is Annotated:
        hint, shown = get_args(hint)
    known, parser = _names(name), shown.parser
    alone = get_origin(hint) in (None, Literal, list, Sequence)
    first, *others = (hint,) if alone else get_args(hint)  # of a union
    metavar, typed = shown.metavar, first
    if get_origin(first) is Literal:
        metavar = metavar or "|".join(get_args(first))
    elif get_origin(first) in (list, Sequence):
        text, typed = f"{text} Can be repeated.", list[str]
    elif str in others:
        typed = str
    if argument:
        return Annotated[
            typed,
            typer.Argument(
                metavar=metavar or name.upper(),
                help=text,
                parser=parser,
                autocompletion=known,
            ),
        ]
    if default:
        text = f"{text.rstrip('.')}; {default} by default."
    names = [metavar if typed is bool and metavar else _flag_name(name), *_ALSO.get(name, ())]
    return Annotated[
        typed | None,
        typer.Option(
            *names,
            metavar=None if typed is bool else metavar or None,
            help=text,
            min=shown.least,
            parser=parser,
            autocompletion=known,
            rich_help_panel=shown.group,
        ),
    ]


def _names(name: str) -> Callable[[str], list[str]] | None:
    """Return what the shell completes a parameter's value by, beyond the choices of its type."""
    find = NAMES.get(name)
    if find is None:
        return None

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")  # of several only the last is begun
        return [f"{before}{comma}{one}" for one in find() if one.startswith(last)]

    return complete


class GroupedCommand(TyperCommand):
    """A command whose help lists its options under headings, and what few need on request."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Answer ``--help-all``, which takes part in nothing else."""
        if HELP_ALL in args[: args.index("--") if "--" in args else None]:
            ctx.meta[HELP_ALL] = True
            print(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return what follows the command's name, without the marks that some versions add."""
        return [re.sub(r"[{}]", "", piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then options by group in the order of their first one, others last."""
        groups: dict[str, list[tuple[str, str]]] = {}
        hidden = False
        for one in self.get_params(ctx):
            heading = "Arguments" if one.param_type_name == "argument" else "Options"
            heading = getattr(one, "rich_help_panel", None) or heading
            if one.name in RARE and not ctx.meta.get(HELP_ALL):
                hidden = True
            elif (record := one.get_help_record(ctx)) is not None:
                name, text = record
                groups.setdefault(heading, []).append((re.sub(r" <.*>$", "", name), text))
        if hidden:
            groups["Options"].append((HELP_ALL, "Show the options that few need, too."))
        others = groups.pop("Options")
        for heading, records in {**groups, "Options": others}.items():
            with formatter.section(heading):
                formatter.write_dl(records)
