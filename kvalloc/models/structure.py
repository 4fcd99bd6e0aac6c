"""Where a transformers model keeps its parts: the decoder, its layers, its text config."""

from __future__ import annotations

import json
from itertools import chain, product
from typing import TYPE_CHECKING, Any, NamedTuple

from kvalloc.errors import UnsupportedModelError
from kvalloc.models.names import is_compiled, placement, uncompiled

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor


def decoder_of(model: Any) -> Any:
    """Return the model without its language-model head; each forward passes through it once."""
    get_decoder = getattr(model, "get_decoder", None)
    decoder = get_decoder() if get_decoder is not None else None
    decoder = uncompiled(model if decoder is None else decoder)
    if not hasattr(decoder, "config"):  # ModernBERT's head has that name
        decoder = getattr(model, "base_model", decoder)
    if hasattr(decoder, "lm_head") and hasattr(decoder, "model"):  # Llama 4 returns its head, too
        return uncompiled(decoder.model)
    return decoder


def decoder_layers(model: Any) -> Any:
    """Return the decoder's layers in order; None if they have none of the usual names."""
    decoder, names = decoder_of(model), ("layers", "h", "blocks")
    return next((one for name in names if (one := getattr(decoder, name, None))), None)


def has_compiled_layers(model: Any) -> bool:
    """Return whether ``torch.compile`` has taken a layer of a model, or a part of one.

    A compiled model reads once which attention it uses, and a cache may come later.
    """
    layers = list(decoder_layers(model) or ())
    return any(is_compiled(one) for layer in layers for one in (layer, *layer.children()))


def plain_weight(weight: Tensor | Callable[[], Tensor]) -> Tensor:
    """Return a layer's weight as numbers, also if torch has quantized it.

    A layer of ``torch.ao.quantization.quantize_dynamic`` has a method in its place.
    """
    weight = weight() if callable(weight) else weight
    return weight.dequantize() if weight.is_quantized else weight


def is_packed(module: Any) -> bool:
    """Whether torch has quantized a layer, and its weight is a method."""
    return callable(getattr(type(module), "weight", None))


def computing_device(module: Any) -> torch.device:
    """Return the device on which a module computes, also if its weights are kept elsewhere."""
    import torch

    for part in module.modules():
        if (hook := placement(part)) is not None and hook.execution_device is not None:
            return torch.device(hook.execution_device)
    packed = (part.weight() for part in module.modules() if is_packed(part))
    first: Tensor = next(chain(module.parameters(), module.buffers(), packed))
    return first.device


def input_device(model: Any) -> torch.device:
    """Return the device of token ids: where the embeddings are."""
    return computing_device(model.get_input_embeddings())


def text_config(model: Any) -> Any:
    """Return the config of the model's decoder, also if the model's config has several parts."""
    config = getattr(model, "config", None)
    if config is None:
        name = type(model).__name__
        raise UnsupportedModelError(f"{name} has no config; kvalloc needs a transformers model")
    of_text = getattr(config, "get_text_config", None)
    return config if of_text is None else of_text(decoder=True)


class Heads(NamedTuple):
    """Heads of a layer: query heads, KV heads, and the numbers of a key and of a value."""

    queries: int
    kv: int
    key_dim: int
    value_dim: int

    def differences(self, theirs_heads: Heads) -> str:
        """Return in words how they differ from others."""
        words = (
            "{} query heads",
            "{} KV heads",
            "keys of {} numbers",
            "values of {} numbers",
        )
        pairs = zip(words, self, theirs_heads, strict=True)
        return " and ".join(word.format(mine) for word, mine, other in pairs if mine != other)


def configured_heads(model: Any) -> Heads:
    """Return the heads that a model's config says all layers have.

    Raises
    ------
    UnsupportedModelError
        If it does not say, or the model stores something else than keys and values.
    """
    config, name = text_config(model), type(model).__name__
    n_query_heads = size_of(config, name, "num_attention_heads")
    n_kv_heads = n_query_heads
    if getattr(config, "num_key_value_heads", None) is not None:
        n_kv_heads = size_of(config, name, "num_key_value_heads")
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModelError(
            f"{name} stores compressed keys and values (latent attention), which kvalloc does not "
            "account for"
        )
    if getattr(config, "head_dim", None) is not None:
        head_dim = size_of(config, name, "head_dim")
    else:
        head_dim = size_of(config, name, "hidden_size") // n_query_heads
    return Heads(n_query_heads, n_kv_heads, head_dim, head_dim)


def size_of(config: Any, model_name: str, field: str) -> int:
    """Return a size of a config, or refuse a model without it."""
    value = getattr(config, field, None)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        what = "no" if value is None else f"{value!r} as"
        raise UnsupportedModelError(
            f"the config of {model_name} has {what} {field}, so kvalloc cannot size its KV cache; "
            "it works on models with the same attention heads in every layer"
        )
    return value


def has_layer_inputs(model: Any) -> bool:
    """Return whether each layer has embeddings of the tokens beside its hidden states."""
    return bool(getattr(text_config(model), "hidden_size_per_layer_input", 0))


def token_kinds(model: Any) -> dict[str, int]:
    """Return the token ids that stand for pieces of images, videos and audio, by kind."""
    tokens = dict[str, int]()
    for kind, end in product(("image", "video", "audio"), ("token_index", "token_id")):
        if isinstance(token := getattr(model.config, f"{kind}_{end}", None), int):
            tokens[kind] = token
    return tokens


def context_limit(model: Any) -> int | None:
    """Return the tokens that the model was made for; None if its config does not say."""
    limit = getattr(text_config(model), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def end_tokens(model: Any) -> frozenset[int]:
    """Return the tokens that end a turn of the model."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])


def repetition_penalty(model: Any) -> float:
    """Return by how much ``generate()`` holds back tokens that stand already; 1 for not at all."""
    config = getattr(model, "generation_config", None)
    return float(getattr(config, "repetition_penalty", None) or 1)


def check_decoder_only(model: Any) -> None:
    """Refuse encoder-decoder models.

    Raises
    ------
    UnsupportedModelError
        Names the model's class.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} is an encoder-decoder model; kvalloc works on decoder-only "
            "language models"
        )


def rotary_settings(config: Any) -> str | None:
    """Return rotary settings as JSON in one order; None if the config has none."""
    settings = getattr(config, "rope_parameters", None)
    return None if not settings else json.dumps(settings, sort_keys=True, default=str)
