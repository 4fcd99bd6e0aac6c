"""Flags of commands, from options of functions."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import MISSING, dataclass, fields, is_dataclass
from math import inf
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Literal, Unpack, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from kvalloc.cli.output import Printing, ProgressBar, is_verbose, note, printing
from kvalloc.errors import InputError, option
from kvalloc.units import Option, field_texts

SOLVING, MODEL, ENGINE = "Solver", "Model", "Where it runs"
"""Headings in the help."""


def typed_options(options: object, names: Iterable[str]) -> dict[str, Any]:
    """Return the named options with a value."""
    values = {name: getattr(options, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class ModelArgument:
    """The model."""

    model: Annotated[str, Option()]
    """A hub id, a local folder, a .gguf file, or 'demo'."""


@dataclass(frozen=True)
class ScoresArgument:
    """The score profile."""

    scores: Annotated[Path, Option()]
    """A score profile that 'kvalloc profile' wrote, or a shipped one's name."""


@dataclass(frozen=True, kw_only=True)
class SolverOptions:
    """Options of the solver; see `kvalloc.solve`."""

    solver: Annotated[str, Option("NAME", SOLVING)] = "auto"
    """Solver, or module:Class, with its options after colons, such as ilp:gap=0.001; see 'kvalloc
    list solvers'."""

    average: Annotated[str, Option("curves|allocations", SOLVING)] = "curves"
    """Solve once on the mean curves, or solve every sample and average the budgets."""

    time_limit: Annotated[float | None, Option("SECONDS", SOLVING)] = None
    """Time limit of a solver in seconds, by default 60; its best choice so far counts."""

    def __post_init__(self) -> None:
        if self.time_limit is not None and not 0 < self.time_limit < inf:
            raise InputError(f"--time-limit is {self.time_limit:g} s, expected a number above 0")


@dataclass(frozen=True, kw_only=True)
class FittedOptions:
    """Choice of the fitted file; see `kvalloc.apply`."""

    fitted: Annotated[Path | None, Option("FILE", MODEL)] = None
    """A file of 'kvalloc fit' for the model, instead of the one found by default."""

    allow_other_model: Annotated[bool, Option("", MODEL)] = False
    """Accept a profile or fitted file of another model of the same sizes."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options of loading a model."""

    dtype: Annotated[str | None, Option("NAME", MODEL)] = None
    """Type of weights and cache: float32, bfloat16 or float16; float32 by default."""

    device: Annotated[str | None, Option("NAME", MODEL)] = None
    """Device, such as cuda:0, or auto to spread a large model over all; the CPU by default."""

    @property
    def keywords(self) -> dict[str, Any]:
        """Return the typed options, for `kvalloc.load_model`."""
        return typed_options(self, ("dtype", "device"))

    def load(self, model: str) -> Any:
        """Load a model, with a note if it takes long."""
        from kvalloc.models.loading import load_model

        with ProgressBar(f"loading {model}"):
            return load_model(model, notify=note, **self.keywords)


@dataclass(frozen=True, kw_only=True)
class EngineOptions(LoadOptions):
    """Place where a model runs."""

    engine: Annotated[Literal["local", "ray"], Option("", ENGINE)] = "local"
    """Run in this process, or in workers of a Ray cluster that each load the model."""

    address: Annotated[str | None, Option("HOST:PORT", ENGINE)] = None
    """With ray: address of a cluster, HOST:PORT or auto; by default one is started on this machine.
    """

    workers: Annotated[int | None, Option("N", ENGINE, minimum=1)] = None
    """With ray: number of workers; by default as many as the cluster has GPUs, else as its CPUs
    allow."""

    threads: Annotated[int | None, Option("N", ENGINE, minimum=1)] = None
    """CPU threads, with ray of each worker. The same number gives the same bits everywhere."""

    @contextmanager
    def running(self, model: str) -> Iterator[Any]:
        """Yield the model on its engine; inside, stdout prints nothing."""
        if self.engine == "local":
            if about := [*typed_options(self, ("address", "workers"))]:
                raise InputError(
                    f"{option(about[0])} goes with {option('engine', 'ray')}; add that"
                )
            if self.threads is not None:
                import torch

                torch.set_num_threads(self.threads)
            yield self.load(model)
            return
        from kvalloc.engine.ray import RayEngine
        from kvalloc.models.loading import LoadedModel, ModelSource

        source = ModelSource(source=model, **self.keywords)
        tokenizer, model_id = source.tokenizer(note)
        placing = typed_options(self, ("address", "workers", "threads"))
        workers = RayEngine(source=source, log=is_verbose(), **placing)
        with ExitStack() as stack:
            # Ray tells of workers that died on stdout, where a command's result belongs
            sink = sys.stderr if is_verbose() else stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(redirect_stdout(sink))
            with ProgressBar(f"loading {model} in workers"):
                stack.enter_context(workers)
            yield LoadedModel(model=workers, tokenizer=tokenizer, model_id=model_id)


HELP_ALL = "--help-all"

RARE = frozenset(
    {
        *("min_tokens", "max_tokens", "page", "max_distinct"),
        *("cap", "measure_prompts", "average"),
        *("shard", "fairness"),
        *("chunk", "lengths", "time_limit"),
        *("peer", "plain_bits", "metric", "turns", "answer_tokens"),
        *("decode_every", "seed", "recompute"),
        *("fitted", "allow_other_model"),
    }
)
"""Rarely used options, by name; see `is_rare`."""

_ALSO = {"output": ("-o",), "quiet": ("-q",), "verbose": ("-v",)}
"""Other names of flags."""


_SHIPPED, _PROMPTS = "kvalloc.formats.shipped_profiles:shipped_", "kvalloc.prompts."
_NAMES = {
    "profile": (f"{_SHIPPED}profiles",),
    **dict.fromkeys(("scores", "fitted"), (f"{_SHIPPED}fitted",)),
    **dict.fromkeys(("file", "files"), (f"{_SHIPPED}fitted", f"{_SHIPPED}profiles")),
    "solver": ("kvalloc.solvers",),
    "scorer": ("kvalloc.scorers",),
    "policy": ("kvalloc.policies", "kvalloc.scorers"),
    "tasks": (f"{_PROMPTS}tasks:TASKS",),
    "metric": (f"{_PROMPTS}metrics:METRICS",),
    "to": ("kvalloc.interop.exporting:TARGETS",),
    "formats": tuple(f"kvalloc.accounting.engine_formats:{one}S" for one in ("ENGINE", "FORMAT")),
    "dtype": ("kvalloc.models.loading:DTYPES",),
}
"""Sources of the names that complete a parameter: groups of entry points, and functions or tables
of modules."""


def takes(
    only: Mapping[type, Collection[str]] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function: an argument or flag for every `Option` field.

    The function's parameters are dataclasses. Fields not keyword-only are arguments; without a
    default they are required. Keywords of a ``TypedDict`` (``Unpack``) reach the function if typed.
    ``only`` names some classes' fields to take. Every command gets `Printing`.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = [*get_type_hints(command).values(), Printing]
        classes: list[Any] = [hint for hint in hints if is_dataclass(hint)]
        keywords = [get_args(hint)[0] for hint in hints if get_origin(hint) is Unpack]
        flags = {kind: _parameters(kind, (only or {}).get(kind)) for kind in (*keywords, *classes)}
        parameters = [flag for kind in flags.values() for flag in kind]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            options = [
                kind(**{flag.name: values.pop(flag.name) for flag in flags[kind]})
                for kind in classes
            ]
            with printing(options.pop()):
                command(*options, **{n: one for n, one in values.items() if one is not None})

        result: Any = run
        result.__annotations__ = {one.name: one.annotation for one in parameters}
        result.__signature__ = inspect.Signature(parameters)
        return run

    return decorate


def _parameters(kind: type, names: Collection[str] | None) -> list[inspect.Parameter]:
    texts, hints = field_texts(kind), get_type_hints(kind, include_extras=True)
    known = {one.name: one for one in fields(kind)} if is_dataclass(kind) else {}
    names = names or [name for name, hint in hints.items() if get_origin(hint) is Annotated]
    parameter = functools.partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    parameters = []
    for name in names:
        field: Any = known.get(name)
        is_argument = field is not None and not field.kw_only
        flag = _flag(name, hints[name], texts.get(name, ""), argument=is_argument)
        default = None if field is None else field.default
        default = inspect.Parameter.empty if default is MISSING else default
        parameters.append(parameter(name, default=default, annotation=flag))
    return parameters


def _flag_name(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _flag(name: str, hint: Any, text: str, *, argument: bool) -> Any:
    hint, shown = get_args(hint)
    text = re.sub(r"`(\w+)`", lambda other: _flag_name(other[1]), " ".join(text.split()))
    is_single = get_origin(hint) in (None, Literal, list, Sequence)
    first, *alternatives = (hint,) if is_single else get_args(hint)  # of a union
    metavar, typed = shown.metavar, first
    if get_origin(first) is Literal:
        metavar = metavar or "|".join(get_args(first))
    elif get_origin(first) in (list, Sequence):
        text, typed = f"{text} Can be repeated.", list[str]
    elif str in alternatives:
        typed = str
    same: dict[str, Any] = {"help": text, "autocompletion": _names(name)}
    if argument:
        return Annotated[typed, typer.Argument(metavar=metavar or name.upper(), **same)]
    names = [metavar if typed is bool and metavar else _flag_name(name), *_ALSO.get(name, ())]
    same |= {"metavar": None if typed is bool else metavar or None, "min": shown.minimum}
    return Annotated[typed | None, typer.Option(*names, rich_help_panel=shown.group, **same)]


def _names(name: str) -> Callable[[str], list[str]] | None:
    """Return completions of a value."""
    if name == "model":
        return lambda incomplete: ["demo"] if "demo".startswith(incomplete) else []
    if name not in _NAMES:
        return None

    def complete(incomplete: str) -> list[str]:
        from kvalloc.problem import registry

        before, comma, last = incomplete.rpartition(",")  # of several only the last is begun
        known: list[str] = []
        for source in _NAMES[name]:
            table = resolve_name(source) if ":" in source else registry.names(source)
            known += table() if callable(table) else table
        return [f"{before}{comma}{one}" for one in known if one.startswith(last)]

    return complete


def is_rare(parameter: Any) -> bool:
    """Return whether only ``--help-all`` shows an option."""
    return parameter.name in RARE or getattr(parameter, "rich_help_panel", None) == ENGINE


class GroupedCommand(TyperCommand):
    """A command with grouped help, rare options on request."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Answer ``--help-all`` first."""
        if HELP_ALL in args[: args.index("--") if "--" in args else None]:
            ctx.meta[HELP_ALL] = True
            print(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the usage without some versions' marks."""
        return [re.sub(r"[{}]", "", piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then options by group."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        hidden = False
        for one in self.get_params(ctx):
            heading = "Arguments" if one.param_type_name == "argument" else "Options"
            heading = getattr(one, "rich_help_panel", None) or heading
            if is_rare(one) and not ctx.meta.get(HELP_ALL):
                hidden = True
            elif (record := one.get_help_record(ctx)) is not None:
                name, text = record
                groups.setdefault(heading, []).append((re.sub(r" <.*>$", "", name), text))
        if hidden:
            groups["Options"].append((HELP_ALL, "Show the options that few need, too."))
        last = {heading: groups.pop(heading, []) for heading in (MODEL, ENGINE, "Options")}
        for heading, records in {**groups, **last}.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)
