"""Each promise of docs/promises.md names tests that exist; nothing asks a network unasked."""

import re
import socket

import pytest
from cli_tools import prose, run, save_tiny_model
from docs_pages import ROOT
from huggingface_hub import constants
from tiny_models import tiny_model

PAGE = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PROMISES = [line for line in PAGE.splitlines() if line.startswith("| ")][1:]  # below the heading


@pytest.mark.parametrize("row", PROMISES, ids=lambda row: row[2:60])
def test_every_promise_names_tests_that_exist(row):
    tests = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", row)
    assert tests
    for file, test in tests:
        expected = f"def {test}(" if test else "def test_"
        assert expected in (ROOT / file).read_text(encoding="utf-8")
    assert all(f"\n{target}:" in MAKEFILE for target in re.findall(r"`make ([\w-]+)`", row))


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
