"""vLLM on a CPU, whose attention reads all K and V from the cache.

run_vllm.py JOB.json OUT.npz       predictions
run_vllm.py NUMBERS.npy OUT.npz    rows of numbers, as each format gives them back

A setting is what `vllm.LLM` takes as keywords. With "nearest", K and V come to the cache rounded
to the nearest number, as CUDA's conversion rounds them: the kernel for CPUs cuts them instead.
"""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from typing import Any

import numpy as np
import torch
from compare import Job, run

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # hooks are called in this process

import vllm
from vllm import _custom_ops as kernels

PLAIN = {
    "dtype": "float32", "enforce_eager": True, "enable_prefix_caching": False,
    "max_model_len": 1024, "kv_cache_memory_bytes": 2**28, "skip_tokenizer_init": True,
}  # fmt: skip
"""Nothing is rounded or reused but what a setting says."""

TYPES = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}

BLOCK = 32
"""Tokens that the kernel stores together, at least."""


class Engine:
    """A model with a cache of some setting."""

    def __init__(self, path: str, setting: dict[str, Any]) -> None:
        self._states: list[torch.Tensor] = []
        self._nearest = False
        self._engine = vllm.LLM(path, **PLAIN, **setting)
        self._engine.apply_model(self._watch)

    def logits(self, tokens: list[int], *, nearest: bool) -> np.ndarray:
        """Return the logits of each position of a text, read at once."""
        self._states.clear()
        self._nearest = nearest
        once = vllm.SamplingParams(max_tokens=1, detokenize=False)
        self._engine.generate({"prompt_token_ids": tokens}, once, use_tqdm=False)
        [states] = self._states
        [found] = self._engine.apply_model(lambda model: model.compute_logits(states))
        return np.array(found)

    def _watch(self, model: Any) -> None:
        def keep(module: Any, args: Any, states: torch.Tensor) -> None:
            self._states.append(states.clone())

        model.register_forward_hook(keep)
        for layer in model.modules():
            if kind := TYPES.get(getattr(layer, "kv_cache_dtype", "")):
                layer.impl.do_kv_cache_update = self._storing(layer.impl.do_kv_cache_update, kind)

    def _storing(self, store: Any, kind: torch.dtype) -> Any:
        def stored(layer: Any, keys: torch.Tensor, values: torch.Tensor, *place: Any) -> None:
            if self._nearest:
                largest = torch.finfo(kind).max
                keys, values = (
                    one.clamp(-largest, largest).to(kind).to(one.dtype) for one in (keys, values)
                )
            store(layer, keys, values, *place)

        return stored


@cache
def loaded(path: str, setting: str) -> Engine:
    return Engine(path, json.loads(setting))


def logits(job: Job, setting: dict[str, Any], tokens: np.ndarray) -> np.ndarray:
    """Return the logits of each position of a text with a cache of this setting."""
    words = {**setting}
    nearest = words.pop("nearest", False)
    return loaded(job["model"], json.dumps(words)).logits(tokens.tolist(), nearest=nearest)


def given_back(numbers: np.ndarray, name: str) -> np.ndarray:
    """Return rows of float32 as the kernel for CPUs stores values."""
    rows = torch.from_numpy(numbers)[:, None]
    count, _, dim = rows.shape
    stored = torch.zeros(count // BLOCK, 1, 2 * BLOCK, dim, dtype=torch.uint8)
    keys, values = stored.chunk(2, dim=2)
    places = torch.arange(count)
    kernels.cpu_attn_reshape_and_cache(
        rows, rows, keys, values, places, "vec", k_scale=1.0, v_scale=1.0, kv_cache_dtype=name
    )
    return values.contiguous().view(TYPES[name]).float().view(count, dim).numpy()


if __name__ == "__main__":
    if sys.argv[1].endswith(".npy"):
        rows = np.load(sys.argv[1])
        np.savez(sys.argv[2], **{name: given_back(rows, name) for name in TYPES})
    else:
        run(logits)
