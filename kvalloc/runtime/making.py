"""Construction of a reduced cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from kvalloc.accounting.costs import MIXES
from kvalloc.errors import InputError, UnsupportedRequestError, option
from kvalloc.models.attention import AttentionSwitch
from kvalloc.models.families import cached_layers
from kvalloc.models.loading import shape_of, warn_if_untested
from kvalloc.models.names import uncompiled
from kvalloc.models.probe import Probe
from kvalloc.models.structure import decoder_of
from kvalloc.runtime import refusals
from kvalloc.runtime.cache import BudgetCache
from kvalloc.runtime.policies import policy_of
from kvalloc.runtime.policies.score import Score
from kvalloc.runtime.rows import Method, Way
from kvalloc.runtime.states import with_state
from kvalloc.runtime.store import Store
from kvalloc.shape import HALF_BYTES, REDUCIBLE, ModelShape

__all__ = ["Way", "build_rows", "make_layers"]


def make_layers(model: nn.Module, shape: ModelShape) -> list[Any]:
    """Return cache layers for the model: a `Store` where budgets apply, else transformers' own.

    Raises
    ------
    UnsupportedModelError
        If kvalloc does not know a layer's kind.
    """
    layers = cached_layers(model)
    for index, one in enumerate(shape.by_layer):
        if one.kind == "hybrid":
            layers[index] = with_state(Store, layers[index])
        elif one.kind in REDUCIBLE:
            layers[index] = Store(latent=one.kind == "latent")
        if one.reads is not None and isinstance(store := layers[one.reads], Store):
            store.readers += 1
    return layers


def build_rows(
    model: nn.Module,
    ways: Sequence[Way],
    *,
    prompt_tokens: int | None = None,
    lengths: Sequence[int] | None = None,
    shape: ModelShape | None = None,
) -> BudgetCache:
    """Make a cache that keeps each row of a batch in its own way.

    Parameters
    ----------
    ways : sequence of Way
        One a row, or one for all; rows of one way share its memory.
    prompt_tokens : int, optional
        Length, padding included, of a prompt in several forwards; its budgets hold from the first.
        By default the first forward is the whole prompt.
    lengths : sequence of int, optional
        Tokens of each row of an announced prompt.

    Raises
    ------
    ModelMismatchError
        If a profile was made for another model.
    UnsupportedModelError
        If the model cannot be reduced.
    UnsupportedRequestError
        If a layer is compiled, or the policy cannot bound the memory.
    InputError
        If budgets or scorer do not fit sinks and window, or a policy is unknown.
    """
    warn_if_untested()
    model = uncompiled(model)
    refusals.check_model(model, prompt_tokens)
    shape, switch = shape or shape_of(model), AttentionSwitch.of(model)  # the hooks share it
    wide = next(model.parameters()).itemsize > HALF_BYTES
    methods = {way: _method(way, shape, switch.probe, wide=wide) for way in dict.fromkeys(ways)}
    rows = [methods[way] for way in ways]
    known = None if lengths is None else tuple(lengths)
    cache = BudgetCache(decoder_of(model), make_layers(model, shape), rows, prompt_tokens, known)
    for method in methods.values():
        policy = method.profile.policy
        listener = method.policy.extension(sinks=policy.sinks, window=policy.window)
        if listener is not None:
            cache.extensions.append(listener)
    return cache


def _method(way: Way, shape: ModelShape, probe: Probe, *, wide: bool) -> Method:
    options, profile = way.options, way.options.with_policy(way.profile)
    tokens, other = options.decode_every, options.allow_other_model
    refusals.check_profile(profile)
    if not (tokens is None or (type(tokens) is int and tokens >= 1)):
        raise InputError(
            f"{option('decode_every')} is {tokens!r}, expected a number of tokens >= 1"
        )
    profile.shape.require_same_model(shape, allow_other_model=other)
    policy = policy_of(profile.policy)
    policy.scorer.check_model(shape, allow_other_model=other)
    after = policy.turn_policy(rotates=probe.moves_queries)
    known = {**vars(way), "profile": profile}
    method = Method(**known, policy=policy, after=after, wide=wide)
    unserved = {*policy.unserved, *(["latent"] if policy.combines else [])}
    if unserved := unserved & {*shape.layer_types}:
        raise UnsupportedRequestError(
            f"the policy {policy.name} does not serve layers of the kind '{min(unserved)}', which "
            "this model has; choose another policy"
        )
    if np.isin(profile.widths, [*MIXES]).any() and not isinstance(policy, Score):
        raise UnsupportedRequestError(
            f"these budgets give entries of a KV head several widths; the policy {policy.name} "
            "does not say which are the best; choose one that ranks, or one width for each head"
        )
    if profile.fits_a_peak and (method.holds(in_chunks=False) or policy.combines):
        raise UnsupportedRequestError(
            f"these budgets were decided for {option('memory')} at its peak, and the policy "
            f"{policy.name} takes more while the prompt is read; choose another policy, or decide "
            f"by {option('budget')}"
        )
    return method
