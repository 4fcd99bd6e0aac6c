"""``kvalloc.apply``: how long it lasts, what it takes, and what it refuses on entering."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from prompt_runs import CONTEXT, SINKS, TARGET, applied, generate
from transformers import DynamicCache

import kvalloc
from kvalloc.errors import InputError, KVAllocError, UnsupportedRequestError
from kvalloc.runtime.hooks import hooked_models


@pytest.fixture
def model(tiny: ModuleType) -> Any:
    return tiny.tiny_model()


def test_the_model_is_as_before(tiny: ModuleType, model: Any) -> None:
    gc.collect()  # what earlier tests left in cycles is not counted
    before, ids = hooked_models(), tiny.prompt(CONTEXT)
    plain = generate(model, ids)
    assert applied(model, ids, target_retention=0.6, **TARGET) is not None
    gc.collect()
    assert hooked_models() == before
    assert "generate" not in vars(model)
    assert torch.equal(generate(model, ids), plain)


def test_a_plain_call_lasts_until_it_is_removed(tiny: ModuleType, model: Any) -> None:
    ids = tiny.prompt(CONTEXT)
    earlier = kvalloc.apply(model, target_retention=0.6, **TARGET)
    later = kvalloc.apply(model, tiny.make_profile(model, CONTEXT, 0.3))
    generate(model, ids)
    assert (earlier.last_cache, later.last_cache is None) == (None, False)
    earlier.remove()  # below the later one, which goes on
    generate(model, ids)
    later.remove()
    later.remove()
    assert "generate" not in vars(model)
    generate(model, ids, past_key_values=DynamicCache(config=model.config))
    assert earlier.last_cache is None
    with pytest.raises(UnsupportedRequestError, match="apply\\(\\) again"), earlier:
        pass


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def saved(model: Any) -> Any:
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved, copy.copy])
def test_a_copy_is_a_plain_model_of_its_own(tiny: ModuleType, model: Any, copied: Any) -> None:
    """With its own weights, inside and after; of a shallow one only what it shares is not."""
    ids, profile = tiny.prompt(CONTEXT), tiny.make_profile(model, CONTEXT, 0.3)
    expected = generate(model, ids)
    with kvalloc.apply(model, profile) as earlier, kvalloc.apply(model, profile) as applied:
        earlier.remove()  # below the later one, which goes on
        generate(model, ids)
        last, twin = applied.last_cache, copied(model)
        assert "generate" not in vars(twin)
        assert "__getstate__" not in vars(twin)
        if copied is not copy.copy:
            with torch.no_grad():
                model.lm_head.weight.neg_()
            assert b"kvalloc" not in pickle.dumps(twin)
        assert torch.equal(generate(twin, ids), expected)
        assert applied.last_cache is last
        if copied is not copy.copy:
            assert not torch.equal(generate(model, ids), expected)
            with kvalloc.apply(twin, profile) as own:
                generate(twin, ids)
            assert own.last_cache is not None
    assert "__getstate__" not in vars(model)
    assert torch.equal(generate(twin, ids), expected)


def test_a_copy_keeps_a_generate_that_was_the_user_s(tiny: ModuleType, model: Any) -> None:
    model.generate = pickled
    with kvalloc.apply(model, tiny.make_profile(model, CONTEXT, 0.3)):
        assert copy.deepcopy(model).generate is pickled
        assert model.generate is not pickled
    assert model.generate is pickled


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "no target"),
        ({"target_retention": 1.2}, "retention of 1.2"),
        ({"target_retention": 0.9, "budget": "20%"}, "two targets"),
        ({"target_retention": 0.9, "solver": "none"}, "no solver 'none'"),
        ({"target_retention": 0.9, "scorer": "none"}, "no scorer 'none'"),
        ({"target_retention": 0.9, "sinks": -1}, "sinks is -1"),
        ({"target_retention": 0.9, "measured_tokens": 12}, "measured_tokens is 12"),
        ({"target_retention": 0.9, "level": "model"}, "level is 'model'"),
        ({"target_retention": 0.9, "adapt": 0.2}, "stored profile"),
        ({"target_retention": 0.9, "decode_every": 0}, "decode_every is 0"),
        ({"target_retention": 0.9, "policy": "none"}, "no policy or scorer 'none'"),
        ({"target_retention": 0.9, "allow_other_model": True}, "allow_other_model accepts the st"),
        ({"target_loss": 0.1}, "target_loss cannot be asked of each prompt"),
        ({"budget": "20%", "bits": "16,8"}, "bits cannot be asked of each prompt"),
        ({"budget": "20%", "sink": 3}, "no option 'sink'"),
        ({"compression_ratio": 0.8}, "name the share that stays: budget='20%'"),
    ],
)
def test_targets_that_cannot_be_are_refused_on_entering(
    model: Any, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(KVAllocError, match=match):
        kvalloc.apply(model, **options)
    assert "generate" not in vars(model)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"target_retention": 0.9}, "two decisions at once"),
        ({"solver": "greedy"}, "solver are two decisions"),
        ({"adapt": 2}, "adapt is 2"),
        ({"measured_tokens": 40}, "leave out measured_tokens"),
        ({"adapt": 0.2, "measured_tokens": 6}, "measured_tokens is 6"),
    ],
)
def test_what_does_not_go_with_a_profile_is_refused(
    tiny: ModuleType, model: Any, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(InputError, match=match):
        kvalloc.apply(model, tiny.make_profile(model, CONTEXT, 0.3), **options)
    with pytest.raises(InputError, match="give adapt"):
        tiny.make_profile(model, CONTEXT, 0.3).cache(model, measured_tokens=40)


def test_apply_takes_the_file_or_the_name_of_a_profile(
    tiny: ModuleType, model: Any, tmp_path: Path
) -> None:
    profile = tiny.make_profile(model, CONTEXT, 0.4, sinks=SINKS)
    profile.save(tmp_path / "p.json")
    ids = tiny.prompt(CONTEXT)
    for given in (tmp_path / "p.json", str(tmp_path / "p.json")):
        assert applied(model, ids, given).retained_bytes == profile.retained_bytes_at(CONTEXT)
    with pytest.raises(KVAllocError, match="SmolLM2"):
        kvalloc.apply(model, "smollm2-135m-instruct-bits-20")
    with pytest.raises(InputError, match="the profile is a int, expected a BudgetProfile"):
        kvalloc.apply(model, 3)
