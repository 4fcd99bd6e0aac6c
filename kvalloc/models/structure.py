"""Structure of transformers models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, product
from typing import TYPE_CHECKING, Any

from kvalloc.errors import UnsupportedModelError, UnsupportedRequestError
from kvalloc.models.names import IMAGE_AXES, is_compiled, placement, uncompiled

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor


def decoder_of(model: Any) -> Any:
    """Return the model without its language-model head."""
    get_decoder = getattr(model, "get_decoder", None)
    decoder = get_decoder() if get_decoder is not None else None
    decoder = uncompiled(model if decoder is None else decoder)
    if not hasattr(decoder, "config"):  # ModernBERT's head has that name
        decoder = getattr(model, "base_model", decoder)
    if hasattr(decoder, "lm_head") and hasattr(decoder, "model"):  # Llama 4 returns its head, too
        decoder = uncompiled(decoder.model)
    if decoder is uncompiled(model) or not hasattr(decoder, "get_decoder"):
        return decoder
    return decoder_of(decoder)  # BLIP-2 returns a model that its head passes by


def decoder_layers(model: Any) -> Any:
    """Return the decoder's layers, in order; None without a usual name."""
    decoder, names = decoder_of(model), ("layers", "h", "blocks", "layer")
    parts = (decoder, getattr(decoder, "encoder", None))  # BERT's layers are in its encoder
    modules = (getattr(part, name, None) for part in parts for name in names)
    return next((one for one in modules if one), None)


def check_layers(model: Any) -> None:
    """Refuse a model with a layer, or a part of one, compiled by ``torch.compile``."""
    layers = list(decoder_layers(model) or ())
    if any(is_compiled(one) for layer in layers for one in (layer, *layer.children())):
        raise UnsupportedRequestError(
            "a layer of this model is compiled by itself, which sees nothing of a cache; compile "
            "the whole model, or none of it"
        )


def plain_weight(weight: Tensor | Callable[[], Tensor]) -> Tensor:
    """Return a layer's weight as numbers, also if quantized by torch."""
    weight = weight() if callable(weight) else weight
    return weight.dequantize() if weight.is_quantized else weight


def is_packed(module: Any) -> bool:
    """Return whether a layer's weight is a method, after quantization by torch."""
    return callable(getattr(type(module), "weight", None))


def computing_device(module: Any) -> torch.device:
    """Return the device on which a module computes, also if offloaded."""
    import torch

    for part in module.modules():
        if (hook := placement(part)) is not None and hook.execution_device is not None:
            return torch.device(hook.execution_device)
    packed = (part.weight() for part in module.modules() if is_packed(part))
    first: Tensor = next(chain(module.parameters(), module.buffers(), packed))
    return first.device


def input_device(model: Any) -> torch.device:
    """Return the device of token ids."""
    return computing_device(model.get_input_embeddings())


def text_config(model: Any) -> Any:
    """Return the config of the model's decoder."""
    config = getattr(model, "config", None)
    if config is None:
        name = type(model).__name__
        raise UnsupportedModelError(f"{name} has no config; kvalloc needs a transformers model")
    of_text = getattr(config, "get_text_config", None)
    return config if of_text is None else of_text(decoder=True)


@contextmanager
def evaluating(module: Any) -> Iterator[None]:
    """Switch dropout off, and restore each module's flag."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def token_kinds(model: Any) -> dict[str, int]:
    """Return the token ids of images, videos and audio, by kind."""
    tokens = dict[str, int]()
    for kind, end in product(("image", "video", "audio"), ("token_index", "token_id")):
        if isinstance(token := getattr(model.config, f"{kind}_{end}", None), int):
            tokens[kind] = token
    return tokens


def scattering_tokens(model: Any) -> list[int]:
    """Return the ids of `token_kinds` if they get positions on several axes."""
    parts = (model, getattr(model, "base_model", model))
    return [*token_kinds(model).values()] if any(hasattr(one, IMAGE_AXES) for one in parts) else []


def context_limit(model: Any) -> int | None:
    """Return the config's limit of tokens, or None."""
    limit = getattr(text_config(model), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def end_tokens(model: Any) -> frozenset[int]:
    """Return the tokens that end a turn."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])


def repetition_penalty(model: Any) -> float:
    """Return the repetition penalty of ``generate()``; 1 for none."""
    config = getattr(model, "generation_config", None)
    return float(getattr(config, "repetition_penalty", None) or 1)


def check_decoder_only(model: Any) -> None:
    """Raise `UnsupportedModelError` for an encoder-decoder model."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} is an encoder-decoder model; kvalloc works on decoder-only "
            "language models"
        )


def rotary_settings(config: Any) -> str | None:
    """Return rotary settings as sorted JSON; None without any."""
    settings = getattr(config, "rope_parameters", None)
    return None if not settings else json.dumps(settings, sort_keys=True, default=str)
