"""Messages name options as whoever reads them writes them: keywords in Python, flags typed."""

import ast
import re
import threading
from contextvars import copy_context
from pathlib import Path

import pytest
from cli_tools import run
from factories import make_scores

import kvalloc
from kvalloc.errors import KVAllocError, naming_flags, option
from kvalloc.formats.score_profile import ScoreProfile

PACKAGE = Path(kvalloc.__file__).parent
FLAG = re.compile(r"(?<![\w-])--[a-z]")
COMMAND = re.compile(r"(kvalloc|pip|ray) [^';)]*")
"""A whole command line is what to type, whoever reads it."""


@pytest.fixture
def file(tmp_path):
    make_scores(0).save(tmp_path / "s.safetensors")
    return tmp_path / "s.safetensors"


@pytest.mark.parametrize(
    "asked",
    [
        {"budget": "20%", "memory": "1MiB"},
        {"budget": "0.1%"},
        {"memory": "64B"},
        {"budget": "40%", "max_distinct": 0},
        {"budget": "40%", "bits": (16, 3)},
        {"budget": "40%", "max_distinct": 1, "solver": "greedy"},
        {"target_loss": 0.1},
        {"budget_tokens": 1},
        {"budget": "40%", "cap": "0-99=1MiB"},
        {"budget": "40%", "min_tokens": 20, "max_tokens": 10},
    ],
)
def test_one_message_speaks_to_both(file, asked):
    with pytest.raises(KVAllocError) as caught:
        kvalloc.solve(ScoreProfile.load(file), **asked)
    said = str(caught.value)
    assert not FLAG.search(said)
    typed = [word for name, value in asked.items() for word in _words(name, value)]
    refused = run("solve", file, *typed, "-o", file.parent / "p.json")
    assert (refused.code, refused.out) == (2, "")
    line = refused.err.removeprefix("error: ").rstrip()
    assert FLAG.search(line)
    assert not re.search(r"\b[a-z_]+=['\d(]|\b[a-z]+_[a-z]+\b", line.replace("head_dim", ""))
    # apart from how options are written it is the same sentence
    assert _without_options(line) == _without_options(said)


def _words(name, value):
    flag = f"--{name.replace('_', '-')}"
    return [flag, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]


def _without_options(text):
    """Flags as keywords, and no punctuation between names and values."""
    text = re.sub(r"'kvalloc (\w+) (.*?)'", r"kvalloc.\1(\2)", text)
    text = FLAG.sub(lambda flag: flag[0][2:], text).replace("=True", "")
    return re.sub(r"[-_=' ,()]+", " ", text).strip()


def test_a_command_in_one_thread_leaves_the_messages_of_another():
    found = []
    with naming_flags():
        inside, other = (
            copy_context(),
            threading.Thread(target=lambda: found.append(option("page"))),
        )
        other.start()
        other.join()
        with pytest.raises(ZeroDivisionError), naming_flags():
            raise ZeroDivisionError
        assert option("page") == "--page"
    assert found == ["page"]
    assert inside.run(option, "page") == "--page"  # what a solver with a time limit runs in
    assert option("page") == "page"


def _texts(tree):
    """All strings of a module but its docstrings; the pieces of an f-string joined."""
    skipped = set()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            pieces = [one for one in node.values if isinstance(one, ast.Constant)]
            skipped.update(map(id, pieces))
            found.append("{}".join(str(one.value) for one in pieces))
    constants = [one for one in ast.walk(tree) if isinstance(one, ast.Constant)]
    return found + [
        one.value for one in constants if isinstance(one.value, str) and id(one) not in skipped
    ]


def test_no_message_outside_the_command_line_spells_a_flag():
    # of the rest, the demo's report is what `kvalloc demo` prints
    apart = ("cli", "report")
    named = {}
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.joinpath("solvers").glob("*.py")]):
        place = path.relative_to(PACKAGE)
        # the flags of interop/engines.py are other programs'
        if place.parts[0] in apart or str(place) in ("errors.py", "interop/engines.py"):
            continue
        texts = [COMMAND.sub("", text) for text in _texts(ast.parse(path.read_text("utf-8")))]
        wrong = [text for text in texts if FLAG.search(text)]
        if wrong:
            named[str(path.relative_to(PACKAGE))] = wrong
    assert named == {}
