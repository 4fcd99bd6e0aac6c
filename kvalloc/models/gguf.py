"""GGUF: a ``.gguf`` file as a model folder, converted once into the user's cache."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from kvalloc.errors import (
    InputError,
    MissingDependencyError,
    require,
)
from kvalloc.files import cache_folder, temporary_beside
from kvalloc.models.pretrained import read_pretrained

_FORMAT = "1"
_OLDEST_READER = "5.23"
"""Older transformers read the tokenizer of GGUF files wrongly (5.2 adds or changes tokens)."""

_REORDERED = frozenset(
    {
        *("llama", "mistral", "mixtral", "smollm3", "arcee", "granite", "granitemoe"),
        *("olmo", "minicpm", "baichuan", "internlm2", "internlm3", "xverse"),
    }
)
"""Model types with another order of query and key channels in GGUF files: rotated pairs are
neighbours."""


def reorders_keys(config: Any) -> bool:
    """Return whether such a model's GGUF file has rotated pairs of channels as neighbours."""
    return getattr(config, "model_type", "") in _REORDERED


def converted_folder(
    file: Path,
    dtype: str,
    *,
    notify: Callable[[str], None] | None = None,
) -> Path:
    """Return the model folder of a ``.gguf`` file, converted now if not in the cache.

    It appears complete or not at all, also if two processes convert one file. Before a conversion,
    `notify` gets one line; by default stderr.

    Raises
    ------
    InputError
        If the file is not GGUF, or the cache folder cannot be written to.
    MissingDependencyError
        If transformers is too old, or a package is missing.
    UnsupportedModelError
        If transformers cannot read this model.
    """
    import transformers
    from packaging.version import Version

    base = cache_folder() / "gguf"
    key = f"{_digest(file)}-{dtype}-{_FORMAT}"
    if (folder := next(base.glob(f"*-{key}"), None)) is not None:
        return folder
    if Version(transformers.__version__) < Version(_OLDEST_READER):
        raise MissingDependencyError(
            f"transformers {transformers.__version__} reads the tokenizer of GGUF files wrongly; "
            f"load {file.name} once with transformers {_OLDEST_READER} or newer: "
            f"pip install 'transformers>={_OLDEST_READER}'"
        )
    require("reading a .gguf file", "gguf", "accelerate", extra="run")
    notify = notify or partial(print, file=sys.stderr, flush=True)
    notify(f"unpacking {file.name} once into {base}; this takes about half a minute")
    return _convert(file, base / f"{file.stem}-{key}", dtype)


def _convert(file: Path, target: Path, dtype: str) -> Path:
    base = target.parent
    try:
        base.mkdir(parents=True, exist_ok=True)
        with temporary_beside(base, ".converting-") as hidden:
            folder = hidden / target.name
            folder.mkdir()
            _unpack(file, folder, dtype)
            for written in folder.iterdir():
                with open(written, "rb") as handle:
                    os.fsync(handle.fileno())
            try:
                folder.rename(target)
            except OSError:
                # another process was faster: its folder is as good, ours goes away
                if not target.is_dir():
                    raise
    except (OSError, SafetensorError) as error:  # a full disk is the latter
        raise InputError(
            f"cannot keep the unpacked {file.name} in {base} ({error}); make room, or "
            "set KVALLOC_CACHE to a folder that can be written to"
        ) from error
    return target


def _unpack(file: Path, folder: Path, dtype: str) -> None:
    import torch
    import transformers

    options: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    if hasattr(transformers, "GgufConfig"):  # newer versions may keep the blocks packed by default
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    parent = str(file.absolute().parent)
    # the reader's own progress bar knows no switch; it writes to what stderr is right now
    with contextlib.redirect_stderr(io.StringIO()):
        read = read_pretrained(parent, file.name, options, gguf_file=file.name)
        for part in read:
            part.save_pretrained(folder)


def _digest(file: Path) -> str:
    try:
        with open(file, "rb") as handle:
            if handle.read(4) != b"GGUF":
                raise InputError(f"{file} is not a GGUF file (it does not start with GGUF)")
            handle.seek(0)
            return hashlib.file_digest(handle, "sha256").hexdigest()[:16]
    except OSError as error:
        raise InputError(f"cannot read {file} ({error.strerror})") from error
