"""A tiny random model of each name in transformers' mappings.

The defaults of a name's config are shrunk by rules that are the same for all names: the tables
`named_models.json` have values and largest values of fields; lists by layer are cut to the same
four layers, among which is each kind of attention. A name that needs something else has a row.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto

CAUSAL: Mapping[str, str] = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
WITH_IMAGES: Mapping[str, str] = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

_TABLES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_VALUES, _LARGEST, _ROWS = _TABLES["values"], _TABLES["largest"], _TABLES["rows"]
VOCABULARY: int = _LARGEST["vocab_size"]


class NotAlone(Exception):
    """No model of a name can be tried alone, on text; says why."""


def named_model(name: str, mapping: Mapping[str, str] = CAUSAL) -> Any:
    """Return the random model of a name; always the same.

    Raises
    ------
    NotAlone
    """
    if name in _TABLES["not alone"]:
        raise NotAlone(_TABLES["not alone"][name])
    kind = getattr(transformers, mapping[name])
    config_class = CONFIG_MAPPING[name]
    config = config_class(**_shrunk(config_class(), _ROWS.get(name, {})))
    text_config = config.get_text_config(decoder=True)
    if not isinstance(config, kind.config_class) and isinstance(text_config, kind.config_class):
        config = text_config
    torch.manual_seed(0)
    model = kind._from_config(config).eval()
    vary_norms(model)
    model.generation_config.update(pad_token_id=0, decoder_start_token_id=1, eos_token_id=None)
    return model


def vary_norms(model: torch.nn.Module) -> None:
    """Make weights of norms within attention random: a new model's are ones, which hide a lot."""
    with torch.no_grad():
        attentions = [
            one for one in model.modules() if re.search("Attention|MLA", type(one).__name__)
        ]
        for part in (part for one in attentions for part in one.children()):
            weight = getattr(part, "weight", None)
            if "norm" in type(part).__name__.lower() and weight is not None:
                weight += torch.empty_like(weight).uniform_(-0.25, 0.25)


def _shrunk(default: PreTrainedConfig, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a small config; those of a row as they are."""
    fields, layers = {field.name for field in dataclasses.fields(default)}, _four_layers(default)
    n_layers, settings = getattr(default, "num_hidden_layers", 0), dict(row)
    for name, value in vars(default).items():
        if isinstance(value, PreTrainedConfig):
            settings[name] = type(value)(**_shrunk(value, row.get(name, {})))
        elif name not in fields or name in row:
            continue
        elif name in _VALUES:
            settings[name] = _VALUES[name]
        elif isinstance(value, list) and len(value) == n_layers > 0:
            settings[name] = [value[layer] for layer in layers]
        elif isinstance(value, dict) and "mrope_section" in value:
            pairs = int(_VALUES["head_dim"] * value.get("partial_rotary_factor", 1)) // 2
            small = 3 * pairs // 8
            settings[name] = value | {"mrope_section": [pairs - 2 * small, small, small]}
        elif type(value) is int:
            settings[name] = _smaller(name, value, vars(default))
    return settings


def _smaller(name: str, value: int, fields: Mapping[str, Any]) -> int:
    if name.endswith("num_key_value_heads"):
        grouped = value != fields.get(name.replace("key_value", "attention"))
        return min(value, 2 if grouped else _LARGEST["num_attention_heads"])
    if name.endswith(("_token_id", "_token_index")):
        return value if value < VOCABULARY else 100 + value % (VOCABULARY - 101)
    return min(value, _LARGEST.get(name, value))


def _four_layers(default: PreTrainedConfig) -> list[int]:
    """Return layers with each kind of attention, then the first ones."""
    n_layers = getattr(default, "num_hidden_layers", 0)
    kinds = getattr(default, "layer_types", None) or getattr(default, "layers_block_type", None)
    kinds = kinds or [None] * n_layers
    first = {kind: layer for layer, kind in reversed([*enumerate(kinds)])}
    return sorted([*first.values(), *(n for n in range(n_layers) if n not in first.values())][:4])
