"""Text sources: files, folders, JSONL prompts, and the texts that ship with kvalloc."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from kvalloc.errors import InputError, option
from kvalloc.files import near_file

TEXT_SUFFIXES = (
    *(".txt", ".md", ".rst", ".tex", ".html", ".xml", ".json", ".yaml", ".yml", ".toml", ".csv"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".rs", ".go", ".java", ".js", ".ts"),
    *(".rb", ".sh", ".sql"),
)
"""What counts as text when a folder is read; a file that is named itself may end in anything."""

PROMPT_FIELDS = "'prompt', 'text', 'messages', or 'context' with 'input'"


@dataclass(frozen=True, kw_only=True)
class Document:
    """Running text that is cut into samples of equal length.

    Attributes
    ----------
    text : str
        The text.
    name : str
        For messages and provenance: a file's name without its folder.
    """

    text: str
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt, measured as one sample.

    Attributes
    ----------
    text : str
        The prompt; empty when `messages` or `token_ids` is given.
    messages : tuple of dict
        A chat, brought into the model's own form by the tokenizer's chat template.
    answer : str
        What the model should write next, where the data says so; empty where it does not.
    question : str
        What is read between the two, after the prompt has been compressed: the prompt is then the
        context alone. Empty where the prompt itself ends with the question.
    token_ids, question_ids, answer_ids : tuple of int
        Tokens of prompt, question and answer, used instead of the texts.
    task : str
        What it asks for, where the data says so: losses of different tasks are of different size.
    name : str
        For messages: the file it came from.
    line : int or None
        Line in that file, counted from 1.
    """

    text: str = ""
    messages: tuple[dict[str, Any], ...] = field(default=())
    answer: str = ""
    question: str = ""
    token_ids: tuple[int, ...] = ()
    question_ids: tuple[int, ...] = ()
    answer_ids: tuple[int, ...] = ()
    task: str = ""
    name: str = ""
    line: int | None = None

    @property
    def where(self) -> str:
        """How to call this prompt in a message."""
        place = self.name or "the prompts"
        return place if self.line is None else f"{place}, line {self.line}"


def read_texts(paths: Iterable[str | Path]) -> list[Document]:
    """Read text files, and folders with all text files below them.

    Parameters
    ----------
    paths : iterable of str or Path
        Files of any name, or folders; in a folder the files that end as text does (see
        `TEXT_SUFFIXES`) are read in the order of their names, hidden and empty ones left out.

    Returns
    -------
    list of Document

    Raises
    ------
    InputError
        If a path does not exist, a file is empty or not UTF-8 text, or a folder holds no text.
    """
    documents: list[Document] = []
    for path in map(Path, paths):
        if os.path.isdir(path):
            documents += _read_folder(path)
            continue
        if path.suffix.lower() == ".jsonl":
            reader = option("prompts", keyword="read_prompts")
            raise InputError(f"{path} holds JSONL prompts; read it with {reader}, not as text")
        text = read_utf8(path)
        if not text.strip():
            raise InputError(f"{path} is empty; give a file with text in it")
        documents.append(Document(text=text, name=path.name))
    return documents


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read prompts from a JSONL file, one object a line.

    Parameters
    ----------
    path : str or Path
        Each line an object with ``prompt`` or ``text`` (a string), ``messages`` (a chat), or
        ``context`` and ``input`` (joined by an empty line, the question last). The answer is
        ``answer`` (a string) or the first of ``answers``, the task ``task`` or ``dataset``, and
        what is read between prompt and answer once the prompt is compressed ``question_after``,
        where there is one. Other fields are ignored, empty lines skipped.

    Returns
    -------
    list of Prompt

    Raises
    ------
    InputError
        As `read_objects`, and if an object holds no prompt; names file, line and field.
    """
    return [prompt_of(fields, Path(path).name, line) for line, fields in read_objects(path)]


def read_objects(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read the objects of a JSONL file, empty lines skipped.

    Yields
    ------
    line : int
        Counted from 1.
    fields : dict
        The object, whose texts can be written as UTF-8.

    Raises
    ------
    InputError
        If the file does not exist, is empty or not UTF-8 text, or a line is not such an object;
        names file, line and field.
    """
    file, empty = Path(path), True
    for number, line in enumerate(read_utf8(file).split("\n"), start=1):
        if line.strip():
            empty = False
            yield number, _parse_object(line, f"{file.name}, line {number}")
    if empty:
        raise InputError(f"{path} is empty; give a JSONL file with one prompt a line")


def prompt_of(fields: dict[str, Any], name: str, line: int) -> Prompt:
    """Return the prompt of one object; see `read_prompts`."""
    where = f"{name}, line {line}"
    texts = {key: _text(fields.get(key)) for key in ("prompt", "text", "question_after")}
    joined = "\n\n".join(filter(None, (_text(fields.get(key)) for key in ("context", "input"))))
    messages = fields.get("messages")
    if not (isinstance(messages, list) and all(isinstance(one, dict) for one in messages)):
        messages = []
    text = "" if messages else texts["prompt"] or texts["text"] or joined
    named = ("answer", "answers")
    answer = next((one for name in named for one in given_answers(fields, name, where)), "")
    if not messages and not text:
        raise InputError(
            f"{where} has no text to measure; each line holds one with {PROMPT_FIELDS}"
        )
    if text and not texts["prompt"] and not texts["text"]:
        context_of(fields, where)
    return Prompt(
        text=text,
        messages=tuple(messages),
        answer=answer,
        question=texts["question_after"],
        task=(_text(fields.get("task")) or _text(fields.get("dataset"))).strip(),
        name=name,
        line=line,
    )


def string_field(fields: dict[str, Any], name: str, where: str, way_out: str) -> str:
    """Return a field that must be a string; refuse another one, or none."""
    if name not in fields:
        raise InputError(f"{where} has no field {name!r}; {way_out}")
    if not isinstance(fields[name], str):
        raise InputError(f"{where}: the field {name!r} is not a string; {way_out}")
    return str(fields[name])


def context_of(fields: dict[str, Any], where: str) -> str:
    """Return the text that comes with a question; refuse a question that stands alone."""
    way_out = "give it the text, or call 'input' 'prompt'"
    context = string_field(fields, "context", where, way_out)
    if not context.strip():
        raise InputError(f"{where}: the field 'context' is empty; {way_out}")
    return context


def shipped_texts(prefix: str) -> dict[str, str]:
    """Return the shipped public-domain texts whose names have this prefix, by file name."""
    folder = resources.files("kvalloc") / "data" / "texts"
    files = sorted(folder.iterdir(), key=lambda entry: entry.name) if folder.is_dir() else []
    return {
        entry.name: entry.read_text("utf-8")
        for entry in files
        if entry.name.startswith(prefix) and entry.name.endswith(".txt")
    }


def default_texts() -> list[Document]:
    """Return the public-domain texts that ship with kvalloc for profiling, by name.

    The shipped haystacks of the needle questions are not among them: what is measured on one
    text is to hold on another.

    Raises
    ------
    InputError
        If the installation lacks them.
    """
    texts = shipped_texts("profile_")
    if not texts:
        raise InputError(
            "the texts that ship with kvalloc are missing from this installation; reinstall "
            f"kvalloc, or name a text with {option('text', keyword='texts')}"
        )
    return [Document(text=text, name=name) for name, text in texts.items()]


def _read_folder(folder: Path) -> list[Document]:
    files = [
        file
        for file in sorted(folder.rglob("*"))
        if file.suffix.lower() in TEXT_SUFFIXES
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    ]
    documents = [Document(text=read_utf8(file), name=file.name) for file in files]
    documents = [document for document in documents if document.text.strip()]
    if not documents:
        raise InputError(
            f"the folder {folder} holds no text files; files count as text when they end in "
            ".txt, .md, .rst, .py and the like"
        )
    return documents


def read_utf8(path: Path) -> str:
    """Return the text of a file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        near = near_file(path)
        raise InputError(f"there is no file or folder {path}; {near}check the path") from error
    except (OSError, ValueError) as error:  # the latter where a name holds a zero byte
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read {path} ({reason})") from error
    return decoded(data, str(path))


def decoded(data: bytes, where: str) -> str:
    """Return UTF-8 text; refuse other bytes, which are called ``where``."""
    if b"\0" in data:
        raise InputError(f"{where} is not text (it holds zero bytes); give a UTF-8 text file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where} is not UTF-8 text (byte {error.start} cannot be read); convert it to UTF-8"
        ) from error


def _parse_object(line: str, where: str) -> dict[str, Any]:
    try:
        fields = from_json(line)
    except ValueError as error:
        fault = str(error).replace(" at line 1 column", " at column")
        raise InputError(
            f"{where} is not JSON ({fault}); each line holds one object with {PROMPT_FIELDS}"
        ) from error
    if not isinstance(fields, dict):
        raise InputError(f"{where} is not an object; each line holds one with {PROMPT_FIELDS}")
    return fields


def _text(value: object) -> str:
    """Return a string that is not blank; empty for anything else."""
    return value if isinstance(value, str) and value.strip() else ""


def given_answers(fields: dict[str, Any], name: str, where: str) -> tuple[str, ...]:
    """Return the answers of a field, one or a list, without empty ones.

    Raises
    ------
    InputError
        If one is not a string.
    """
    given = fields.get(name)
    answers = given if isinstance(given, list) else [given]
    if not all(one is None or isinstance(one, str) for one in answers):
        raise InputError(
            f"{where}: the field {name!r} holds an answer that is not a string; write it as "
            "one, or leave it out"
        )
    return tuple(text.strip() for one in answers if (text := _text(one)))
