"""Refusals of requests that the runtime cannot serve."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvalloc.errors import (
    InputError,
    ModelMismatchError,
    UnsupportedRequestError,
    one_line,
    option,
)
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.models.names import base_implementation, mask_function
from kvalloc.models.structure import check_layers, context_limit, decoder_of
from kvalloc.runtime.policies import policy_class
from kvalloc.runtime.policies.base import EvictionPolicy

OFFLOADED = "a reduced cache cannot be offloaded; it is small enough to stay on the device"


def check_profile(profile: BudgetProfile) -> None:
    """Refuse bits that the profile's policy does not allow.

    Raises
    ------
    UnsupportedRequestError
    """
    name, kind = profile.policy.name, policy_class(profile.policy.name)
    rounded = profile.widths[profile.widths != 16]
    if rounded.size and kind.extension is not EvictionPolicy.extension:
        raise UnsupportedRequestError(
            f"this profile has entries at {int(rounded.min())} bits, but the policy {name} "
            "compares keys as the model made them; choose another policy, or solve again without "
            f"{option('bits')}"
        )


def check_model(model: nn.Module, prompt_tokens: int | None) -> None:
    """Refuse a model that the cache cannot work with.

    Raises
    ------
    UnsupportedRequestError
        For compiled layers, or another cache in the generation config.
    InputError
        For a prompt length below 1.
    """
    if prompt_tokens is not None and prompt_tokens < 1:
        raise InputError(f"prompt_tokens is {prompt_tokens}, expected >= 1")
    check_layers(model)
    _check_kind(model, {})


def _check_kind(model: nn.Module, arguments: Mapping[str, Any]) -> None:
    kind = setting(model, arguments, "cache_implementation") or "dynamic"
    if kind != "dynamic":
        raise UnsupportedRequestError(
            f"the generation config asks for a {kind} cache beside kvalloc's; leave "
            "cache_implementation out, or set model.generation_config.cache_implementation to "
            "None"
        )


def _check_outputs(*, uses_cache: Any, weights: Any) -> None:
    if uses_cache is False:
        raise UnsupportedRequestError(
            "use_cache=False asks for no cache, so there is nothing to reduce; leave it out"
        )
    if weights:
        raise UnsupportedRequestError(
            "output_attentions=True is not supported: layers keep different entries, so the "
            "weights' columns would not mean the same tokens"
        )


def check_positions(policy: EvictionPolicy, *, scattered: bool) -> None:
    """Refuse a policy that rotates by token numbers if a row is `scattered`.

    Raises
    ------
    UnsupportedRequestError
    """
    if scattered and policy.rotates:
        raise UnsupportedRequestError(
            f"the scorer {policy.scorer.name} of the policy {policy.name} cannot rotate tokens of "
            f"images: positions on several axes; name {option('budget', '20%')} alone, or the "
            "scorer snapkv"
        )


def check_owner(model: nn.Module, cache: Any) -> None:
    """Refuse a reduced cache that was made for another model.

    Raises
    ------
    ModelMismatchError
    """
    owner = getattr(cache, "decoder", None)
    if owner is not None and owner() is not decoder_of(model):
        raise ModelMismatchError(
            f"this cache was made for another {type(model).__name__} object than the one that is "
            "asked; load it for this one with kvalloc.load_cache, or read the text again"
        )


def setting(model: nn.Module, arguments: Mapping[str, Any], name: str) -> Any:
    """Return a setting of a ``generate()`` call, config or model, or None."""
    configs = (arguments.get("generation_config"), getattr(model, "generation_config", None))
    values = (arguments.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in values if value is not None), None)


def check_generate(model: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Refuse a ``generate()`` call.

    Raises
    ------
    UnsupportedRequestError
        For another cache implementation, attention weights, or no cache.
    """
    setting_of = partial(setting, model, arguments)
    if "offloaded" in (setting_of("cache_implementation") or ""):
        raise UnsupportedRequestError(OFFLOADED)
    _check_kind(model, arguments)
    _check_outputs(uses_cache=setting_of("use_cache"), weights=setting_of("output_attentions"))


def check_goes_on(tokens: int, seen: int) -> None:
    """Refuse a text without new tokens."""
    if tokens <= seen:
        raise InputError(
            f"a turn of no tokens: these are {tokens}, and the cache has seen {seen} already; pass "
            "the whole text so far and what is said next"
        )


def check_turn(decoder: nn.Module, seen: int, new: int) -> None:
    """Refuse a turn without tokens, or beyond the model's limit."""
    check_goes_on(seen + new, seen)
    limit = context_limit(decoder) if seen and new > 1 else None
    if limit is not None and seen + new > limit:
        raise InputError(
            f"{seen} tokens in the cache and {new} that follow are beyond the {limit} tokens that "
            "the model was made for; shorten the turn or begin a new conversation"
        )


def check_forward(decoder: nn.Module, arguments: Mapping[str, Any], stored_rows: int) -> None:
    """Refuse a forward.

    Raises
    ------
    UnsupportedRequestError
        If the attention implementation, the arguments or the batch size do not fit.
    """
    base, batch = base_implementation(decoder.config), new_tokens_shape(arguments)[0]
    weights = arguments.get("output_attentions")
    if weights is None:
        weights = getattr(decoder.config, "output_attentions", False)
    if not stored_rows:  # looked for once a prompt; `hooks` notices layers compiled after it
        check_layers(decoder)
    _check_outputs(uses_cache=arguments.get("use_cache"), weights=weights)
    if arguments.get("encoder_hidden_states") is not None:
        raise UnsupportedRequestError(
            "layers that attend to an encoder beside the text (cross-attention) store entries that "
            "no budget is for; leave out encoder_hidden_states, or the kvalloc cache"
        )
    if decoder.training and any(
        getattr(one, "gradient_checkpointing", False) for one in decoder.modules()
    ):
        raise UnsupportedRequestError(
            "with gradient checkpointing a model in training fills no cache; call model.eval(), or "
            "model.gradient_checkpointing_disable()"
        )
    if mask_function(base) is None:
        raise UnsupportedRequestError(
            f"a reduced cache runs on sdpa, eager, flash and flex attention, not on {base}; load "
            'the model with attn_implementation="sdpa"'
        )
    if stored_rows not in (0, batch):
        raise UnsupportedRequestError(
            f"the cache holds a batch of {stored_rows}, but this input has one of {batch}; make a "
            "cache for each batch, or repeat the rows with cache.batch_repeat_interleave(n)"
        )


def selected_rows(indices: Any, n_rows: int) -> Tensor:
    """Return the numbers of selected rows, on the host.

    Raises
    ------
    InputError
        If no row is selected, or a missing one.
    """
    rows = torch.as_tensor(indices, device="cpu")  # whatever the default device is
    is_mask, dtype = rows.dtype == torch.bool, rows.dtype
    sound = rows.ndim == 1 and not dtype.is_floating_point and not dtype.is_complex
    sound &= len(rows) == n_rows if sound and is_mask else True
    if sound:
        rows = rows.nonzero()[:, 0] if is_mask else rows.long()
        sound = bool(((rows >= -n_rows) & (rows < n_rows)).all())
    if not sound:
        raise InputError(
            f"a selection of rows is {one_line(rows.tolist(), 60)}, but the cache holds {n_rows}, "
            "from 0 on; give whole numbers below that, or a mask of as many"
        )
    if not rows.numel():
        raise InputError(
            f"a selection of no rows would leave nothing of the {n_rows} in the cache; call "
            "cache.reset() to empty it"
        )
    return rows % n_rows


def new_tokens_shape(arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Return rows and new tokens of a forward.

    Raises
    ------
    UnsupportedRequestError
        Without embeddings and ids.
    """
    tokens = arguments.get("inputs_embeds")
    tokens = arguments.get("input_ids") if tokens is None else tokens
    if not isinstance(tokens, Tensor):
        raise UnsupportedRequestError("this forward has neither input_ids nor inputs_embeds")
    rows, columns = tokens.shape[:2]
    return rows, columns
