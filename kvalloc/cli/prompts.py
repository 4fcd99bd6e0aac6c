"""The prompt of a command line: text, a file, or stdin."""

from __future__ import annotations

import sys
from pathlib import Path

from kvalloc.errors import InputError


def given_prompt(prompt: str | None, file: Path | None) -> tuple[str, str]:
    """The prompt, and where it came from."""
    if prompt is not None and file is not None:
        raise InputError("--prompt and --prompt-file are two prompts at once; give one of them")
    if prompt is not None:
        text, where = prompt, "--prompt"
    elif file is not None:
        text, where = _read_file(file), file.name
    else:
        if sys.stdin is None or sys.stdin.isatty():
            raise InputError("there is no prompt; give --prompt TEXT, --prompt-file FILE or stdin")
        text, where = _decode(sys.stdin.buffer.read(), "stdin"), "stdin"
    if not text.strip():
        raise InputError(f"the prompt from {where} is empty; give some text")
    return text, where


def _read_file(file: Path) -> str:
    try:
        return _decode(file.read_bytes(), str(file))
    except FileNotFoundError:
        raise InputError(f"there is no file {file}; check the path") from None
    except OSError as error:
        raise InputError(f"cannot read {file} ({error.strerror})") from error


def _decode(data: bytes, where: str) -> str:
    if b"\0" in data:
        raise InputError(f"{where} is not text (it holds zero bytes); give UTF-8 text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where} is not UTF-8 text (byte {error.start} cannot be read); convert it to UTF-8"
        ) from error
