"""Where a transformers model keeps its parts: the decoder, its layers, its text config."""

from __future__ import annotations

from typing import Any

from kvalloc.errors import UnsupportedModelError

__all__ = ["check_decoder_only", "context_limit", "decoder_layers", "decoder_of", "text_config"]


def decoder_of(model: Any) -> Any:
    """The model without its language-model head; every forward passes through it once."""
    get_decoder = getattr(model, "get_decoder", None)
    decoder = get_decoder() if get_decoder is not None else None
    return model if decoder is None else decoder


def decoder_layers(model: Any) -> Any:
    """The decoder's layers in order; None where the decoder has no ``layers``."""
    return getattr(decoder_of(model), "layers", None) or None


def text_config(model: Any) -> Any:
    """The config of the model's decoder, also where the model's own config has several parts."""
    of_text = getattr(model.config, "get_text_config", None)
    return model.config if of_text is None else of_text(decoder=True)


def context_limit(model: Any) -> int | None:
    """Tokens that the model was made for; None where its config does not say."""
    limit = getattr(text_config(model), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


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
