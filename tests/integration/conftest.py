"""Tiny models on disk, text, and profiles of them, for the tests of commands that run a model."""

from __future__ import annotations

from typing import Any

import pytest
from cli_tools import CLI_CONTEXT, prose, save_tiny_model, succeed
from factories import make_scores, make_shape
from tiny_models import tiny_model
from transformers import MambaConfig, MambaForCausalLM

_LOADED: dict[tuple[object, ...], Any] = {}


@pytest.fixture(scope="module", autouse=True)
def demo_is_loaded_once():
    """Commands leave a model as it was, so all of a process may have the same one."""
    from kvalloc.models import loading

    load = loading.load_model

    def loaded(source: object, **options: Any) -> Any:
        asked = {name: given for name, given in options.items() if name != "notify"}
        if source != loading.DEMO or asked.get("attention"):
            return load(source, **options)
        key = asked.get("dtype", "float32"), asked.get("device")
        if key not in _LOADED:
            _LOADED[key] = load(source, **options)
        return _LOADED[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load_model", loaded)
        yield


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A folder of model folders."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny_model(folder / "tiny", tiny_model())
    save_tiny_model(folder / "twin", tiny_model(seed=1))
    save_tiny_model(folder / "chatty", tiny_model(), chat=True)
    save_tiny_model(folder / "deeper", tiny_model(num_hidden_layers=4))
    save_tiny_model(folder / "gemma", tiny_model("gemma3"))
    save_tiny_model(
        folder / "mamba",
        MambaForCausalLM(
            MambaConfig(vocab_size=101, hidden_size=16, state_size=4, num_hidden_layers=2)
        ),
    )
    return folder


@pytest.fixture
def scores(tmp_path):
    """A made-up score profile in a folder of its own."""
    path = tmp_path / "s.safetensors"
    make_scores(shape=make_shape(max_context_tokens=500)).save(path)
    return path


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text.txt").write_text(prose(1000))
    (tmp_path / "prompt.txt").write_text(prose(100))
    return tmp_path


@pytest.fixture(scope="session")
def profiles(models, tmp_path_factory):
    """Profiles of the tiny model: s.safetensors, and p.json at half of all entries."""
    folder = tmp_path_factory.mktemp("profiles")
    (folder / "text.txt").write_text(prose(1000))
    arguments = ("--text", folder / "text.txt", "--context", CLI_CONTEXT, "--samples", 2)
    for name in ("tiny", "gemma"):
        scores = folder / f"{name}.safetensors"
        succeed("profile", models / name, *arguments, "-o", scores)
        budget = ("--budget", "50%", "--quiet")
        succeed("solve", scores, *budget, "-o", folder / f"{name}.json")
        head = (*budget, "--level", "head")
        succeed("solve", scores, *head, "-o", folder / f"{name}-head.json")
    return folder
