"""A tiny random model of each family of transformers that people run, and prompts with images.

`families.json` has the class of each model and of its config, and its settings.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

_TABLES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
TEXT_ONLY: dict[str, dict[str, Any]] = _TABLES["text only"]
WITH_IMAGES: dict[str, dict[str, Any]] = _TABLES["with images"]
FOR_ATTENTION: dict[str, dict[str, Any]] = _TABLES["for attention"]
IMAGE = 120
"""The token that stands for a piece of an image."""


def family(name: str) -> Any:
    """Return a random model; skip the test if this transformers has no such family."""
    made = (TEXT_ONLY | WITH_IMAGES | FOR_ATTENTION)[name]
    if not hasattr(transformers, made["model"]):
        pytest.skip(f"this transformers has no {made['model']}")
    settings = made["settings"]
    if "text" in made:
        text = getattr(transformers, made["text"]["config"])
        text = text(**_TABLES["all"] | made["text"]["settings"])
        settings = settings | {"text_config": text.to_dict()}
    else:
        settings = _TABLES["all"] | settings
    torch.manual_seed(0)
    config = getattr(transformers, made["config"])(**settings)
    model = getattr(transformers, made["model"])(config).eval()
    config = model.config.get_text_config()
    if (
        getattr(config, "num_kv_shared_layers", None) == 0
        and not transformers.DynamicCache(config=config).layers
    ):
        pytest.skip("this transformers caches no layer if none is shared")
    if name in FOR_ATTENTION and not model._supports_attention_backend:
        pytest.skip(f"this transformers shows no attention of {name}")
    takes = inspect.signature(model.forward).parameters
    if "image_grid_thw" in takes and "mm_token_type_ids" not in takes:
        pytest.skip("this transformers takes positions of another batch after a generate()")
    return model


def with_image(name: str, ids: torch.Tensor) -> dict[str, Any]:
    """Return a prompt with an image at its fifth token."""
    ids, n_rows, image = ids.clone(), len(ids), WITH_IMAGES[name].get("image", {})
    ids[:, 3] = image.get("start", ids[:, 3])
    ids[:, 4 : 4 + image.get("tokens", 1)] = IMAGE
    pixels = torch.randn(n_rows, *image.get("pixels", (3, 28, 28)))
    prompt: dict[str, Any] = {"input_ids": ids, "pixel_values": pixels}
    if "grid" in image:
        prompt |= {"pixel_values": pixels.flatten(0, 1)}
        prompt |= {"image_grid_thw": torch.tensor([image["grid"]] * n_rows)}
    if "patches" in image:
        places = torch.cartesian_prod(*(torch.arange(n) for n in image["patches"]))
        prompt["image_position_ids"] = places.expand(n_rows, -1, -1)
    if "sizes" in image:
        prompt["image_sizes"] = torch.tensor([image["sizes"]] * n_rows)
    if "types" in image:
        prompt[image["types"]] = (ids == IMAGE).long()
    return prompt


class Factor(torch.nn.Module):
    """Multiplies states by numbers that are no weight of a norm."""

    def __init__(self, numbers):
        super().__init__()
        self.numbers = numbers.detach()

    def forward(self, states):
        return states * self.numbers
