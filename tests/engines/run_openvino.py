"""OpenVINO with K and V of a precision: run_openvino.py JOB.json OUT.npz.

The model is a GGUF file, which OpenVINO GenAI reads. A setting is what `compile_model` takes. A
text is read in steps: the tokens of one step see each other's K and V before they are rounded.
"""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from compare import Job, run

PLAIN = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
"""Nothing is rounded but what a setting says."""


@cache
def graph(path: str) -> Any:
    """Return the graph that OpenVINO GenAI makes of a GGUF file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, Path(path).name)
        file.symlink_to(path)
        openvino_genai.LLMPipeline(file, "CPU", enable_save_ov_model=True)
        return openvino.Core().read_model(Path(folder, "openvino_model.xml"))


@cache
def compiled(path: str, setting: str, threads: int) -> Any:
    config = {**PLAIN, "INFERENCE_NUM_THREADS": threads, **json.loads(setting)}
    return openvino.Core().compile_model(graph(path), "CPU", config)


def logits(job: Job, setting: dict[str, str], tokens: np.ndarray) -> np.ndarray:
    """Return the logits of each position of a text, read in steps."""
    model = compiled(job["model"], json.dumps(setting), job["threads"])
    request, found = model.create_infer_request(), []
    for start in range(0, tokens.size, job["step"]):
        ids = tokens[None, start : start + job["step"]].astype(np.int64)
        end = start + ids.size
        inputs = {
            "input_ids": ids,
            "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(start, end)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        request.infer(inputs)
        found.append(request.get_output_tensor(0).data[0].copy())
    return np.concatenate(found)


if __name__ == "__main__":
    run(logits)
