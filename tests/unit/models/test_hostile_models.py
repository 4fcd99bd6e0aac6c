"""Model folders and GGUF files that were made to do harm: no code runs, nothing outside is read."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from cli_tools import save_tiny_model
from hostile_files import outcomes
from tiny_models import tiny_model

from kvalloc.errors import UnsupportedModelError
from kvalloc.models.loading import load_model, shape_of

pytestmark = pytest.mark.fuzz

INDEX = "model.safetensors.index.json"


WRITTEN = ("config.json", "tokenizer.json", "tokenizer_config.json", INDEX)


def tiny_gguf(folder):
    """A llama of one layer in GGUF's form."""
    import gguf

    file = folder / "tiny.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    hidden, words = 32, ["<unk>", "<s>", "</s>", *map(chr, range(97, 123)), "ab", "cd", "ef"]
    for name, value in {
        **{f"{name}_length": hidden for name in ("context", "embedding", "feed_forward")},
        **{"block_count": 1, "head_count": 4, "head_count_kv": 2, "rope_dimension_count": 8},
        **{"layer_norm_rms_eps": 1e-5, "vocab_size": len(words), "tokenizer_model": "llama"},
        **{"token_list": words, "token_scores": [0.0] * len(words)},
        **{"token_types": [2, 3, 3, *[1] * (len(words) - 3)], "bos_token_id": 1, "eos_token_id": 2},
    }.items():
        getattr(writer, f"add_{name}")(value)
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd": (len(words), hidden),
        "output_norm": (hidden,),
        "output": (len(words), hidden),
        **{f"blk.0.{name}_norm": (hidden,) for name in ("attn", "ffn")},
        **{f"blk.0.attn_{name}": (hidden, hidden) for name in ("q", "output")},
        **{f"blk.0.attn_{name}": (hidden // 2, hidden) for name in ("k", "v")},
        **{f"blk.0.ffn_{name}": (hidden, hidden) for name in ("gate", "up", "down")},
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    content = file.read_bytes()
    file.unlink()
    return content


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """Return a kind for each JSON file of a model's folder, and GGUF."""
    folder, model = save_tiny_model(tmp_path_factory.mktemp("sound"), tiny_model()), tiny_model()
    index = dict.fromkeys((name for name, _ in model.named_parameters()), "weights.safetensors")
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}

    def read(path, name):
        changed = path.with_name("model")
        changed.mkdir(exist_ok=True)
        for file, content in {**whole, name: path.read_bytes()}.items():
            (changed / file).write_bytes(content)
        return shape_of(load_model(changed).model)

    def read_gguf(path):
        try:
            return shape_of(load_model(path.rename(path.with_suffix(".gguf"))).model)
        finally:
            shutil.rmtree(path.with_name("cache"), ignore_errors=True)

    gguf = tiny_gguf(tmp_path_factory.mktemp("gguf"))
    return {
        **{name: ((whole[name],), partial(read, name=name)) for name in WRITTEN},
        "GGUF": ((gguf,), read_gguf),
    }


def test_model_files_made_by_chance_are_refused_or_read(kinds, tmp_path, monkeypatch, request):
    count = request.config.getoption("--hostile-files")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVALLOC_CACHE", str(tmp_path / "cache"))
    found = Counter()
    for name, kind in kinds.items():
        found += outcomes(name, kind, tmp_path / "hostile", max(5, count // 25))
    assert found["refused"]
    assert found["read"]


def planted(folder, **config):
    """A model's folder with Python files that leave a trace when they run."""
    save_tiny_model(folder, tiny_model())
    code = f"open({str(folder / 'ran')!r}, 'w')\nclass Mine: ...\n"
    (folder / "own.py").write_text(code)
    for name, classes in (
        ("config.json", {"AutoConfig": "own.Mine", "AutoModelForCausalLM": "own.Mine"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["own.Mine", None]}),
    ):
        stated = json.loads((folder / name).read_text())
        changed = {**stated, "auto_map": classes, **(config if name == "config.json" else {})}
        (folder / name).write_text(json.dumps(changed))
    return folder


def test_a_model_with_code_of_its_own_is_refused_and_nobody_is_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)  # whoever asks fails
    folder = planted(tmp_path / "own", model_type="mine", architectures=["Mine"])
    with pytest.raises(UnsupportedModelError, match="brings code of its own, which kvalloc does"):
        load_model(folder)
    assert not (folder / "ran").exists()


def test_code_beside_a_known_model_is_not_run(tmp_path):
    folder = planted(tmp_path / "llama")
    assert shape_of(load_model(folder).model).n_layers == 3
    assert not (folder / "ran").exists()


def test_every_loader_says_that_foreign_code_is_not_run(tmp_path, monkeypatch):
    given = []
    for kind in (transformers.AutoTokenizer, transformers.AutoModelForCausalLM):
        real = kind.from_pretrained

        def noted(*names, real=real, **options):
            given.append(options.get("trust_remote_code"))
            return real(*names, **options)

        monkeypatch.setattr(kind, "from_pretrained", noted)
    monkeypatch.setenv("KVALLOC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tiny.gguf").write_bytes(tiny_gguf(tmp_path))
    load_model(save_tiny_model(tmp_path / "tiny", tiny_model()))
    load_model(tmp_path / "tiny.gguf")
    assert given == [False] * 6


class _Harm:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return open, (str(self.trace), "w")


def test_weights_that_are_a_pickle_run_nothing(tmp_path):
    folder = save_tiny_model(tmp_path / "tiny", tiny_model())
    (folder / "model.safetensors").unlink()
    torch.save({"x": _Harm(tmp_path / "ran")}, folder / "pytorch_model.bin", pickle_module=pickle)
    with pytest.raises(UnsupportedModelError, match="cannot be loaded"):
        load_model(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["num_hidden_layers", "intermediate_size", "vocab_size"])
def test_a_config_of_a_huge_model_is_refused_before_it_is_made(tmp_path, name):
    folder = save_tiny_model(tmp_path / "tiny", tiny_model())
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stated, name: 2**31}))
    with pytest.raises(UnsupportedModelError, match="numbers, and its weights have .* bytes"):
        load_model(folder)


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/outside.safetensors"])
def test_weights_are_not_read_from_outside_the_folder(tmp_path, shard):
    folder = save_tiny_model(tmp_path / "tiny", tiny_model())
    outside = tmp_path / "outside.safetensors"
    (folder / "model.safetensors").rename(outside)
    place = str(outside) if shard.startswith("/") else shard
    names = [name for name, _ in tiny_model().named_parameters()]
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, place)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedModelError, match="outside of its folder"):
        load_model(folder)
