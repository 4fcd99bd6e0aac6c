"""The command ``kvalloc``; errors become one line."""

from __future__ import annotations

import ast
import errno
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from importlib import resources
from io import TextIOWrapper
from itertools import chain
from textwrap import indent
from typing import Any

import typer
import typer.completion
from typer.core import TyperGroup

from kvalloc import __version__
from kvalloc.errors import KVAllocError, in_our_words, naming_flags, nearest, no_such, plain

GROUPS = {
    "Begin here": ("demo", "doctor"),
    "Measure": ("profile", "fit", "merge"),
    "Decide": ("solve", "compare", "frontier", "plan", "advise"),
    "Look at files": ("report", "inspect", "verify"),
    "Run a model": ("generate", "chat", "eval"),
    "Share": ("export",),
    "What there is": ("list",),
}
"""The commands by their heading in the help."""

COMMANDS = tuple(chain(*GROUPS.values()))

USER_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141
"""Exit codes."""

_USER_OS_ERRORS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG),
    *(errno.ENAMETOOLONG, errno.ELOOP),
}

_COMPLETION = "_KVALLOC_COMPLETE"
"""The environment variable in which a shell requests completions."""

_SETTINGS = {"help_option_names": ["--help", "-h"], "max_content_width": 100}

LOSS_VALUES = ("measured", "fast")
"""Values of ``kvalloc profile --loss``; the first one is the default without a value."""


class _LazyGroup(TyperGroup):
    """A group that imports the module of one command alone."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _build(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in COMMANDS and not (args[0].startswith("-") or ctx.resilient_parsing):
            ctx.fail(no_such("command", args[0], COMMANDS))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, COMMANDS))
        for heading, names in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), summary(name)) for name in names])


def summary(command: str) -> str:
    """Return a command's first line of help, from its source: imports take a second."""
    source = (resources.files("kvalloc.cli") / f"{command}.py").read_text("utf-8")
    functions = (one for one in ast.parse(source).body if isinstance(one, ast.FunctionDef))
    text = next(ast.get_docstring(one) for one in functions if one.name == command)
    return (text or "").partition("\n")[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, ``sys.argv[1:]`` by default, and return its exit code.

    It is 2 for a user's mistake (one line on stderr), 130 after Ctrl-C, 141 if stdout's reader is
    gone. A defect of kvalloc is not caught.
    """
    _prepare_streams()
    try:
        with naming_flags():
            code = run_command(_complete(list(sys.argv[1:] if arguments is None else arguments)))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output has gone. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt as interrupt:
        _complain(str(interrupt) or "interrupted", prefix="")
        return INTERRUPTED
    return code


def _prepare_streams() -> None:
    """Discard output to a closed stdout (``>&-``); escape characters outside its encoding."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # of the process from now on, so nobody closes it
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        if isinstance(stream := getattr(sys, name), TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _complete(arguments: list[str]) -> list[str]:
    """Give a bare ``--loss`` its value: typer has no optional values."""
    if arguments[:1] != ["profile"]:
        return arguments
    complete: list[str] = []
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        complete.append(argument)
        # a near value is a mistyped one, not the model
        if argument == "--loss" and not nearest(following, LOSS_VALUES):
            complete.append(LOSS_VALUES[0])
    return complete


def run_command(arguments: list[str]) -> int:
    """Run a complete command line; return its exit code."""
    application = typer.Typer(cls=_LazyGroup, rich_markup_mode=None)
    application.callback(invoke_without_command=True, context_settings=_SETTINGS)(_top)
    command: Any = typer.main.get_command(application)
    if instruction := os.environ.get(_COMPLETION):
        typer.completion.completion_init()  # type: ignore[attr-defined]  # imported there
        return typer.completion.shell_complete(command, {}, "kvalloc", _COMPLETION, instruction)
    try:
        # Not `command.main`: it would print errors in its own way.
        with command.make_context("kvalloc", arguments) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    except typer.Abort:
        raise KeyboardInterrupt from None
    except Exception as error:
        message = _users_mistake(error, arguments)
        if message is None:
            raise
        _complain(message)
        return USER_ERROR
    return 0


def _top(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    """Decide how many KV-cache entries each layer and head of a language model may keep.

    \b
    A smaller cache now, by the best method for the model:
      kvalloc generate demo --budget 20% --prompt-file prompt.txt

    \b
    Or measure once, decide in a moment, run with budgets of your own:
      kvalloc profile demo -o s.safetensors
      kvalloc solve s.safetensors --budget 20% -o p.json
      kvalloc generate demo --profile p.json --prompt-file prompt.txt
    """  # noqa: D301  (the marks are typer's, for lines that are not wrapped)
    if version:
        print(f"kvalloc {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def _build(name: str) -> Any:
    from kvalloc.cli.options import GroupedCommand

    function: Callable[..., None] = getattr(importlib.import_module(f"kvalloc.cli.{name}"), name)
    text, _, examples = (inspect.getdoc(function) or "").partition("\n\nExamples\n--------\n")
    paragraphs = (examples or f"kvalloc {name}\nkvalloc {name} --json").split("\n\n")
    application = typer.Typer(add_completion=False, rich_markup_mode=None)
    application.command(
        name,
        cls=GroupedCommand,
        help=text,
        epilog="\b\nExamples:\n" + "\n\n\b\n".join(indent(one, "  ") for one in paragraphs),
        context_settings=_SETTINGS,
    )(function)
    return typer.main.get_command(application)


def _users_mistake(error: Exception, arguments: Sequence[str]) -> str | None:
    """Return a user's mistake in a line, or None for a defect."""
    if isinstance(error, KVAllocError):
        return str(error)
    # typer's usage errors; which package their class is in depends on typer's version
    describe = getattr(error, "format_message", None)
    if describe is not None:
        context = getattr(error, "ctx", None)
        where = context.command_path if context is not None else "kvalloc"
        meant = ""
        if flag := getattr(error, "option_name", None):
            known = [one.name for one in context.command.params] if context is not None else []
            typed = " ".join(arguments).replace("=", " ").partition(flag)[2].split()
            meant = in_our_words(flag.strip("-").replace("-", "_"), known, *typed[:1])
        fault = describe().rstrip(".").replace(": Value error, ", ": ")
        return f"{fault}; {meant}see '{where} --help'"
    if isinstance(error, OSError) and error.errno in _USER_OS_ERRORS:
        return f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)
    if isinstance(error, ModuleNotFoundError):
        from kvalloc.models.loading import require_run_packages

        try:
            require_run_packages()
        except KVAllocError as missing:
            return str(missing)
    text = str(error)
    if (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "not enough memory" in text)
    ):
        return "out of memory; use a shorter context, a smaller dtype or a smaller model"
    return None


def _complain(message: str, *, prefix: str = "error: ") -> None:
    print(f"{prefix}{plain(' '.join(message.split()))}", file=sys.stderr)
