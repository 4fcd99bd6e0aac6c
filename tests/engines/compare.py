"""How far the predictions of an engine move with a setting of its cache; numpy alone.

It runs in the environment of an engine, which has no torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Job = dict[str, Any]
"""What a worker is told: `model`, a path; `tokens`, lists of int, (n_texts, n_tokens); `reference`
and `settings` by name, each what the worker's `logits` takes; and what one engine needs besides."""

Logits = Callable[[Job, Any, np.ndarray], np.ndarray]
"""``logits(job, setting, tokens)``: of each position of a text, (n_tokens, vocabulary)."""


def run(logits: Logits) -> None:
    """Read the job that the command line names, compare each setting with the reference, and write.

    The second argument is the file: KL and agreement of each position, ``NAME`` and ``NAME.same``,
    (n_texts, n_tokens), and ``nll``, the loss of the reference on the text's next tokens.
    """
    job: Job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    found: dict[str, list[np.ndarray]] = {}
    for ids in job["tokens"]:
        tokens = np.array(ids, np.int32)
        full = log_probabilities(logits(job, job["reference"], tokens))
        found.setdefault("nll", []).append(-full[np.arange(tokens.size - 1), tokens[1:]])
        for name, setting in job["settings"].items():
            reduced = log_probabilities(logits(job, setting, tokens))
            kls = np.einsum("tv,tv->t", np.exp(full), full - reduced, dtype=np.float64)
            found.setdefault(name, []).append(kls)
            same = full.argmax(axis=-1) == reduced.argmax(axis=-1)
            found.setdefault(f"{name}.same", []).append(same)
    np.savez(sys.argv[2], **{name: np.stack(rows) for name, rows in found.items()})


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """Return the log-softmax of rows, in float32."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    sums = np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)
    return shifted - np.log(sums).astype(np.float32)
