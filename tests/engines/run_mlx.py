"""mlx-lm with a list of caches by layer.

run_mlx.py JOB.json OUT.npz       predictions
run_mlx.py NUMBERS.npy OUT.npz    rows of numbers, as each format gives them back

A setting is a list of [bits, group], one a layer; 16 bits are mlx-lm's own cache.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from compare import Job, run
from mlx_lm.models.cache import KVCache, QuantizedKVCache
from mlx_lm.utils import load_model


@cache
def loaded(path: str) -> Any:
    """Return the model of a folder, without its tokenizer."""
    config = json.loads(Path(path, "config.json").read_text(encoding="utf-8"))
    # transformers 5 writes the base of RoPE where mlx-lm 0.32 does not look for it
    return load_model(Path(path), model_config=config["rope_parameters"])[0]


def logits(job: Job, setting: Sequence[Sequence[int]], tokens: np.ndarray) -> np.ndarray:
    """Return the logits of each position of a text, read at once."""
    caches = [
        KVCache() if bits == 16 else QuantizedKVCache(group_size=group, bits=bits)
        for bits, group in setting
    ]
    result = loaded(job["model"])(mx.array(tokens)[None], cache=caches)[0]
    return np.array(result.astype(mx.float32))


def given_back(numbers: np.ndarray, bits: int, group: int) -> np.ndarray:
    """Return rows of float32 as mlx's affine quantisation gives them back."""
    stored = mx.quantize(mx.array(numbers), group_size=group, bits=bits)
    return np.array(mx.dequantize(*stored, group_size=group, bits=bits))


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    if sys.argv[1].endswith(".npy"):
        rows = np.load(sys.argv[1])
        pairs = [(8, 64), (6, 64), (4, 32), (4, 64), (3, 64), (2, 64)]
        np.savez(sys.argv[2], **{f"mlx_{b}_{g}": given_back(rows, b, g) for b, g in pairs})
    else:
        run(logits)
