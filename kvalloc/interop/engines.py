"""Command line and file of an engine choice."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from kvalloc.accounting.engine_formats import ENGINES, FORMATS, WHOLE
from kvalloc.errors import one_of, require
from kvalloc.files import provenance, write_text
from kvalloc.formats.engine_choice import EngineChoice, EngineSetting, Pair
from kvalloc.interop.target import reading
from kvalloc.shape import ModelShape

PAGE_TOKENS = 256
"""Tokens of a page of exllamav3, which stores whole pages."""

_ALGORITHMS: dict[Pair, str] = {
    ("fp8", "fp8"): "FP8",
    ("fp8", "nvfp4"): "FP8_K_NVFP4_V",
    ("nvfp4", "nvfp4"): "NVFP4",
}
"""ModelOpt's names of pairs."""

MLX_LINES = """\
import json
from mlx_lm import generate, load
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

model, tokenizer = load("{model}")
cache = make_prompt_cache(model)
for layer, stored in enumerate(json.load(open("{file}"))["layers"]):
    if stored is not None:
        cache[layer] = QuantizedKVCache(**stored)
print(generate(model, tokenizer, prompt="Hello", prompt_cache=cache))"""
"""Python lines that make mlx-lm's list of caches from a file, and answer with it."""


def by_format(setting: EngineSetting, *, brief: bool = False) -> str:
    """Return a setting's pairs in words, with their layers or, if brief, the number of these."""
    layers: dict[Pair, list[int]] = {}
    for layer, pair in enumerate(setting.pairs):
        layers.setdefault(pair, []).append(layer)
    texts = []
    for pair, places in layers.items():
        text = " + ".join(dict.fromkeys(pair))
        if len(layers) > 1:
            where = f"{text} in layer{'s' * (len(places) > 1)} {_ranges(places)}"
            text = f"{text} x {len(places)}" if brief else where
        texts.append(text)
    return "; ".join(texts)


def _ranges(places: Sequence[int]) -> str:
    """Return rising numbers in short.

    Examples
    --------
    >>> _ranges([0, 1, 2, 3, 8])
    '0-3,8'
    """
    runs = [[*run] for _, run in groupby(places, key=lambda one: one - places.index(one))]
    return ",".join(f"{run[0]}-{run[-1]}" if run[1:] else str(run[0]) for run in runs)


def _llama_server(choice: EngineChoice) -> str:
    rows = f" -np {choice.batch}" if choice.batch > 1 else ""
    # without flash attention no values can be rounded
    return f"llama-server -m MODEL.gguf -c {choice.context_tokens * choice.batch}{rows} -fa on"


def _llama_cpp(choice: EngineChoice) -> str:
    key, value = choice.pairs[0]
    return f"{_llama_server(choice)} -ctk {key} -ctv {value}"


def _ik_llama_cpp(choice: EngineChoice) -> str:
    words = [_llama_server(choice)]
    for letter, names, dim in zip(
        "kv", zip(*choice.pairs, strict=True), choice.shape.dims, strict=True
    ):
        runs = [(name, len([*same])) for name, same in groupby(names)]
        longest = max(range(len(runs)), key=lambda place: runs[place][1])
        middle = 1 if len(runs) == 3 else longest
        words.append(f"-ct{letter} {runs.pop(middle)[0]}")
        for place, (name, n_layers) in enumerate(runs):
            words.append(f"-ct{letter}-{'first' if place < middle else 'last'} {name},{n_layers}")
        if {*names} != {WHOLE} and not dim % 64:  # llama.cpp turns them without being told
            words.append(f"-{letter}had")
    return " ".join(words)


def _exllamav3(choice: EngineChoice) -> str:
    tokens = -(-choice.context_tokens * choice.batch // PAGE_TOKENS) * PAGE_TOKENS
    bits = ",".join(str(FORMATS[name].code_bits) for name in choice.pairs[0])
    rounded = f" -cq {bits}" if WHOLE not in choice.pairs[0] else ""
    return f"python examples/chat.py -m MODEL -mode MODE -cs {tokens}{rounded}"


def _mlx(choice: EngineChoice) -> Any:
    """Return bits and group size by layer; None for mlx-lm's own cache."""
    formats = [FORMATS[key] for key, _ in choice.pairs]
    layers = [
        {"bits": one.code_bits, "group_size": one.block} if one.name != WHOLE else None
        for one in formats
    ]
    return {"model": choice.shape.model_id, "layers": layers}


def _read_mlx(stated: Any, n_layers: int) -> list[Pair]:
    stored = [one and f"mlx_{one['bits']}_{one['group_size']}" for one in stated["layers"]]
    return [(name or WHOLE, name or WHOLE) for name in stored]


def _openvino(choice: EngineChoice) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for part, name in zip(("KEY", "VALUE"), choice.pairs[0], strict=True):
        precision, _, by = name.partition("_")
        settings[f"{part}_CACHE_PRECISION"] = precision
        if by:
            settings[f"{part}_CACHE_GROUP_SIZE"] = 0  # the whole head, or a block of its tokens
        if by and part == "KEY":  # values are by token in any case
            settings["KEY_CACHE_QUANT_MODE"] = f"BY_{by.upper()}"
    return settings


def _openvino_call(choice: EngineChoice) -> str:
    words = "".join(f", {name}={value!r}" for name, value in _openvino(choice).items())
    return f"LLMPipeline('MODEL', 'CPU'{words})"


def _vllm(choice: EngineChoice) -> dict[str, Any]:
    keys = [key for key, _ in choice.pairs]
    if {*keys} == {WHOLE}:
        return {"kv_cache_dtype": "auto"}
    [rounded] = {*keys} - {WHOLE}
    stores = [layer for layer, one in enumerate(choice.shape.by_layer) if one.kv_heads]
    skipped = [str(layer) for layer in stores if keys[layer] == WHOLE]
    return {"kv_cache_dtype": rounded, "kv_cache_dtype_skip_layers": skipped}


def _vllm_flags(choice: EngineChoice) -> str:
    stated = _vllm(choice)
    skipped = stated.get("kv_cache_dtype_skip_layers")
    more = f" --kv-cache-dtype-skip-layers {' '.join(skipped)}" if skipped else ""
    words = f"vllm serve MODEL --max-model-len {choice.context_tokens} --kv-cache-dtype"
    return f"{words} {stated['kv_cache_dtype']}{more}"


def _modelopt(choice: EngineChoice) -> dict[str, Any]:
    algorithms = [_ALGORITHMS.get(pair) for pair in choice.pairs]
    layers = {
        f"model.layers.{layer}.self_attn": {"quant_algo": name}
        for layer, name in enumerate(algorithms)
        if name is not None
    }
    return {
        "producer": {"name": "kvalloc", "version": provenance()["versions"]["kvalloc"]},
        "quantization": {
            "quant_algo": None,
            "kv_cache_quant_algo": "MIXED_PRECISION" if len({*algorithms}) > 1 else algorithms[0],
            "kv_cache_schema_version": 1,
            "kv_cache_quantized_layers": layers,
        },
    }


def _read_modelopt(stated: Any, n_layers: int) -> list[Pair]:
    pairs: list[Pair] = [(WHOLE, WHOLE)] * n_layers
    of_name = {name: pair for pair, name in _ALGORITHMS.items()}
    for module, layer in stated["quantization"]["kv_cache_quantized_layers"].items():
        [place] = re.findall(r"\.(\d+)\.", module)
        pairs[int(place)] = of_name[layer["quant_algo"]]
    return pairs


def _kvtuner(choice: EngineChoice) -> str:
    rows = [[FORMATS[name].code_bits for name in pair] for pair in choice.pairs]
    form = "{}:\n  nbits_key: {}\n  nbits_value: {}"
    return "\n".join(form.format(layer, *row) for layer, row in enumerate(rows))


def _read_kvtuner(stated: Any, n_layers: int) -> list[Pair]:
    rows = [stated[layer] for layer in range(len(stated))]
    return [(f"kvt_{row['nbits_key']}", f"kvt_{row['nbits_value']}") for row in rows]


class EngineSyntax(NamedTuple):
    """Syntax of an engine's settings."""

    line: Callable[[EngineChoice], str]
    """Returns a command line, or a description of the file."""

    content: Callable[[EngineChoice], Any]
    """Returns the content of the file: a text, or plain values that are written as JSON."""

    suffix: str = ".json"
    """Usual ending of the file."""

    read: Callable[[Any, int], list[Pair]] | None = None
    """Returns the pairs of plain values and a number of layers."""

    use: str = ""
    """How the file is used, with ``{model}`` and ``{file}``."""

    note: str = ""
    """A caution for the user of the engine."""


_OPENVINO_USE = "openvino_genai.LLMPipeline('{model}', 'CPU', **json.load(open('{file}')))"
_VLLM_USE = "vllm.LLM('{model}', **json.load(open('{file}')))"
_MODELOPT_USE = "{file} is hf_quant_config.json in the folder of {model}"
_KVTUNER_USE = (
    "FlexibleQuantizedCacheConfig(per_layer_quant=True, per_layer_config_path='{file}', "
    "asym=True, q_group_size=-1, axis_key=0, axis_value=0, residual_length=0)"
)
_CUDA = (
    "a CUDA build computes attention with iq4_nl on the CPU, and without GGML_CUDA_FA_ALL_QUANTS "
    "that of other pairs, too, unless K and V are both in f16, in q8_0 or in q4_0"
)
_CUT = "on a CPU vLLM 0.32 cuts numbers instead of rounding them, which loses 3 to 4 times as much"
_MODULES = "modules are named model.layers.N.self_attn"

SYNTAX: dict[str, EngineSyntax] = {
    "llama.cpp": EngineSyntax(_llama_cpp, _llama_cpp, ".sh", note=_CUDA),
    "ik_llama.cpp": EngineSyntax(_ik_llama_cpp, _ik_llama_cpp, ".sh"),
    "mlx-lm": EngineSyntax(by_format, _mlx, read=_read_mlx, use=MLX_LINES),
    "openvino": EngineSyntax(_openvino_call, _openvino, use=_OPENVINO_USE),
    "vllm": EngineSyntax(_vllm_flags, _vllm, use=_VLLM_USE, note=_CUT),
    "modelopt": EngineSyntax(
        by_format, _modelopt, ".json", _read_modelopt, _MODELOPT_USE, _MODULES
    ),
    "kvtuner": EngineSyntax(by_format, _kvtuner, ".yaml", _read_kvtuner, _KVTUNER_USE),
    "exllamav3": EngineSyntax(_exllamav3, _exllamav3, ".sh"),
}
"""By the engine's name."""


def write_choice(choice: EngineChoice, path: str | Path) -> None:
    """Write the engine's file, or raise InputError."""
    content = SYNTAX[choice.engine].content(choice)
    write_text(path, content if isinstance(content, str) else json.dumps(content, indent=2))


def read_pairs(engine: str, path: str | Path, shape: ModelShape) -> tuple[Pair, ...]:
    """Return the formats by layer of a mlx-lm, modelopt or kvtuner file.

    Raises
    ------
    InputError
        If it is no such file, or for another number of layers.
    """
    readers = {name: one.read for name, one in SYNTAX.items() if one.read is not None}
    reader = one_of("engine whose files are read", engine, readers)
    with reading(path, f"says no formats of {engine} for {shape.n_layers} layers"):
        require("a file of an engine", "yaml", extra="run")  # which reads JSON, too
        import yaml  # type: ignore[import-untyped]

        pairs = reader(yaml.safe_load(Path(path).read_text(encoding="utf-8")), shape.n_layers)
        odd = {*pairs} - {*ENGINES[engine].pairs}
        if len(pairs) != shape.n_layers or odd:
            raise ValueError(f"it has {len(pairs)} layers, with {odd or 'known formats'}")
    return tuple(pairs)
