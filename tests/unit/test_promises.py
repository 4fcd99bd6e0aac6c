"""docs/promises.md names tests and targets that exist; nothing asks a network unasked."""

import ast
import re
import socket

import pytest
from cli_tools import prose, run, save_tiny_model
from docs_pages import ROOT
from huggingface_hub import constants
from tiny_models import tiny_model

PAGE = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def rows():
    """Of every table: what is promised, its tests, its long form."""
    result = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("| ")]
    return [row for row in result if row[0].strip() != "promise"]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0].strip()[:50])
def test_every_promise_names_tests_and_targets_that_exist(row):
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", row[1])
    assert named
    for file, test in named:
        defined = ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
        tests = {one.name for one in defined if isinstance(one, ast.FunctionDef)}
        assert test in tests if test else any(name.startswith("test_") for name in tests), file
    for target in re.findall(r"`make ([a-z-]+)`", row[2]):
        assert target in TARGETS


def test_every_target_on_the_page_exists():
    texts = [PAGE, (ROOT / "docs" / "releasing.md").read_text(encoding="utf-8")]
    named = {name for text in texts for name in re.findall(r"`make ([a-z-]+)", text)}
    assert len(rows()) > 20
    assert named <= TARGETS


def test_what_is_here_asks_no_network(tmp_path, monkeypatch):
    """Files, commands without a model, and a model in a folder: not one name is looked up."""
    asked = []

    def noted(*where, **_):
        asked.append(where)
        raise OSError("no network")

    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, noted)
    monkeypatch.setattr(socket.socket, "connect", noted)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # which would refuse by itself
    monkeypatch.chdir(tmp_path)
    commands = (
        "compare smollm2-135m-instruct --budget 20%",
        "solve smollm2-135m-instruct --budget 20% -o p.json",
        "inspect p.json",
        "verify p.json smollm2-135m-instruct",
        "report p.json smollm2-135m-instruct -o report.html",
        "list profiles",
        "list solvers",
        "doctor",
    )
    for command in commands:
        ran = run(*command.split())
        assert ran.code == 0, command
    folder = save_tiny_model(tmp_path / "model", tiny_model())
    words = ("--prompt", prose(60), "--budget", "50%", "--max-new-tokens", 4)
    assert run("generate", folder, *words).code == 0
    assert asked == []
