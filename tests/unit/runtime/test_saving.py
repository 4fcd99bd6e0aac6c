"""A cache in a file: the same answers later, and no answers from what cannot be trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import runtime_oracle as tiny
import torch
from prompt_runs import run
from safetensors import safe_open
from safetensors.torch import save_file

import kvalloc
from kvalloc.errors import ModelMismatchError, ProfileFileError

CONTEXT = 150


def saved(model: Any, path: Path, level: str = "head") -> Any:
    profile = tiny.make_profile(model, CONTEXT, 0.5)
    cache = kvalloc.make_cache(model, tiny.by_head(profile, 40) if level == "head" else profile)
    run(model, tiny.prompt(CONTEXT), cache)
    cache.save(path)
    return cache


@pytest.mark.parametrize("every", [None, 20])
@pytest.mark.parametrize("scorer", ["xkv", "lookahead"])
def test_a_loaded_conversation_keeps_what_the_saved_one_keeps(
    tmp_path: Path, scorer: str, every: int | None
) -> None:
    """Saved between two turns of which the later ones let all that is kept compete again."""
    model = tiny.tiny_model()
    profile = tiny.make_profile(model, CONTEXT, 0.5, scorer=scorer)
    cache = kvalloc.make_cache(model, profile, decode_every=every)
    for tokens in (CONTEXT, 30):
        run(model, tiny.prompt(tokens, 2), cache)
    cache.evict()
    cache.save(tmp_path / "c.safetensors")
    loaded = kvalloc.load_cache(tmp_path / "c.safetensors", model)
    for turn, tokens in enumerate((30, 10, 15, 70)):
        question = tiny.prompt(tokens, 2, seed=turn)
        assert torch.equal(run(model, question, loaded), run(model, question, cache))
        assert tiny.same_kept(loaded, cache)
        assert (loaded.kept_tokens == cache.kept_tokens).all()


def test_other_weights_may_be_allowed_but_not_other_sizes(tmp_path: Path) -> None:
    model, path = tiny.tiny_model(), tmp_path / "c.safetensors"
    saved(model, path)
    tuned = tiny.copy.deepcopy(model)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.mul_(1.001)
    assert kvalloc.load_cache(path, tuned, allow_other_model=True).get_seq_length() == CONTEXT
    with pytest.raises(ModelMismatchError):
        kvalloc.load_cache(path, tiny.tiny_model(num_hidden_layers=3), allow_other_model=True)


def edited(source: Path, target: Path, change: Any) -> Path:
    with safe_open(source, framework="pt") as file:
        header = json.loads(file.metadata()["kvalloc_cache"])
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    change(header, tensors)
    save_file(tensors, target, metadata={"kvalloc_cache": json.dumps(header)})
    return target


EDITS: list[tuple[Any, str]] = [
    (lambda header, tensors: tensors["0.bits_16.kept_keys"].add_(1), "tensors"),
    (lambda header, tensors: tensors.pop("1.bits_16.kept_values"), "tensors"),
    (lambda header, tensors: header["profile"]["budgets"].reverse(), "profile"),
    (lambda header, tensors: header.pop("versions"), "versions is missing"),
    (lambda header, tensors: header.update(schema_version=99), "schema_version is 99"),
    (lambda header, tensors: header.update(seen_tokens=151), "digest of the content"),
    (lambda header, tensors: header.update(decode_every=0), "decode_every is 0"),
    (lambda header, tensors: header.update(batch="1"), "batch is 1, expected a valid integer"),
    (lambda header, tensors: header.update(row_profiles=[]), "expected one for each of 1 rows"),
    (lambda header, tensors: header.update(notes=[]), "notes"),
    (lambda header, tensors: header.update(profile=5), "profile.file is int"),
    (lambda header, tensors: header.update(kind="kvalloc.budget_profile"), "is a budget profile"),
    (lambda header, tensors: header.update(digest="0" * 64), "digest of the content"),
]


def test_files_that_were_changed_are_refused_by_their_field(tmp_path: Path) -> None:
    model, path = tiny.tiny_model(), tmp_path / "c.safetensors"
    saved(model, path)
    for change, named in EDITS:
        with pytest.raises(ProfileFileError) as caught:
            kvalloc.load_cache(edited(path, tmp_path / "e.safetensors", change), model)
        assert named in str(caught.value)
        assert "\n" not in str(caught.value)
        again = "read the prompt again and save the cache again"
        # it may be what it says it is
        assert again in str(caught.value) or "budget profile" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [("cut", "not readable as safetensors"), ("none", "missing"), ("other", "head")],
)
def test_files_that_hold_no_cache_are_refused(tmp_path: Path, name: str, said: str) -> None:
    model = tiny.tiny_model()
    saved(model, tmp_path / "c")
    (tmp_path / "cut").write_bytes((tmp_path / "c").read_bytes()[:-100])
    save_file({"a": torch.zeros(2)}, tmp_path / "other")
    with pytest.raises(ProfileFileError, match=said):
        kvalloc.load_cache(tmp_path / name, model)
