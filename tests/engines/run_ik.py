"""ik_llama.cpp by the bindings of its package: run_ik.py JOB.json OUT.npz.

A setting is words of its command line: -ctk, -ctv, their -first and -last, -khad and -vhad.
"""

from __future__ import annotations

import ctypes
from functools import cache

import ik_llama_cpp._ctypes_api as api
import numpy as np
from compare import Job, run
from run_llama import TYPES


@cache
def loaded(path: str) -> tuple[int, int]:
    """Return a model and the size of its vocabulary."""
    api.llama_backend_init()
    model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
    if not model:
        raise ValueError(f"ik_llama.cpp cannot load {path}")
    return model, api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))


def logits(job: Job, setting: str, tokens: np.ndarray) -> np.ndarray:
    """Return the logits of each position of a text with a cache of these words."""
    (model, vocabulary), count = loaded(job["model"]), tokens.size
    params = api.llama_context_default_params()
    params.n_ctx = params.n_batch = 256 * -(-count // 256)
    params.n_threads = params.n_threads_batch = job["threads"]
    params.flash_attn = params.logits_all = True
    words = setting.split()
    for letter in "kv":
        setattr(params, f"{letter}_cache_hadamard", f"-{letter}had" in words)
        for end in ("", "_first", "_last"):
            flag = f"-ct{letter}{end}".replace("_", "-")
            if flag in words:
                name, *n_layers = words[words.index(flag) + 1].split(",")
                setattr(params, f"type_{letter}{end}", TYPES[name])
                if end:
                    setattr(params, f"n_{letter}{end}", int(n_layers[0]))
    context = api.llama_init_from_model(model, params)
    if not context:
        raise ValueError(f"ik_llama.cpp makes no cache with {setting}")
    batch = api.llama_batch_init(count, 0, 1)
    batch.n_tokens = count
    for place, token in enumerate(tokens.tolist()):
        batch.token[place], batch.pos[place] = token, place
        batch.n_seq_id[place], batch.seq_id[place][0], batch.logits[place] = 1, 0, 1
    if code := api.llama_decode(context, batch):
        raise ValueError(f"llama_decode returned {code} with {setting}")
    first = ctypes.cast(api.llama_get_logits_ith(context, 0), ctypes.POINTER(ctypes.c_float))
    found = np.ctypeslib.as_array(first, (count, vocabulary)).copy()
    api.llama_batch_free(batch)
    api.llama_free(context)
    return found


if __name__ == "__main__":
    run(logits)
