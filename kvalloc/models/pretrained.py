"""Quiet reading of models and tokenizers."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvalloc.errors import MissingDependencyError, UnsupportedModelError, one_line


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence progress bars and warnings of transformers."""
    from transformers import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    hub = logging.getLogger("huggingface_hub")
    hub_level = hub.level
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    hub.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hub.setLevel(hub_level)
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def read_pretrained(
    folder: str, name: str, options: dict[str, Any] | None, **where: Any
) -> tuple[Any, Any]:
    """Read a causal language model, which may also take images, and its tokenizer.

    Parameters
    ----------
    options : dict, or None
        Of the model; None reads no model.

    Raises
    ------
    MissingDependencyError
    UnsupportedModelError
        If transformers cannot read it, or weights are missing.
    """
    import transformers
    from transformers import AutoConfig, AutoTokenizer

    kind: Any = transformers.AutoModelForCausalLM
    where["trust_remote_code"] = False  # or transformers would ask at the terminal
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(folder, **where)
            if options is None:
                return None, tokenizer
            if "gguf_file" not in where:
                config = type(AutoConfig.from_pretrained(folder, **where))
                if config not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and (
                    config in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
                ):
                    kind = transformers.AutoModelForImageTextToText
            where["output_loading_info"] = True
            model, read = kind.from_pretrained(folder, **where, **options)
    except ImportError as error:
        raise MissingDependencyError(f"{name} cannot be loaded: {one_line(error)}") from error
    except Exception as error:
        # transformers has no error class of its own: any error is about this model
        why = f"cannot be loaded as a causal language model: {one_line(error)}"
        if "trust_remote_code" in str(error):
            why = (
                "brings code of its own, which kvalloc does not run; if you trust it, load it with "
                "transformers and give the loaded model to kvalloc's functions"
            )
        raise UnsupportedModelError(f"{name} {why}") from error
    if missing := sorted(read["missing_keys"]):
        raise UnsupportedModelError(
            f"{name} has no weights for parts of its config, such as {missing[0]}; fetch all files"
        )
    return model, tokenizer
