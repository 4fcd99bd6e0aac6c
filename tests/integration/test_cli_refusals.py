"""Every command line that is refused: one line that says what is wrong, and no file changed.

What the library refuses is in the tests of the library; that its errors are one line, in
tests/unit/cli/test_cli_main.py. Here is what the commands themselves look at.
"""

import json
import os
import shlex
import tomllib
from pathlib import Path

import pytest
from cli_tools import prose, refused, succeed
from factories import make_budget_profile, make_losses, make_scores, make_shape

import kvalloc


@pytest.fixture(scope="module")
def folder(models, profiles, tmp_path_factory):
    """Models, profiles, texts, a saved cache, and files that are none of these."""
    folder = tmp_path_factory.mktemp("refused")
    for path in (*models.iterdir(), *profiles.glob("tiny*")):
        (folder / path.name).symlink_to(path)
    for name, tokens in (("text", 1000), ("prompt", 100), ("long", 600), ("doc", 120)):
        (folder / f"{name}.txt").write_text(prose(tokens))
    (folder / "long.jsonl").write_text(json.dumps({"prompt": "w1 " * 505, "answer": "w2"}))
    scores, other = make_scores(), make_scores(shape=make_shape(model_id="tests/other"))
    scores.save(folder / "s.safetensors")
    make_scores(1).save(folder / "a.safetensors")
    make_losses(per="layer").save(folder / "losses.safetensors")
    kvalloc.solve(scores, budget="40%").save(folder / "p.json")
    kvalloc.solve(other, budget="40%").save(folder / "other.json")
    make_budget_profile([[20, 20]] * 5).save(folder / "five.json")
    (folder / "e.json").write_text('{"kind": "kvalloc.evaluation"}')
    (folder / "cut.safetensors").write_bytes((folder / "s.safetensors").read_bytes()[:2000])
    (folder / "w.json").write_text('{"a": 1}')
    (folder / "empty").write_bytes(b"")
    (folder / "plain").write_bytes(b"plain text, and nothing else")
    reading = ("chat", folder / "tiny", "--profile", folder / "tiny.json", "--max-new-tokens", 6)
    reading = (*reading, "--prompt-file", folder / "doc.txt", "--save-cache", folder / "doc.kv")
    succeed(*reading)
    return folder


REFUSED = tomllib.loads(Path(__file__).with_name("refused.toml").read_text(encoding="utf-8"))
TYPED = [
    (f"{'' if command == 'top' else command} {line}", words)
    for command, lines in REFUSED.items()
    for line, words in lines.items()
]
NOT_UTF8 = os.fsdecode(b"caf\xe9")


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        *TYPED,
        (
            f"generate tiny --budget 100% --prompt {NOT_UTF8}",
            "is not UTF-8 text (byte 3 cannot be read); convert it to UTF-8",
        ),
        (f"chat tiny --budget 100% --prompt w1 --question {NOT_UTF8}", "is not UTF-8 text"),
        (f"chat tiny --cache doc.kv --question '{'w5 ' * 400}'", "no room"),
    ],
)
def test_a_wrong_command_line_is_one_line(folder, monkeypatch, typed, words):
    monkeypatch.chdir(folder)
    refused(folder, *shlex.split(typed), words=words.split(" | "))
