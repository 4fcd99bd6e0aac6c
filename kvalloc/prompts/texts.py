"""Text sources: files, folders, JSONL prompts, and shipped texts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from kvalloc.errors import InputError, option
from kvalloc.files import near_file

TEXT_SUFFIXES = (
    *(".txt", ".md", ".rst", ".tex", ".html", ".xml", ".json", ".yaml", ".yml", ".toml", ".csv"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".rs", ".go", ".java", ".js", ".ts"),
    *(".rb", ".sh", ".sql"),
)
"""Endings of text files in a folder; a file that is named itself may have any ending."""

PROMPT_FIELDS = "'prompt', 'text', 'messages', or 'context' with 'input'"


@dataclass(frozen=True, kw_only=True)
class Document:
    """Running text, cut into samples of equal length.

    Attributes
    ----------
    text : str
    name : str
        File name without folder.
    """

    text: str
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt: one sample.

    Attributes
    ----------
    text : str
        Empty when `messages` or `token_ids` is given.
    messages : tuple of dict
        A chat, for the tokenizer's chat template.
    answer, task : str
    question : str
        Between prompt and answer, read after the compression.
    token_ids, question_ids, answer_ids : tuple of int
        Used instead of the texts.
    name, line : str, int or None
        File and line, from 1.
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
        """Name of this prompt in a message."""
        place = self.name or "the prompts"
        return place if self.line is None else f"{place}, line {self.line}"


def _not_blank(value: object) -> object:
    """Return a text, empty if it is blank or null."""
    return "" if value is None or (isinstance(value, str) and not value.strip()) else value


def _listed(value: object) -> object:
    """Return a field's answers, without empty ones."""
    answers = value if isinstance(value, list) else [value]
    texts = (one.strip() if isinstance(one, str) else one for one in answers)
    return tuple(one for one in texts if one not in (None, ""))


Text = Annotated[str, BeforeValidator(_not_blank)]
Answers = Annotated[tuple[str, ...], BeforeValidator(_listed)]


class Fields(BaseModel):
    """Fields of a line that kvalloc reads; others are free."""

    model_config = ConfigDict(strict=True, frozen=True)

    prompt: Text = ""
    text: Text = ""
    messages: list[dict[str, Any]] | None = None
    context: Text = ""
    input: Text = ""
    answer: Answers = ()
    answers: Answers = ()
    question_after: Text = ""
    task: Text = ""
    dataset: Text = ""
    language: Text = ""
    all_classes: list[str] | None = None

    def has(self, name: str) -> bool:
        """Return whether the object has a field."""
        return name in self.model_fields_set

    def require_context(self, where: str) -> None:
        """Refuse a question without its text.

        Raises
        ------
        InputError
        """
        if not self.context:
            fault = "is empty" if self.has("context") else "is missing"
            raise InputError(
                f"{where}: the field 'context' {fault}; give it the text, or call 'input' 'prompt'"
            )


def read_texts(paths: Iterable[str | Path]) -> list[Document]:
    """Read text files, and all below folders.

    Parameters
    ----------
    paths : iterable of str or Path
        Files of any name, or folders: files with `TEXT_SUFFIXES`, by name, not hidden or empty.

    Raises
    ------
    InputError
        If a path is missing, a file is empty, JSONL or not UTF-8, or a folder has no text.
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
        Objects have ``prompt`` or ``text`` (a string), ``messages`` (a chat), or ``context`` and
        ``input`` (joined by an empty line). The answer is ``answer`` or the first of ``answers``,
        the task ``task`` or ``dataset``. ``question_after`` is read after the compression.

    Raises
    ------
    InputError
        As `read_objects`.
    """
    return [prompt for prompt, _ in read_objects(path)]


def read_objects(path: str | Path) -> Iterator[tuple[Prompt, Fields]]:
    """Read the objects of a JSONL file, empty lines skipped.

    Yields
    ------
    prompt : Prompt
        See `read_prompts`.
    fields : Fields
        Its texts can be written as UTF-8.

    Raises
    ------
    InputError
        If the file is missing, empty or not UTF-8, or a line holds no prompt; names file, line and
        field.
    """
    file, empty = Path(path), True
    for number, line in enumerate(read_utf8(file).split("\n"), start=1):
        if line.strip():
            empty = False
            fields = _parse_object(line, f"{file.name}, line {number}")
            yield _prompt_of(fields, file.name, number), fields
    if empty:
        raise InputError(f"{path} is empty; give a JSONL file with one prompt a line")


def _prompt_of(fields: Fields, name: str, line: int) -> Prompt:
    joined = "\n\n".join(filter(None, (fields.context, fields.input)))
    prompt = Prompt(
        text="" if fields.messages else fields.prompt or fields.text or joined,
        messages=tuple(fields.messages or ()),
        answer=next(iter(fields.answer + fields.answers), ""),
        question=fields.question_after,
        task=(fields.task or fields.dataset).strip(),
        name=name,
        line=line,
    )
    if not (prompt.messages or prompt.text):
        raise InputError(
            f"{prompt.where} has no text to measure; each line holds one with {PROMPT_FIELDS}"
        )
    if prompt.text and prompt.text == joined:
        fields.require_context(prompt.where)
    return prompt


def shipped_texts(prefix: str) -> dict[str, str]:
    """Return the shipped public-domain texts with this prefix, by file name."""
    folder = resources.files("kvalloc") / "data" / "texts"
    files = sorted(folder.iterdir(), key=lambda entry: entry.name) if folder.is_dir() else []
    return {
        entry.name: entry.read_text("utf-8")
        for entry in files
        if entry.name.startswith(prefix) and entry.name.endswith(".txt")
    }


def default_texts() -> list[Document]:
    """Return the shipped public-domain texts for profiling, by name.

    Raises
    ------
    InputError
        If they are missing.
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
    """Return UTF-8 text; refuse other bytes, called ``where`` in the message."""
    if b"\0" in data:
        raise InputError(f"{where} is not text (it holds zero bytes); give a UTF-8 text file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where} is not UTF-8 text (byte {error.start} cannot be read); convert it to UTF-8"
        ) from error


def _parse_object(line: str, where: str) -> Fields:
    try:
        return Fields.model_validate_json(line)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
    if fault["loc"]:
        raise InputError(f"{where}: the field {fault['loc'][0]!r} cannot be read: {fault['msg']}")
    reason = fault["msg"].replace(" at line 1 column", " at column")
    raise InputError(f"{where} is not a JSON object with {PROMPT_FIELDS}: {reason}")
