"""File of a saved cache, read without torch: JSON header, and tensors checked against it.

Edited files can be signed again, and kernels check nothing: all parts are compared.

Tensors of layer L; before any eviction only the first two:

- ``L.keys``, ``L.values``, (rows, KV heads, tokens, head size): tokens since the latest eviction,
  each row's at the end;
- ``L.latest``, (rows,): the number of these tokens;
- ``L.bits_W.lengths``, (rows, KV heads): kept entries of width W;
- ``L.bits_W.kept_keys``, ``kept_values``, (entries, numbers or bytes): one head after another;
- ``L.bits_W.kept_positions``, (entries,): the token of each entry in its row, without padding;
- ``L.bits_W.key_scales``, (blocks, 2, head size): scales and minima, below 16 bits.

``visible``, (rows, tokens seen), is 0 for padding, and absent without padding. ``repeats`` are
`repeat_counts` of each row's tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, PlainSerializer, PlainValidator, model_validator

from kvalloc.accounting import IntArray
from kvalloc.accounting.costs import KEY_BLOCK_TOKENS, WIDTHS, bits_fault, packed_row_bytes
from kvalloc.errors import ProfileFileError, by_interface, option
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.record import FileRecord, require
from kvalloc.shape import WINDOWED, LayerShape


def _checked(stated: object) -> BudgetProfile:
    if isinstance(stated, BudgetProfile):
        return stated
    try:
        return BudgetProfile.from_record("", stated)
    except ProfileFileError as error:
        require(False, error.field, error.value, error.expected)
        raise


_Profile = Annotated[
    BudgetProfile,
    PlainValidator(_checked),
    PlainSerializer(BudgetProfile.record, return_type=dict[str, Any]),
]

#: Names of types in safetensors and in torch, and their bytes: no others are in a saved cache.
_TYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "U8": ("uint8", 1),
}


MAX_SECONDS = 1e9
"""Longest time in a note that is used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor as its bytes, with its type's name in torch."""

    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]

    def elements(self) -> npt.NDArray[Any]:
        """Return its elements; bfloat16, which NumPy does not have, as int16."""
        dtype = "int16" if self.dtype == "bfloat16" else self.dtype
        return self.data.view(dtype).reshape(self.shape)


def tensor_digest(tensors: Mapping[str, StoredTensor]) -> str:
    """Return a digest of names, shapes, types and bytes."""
    hasher = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        hasher.update(f"{name} {tensor.shape} {tensor.dtype}\n".encode())
        raw: Any = tensor.data
        hasher.update(raw)
    return hasher.hexdigest()


class SavedCacheHeader(FileRecord):
    """All of a saved cache but its tensors."""

    NAME: ClassVar[str] = "saved cache"
    METADATA: ClassVar[str] = "kvalloc_cache"

    kind: Literal["kvalloc.cache"] = "kvalloc.cache"
    """Kind of the file."""

    schema_version: Literal[8] = 8
    """Version of the file's schema."""

    model: str
    """Class of the decoder that filled the cache."""

    model_digest: str
    """Digest of its weights (`kvalloc.models.weights.weights_digest`)."""

    profile: _Profile
    """The budgets."""

    row_profiles: tuple[_Profile, ...] | None = None
    """The budgets of each row, if each prompt decided its own."""

    longer_profile: _Profile | None = None
    """Profile that takes over once the conversation is long enough, or None."""

    dtype: Literal["float64", "float32", "float16", "bfloat16"]
    """Type of the model's numbers, by its name in torch; a type wider than 16 bits is stored in
    float16 or bfloat16, except for the latest tokens."""

    batch: int = Field(ge=1)
    """Rows."""

    seen_tokens: int = Field(ge=1, lt=2**31)
    """Tokens that the cache has seen, prompt included; positions are int32."""

    prompt_tokens: int = Field(ge=1)
    """Tokens of the prompt."""

    ranked_tokens: tuple[Annotated[int, Field(ge=1)], ...]
    """Tokens of each row when all its kept entries were last ranked."""

    decode_every: int | None = Field(default=None, ge=1)
    """Tokens after which kept and new entries are ranked together; None for the default."""

    memory: int | None = Field(default=None, ge=1)
    """Bytes that the cache never exceeds; None without a limit."""

    tensor_digest: str
    """Digest of all tensors."""

    versions: dict[str, str]
    """Version of torch."""

    notes: dict[str, Any]
    """Plain values of the caller, such as the source of the text."""

    @property
    def read_seconds(self) -> float | None:
        """Seconds of reading the prompt, if noted."""
        seconds = self.notes.get("read_seconds")
        if isinstance(seconds, int | float) and 0 <= seconds < MAX_SECONDS:
            return float(seconds)
        return None

    @property
    def ids(self) -> list[int] | None:
        """Tokens seen, if a note of one row has all."""
        ids, end = self.notes.get("ids"), self.profile.shape.vocab_size or 2**31
        if not isinstance(ids, list) or len(ids) != self.seen_tokens or self.batch != 1:
            return None
        return ids if all(type(token) is int and 0 <= token < end for token in ids) else None

    @classmethod
    def read(cls, path: str | Path) -> tuple[Self, dict[str, StoredTensor]]:
        """Return header and tensors of a saved cache, checked against each other.

        Raises
        ------
        ProfileFileError
        """
        with cls.opened(path) as file:
            header = cls.from_record(path, cls.stated(path, file))
        tensors = _stored_tensors(path)
        if (stated := header.tensor_digest) != tensor_digest(tensors):
            raise cls.file_error(path, "tensor_digest", stated, "that of its tensors")
        _Contents(path, header, tensors).check()
        return header, tensors

    @classmethod
    def expected(cls) -> str:
        """Return a description of such a file."""
        how = by_interface(python="by kvalloc.save_cache()", flags=f"with {option('save_cache')}")
        return f"a cache written {how}"

    @classmethod
    def remedy(cls) -> str:
        """Return how to make such a file again."""
        return "read the prompt again and save the cache again"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        rows, profile = self.row_profiles, self.profile
        for name, of_rows in (("row_profiles", rows), ("ranked_tokens", self.ranked_tokens)):
            if of_rows is not None:
                expected = f"one for each of {self.batch} rows"
                require(len(of_rows) == self.batch, name, len(of_rows), expected)
        sizes = all(row.budgets.shape == profile.budgets.shape for row in rows or ())
        require(sizes, "row_profiles", "of other sizes", "of the sizes of the profile")
        alike = all(
            getattr(self.longer_profile or profile, name) == getattr(profile, name)
            for name in ("shape", "policy", "by_prompt", "length_rule")
        )
        require(alike, "longer_profile", "of another kind", "budgets alone to differ")
        expected = f"at most the {self.seen_tokens} tokens seen"
        sound = self.prompt_tokens <= self.seen_tokens
        require(sound, "prompt_tokens", self.prompt_tokens, expected)
        return self


def _stored_tensors(path: str | Path) -> dict[str, StoredTensor]:
    tensors = {}
    with open(path, "rb") as file:
        first = 8 + int.from_bytes(file.read(8), "little")
        table = json.loads(file.read(first - 8))
        table.pop("__metadata__", None)
        for name, stated in table.items():
            start, end = stated["data_offsets"]
            dtype, n_bytes = _TYPES.get(stated["dtype"], (stated["dtype"], 0))
            file.seek(first + start)
            data = np.fromfile(file, np.uint8, end - start)
            if n_bytes and data.size != prod(stated["shape"]) * n_bytes:  # changed since it opened
                raise SavedCacheHeader.file_error(path, name, "cut off", "all of its bytes")
            tensors[name] = StoredTensor(dtype=dtype, shape=tuple(stated["shape"]), data=data)
    return tensors


class _Contents:
    def __init__(
        self, path: str | Path, header: SavedCacheHeader, tensors: Mapping[str, StoredTensor]
    ) -> None:
        self._path, self._header, self._left = path, header, dict(tensors)
        self._shown: npt.NDArray[np.bool_] | None = None

    def check(self) -> None:
        header = self._header
        n_bytes = sum(tensor.data.size for tensor in self._left.values())
        rows = n_bytes // header.profile.shape.n_kv_heads
        self._require(header.batch <= rows, "batch", header.batch, "an entry for each row and head")
        if "visible" in self._left:
            self._shown = self._take("visible", "uint8", (header.batch, header.seen_tokens)) != 0
        if (name := "repeats") in self._left:
            counts = self._take(name, "int32", (header.batch, header.seen_tokens))
            self._require(bool((counts >= 1).all()), name, "0 or less", "1 or more")
        for index, layer in enumerate(header.profile.shape.by_layer):
            if layer.kv_heads:
                self._check_layer(index, layer)
        self._require(not self._left, min(self._left, default=""), "a tensor", "no such tensor")

    def _check_layer(self, index: int, layer: LayerShape) -> None:
        header = self._header
        seen, heads = header.seen_tokens, layer.kv_heads
        name = f"{index}.keys"
        keys = self._take(name, header.dtype, (header.batch, heads, None, layer.key_dim))
        n_dense = keys.shape[2]
        self._take(f"{index}.values", header.dtype, (header.batch, heads, n_dense, layer.value_dim))
        whole = not any(name.startswith(f"{index}.bits_") for name in self._left)
        if layer.kind in WINDOWED or whole:
            total = layer.stored_tokens(seen) if layer.kind in WINDOWED else seen
            self._require(n_dense == total, name, f"of {n_dense} tokens", f"all {total}")
            return
        name = f"{index}.latest"
        latest = self._take(name, "int64", (header.batch,))
        tokens = np.full(header.batch, seen) if self._shown is None else self._shown.sum(axis=1)
        sound = bool((latest >= 0).all() and (latest <= tokens.clip(max=n_dense)).all())
        self._require(sound, name, latest.tolist(), f"up to {n_dense}, and to the tokens seen")
        kept = []
        for bits in WIDTHS:
            name = f"{index}.bits_{bits}.lengths"
            if name in self._left:
                expected = f"a width that heads of {layer.value_dim} numbers can have"
                self._require(not bits_fault(bits, layer.value_dim), name, "there", expected)
                kept += self._check_segments(f"{index}.bits_{bits}.", bits, heads, tokens - latest)
        places = np.concatenate([np.zeros(0, np.int64), *kept])
        sound = len(np.unique(places)) == len(places)
        name = f"{index}.kept_positions"
        self._require(sound, name, "of a token at two widths", "each at one")
        counts = np.bincount(places // max(seen, 1), minlength=header.batch * heads)
        sound = bool((counts > 0)[(tokens > latest).repeat(heads)].all())
        self._require(sound, name, "of no token in a head", "some in each")

    def _check_segments(self, prefix: str, bits: int, heads: int, end: IntArray) -> list[IntArray]:
        """Return the token of each entry, with a different number for each segment."""
        header, dims = self._header, self._header.profile.shape.dims
        name = f"{prefix}lengths"
        counts = self._take(name, "int64", (header.batch, heads)).reshape(-1)
        low, high, ends = int(counts.min()), int(counts.max()), end.repeat(heads)
        sound = low >= 0 and bool((counts <= ends).all())
        self._require(sound, name, f"from {low} to {high}", f"from 0 to {int(end.max())}")
        total, widths, dtypes = int(counts.sum()), dims, _stored_types(header.dtype)
        if bits != 16:
            widths, dtypes = packed_row_bytes(bits, *dims), ("uint8",)
            blocks = int((-(-counts // KEY_BLOCK_TOKENS)).sum())
            self._take(f"{prefix}key_scales", ("float16", "bfloat16"), (blocks, 2, dims[0]))
        self._take(f"{prefix}kept_keys", dtypes, (total, widths[0]))
        self._take(f"{prefix}kept_values", dtypes, (total, widths[1]))
        name = f"{prefix}kept_positions"
        tokens = self._take(name, "int32", (total,))
        segments = np.arange(counts.size).repeat(counts)
        rising = (tokens[1:] > tokens[:-1]) | (segments[1:] != segments[:-1])
        sound = bool(rising.all() and (tokens >= 0).all() and (tokens < ends.repeat(counts)).all())
        expected = f"tokens that rise in each head, from 0 and below {int(end.max())}"
        self._require(sound, name, "others", expected)
        return [segments * header.seen_tokens + tokens]

    def _take(
        self, name: str, dtype: str | tuple[str, ...], shape: tuple[int | None, ...]
    ) -> npt.NDArray[Any]:
        tensor = self._left.pop(name, None)
        dtypes = (dtype,) if isinstance(dtype, str) else dtype
        expected = f"{' or '.join(dtypes)} of {_sizes(shape)}"
        if tensor is None:
            raise self._header.file_error(self._path, name, "missing", expected)
        pairs = zip(shape, tensor.shape, strict=False)
        fits = len(shape) == len(tensor.shape) and all(size in (None, n) for size, n in pairs)
        stated = f"{tensor.dtype} of {_sizes(tensor.shape)}"
        self._require(fits and tensor.dtype in dtypes, name, stated, expected)
        return tensor.elements()

    def _require(self, holds: bool, field: str, value: object, expected: str) -> None:
        if not holds:
            raise self._header.file_error(self._path, field, value, expected)


def _stored_types(dtype: str) -> tuple[str, ...]:
    return (dtype, "float16", "bfloat16") if dtype in ("float32", "float64") else (dtype,)


def _sizes(shape: tuple[int | None, ...]) -> str:
    return " x ".join("n" if size is None else str(size) for size in shape)
