"""llama.cpp by its C API, which is in the shared object of xllamacpp.

run_llama.py JOB.json OUT.npz       predictions; a setting is [K type, V type]
run_llama.py NUMBERS.npy OUT.npz    rows of numbers, as each of ggml's types gives them back
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Sequence
from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_float,
    c_int,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_void_p,
)
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from compare import Job, run

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20}
"""Numbers of ggml's types."""


def fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class ModelParams(Structure):
    """`llama_model_params` of build 11549."""

    _fields_ = [
        *fields(c_void_p, "devices tensor_buft_overrides"),
        *fields(c_int32, "n_gpu_layers split_mode load_mode lazy_mode main_gpu"),
        *fields(c_void_p, "tensor_split progress_callback progress_callback_user_data"),
        *fields(c_void_p, "kv_overrides"),
        *fields(c_bool, "vocab_only check_tensors use_extra_bufts no_host no_alloc load_mtp"),
    ]


class ContextParams(Structure):
    """`llama_context_params` of build 11549."""

    _fields_ = [
        *fields(c_uint32, "n_ctx n_batch n_ubatch n_seq_max n_rs_seq n_outputs_max"),
        *fields(c_uint32, "n_outputs_max_per_seq"),
        *fields(c_int32, "n_threads n_threads_batch ctx_type rope_scaling_type pooling_type"),
        *fields(c_int32, "attention_type flash_attn_type"),
        *fields(c_float, "rope_freq_base rope_freq_scale yarn_ext_factor yarn_attn_factor"),
        *fields(c_float, "yarn_beta_fast yarn_beta_slow"),
        *fields(c_uint32, "yarn_orig_ctx"),
        *fields(c_float, "defrag_thold"),
        *fields(c_void_p, "cb_eval cb_eval_user_data"),
        *fields(c_int32, "type_k type_v"),
        *fields(c_size_t, "moe_cache_size"),
        *fields(c_void_p, "abort_callback abort_callback_data"),
        *fields(c_bool, "embeddings offload_kqv no_perf op_offload swa_full kv_unified"),
        *fields(c_void_p, "samplers"),
        *fields(c_size_t, "n_samplers"),
        *fields(c_void_p, "ctx_other"),
    ]


class Batch(Structure):
    """`llama_batch`."""

    _fields_ = [
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    ]


MODEL_DEFAULTS = {"n_gpu_layers": -1, "split_mode": 1, "load_mode": -1, "use_extra_bufts": True}
CONTEXT_DEFAULTS = {
    "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "flash_attn_type": -1, "yarn_ext_factor": -1.0,
    "defrag_thold": -1.0, "type_k": TYPES["f16"], "type_v": TYPES["f16"], "offload_kqv": True,
    "swa_full": True, "kv_unified": False, "n_samplers": 0, "ctx_other": None,
}  # fmt: skip
"""What the structs give of the engine's defaults, unless another build has other ones."""

PROTOTYPES: dict[str, tuple[Any, Sequence[Any]]] = {
    "llama_model_default_params": (ModelParams, ()),
    "llama_context_default_params": (ContextParams, ()),
    "llama_model_load_from_file": (c_void_p, (c_char_p, ModelParams)),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
    "llama_init_from_model": (c_void_p, (c_void_p, ContextParams)),
    "llama_batch_init": (Batch, (c_int32, c_int32, c_int32)),
    "llama_batch_free": (None, (Batch,)),
    "llama_decode": (c_int32, (c_void_p, Batch)),
    "llama_get_logits": (POINTER(c_float), (c_void_p,)),
    "llama_free": (None, (c_void_p,)),
}

LOG = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
SILENT = LOG(lambda level, text, data: None)


@cache
def library() -> Any:
    """Return the shared object, whose defaults are read through the structs and compared."""
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        raise ImportError("xllamacpp is not installed here")
    found = ctypes.CDLL(str(Path(spec.origin).with_name("xllamacpp.abi3.so")))
    for name, (result, arguments) in PROTOTYPES.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    for made, expected in (
        (found.llama_model_default_params(), MODEL_DEFAULTS),
        (found.llama_context_default_params(), CONTEXT_DEFAULTS),
    ):
        read = {name: getattr(made, name) for name in expected}
        if read != expected:
            raise ValueError(f"the structs are of another build: {read}, expected {expected}")
    found.llama_log_set(SILENT, None)
    found.llama_backend_init()
    return found


@cache
def loaded(path: str) -> tuple[int, int]:
    """Return a model and the size of its vocabulary."""
    api = library()
    model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
    if not model:
        raise ValueError(f"llama.cpp cannot load {path}")
    return model, api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))


def logits(job: Job, setting: Sequence[str], tokens: np.ndarray) -> np.ndarray:
    """Return the logits of each position of a text with K and V of these types."""
    api, (model, vocabulary), count = library(), loaded(job["model"]), tokens.size
    params = api.llama_context_default_params()
    params.n_ctx = params.n_batch = 256 * -(-count // 256)
    params.n_threads = params.n_threads_batch = job["threads"]
    params.flash_attn_type = 1  # without it V cannot be quantised
    params.type_k, params.type_v = (TYPES[name] for name in setting)
    context = api.llama_init_from_model(model, params)
    if not context:
        raise ValueError(f"llama.cpp makes no cache with K, V in {', '.join(setting)}")
    batch = api.llama_batch_init(count, 0, 1)
    batch.n_tokens = count
    for place, token in enumerate(tokens.tolist()):
        batch.token[place], batch.pos[place] = token, place
        batch.n_seq_id[place], batch.seq_id[place][0], batch.logits[place] = 1, 0, 1
    if code := api.llama_decode(context, batch):
        raise ValueError(f"llama_decode returned {code} with K, V in {', '.join(setting)}")
    found = np.ctypeslib.as_array(api.llama_get_logits(context), (count, vocabulary)).copy()
    api.llama_batch_free(batch)
    api.llama_free(context)
    return found


def given_back(numbers: np.ndarray, name: str) -> np.ndarray:
    """Return rows of float32 as a type of ggml gives them back, rounded by the CPU's code."""
    api, stored = library(), np.zeros(numbers.size, np.float64)
    result = np.empty_like(numbers)
    pointers = [array.ctypes.data_as(c_void_p) for array in (numbers, stored, result)]
    getattr(api, f"quantize_row_{name}")(*pointers[:2], c_int64(numbers.size))
    getattr(api, f"dequantize_row_{name}")(*pointers[1:], c_int64(numbers.size))
    return result


if __name__ == "__main__":
    if sys.argv[1].endswith(".npy"):
        rows = np.load(sys.argv[1])
        np.savez(sys.argv[2], **{name: given_back(rows, name) for name in list(TYPES)[2:]})
    else:
        run(logits)
