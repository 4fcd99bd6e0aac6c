"""mlx-lm with a list of caches by layer: run_mlx.py JOB.json OUT.npz.

A setting is a list of [bits, group], one a layer; 16 bits are mlx-lm's own cache.
"""

from __future__ import annotations

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
    return load_model(Path(path))[0]


def logits(job: Job, setting: Sequence[Sequence[int]], tokens: np.ndarray) -> np.ndarray:
    """Return the logits of each position of a text, read at once."""
    caches = [
        KVCache() if bits == 16 else QuantizedKVCache(group_size=group, bits=bits)
        for bits, group in setting
    ]
    result = loaded(job["model"])(mx.array(tokens)[None], cache=caches)[0]
    return np.array(result.astype(mx.float32))


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    run(logits)
