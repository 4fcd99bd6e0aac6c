"""Calls of `generate()` over one model: the answer of each, and all that it may leave behind.

As a program it makes each call in a process that has made no other: what `tests/unit/runtime/
test_soak.py` compares long histories with.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import hashlib
import json
import multiprocessing
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import runtime_oracle as oracle
import torch
from prompt_runs import padding_mask
from scorer_oracle import SCORERS
from transformers import AttentionInterface

import kvalloc
from kvalloc.errors import KVAllocError
from kvalloc.prompts.texts import Prompt
from kvalloc.runtime.policies import policy_names

Call = tuple[str, str]
"""A way to reduce the cache and a shape of the prompt, by name."""

CONTEXT, NEW = 60, 20


def break_off(ids: torch.Tensor, scores: object) -> bool:
    """Raise what the caller's own code may raise amid an answer."""
    raise ConnectionError("half-way")


SHAPES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "one row": ((CONTEXT,), {}),
    "two rows": ((CONTEXT,) * 2, {}),
    "padded rows": ((CONTEXT, 49, 38), {}),
    "longer": ((2 * CONTEXT,), {}),
    "chunks": ((CONTEXT,), {"prefill_chunk_size": 25}),
    "beams": ((CONTEXT,), {"num_beams": 2}),
    "broken off": ((CONTEXT,), {"stopping_criteria": [break_off]}),
}
"""Tokens of each row, and options of `generate`."""


class Soak:
    """The tiny model, every way to reduce its cache, and a file that is fitted to it."""

    def __init__(self, fitted: Path) -> None:
        self.model: Any = oracle.tiny_model()
        if not fitted.exists():
            ids = [oracle.prompt(CONTEXT, seed=seed)[0].tolist() for seed in range(4)]
            prompts = [Prompt(token_ids=tuple(own)) for own in ids]
            kvalloc.fit(self.model, None, prompts, output=fitted, context=CONTEXT, samples=4)
        layer = oracle.make_profile(self.model, CONTEXT, 0.4)
        head = oracle.by_head(layer)
        packed = {n: head.replace(bits=np.full_like(head.budgets, n)) for n in (8, 5, 4, 3, 2)}
        names = [*policy_names(), *SCORERS, f"surrogate:file={fitted}"]
        self.ways: dict[str, dict[str, Any] | None] = {
            "no kvalloc": None,
            "layer": {"profile": layer},
            **{f"{n} bits": {"profile": profile} for n, profile in packed.items()},
            **{name.partition("=")[0]: {"profile": head, "policy": name} for name in names},
            "every 3": {"profile": head, "decode_every": 3},
            "every 3, 4 bits": {"profile": packed[4], "decode_every": 3},
            "every 3, deferred": {"profile": head, "policy": "reconstruction", "decode_every": 3},
            "each prompt": {"target_retention": 0.8, "level": "head"},
            "each prompt, a solver": {"budget": "40%", "solver": "uniform", "scorer": "h2o"},
            **{f"default {share}": {"budget": share} for share in ("15%", "20%", "30%", "60%")},
            "default, fitted": {"budget": "40%", "fitted": fitted},
            "default, every 3": {"budget": "40%", "decode_every": 3},
        }

    def answer(self, way: str, shape: str) -> str:
        """Return the digest of an answer's tokens, logits and bytes, or why there are none."""
        lengths, options = SHAPES[shape]
        ids = oracle.prompt(max(lengths), len(lengths), seed=len(shape))
        # A model for each thread that shares all modules: `apply` changes its attribute `generate`.
        model, reduced = copy.copy(self.model), self.ways[way]
        options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, **options}
        options |= {"return_dict_in_generate": True, "output_logits": True, "pad_token_id": 0}
        try:
            with nullcontext() if reduced is None else kvalloc.apply(model, **reduced) as applied:
                output = model.generate(ids, attention_mask=padding_mask(lengths), **options)
        except (KVAllocError, ConnectionError) as error:
            return f"{type(error).__name__}: {error}"
        cache = getattr(applied, "last_cache", None)
        digest = hashlib.sha256(b"" if cache is None else b"%d" % cache.retained_bytes)
        for tensor in (output.sequences, *output.logits):
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()

    def alone(self, call: Call) -> str:
        """Return what a call answers in a copy of this process."""
        queue = multiprocessing.SimpleQueue()
        process = multiprocessing.Process(target=lambda: queue.put(self.answer(*call)))
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"{call} ended with {process.exitcode}")
        return str(queue.get())

    def differing(self, calls: list[Call], expected: dict[Call, str], threads: int) -> set[Call]:
        """Return the calls that do not answer as expected, made by several threads at once."""
        with ThreadPoolExecutor(threads) as pool:
            answers = [*pool.map(lambda call: self.answer(*call), calls)]
        return {call for call, one in zip(calls, answers, strict=True) if expected[call] != one}

    def left_behind(self) -> dict[str, object]:
        """Return all that a call may change and has to put back."""
        gc.collect()  # an error holds the frames that it came through, and they the cache
        return {
            "modules": {
                (name, key): [*value] if key.endswith("_hooks") else type(value)
                for name, module in self.model.named_modules()
                for key, value in vars(module).items()
            },
            "config": self.model.config.to_dict(),
            "attention": self.model.config._attn_implementation,
            "generation": self.model.generation_config.to_dict(),
            "registered": sorted(AttentionInterface._global_mapping),
            "settings": (torch.get_default_dtype(), torch.is_grad_enabled()),
            "threads": threading.active_count(),
            "open files": len(os.listdir("/proc/self/fd")),
            "tensors": sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects()),
        }


def resident_bytes() -> int:
    """Return the memory that is resident once what is free has been given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = Path("/proc/self/statm").read_text("ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGESIZE")


if __name__ == "__main__":
    file, known = sys.argv[1:]
    torch.set_num_threads(1)
    print(json.dumps([*map(Soak(Path(file)).alone, json.loads(known))]))
