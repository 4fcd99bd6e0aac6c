"""Commands that are shown and run one after the other: what quickstart and demo are made of."""

from __future__ import annotations

import io
import shlex
import textwrap
from contextlib import nullcontext, redirect_stdout

import typer

from kvalloc.cli.output import is_quiet, wants_json
from kvalloc.report.terminal import terminal_width


def say(*paragraphs: str) -> None:
    """Print paragraphs, wrapped also in a pipe, unless --quiet or --json is given."""
    for text in () if wants_json() or is_quiet() else paragraphs:
        print("\n" + textwrap.fill(text, min(terminal_width(), 80)), flush=True)


def step(*words: object, result: bool = False) -> None:
    """Show a command and run it.

    Parameters
    ----------
    *words
        The command line.
    result : bool
        Whether what it prints is also that of the caller with ``--json``; nothing else is then.

    Raises
    ------
    typer.Exit
        With the command's exit code, where that is not 0: its error has been printed.
    """
    from kvalloc.cli.main import run_command

    line = [*map(str, words)]
    if not (wants_json() or is_quiet()):
        print(f"\n$ {shlex.join(['kvalloc', *line])}", flush=True)
    line += ["--json"] if wants_json() else []
    line += ["--quiet"] if is_quiet() else []
    shown = result if wants_json() else not is_quiet()
    with nullcontext() if shown else redirect_stdout(io.StringIO()):
        code = run_command(line)
    if code:
        raise typer.Exit(code)
