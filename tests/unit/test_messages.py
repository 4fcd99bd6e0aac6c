"""What users read when something is refused: all messages in one file, and short ones.

``make messages`` writes them to build/messages.txt, a line each, to be read at once.
"""

import ast
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "kvalloc").rglob("*.py"), *(ROOT / "solvers").glob("*.py")])
MOST_CHARACTERS = 160
VALUE = 8
"""Characters that a value takes in a message, about."""


def template_of(node):
    """The text of a string, an f-string with its expressions in braces, or a sum of these."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            parts = (template_of(one) for one in values)
            return None if None in (parts := [*parts]) else "".join(parts)
        case ast.FormattedValue(value=value):
            return f"{{{ast.unparse(value)}}}"
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            both = template_of(left), template_of(right)
            return None if None in both else "".join(both)


def messages():
    """File and line, kind and template of each message that is raised or logged."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Raise(exc=ast.Call(func=kind, args=[first, *_])):
                    pass
                case ast.Call(func=ast.Attribute(attr="warning") as kind, args=[first, *_]):
                    pass
                case _:
                    continue
            if (template := template_of(first)) is not None:
                place = f"{path.relative_to(ROOT)}:{node.lineno}"
                yield place, ast.unparse(kind), template


def length_of(template):
    return len(re.sub(r"\{.*?\}+", "v" * VALUE, template))


def test_messages_are_short_and_say_what_to_do():
    known = [*dict.fromkeys(messages())]
    assert len(known) > 400
    if folder := os.environ.get("KVALLOC_MESSAGES"):
        lines = (f"{place}\t{kind}\t{text}\n" for place, kind, text in known)
        Path(folder).write_text("".join(lines), encoding="utf-8")
    long = [f"{length_of(text)}  {place}  {text}" for place, _, text in known]
    long = [one for one in long if int(one.split()[0]) > MOST_CHARACTERS]
    assert not long, "\n".join(long)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("'a' + f'b {c.d} {e!r}'", "ab {c.d} {e}"),
        ("f'{one}' if two else three", None),
    ],
)
def test_a_template(code, expected):
    assert template_of(ast.parse(code, mode="eval").body) == expected
