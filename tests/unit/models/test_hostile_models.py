"""Model folders and GGUF files that were made to do harm: no code runs, nothing outside is read."""

from __future__ import annotations

import itertools
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import hostile_files
import pytest
import torch
import transformers
from cli_tools import save_tiny_model
from tiny_models import tiny_model

from kvalloc.errors import UnsupportedModelError
from kvalloc.models.loading import load_model, shape_of

pytestmark = pytest.mark.fuzz


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, hostile_files.Kind]:
    every = hostile_files.make_kinds(tmp_path_factory.mktemp("sound"), models=True)
    return {name: every[name] for name in ("model folder", "GGUF")}


def test_model_files_made_by_chance_are_refused_or_read(
    kinds: dict[str, hostile_files.Kind],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    count = max(10, request.config.getoption("--hostile-files") // 5)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVALLOC_CACHE", str(tmp_path))
    found = hostile_files.run_many(
        kinds, tmp_path, 0, itertools.count(), lambda so_far: so_far.by_kind.total() < count
    )
    assert found.crashes == []
    assert {outcome for _, outcome in found.by_kind} == {"refused", "read"}


def planted(folder: Path, **config: Any) -> Path:
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


def test_a_model_with_code_of_its_own_is_refused_and_nobody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)  # whoever asks fails
    folder = planted(tmp_path / "own", model_type="mine", architectures=["Mine"])
    with pytest.raises(UnsupportedModelError, match="brings code of its own, which kvalloc does"):
        load_model(folder)
    assert not (folder / "ran").exists()


def test_code_beside_a_known_model_is_not_run(tmp_path: Path) -> None:
    folder = planted(tmp_path / "llama")
    assert shape_of(load_model(folder).model).n_layers == 3
    assert not (folder / "ran").exists()


def test_every_loader_says_that_foreign_code_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []
    for kind in (transformers.AutoTokenizer, transformers.AutoModelForCausalLM):
        real = kind.from_pretrained

        def noted(*names: Any, real: Any = real, **options: Any) -> Any:
            given.append(options.get("trust_remote_code"))
            return real(*names, **options)

        monkeypatch.setattr(kind, "from_pretrained", noted)
    monkeypatch.setenv("KVALLOC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tiny.gguf").write_bytes(hostile_files.tiny_gguf(tmp_path))
    load_model(save_tiny_model(tmp_path / "tiny", tiny_model()))
    load_model(tmp_path / "tiny.gguf")
    assert given == [False] * 6


class _Harm:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return open, (str(self.trace), "w")


def test_weights_that_are_a_pickle_run_nothing(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "tiny", tiny_model())
    (folder / "model.safetensors").unlink()
    torch.save({"x": _Harm(tmp_path / "ran")}, folder / "pytorch_model.bin", pickle_module=pickle)
    with pytest.raises(UnsupportedModelError, match="cannot be loaded"):
        load_model(folder)
    assert not (tmp_path / "ran").exists()


def test_a_broken_gguf_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVALLOC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "m.gguf").write_bytes(hostile_files.tiny_gguf(tmp_path)[:21])
    with pytest.raises(UnsupportedModelError, match=r"cannot read m\.gguf"):
        load_model(tmp_path / "m.gguf")
    assert not list((tmp_path / "cache" / "gguf").iterdir())


@pytest.mark.parametrize("name", ["num_hidden_layers", "intermediate_size", "vocab_size"])
def test_a_config_of_a_huge_model_is_refused_before_it_is_made(tmp_path: Path, name: str) -> None:
    folder = save_tiny_model(tmp_path / "tiny", tiny_model())
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stated, name: 2**31}))
    with pytest.raises(UnsupportedModelError, match="numbers, and its weights have .* bytes"):
        load_model(folder)


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/outside.safetensors"])
def test_weights_are_not_read_from_outside_the_folder(tmp_path: Path, shard: str) -> None:
    folder = save_tiny_model(tmp_path / "tiny", tiny_model())
    outside = tmp_path / "outside.safetensors"
    (folder / "model.safetensors").rename(outside)
    place = str(outside) if shard.startswith("/") else shard
    names = [name for name, _ in tiny_model().named_parameters()]
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, place)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedModelError, match="outside of its folder"):
        load_model(folder)
