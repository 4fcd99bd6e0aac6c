"""Base classes of files: a definition checks itself and is its own schema."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    computed_field,
    field_serializer,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema, from_json, to_json

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.errors import InputError, ProfileFileError
from kvalloc.files import atomic_write, near_file, write_text
from kvalloc.shape import ModelShape

_HEADER_BYTES = 100_000_000
"""The longest header that safetensors reads."""

_LISTS, _MAX_ITEMS = ("layer_types", "layers", "versions", "profiles"), 999
"""Fields with many items, of which pydantic would note every wrong one, and their largest length.
"""

LARGEST_JSON_BYTES = 2**28
"""Bytes of the largest JSON file that is read: an evaluation with a million answers is smaller."""

_LARGE_BYTES, _HOLES = 2**30, 1000
"""A larger safetensors file with less than one part in `_HOLES` stored is not read: a sparse file
could take all memory."""

ROUNDING = 1e-9
"""Largest excess over a limit by float64 rounding."""

_ON_ONE_LINE = {r",\n *(?=[-\d])": ", ", r"\[\n *(?=[-\d])": "[", r"(?<=\d)\n *\]": "]"}
"""Patterns that put the numbers of a list, such as a row of budgets, on one line of JSON."""


def require(holds: bool | np.bool_, field: str, value: object, expected: str) -> None:
    """Refuse a value inside the validator of a `Record`.

    ``field`` is "" for the one that is validated.
    """
    if not holds:
        context = {"field": field, "value": value, "expected": expected}
        raise PydanticCustomError("kvalloc", "{field} is wrong", context)


def require_shape(field: str, array: npt.NDArray[Any], shape: tuple[int, ...]) -> None:
    """Refuse an array of another shape, as `require` does."""
    value, expected = f"{array.dtype} shaped {array.shape}", f"{array.dtype} shaped {shape}"
    require(array.shape == shape, field, value, expected)


class ArrayOf:
    """Annotation of an array field of finite numbers: read-only, lists in JSON."""

    def __init__(
        self,
        dtype: type[np.int64] | type[np.float64],
        ndim: int,
        *,
        low: float = -math.inf,
        high: float = math.inf,
    ) -> None:
        self.dtype, self.ndim, self.low, self.high = np.dtype(dtype), ndim, low, high

    def __get_pydantic_core_schema__(self, _: Any, __: GetCoreSchemaHandler) -> CoreSchema:
        rows: CoreSchema = core_schema.int_schema(strict=True)
        if self.dtype == np.float64:
            rows = core_schema.float_schema(strict=True, allow_inf_nan=False)
        for _ in range(self.ndim):
            rows = core_schema.list_schema(rows, fail_fast=True)
        return core_schema.json_or_python_schema(
            json_schema=core_schema.no_info_after_validator_function(self._read, rows),
            python_schema=core_schema.no_info_plain_validator_function(self._checked),
            serialization=core_schema.plain_serializer_function_ser_schema(
                np.ndarray.tolist, return_schema=rows, when_used="json"
            ),
        )

    def _read(self, rows: Sequence[Any]) -> Any:
        try:
            return self._checked(np.array(rows, dtype=self.dtype))
        except (OverflowError, ValueError) as error:
            too_large = isinstance(error, OverflowError)
            value = "a number beyond 64 bits" if too_large else "rows of unequal length"
            require(False, "", value, f"rows of one length, each number {self.dtype}")
            raise

    def _checked(self, array: Any) -> Any:
        expected = f"{self.dtype} with {self.ndim} axes"
        require(isinstance(array, np.ndarray), "", f"of type {type(array).__name__}", expected)
        right = array.dtype == self.dtype and array.ndim == self.ndim
        require(right, "", f"{array.dtype} shaped {array.shape}", expected)
        if array.size:
            self._check_range(array)
        array.flags.writeable = False
        return array

    def _check_range(self, array: npt.NDArray[Any]) -> None:
        low, high = array.min(), array.max()  # no copy of the array, which may be gigabytes
        if not (np.isfinite(low) and np.isfinite(high)):
            place = np.argwhere(~np.isfinite(array))[0].tolist()
            require(False, "", f"not finite at {place}", "finite numbers")
        inside = self.low - ROUNDING <= low and high <= self.high + ROUNDING
        expected = f"numbers within {self.low:g}..{self.high:g}"
        require(inside, "", f"{low:.6g}..{high:.6g}", expected)


IntArray1D = Annotated[IntArray, ArrayOf(np.int64, 1)]
IntArray2D = Annotated[IntArray, ArrayOf(np.int64, 2)]
FloatArray3D = Annotated[FloatArray, ArrayOf(np.float64, 3)]
FloatArray5D = Annotated[FloatArray, ArrayOf(np.float64, 5)]


class Record(BaseModel):
    """A frozen definition: keyword-only, and a wrong value is an `InputError`."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",
        defer_build=True,
    )

    NAME: ClassVar[str] = "record"
    """Name in messages."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            field, value, expected = first_fault(error)
            raise InputError(f"{self.NAME}: {field} is {value}, expected {expected}") from error

    # Records inside records are validated without this method, so that the outermost one's
    # message says where the fault is.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def replace(self, **changes: Any) -> Self:
        """Return a copy with other values of some fields, checked as a new one."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**{**values, **changes})

    @field_serializer("shape", check_fields=False)
    def _shape_values(self, shape: ModelShape) -> dict[str, Any]:
        return shape.to_dict()

    def record(self) -> dict[str, Any]:
        """Return plain values, as in JSON."""
        return self.model_dump(mode="json")


class FileRecord(Record):
    """A record that is a file, with a digest of its content."""

    MADE_BY: ClassVar[str] = ""
    """The command that writes the file."""

    PROVENANCE: ClassVar[tuple[str, ...]] = ()
    """Fields that every file must state, though a record without a file has defaults."""

    METADATA: ClassVar[str] = ""
    """Key of the record in a safetensors file's metadata."""

    OPTIONAL: ClassVar[tuple[str, ...]] = ()
    """Fields that a safetensors file leaves out if they are empty."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FileRecord) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @computed_field  # type: ignore[prop-decorator]
    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content, hexadecimal digits."""
        try:
            return self._digest_over(self.model_dump(mode="json", exclude={"digest"}))
        except ValueError as error:
            raise InputError(f"{self.NAME}: it holds what JSON cannot hold: {error}") from error

    def header(self) -> dict[str, Any]:
        """Return plain values of all but the arrays, as a safetensors file states them."""
        fields = {*getattr(type(self), "HEADER", type(self)).model_fields}
        unsaid = {name for name in self.OPTIONAL if not getattr(self, name)}
        return self.model_dump(mode="json", include=fields - unsaid)

    @classmethod
    def from_record(cls, path: str | Path, stated: object) -> Self:
        """Return the checked definition of plain values from a file.

        Raises
        ------
        ProfileFileError
        """
        record = cls.parsed(path, stated)
        record.check_digest(path, stated)
        return record

    @classmethod
    def parsed(cls, path: str | Path, stated: object) -> Self:
        """Return the same, its digest not checked."""
        if not isinstance(stated, dict):
            name = type(stated).__name__
            raise cls.file_error(path, "file", name, f"a JSON object, a {cls.NAME}")
        for name in ("kind", "schema_version"):
            value, expected = stated.get(name, "missing"), cls.model_fields[name].default
            if (type(value), value) != (type(expected), expected):  # true is no version
                way_out = "or read it with the kvalloc that wrote it"
                raise cls.file_error(path, name, value, str(expected), way_out)
        for name in cls.PROVENANCE:
            if name not in stated:
                raise cls.file_error(path, name, "missing", "a value")
        shape = stated.get("shape")
        tables = {**stated, **(shape if isinstance(shape, dict) else {})}
        for name in _LISTS:
            items = tables.get(name)
            if isinstance(items, list | dict) and len(items) > _MAX_ITEMS:
                raise cls.file_error(path, name, f"{len(items):,} items", f"at most {_MAX_ITEMS}")
        computed = cls.model_computed_fields.keys()
        fields = {name: value for name, value in stated.items() if name not in computed}
        try:
            record = cls.model_validate_json(to_json(fields))
            derived = record.model_dump(mode="json", include={*computed} - {"digest"})
        except ValidationError as error:
            raise cls.file_error(path, *first_fault(error)) from error
        except (InputError, ValueError, RecursionError) as error:
            raise cls.file_error(path, "content", str(error), f"a sound {cls.NAME}") from error
        for name, true in derived.items():
            if (value := stated.get(name, "missing")) != true:
                expected = f"{true}, which follows from the other fields"
                raise cls.file_error(path, name, value, expected)
        return record

    def check_digest(self, path: str | Path, stated: Any) -> None:
        """Raise a `ProfileFileError` unless a file's digest matches its content."""
        content = {name: value for name, value in stated.items() if name != "digest"}
        try:
            true = self._digest_over(content)
        except ValueError as error:
            raise self.file_error(path, "content", str(error), f"a sound {self.NAME}") from error
        if (value := stated.get("digest", "missing")) != true:
            expected = "the digest of the content (the file was edited or damaged)"
            raise self.file_error(path, "digest", value, expected)

    def _digest_over(self, content: dict[str, Any]) -> str:
        return digest_of(content)

    @classmethod
    def file_error(
        cls, path: str | Path, field: str, value: object, expected: str, more: str = ""
    ) -> ProfileFileError:
        """Return the error for a file that should be such a record."""
        way_out = ", ".join(filter(None, (cls.remedy(), more)))
        return ProfileFileError(path, field=field, value=value, expected=expected, way_out=way_out)

    @classmethod
    def expected(cls) -> str:
        """Return a description of such a file."""
        return f"a {cls.NAME} written by '{cls.MADE_BY}'"

    @classmethod
    def remedy(cls) -> str:
        """Return how to make such a file again."""
        return f"make it again with '{cls.MADE_BY}'"

    @classmethod
    def opened(cls, path: str | Path) -> Any:
        """Open a safetensors file of such a record, in a ``with``.

        Raises
        ------
        ProfileFileError
        """
        from safetensors import SafetensorError, safe_open

        require_kind(path, [cls])
        about = os.stat(path)
        stored = getattr(about, "st_blocks", about.st_size) * 512
        if about.st_size > max(_LARGE_BYTES, _HOLES * stored):
            value = f"{about.st_size:,} bytes, all but {stored:,} of them holes"
            raise cls.file_error(path, "file", value, cls.expected())
        try:
            return safe_open(path, framework="numpy")
        except (SafetensorError, OSError, ValueError) as error:
            value = f"not readable as safetensors ({error})"
            raise cls.file_error(path, "file", value, cls.expected()) from error

    @classmethod
    def stated(cls, path: str | Path, file: Any) -> dict[str, Any]:
        """Return the header of an open safetensors file, unchecked."""
        try:
            header = from_json((file.metadata() or {}).get(cls.METADATA, "null"))
        except (ValueError, TypeError) as error:  # the latter for halves of surrogate pairs
            raise cls.file_error(path, "header", str(error), "JSON") from error
        if not isinstance(header, dict):
            raise cls.file_error(path, "header", header or "missing", cls.expected())
        return header


class MeasuredHeader(FileRecord):
    """Header of a file that was measured on samples of text."""

    METADATA: ClassVar[str] = "kvalloc"
    OPTIONAL: ClassVar[tuple[str, ...]] = ("set_aside",)
    PROVENANCE: ClassVar[tuple[str, ...]] = (
        "text_digest",
        "text_description",
        "versions",
        "created",
    )

    shape: ModelShape
    """The model."""

    context_tokens: int = Field(ge=1)
    """Reference context, the longest sample, tokens."""

    text_digest: str = ""
    """SHA-256 over the token ids of all samples."""

    text_description: str = ""
    """Source of the text, for people."""

    set_aside: dict[int, str] = Field(default_factory=dict)
    """Requested samples that could not be measured, by place: their name and the reason."""

    versions: dict[str, str] = Field(default_factory=dict)
    """Versions of the libraries that measured."""

    created: str = ""
    """ISO date of the measurement, UTC."""


class JsonRecord(FileRecord):
    """A record that is a JSON file."""

    def save(self, path: str | Path) -> None:
        """Write JSON, atomically: one key a line, one row of numbers a line.

        Raises
        ------
        InputError
        """
        text = json.dumps(self.record(), indent=2, sort_keys=True, allow_nan=False)
        for pattern, on_one_line in _ON_ONE_LINE.items():
            text = re.sub(pattern, on_one_line, text)
        write_text(path, text)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read and check a file.

        Raises
        ------
        ProfileFileError
            If it is missing, of another kind or version, edited, or impossible.
        """
        require_kind(path, [cls])
        if (size := os.path.getsize(path)) > LARGEST_JSON_BYTES:
            limit = f"at most {LARGEST_JSON_BYTES:,}"
            raise cls.file_error(path, "file", f"of {size:,} bytes", limit)
        try:
            stated = from_json(Path(path).read_bytes())
        except (ValueError, OSError) as error:
            value, expected = f"not readable as JSON ({error})", cls.expected()
            raise cls.file_error(path, "file", value, expected) from error
        return cls.from_record(path, stated)


WHAT_TO_DO = {
    "score profile": "decide from it with 'kvalloc solve {0} --budget 20% -o p.json'",
    "budget profile": "it is decided already: 'kvalloc generate MODEL --profile {0}' uses it, "
    "'kvalloc inspect {0}' shows it",
    "saved cache": "ask about it with 'kvalloc chat MODEL --cache {0}'",
    "fitted file": "use it with 'kvalloc generate MODEL --budget 20% --fitted {0}'",
    "format profile": "decide from it with 'kvalloc solve {0} --engine llama.cpp --bits 5.5'",
    "engine choice": "write what its engine reads with 'kvalloc export {0} -o FILE'",
    "surrogate": "it is a part of a fitted file: 'kvalloc fit' makes the whole",
    "evaluation": "show it with 'kvalloc report {0} -o report.html'",
    "model": "measure it with 'kvalloc profile {0} -o s.safetensors'",
}
"""Use of a file of each kind, `{0}`, if another kind is needed."""


def require_kind(path: str | Path, kinds: Sequence[type[FileRecord]]) -> str:
    """Return the kind that a file states; empty if none, and only one is possible.

    Raises
    ------
    ProfileFileError
    """
    kind, is_file = kind_of(path), os.path.isfile(path)
    if kind in [one.NAME for one in kinds] or (not kind and is_file and len(kinds) == 1):
        return kind
    way_out = "name another file, or make this one again"
    if kind:
        value, way_out = _with_article(kind), WHAT_TO_DO[kind].format(path)
    elif is_file:
        value = _foreign_content(path)
    elif os.path.exists(path):
        value = "a folder" if os.path.isdir(path) else "no plain file"
    else:
        value, way_out = "missing", f"{near_file(path)}check the path"
    expected = " or ".join(_with_article(one.NAME) for one in kinds)
    expected = kinds[0].expected() if len(kinds) == 1 else expected
    raise ProfileFileError(path, field="file", value=value, expected=expected, way_out=way_out)


def _with_article(kind: str) -> str:
    return f"{'an' if kind.startswith('e') else 'a'} {kind}"


def _foreign_content(path: str | Path) -> str:
    try:
        with open(path, "rb") as file:
            start = file.read(20)
    except OSError as error:
        return f"not readable ({error.strerror})"
    if start.lstrip().startswith(b"{"):
        return "JSON of another kind, or cut short"
    return f"none of kvalloc's ({start!r}...)" if start else "empty"


def kind_of(path: str | Path) -> str:
    """Return the kind that a file states, one of `WHAT_TO_DO`, or "".

    No other part is checked. A folder with a ``config.json``, a ``.gguf`` file, and ``demo``
    without such a file are models.
    """
    file = Path(path)
    if os.path.isfile(file / "config.json") or file.suffix.lower() == ".gguf":
        return "model"
    if not os.path.isfile(file):  # nobody writes into a pipe that is opened twice
        return "model" if str(path) == "demo" and not os.path.exists(file) else ""
    try:
        with open(file, "rb") as handle:
            start = handle.read(8)
            if start.lstrip()[:1] == b"{":
                stated = from_json(start + handle.read(LARGEST_JSON_BYTES))
            else:
                length = int.from_bytes(start, "little")
                header = from_json(handle.read(length if length < _HEADER_BYTES else 0))
                metadata = header.get("__metadata__", {}).items()
                stated = next((from_json(v) for k, v in metadata if k.startswith("kvalloc")), {})
        kind = str(stated.get("kind", "")).removeprefix("kvalloc.").replace("_", " ")
    except (OSError, ValueError, TypeError, AttributeError):
        return ""
    kind = "saved cache" if kind == "cache" else kind
    return kind if kind in WHAT_TO_DO else ""


class ArrayRecord(FileRecord):
    """A record that is a safetensors file: arrays as tensors, all else in a JSON header."""

    HEADER: ClassVar[type[FileRecord]]
    """The record without its arrays."""

    @computed_field  # type: ignore[prop-decorator]
    @cached_property
    def digest(self) -> str:
        """SHA-256 over header and arrays, their types and shapes."""
        return self._digest_over(self.header())

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, atomically.

        Raises
        ------
        InputError
        """
        from safetensors.numpy import save_file

        arrays = {name: np.ascontiguousarray(array) for name, array in self.arrays().items()}
        stated = json.dumps({**self.header(), "digest": self.digest}, sort_keys=True)
        save_tensors(save_file, arrays, path, {self.METADATA: stated})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read and check a file; see `JsonRecord.load`.

        Raises
        ------
        ProfileFileError
        """
        with cls.opened(path) as file:
            stated = cls.stated(path, file)
            try:
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            except (AttributeError, TypeError) as error:  # a type that NumPy has not
                raise cls.file_error(path, "file", str(error), "float64 and int64") from error
        record = cls.of_arrays(path, stated, arrays)
        record.check_digest(path, stated)
        return record

    @classmethod
    def of_arrays(
        cls, path: str | Path, stated: Any, arrays: Mapping[str, npt.NDArray[Any]]
    ) -> Self:
        """Return the record of header and arrays, its digest not checked."""
        header = cls.HEADER.parsed(path, stated)
        values = {name: getattr(header, name) for name in cls.HEADER.model_fields}
        try:
            return cls.model_validate({**values, **arrays})
        except ValidationError as error:
            raise cls.file_error(path, *first_fault(error)) from error

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the present arrays, in the order of the digest."""
        arrays = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in arrays.items() if isinstance(value, np.ndarray)}

    def _digest_over(self, content: dict[str, Any]) -> str:
        return digest_over(json.dumps(content, sort_keys=True), self.arrays())


def save_tensors(
    save_file: Callable[..., None], tensors: Mapping[str, Any], path: str | Path, stated: Any
) -> None:
    """Write tensors and metadata atomically by one of safetensors' functions."""
    from safetensors import SafetensorError

    with atomic_write(path) as temporary:
        try:
            save_file(tensors, temporary, metadata=stated)
        except SafetensorError as error:  # a full disk is not an OSError there
            raise OSError(str(error)) from error


def digest_over(header: str, arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    """Return the SHA-256 over a text and arrays: names, types, shapes and values."""
    hasher = hashlib.sha256(header.encode())
    for name, array in arrays.items():
        hasher.update(f"{name} {array.dtype} {array.shape}".encode())
        hasher.update(np.ascontiguousarray(array).data)
    return hasher.hexdigest()


def digest_of(content: dict[str, Any]) -> str:
    """Return the SHA-256 of plain values, in a fixed order."""
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def first_fault(error: ValidationError) -> tuple[str, object, str]:
    """Return the first fault of a record: field, value, expected value."""
    first = error.errors(include_url=False)[0]
    place, context = [str(part) for part in first["loc"]], first.get("ctx", {})
    if first["type"] == "kvalloc":
        place += [context["field"]] if context["field"] else []
        return ".".join(place), context["value"], context["expected"]
    field = ".".join(place) or "file"
    if first["type"] == "missing":
        return field, "missing", "a value"
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return field, first["input"], "no such field"
    return field, first["input"], first["msg"].removeprefix("Input should be ")
