"""Safetensors files whose arrays are written in blocks, so that no array has to be in memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

NAMES = {"int64": "I64", "float64": "F64"}
"""The types of arrays by NumPy's name, and how a file calls them."""

_NO_DIGEST = "0" * 64
_ALIGNMENT = 8


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """An array that comes in pieces.

    Attributes
    ----------
    dtype : numpy.dtype
        int64 or float64.
    shape : tuple of int
    blocks : iterable of ndarray
        Pieces along the first axis, in order.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    blocks: Iterable[Array]

    @classmethod
    def whole(cls, array: Array) -> Blocks:
        """Return the blocks of an array in memory."""
        return cls(dtype=array.dtype, shape=array.shape, blocks=(array,))

    @property
    def size_bytes(self) -> int:
        """Of all pieces."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


class Digest:
    """SHA-256 over a text, and over arrays with their names, types and shapes."""

    def __init__(self, header: str) -> None:
        self._hasher = hashlib.sha256(header.encode())
        self.update = self._hasher.update
        self.hexdigest = self._hasher.hexdigest

    def begin(self, name: str, array: Array | Blocks) -> None:
        """Take the name, type and shape of the array whose bytes follow."""
        self.update(f"{name} {array.dtype} {array.shape}".encode())


def write_tensors(
    path: Path,
    header: Mapping[str, Any],
    arrays: Mapping[str, Blocks],
    *,
    entry: str,
    progress: Callable[[int], None] | None = None,
) -> str:
    """Write a file as `safetensors` does, byte for byte, one block after the other.

    Parameters
    ----------
    path : Path
        Overwritten.
    header : mapping
        Plain values; with the digest they become the metadata `entry`.
    arrays : mapping of str to Blocks
        In the order of the digest.
    entry : str
    progress : callable, optional
        Called with the bytes that are written.

    Returns
    -------
    str
        The digest over header and arrays.
    """
    # safetensors sorts by type, the widest first and int64 before float64, and then by name.
    order = sorted(arrays, key=lambda name: (arrays[name].dtype == np.float64, name))
    ends = np.cumsum([arrays[name].size_bytes for name in order], dtype=np.int64).tolist()
    begins = dict(zip(order, [0, *ends], strict=False))
    digest = Digest(json.dumps(header, sort_keys=True))

    def head() -> bytes:
        stated = json.dumps({**header, "digest": digest_text}, sort_keys=True)
        table: dict[str, Any] = {"__metadata__": {entry: stated}}
        for name in order:
            one, begin = arrays[name], begins[name]
            table[name] = {
                "dtype": NAMES[str(one.dtype)],
                "shape": one.shape,
                "data_offsets": (begin, begin + one.size_bytes),
            }
        text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    digest_text = _NO_DIGEST  # as long as the true one, which is known at the end
    start, written = len(head()), 0
    with open(path, "wb") as file:
        for name, array in arrays.items():
            digest.begin(name, array)
            file.seek(start + begins[name])
            for block in array.blocks:
                data = np.ascontiguousarray(block).data
                digest.update(data)
                written += file.write(data)
                if progress is not None:
                    progress(written)
        digest_text = digest.hexdigest()
        file.seek(0)
        file.write(head())
    return digest_text


def tensor_table(path: str | Path) -> tuple[int, dict[str, Any]]:
    """Return what a file that `safetensors` opened states of each tensor.

    Returns
    -------
    start : int
        Place of the first byte after the header, from which ``data_offsets`` count.
    table : dict
        ``dtype``, ``shape`` and ``data_offsets`` by name.
    """
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        table = json.loads(file.read(length))
    table.pop("__metadata__", None)
    return 8 + length, table


def tensor_places(path: str | Path) -> dict[str, tuple[np.dtype[Any], tuple[int, ...], int]]:
    """Return type, shape and first byte of each array of a file that `safetensors` opened."""
    types = {name: np.dtype(dtype) for dtype, name in NAMES.items()}
    start, table = tensor_table(path)
    return {
        name: (types[one["dtype"]], tuple(one["shape"]), start + one["data_offsets"][0])
        for name, one in table.items()
    }
