"""The frame around all commands: help, versions, errors in one line, exit codes."""

from __future__ import annotations

import errno
import importlib

import pytest
from cli_tools import run

import kvalloc
from kvalloc.cli import main as cli
from kvalloc.cli.main import COMMANDS, _complete
from kvalloc.errors import InputError


def test_version():
    ran = run("--version")
    assert (ran.code, ran.out, ran.err) == (0, f"kvalloc {kvalloc.__version__}\n", "")


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_lists_every_command(arguments):
    ran = run(*arguments)
    assert ran.code == 0
    listed = ran.out.partition("Commands:")[2].split("\n")
    assert [line.split()[0] for line in listed if line.strip()] == list(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example_and_the_common_options(command):
    ran = run(command, "--help")
    assert ran.code == 0
    assert ran.err == ""
    examples = ran.out.partition("Examples:\n")[2]
    assert f"    kvalloc {command}" in examples
    assert "--json" in ran.out
    assert "--quiet" in ran.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sovle"], ["no command 'sovle'", "'solve'", "kvalloc --help"]),
        (["xyz"], ["no command 'xyz'", "choose from", "inspect"]),
        (["--colour"], ["--colour", "kvalloc --help"]),
        (["solve"], ["SCORES", "kvalloc solve --help"]),
        (["solve", "s", "--budgt", "1"], ["--budgt", "--budget"]),
        (["solve", "s", "--context", "many"], ["--context", "integer"]),
        (["solve", "s", "--budget", "1", "--page", "0"], ["--page 0 is not", "--page 1 or more"]),
        (["tune", "demo", "--steps", "0"], ["--steps", "equal to 1"]),
        (["solve", "s", "--budget"], ["--budget"]),
        (["inspect", "a", "b"], ["b", "kvalloc inspect --help"]),
        (["profile", "demo"], ["--output", "kvalloc profile --help"]),
    ],
)
def test_a_wrong_command_line_is_one_line(arguments, words):
    ran = run(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1
    for word in words:
        assert word in ran.err


@pytest.fixture
def failing(monkeypatch):
    """Makes 'kvalloc solvers' raise what it is given."""
    module = importlib.import_module("kvalloc.cli.solvers")

    def arm(error: BaseException) -> None:
        def solvers(json: bool = False, quiet: bool = False) -> None:
            """Fail."""
            raise error

        monkeypatch.setattr(module, "solvers", solvers)

    return arm


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (InputError("first\nsecond\n\n  third"), 2, "error: first second third"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/some/file"),
            *(2, "error: No space left on device: /some/file"),
        ),
        (
            MemoryError(),
            *(2, "error: out of memory; use a shorter context, a smaller dtype or a smaller model"),
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
        (KeyboardInterrupt("kept in x"), 130, "kept in x"),
    ],
)
def test_what_ends_a_command_is_one_line(failing, error, code, said):
    failing(error)
    ran = run("solvers")
    assert (ran.code, ran.out, ran.err) == (code, "", f"{said}\n")


def test_only_the_command_asked_for_is_imported(monkeypatch):
    asked: list[str] = []
    build = cli._build
    monkeypatch.setattr(cli, "_build", lambda name: asked.append(name) or build(name))
    run("inspect", "--help")
    assert set(asked) == {"inspect"}


@pytest.mark.parametrize(
    ("given", "complete"),
    [
        (["profile", "demo", "--loss"], ["profile", "demo", "--loss", "measured"]),
        (["profile", "--loss", "demo"], ["profile", "--loss", "measured", "demo"]),
        (["profile", "demo", "--loss", "fast"], ["profile", "demo", "--loss", "fast"]),
        (["solve", "--loss"], ["solve", "--loss"]),
        ([], []),
    ],
)
def test_a_bare_loss_means_measured(given, complete):
    assert _complete(given) == complete
