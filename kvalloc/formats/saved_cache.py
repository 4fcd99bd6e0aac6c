"""What the file of a saved cache says of itself: a JSON header, read without torch and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PlainSerializer, PlainValidator, model_validator

from kvalloc.errors import ProfileFileError, by_interface, option
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.record import FileRecord, Record, digest_of, require

__all__ = ["LayerKind", "SavedCacheHeader", "SavedLayer"]


def _checked(stated: object) -> BudgetProfile:
    """A profile inside the header: a file's content, its own digest included."""
    if isinstance(stated, BudgetProfile):
        return stated
    try:
        return BudgetProfile.from_record("", stated)
    except ProfileFileError as error:
        require(False, error.field, error.found, error.expected)
        raise


_Profile = Annotated[
    BudgetProfile,
    PlainValidator(_checked),
    PlainSerializer(BudgetProfile.record, return_type=dict[str, Any]),
]

LayerKind = Literal["sliding", "whole", "even", "ragged", "packed"]


class SavedLayer(Record):
    """What the file holds of one layer."""

    kind: LayerKind
    """How the layer stores its entries."""

    tensors: tuple[str, ...]
    """Names of its tensors; in the file the layer's index and a dot stand before each."""

    bits: tuple[int, ...] | None = None
    """Bit width of each KV head, where entries are packed."""

    packed_following: int | None = None
    """How many of the tokens after the prompt are packed as well."""


class SavedCacheHeader(FileRecord):
    """All of a saved cache but its tensors."""

    NAME: ClassVar[str] = "saved cache"
    METADATA: ClassVar[str] = "kvalloc_cache"

    kind: Literal["kvalloc.cache"] = "kvalloc.cache"
    """What the file is."""

    schema_version: Literal[3] = 3
    """How the file is to be read."""

    model: str
    """Class of the decoder that filled the cache."""

    model_digest: str
    """Digest of its weights (`kvalloc.models.structure.weights_digest`)."""

    profile: _Profile
    """The budgets."""

    row_profiles: tuple[_Profile, ...] | None = None
    """Those of each row, where each prompt decided its own."""

    dtype: str
    """Type of the entries, as torch calls it."""

    batch: int = Field(ge=1)
    """Rows."""

    seen_tokens: int = Field(ge=0)
    """Tokens the cache has seen, prompt included."""

    prompt_tokens: int = Field(ge=0)
    """Tokens of the prompt."""

    layers: tuple[SavedLayer, ...]
    """What is stored of each layer."""

    tensor_digest: str
    """Digest of all tensors."""

    versions: dict[str, str]
    """Version of torch."""

    notes: dict[str, Any]
    """Plain values of the caller's, such as where the text came from."""

    @classmethod
    def load(cls, path: str | Path) -> SavedCacheHeader:
        """The header of a saved cache; none of its tensors is read.

        Parameters
        ----------
        path : str or Path
            Written by `BudgetCache.save`.

        Raises
        ------
        ProfileFileError
            If the file is missing, truncated, no saved cache or of another schema version, its
            header was edited, or a tensor that it names is not there.
        """
        with cls.opened(path, "numpy") as file:
            stated, there = cls.stated(path, file), set(file.keys())
        header = cls.parsed(path, stated)
        for index, layer in enumerate(header.layers):
            for name in layer.tensors:
                if f"{index}.{name}" not in there:
                    found = f"without {name}"
                    raise cls.file_error(path, f"layers.{index}", found, "all its tensors")
        cls.check_digest(path, stated, digest_of)
        return header

    @classmethod
    def expected(cls) -> str:
        """What such a file is, for messages."""
        how = by_interface(python="by cache.save()", flags=f"with {option('save_cache')}")
        return f"a cache written {how}"

    @classmethod
    def again(cls) -> str:
        """How to make the file again."""
        return "read the prompt again and save the cache again"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        rows = self.row_profiles
        sound = rows is None or len(rows) == self.batch
        expected = f"one for each of {self.batch} rows"
        require(sound, "row_profiles", len(rows or ()), expected)
        n_layers, widths = self.profile.shape.n_layers, self.profile.bits
        require(len(self.layers) == n_layers, "layers", len(self.layers), f"{n_layers} layers")
        most = self.seen_tokens - self.prompt_tokens
        for index, layer in enumerate(self.layers):
            packed, following = layer.kind == "packed", layer.packed_following
            bits = tuple(widths[index].tolist()) if packed and widths is not None else None
            sound = layer.bits == bits and packed == (bits is not None)
            expected = "those of its profile, where it is packed"
            require(sound, f"layers.{index}.bits", layer.bits, expected)
            inside = following is not None and 0 <= following <= most
            right, field = inside == packed, f"layers.{index}.packed_following"
            require(right, field, following, f"a number from 0 to {most}, where it is packed")
        return self
