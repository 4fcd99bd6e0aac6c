"""Running commands in a test, and small model folders for them."""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
import io
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from kvalloc.cli.main import main

CLI_CONTEXT = 64
"""Tokens of the samples that tests of commands profile."""


@dataclass(frozen=True)
class Ran:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """All of stdout as one JSON document."""
        return json.loads(self.out)


class Stdin(io.TextIOWrapper):
    """What is typed, in a terminal or not."""

    def __init__(self, text: str, *, terminal: bool = False) -> None:
        super().__init__(io.BytesIO(text.encode()))
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


class Terminal(io.StringIO):
    """An output that is one."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def run(*arguments: object) -> Ran:
    """A command line in this process: errors of ours raise, as they would end a process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return Ran(code, out.getvalue(), err.getvalue())


def succeed(*arguments: object) -> Ran:
    """Run a command line that must end with 0."""
    ran = run(*arguments)
    assert ran.code == 0, ran
    return ran


def files_in(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its content."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
    }


def python(program: str, *arguments: object, **options: Any) -> Any:
    """Run a program in a process of its own, which finds the modules that this one finds."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **options.pop("env", {})}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    known = {"capture_output": True, "text": True, "timeout": 600, "env": environment}
    return subprocess.run(command, **known, **options)


def refused(folder: Path, *arguments: object, words: Iterable[str] = ()) -> str:
    """Run a command that must be refused in one line, with these words, and change no file."""
    before = files_in(folder)
    ran = run(*arguments)
    assert ran.code == 2, ran
    assert ran.out == ""
    assert ran.err.startswith("error: ")
    assert ran.err.endswith("\n")
    assert ran.err.count("\n") == 1, ran.err
    assert "Traceback" not in ran.err
    assert files_in(folder) == before
    for word in words:
        assert word in ran.err
    return ran.err


def word_tokenizer() -> Any:
    """Return a tokenizer of one token a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"[unk]": 0, "[end]": 1, **{f"w{number}": number + 2 for number in range(90)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[unk]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[unk]", eos_token="[end]", pad_token="[end]"
    )


def save_tiny_model(folder: Path, model: Any, *, chat: bool = False) -> Path:
    """Write a model folder with a tokenizer of one token a word, as `save_pretrained` does."""
    tokenizer = word_tokenizer()
    if chat:
        tokenizer.chat_template = "{% for m in messages %}w1 {{ m['content'] }} w2{% endfor %}"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def prose(n_words: int) -> str:
    """A text of that many tokens of the tiny tokenizer."""
    return " ".join(f"w{(7 * number + number // 13) % 90}" for number in range(n_words))


def write_prompts(path: Path) -> None:
    """Five prompts of 48 words with an answer, for the tiny tokenizer."""
    words = prose(400).split()
    texts = [" ".join(words[50 * i : 50 * i + 48]) for i in range(5)]
    rows = [{"text": text, "answer": "w3 w1 w4 w1", "task": "copy"} for text in texts]
    path.write_text("\n".join(map(json.dumps, rows)))


def profile_arguments(models, folder, name="tiny"):
    return ["profile", models / name, "--text", folder / "text.txt", "--context", CLI_CONTEXT,
            "--samples", 2, "-o", folder / "s.safetensors"]  # fmt: skip


def generate_arguments(models, profiles, folder, name="tiny"):
    return ["generate", models / name.removesuffix("-head"), "--profile", profiles / f"{name}.json",
            "--prompt-file", folder / "prompt.txt", "--max-new-tokens", 5]  # fmt: skip


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file may become larger than 100 bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextlib.contextmanager
def without(*missing: str) -> Iterator[None]:
    """Let these packages be missing, as where they are not installed."""
    find, load = importlib.util.find_spec, builtins.__import__

    def look(name: str, *rest: Any) -> Any:
        return None if name.split(".")[0] in missing else find(name, *rest)

    def refuse(name: str, *rest: Any, **named: Any) -> Any:
        if name.split(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return load(name, *rest, **named)

    find_spec = mock.patch("importlib.util.find_spec", look)
    with find_spec, mock.patch("builtins.__import__", refuse):
        yield
