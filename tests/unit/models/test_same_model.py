"""A profile fits a model by what the model is, not by what its folder is called."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from kvalloc.errors import ModelMismatchError
from kvalloc.models.loading import shape_of


def of(seed: int, model_id: str = "someone/tiny", dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(seed)
    return shape_of(tiny_model("llama", seed=seed).to(dtype), model_id=model_id)


def test_identical_weights_fit_under_any_name() -> None:
    of(0).require_same_model(of(0, "renamed-folder"))
    of(0).require_same_model(of(0, "renamed-folder", torch.bfloat16))


def test_other_weights_are_refused_under_the_same_name() -> None:
    with pytest.raises(ModelMismatchError, match="has other weights; make a profile.*allow_other"):
        of(0).require_same_model(of(1))
    of(0).require_same_model(of(1), allow_other_model=True)


def test_where_weights_are_only_alike_the_name_decides() -> None:
    """float16 has no digest, and a fine-tune has another one; both have nearly the same signs."""
    half = of(0, dtype=torch.float16)
    assert half.weights_digest is None
    of(0).require_same_model(half)
    tuned = tiny_model("llama", seed=0)
    with torch.no_grad():
        for weight in tuned.parameters():
            weight += 0.01 * weight.std() * torch.randn_like(weight)
    of(0).require_same_model(shape_of(tuned, model_id="elsewhere/tiny"))
    for other in (of(0, "renamed", torch.float16), shape_of(tuned, model_id="tuned")):
        with pytest.raises(ModelMismatchError, match=r"the profile is for someone/tiny, but the"):
            of(0).require_same_model(other)


@pytest.mark.parametrize(("name", "value"), [("vocab_size", 7), ("rotary", '{"rope_theta": 1}')])
def test_another_config_is_another_model(name: str, value: Any) -> None:
    other = dataclasses.replace(of(0), **{name: value})
    with pytest.raises(ModelMismatchError, match=name):
        of(0).require_same_model(other, allow_other_model=True)
    of(0).require_same_model(dataclasses.replace(of(0), **{name: None}))
