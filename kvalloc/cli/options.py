"""The options that several commands have."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

ModelName = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A hub id, a local folder, a .gguf file, or 'demo'."),
]
Dtype = Annotated[
    str,
    typer.Option(metavar="NAME", help="Of weights and cache: float32, bfloat16 or float16."),
]
Device = Annotated[
    str | None, typer.Option(metavar="NAME", help="Such as cuda:0; the CPU by default.")
]
Json = Annotated[
    bool, typer.Option("--json", help="Print JSON on stdout; progress stays on stderr.")
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print only what was asked for, and errors.")
]
Solver = Annotated[str, typer.Option(metavar="NAME", help="Who decides; see 'kvalloc solvers'.")]
SolverOption = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="An option of the solver; can be repeated."),
]


def from_fields(options: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an argument or option for each annotated field of a dataclass.

    The command gets an instance, and by name what other decorators add.

    Parameters
    ----------
    options : type
        Its fields are annotated as typer wants them, and have the defaults of the options; the
        command line does not set a field without ``Annotated``.

    Returns
    -------
    callable
        Decorates a function of one such instance and those.
    """
    hints = {
        name: hint
        for name, hint in get_type_hints(options, include_extras=True).items()
        if get_origin(hint) is Annotated
    }

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            own = {name: values.pop(name) for name in hints}
            command(options(**own), **values)

        described: Any = run
        fields = inspect.signature(options).parameters.values()
        described.__signature__ = inspect.Signature(
            [
                one.replace(annotation=hints[one.name], kind=one.POSITIONAL_OR_KEYWORD)
                for one in fields
                if one.name in hints
            ]
        )
        described.__annotations__ = hints
        return run

    return decorate


class GroupedCommand(TyperCommand):
    """A command whose help lists its options under the headings of their groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then options by group, in the order in which groups first occur."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for one in self.get_params(ctx):
            record = one.get_help_record(ctx)
            heading = "Arguments" if one.param_type_name == "argument" else "Options"
            heading = getattr(one, "rich_help_panel", None) or heading
            if record is not None:
                groups.setdefault(heading, []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)
