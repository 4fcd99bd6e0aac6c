"""A transformers cache whose layers and heads keep what a budget profile grants them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import Cache

from kvalloc.attention_hook import AttentionStates, Compute, base_implementation
from kvalloc.budget_profile import BudgetProfile, Policy
from kvalloc.errors import (
    InputError,
    ModelMismatchError,
    UnsupportedModelError,
    UnsupportedRequestError,
)
from kvalloc.models import shape_of
from kvalloc.runtime import hooks, refusals
from kvalloc.runtime.layers import BudgetLayer, gathered
from kvalloc.runtime.masks import biased_mask, stored_mask
from kvalloc.runtime.policies import changed_policy, policy_of
from kvalloc.runtime.refusals import check_kept
from kvalloc.runtime.sizes import decoder_of, make_layers

__all__ = ["BudgetCache", "make_cache"]


def make_cache(
    profile: BudgetProfile,
    model: nn.Module,
    *,
    allow_other_model: bool = False,
    prompt_tokens: int | None = None,
    policy: str | Policy | None = None,
    policy_options: Mapping[str, Any] | None = None,
) -> BudgetCache:
    """A cache for one conversation that keeps the profile's budgets of its prompt.

    Parameters
    ----------
    profile : BudgetProfile
        Budgets at layer level. They are scaled to the prompt's length.
    model : transformers.PreTrainedModel
        The model that will use the cache, on sdpa or eager attention.
    allow_other_model : bool
        Accept a model of another name with the same sizes, e.g. a fine-tune.
    prompt_tokens : int, optional
        Length of a prompt that arrives in several forwards: the budgets hold for all of it, and
        entries are evicted when it is complete. By default the first forward is the whole
        prompt; a second chunk could not be told from a follow-up question.
    policy : str or Policy, optional
        How the entries are picked, instead of the profile's own policy; a name stands for a
        policy or a scorer, see `kvalloc.runtime.policies.changed_policy`.
    policy_options : mapping, optional
        Parameters of the policy or scorer that is named.

    Returns
    -------
    BudgetCache

    Raises
    ------
    ModelMismatchError
        If the profile was made for another model.
    UnsupportedModelError
        If the model's attention or cache is of a kind that cannot be reduced.
    UnsupportedRequestError
        If the profile has head-level budgets, or the model is compiled.
    InputError
        If the budgets or the scorer do not fit sinks and window, or there is no such policy.
    """
    profile = _with_policy(profile, policy, policy_options)
    refusals.check_profile(profile)
    refusals.check_model(model, prompt_tokens)
    shape = shape_of(model)
    profile.shape.require_same_model(shape, allow_other_model=allow_other_model)
    layers = make_layers(model, shape)
    return BudgetCache(profile, model, layers=layers, prompt_tokens=prompt_tokens)


class BudgetCache(Cache):
    """Keeps, of a prompt, the entries that a budget profile grants each layer.

    While the prompt runs, each full-attention layer first attends to all of it, then its scorer
    ranks the entries and only the budget stays: sinks, window and, for each KV head, its own
    best. The full tensors are freed before the next layer runs. Tokens that follow, any number
    at a time, are added and never evicted. Positions stay true: `get_seq_length` is the number
    of tokens seen. Make one with `BudgetProfile.cache` or `make_cache`; budgets, entries and
    masks belong to this object and not to the model, so any number of caches can be interleaved.

    Notes
    -----
    Batches work for prompts of equal length; `reorder_cache` (beam search), `crop` back to the
    end of the prompt, `copy.deepcopy` and `reset` work. Sliding-window layers are transformers'
    own.
    """

    # transformers' type also allows layers without keys, which `make_layers` refuses.
    layers: list[Any]

    def __init__(
        self,
        profile: BudgetProfile,
        model: nn.Module,
        *,
        layers: list[Any],
        prompt_tokens: int | None = None,
    ) -> None:
        super().__init__(layers=layers)
        self.profile = profile
        self._policy = policy_of(profile.policy)
        self._decoder = weakref.ref(decoder_of(model))
        self._model_name = type(model).__name__
        self._announced_tokens = prompt_tokens
        self._reader = self._policy.reader(sinks=profile.policy.sinks, window=profile.policy.window)
        self._forget()
        hooks.retain(self, decoder_of(model))

    def _forget(self) -> None:
        if self._reader is not None:
            self._reader.forget()
        self._prompt_tokens = self._announced_tokens
        self._budgets: npt.NDArray[np.int64] | None = None
        self._masks: dict[tuple[int, torch.device], Tensor | None] = {}
        self._additive = False
        self._in_forward = False
        self._interrupted = False
        self._seen_before = 0

    # What is stored

    @property
    def prompt_complete(self) -> bool:
        """Whether the whole prompt has been seen, so that budgets are in force."""
        return self._budgets is not None

    @property
    def reduced(self) -> bool:
        """Whether any entry has been evicted."""
        return any(isinstance(layer, BudgetLayer) and layer.evicted_tokens for layer in self.layers)

    @property
    def retained_bytes(self) -> int:
        """Bytes of K and V storage allocated now, read from the tensors' storages.

        A storage that several tensors share counts once, and one that is larger than the tensor
        in it counts in full.
        """
        storages = {}
        for layer in self.layers:
            for tensor in (layer.keys, layer.values):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    storages[(tensor.device, storage.data_ptr())] = storage.nbytes()
        return sum(storages.values())

    @property
    def full_bytes(self) -> int:
        """Bytes a plain cache would store for the same tokens seen, batch included."""
        keys = self.layers[0].keys
        if keys is None or keys.numel() == 0:
            return 0
        shape = replace(self.profile.shape, dtype_bytes=keys.dtype.itemsize)
        return shape.full_bytes(self.get_seq_length(), int(keys.shape[0]))

    @property
    def kept_tokens(self) -> npt.NDArray[np.int64]:
        """Entries stored now, ``(n_layers, n_kv_heads)``."""
        stored = [
            layer.stored_tokens
            if isinstance(layer, BudgetLayer)
            else (0 if layer.keys is None else int(layer.keys.shape[-2]))
            for layer in self.layers
        ]
        column = np.asarray(stored, dtype=np.int64)[:, None]
        return np.repeat(column, self.profile.shape.n_kv_heads, axis=1)

    def kept_indices(self, layer: int) -> Tensor:
        """Original positions of the prompt's entries that a layer kept.

        Parameters
        ----------
        layer : int
            A full-attention layer.

        Returns
        -------
        Tensor of int32, (batch, n_kv_heads, n_kept)
            In position order. These four bytes an entry are the cache's own book-keeping and do
            not count as K or V bytes.

        Raises
        ------
        InputError
            If the layer is a sliding one, or no prompt has been seen.
        """
        stored = self.layers[layer]
        if not isinstance(stored, BudgetLayer):
            raise InputError(f"layer {layer} is a sliding-window layer: it keeps the last tokens")
        if stored.kept_indices is not None:
            return stored.kept_indices
        if not stored.stored_tokens or self._prompt_tokens is None:
            raise InputError("the cache has seen no prompt yet; run the model with it first")
        batch, heads = stored.keys.shape[:2]
        everything = torch.arange(self._prompt_tokens, dtype=torch.int32, device=stored.keys.device)
        return everything.expand(batch, heads, -1)

    # What the hooks call

    def begin_forward(self, decoder: nn.Module, arguments: Mapping[str, Any]) -> None:
        """Check a forward before anything of it runs, and prepare the layers for it."""
        if self._decoder() is not decoder:
            raise ModelMismatchError(
                f"this cache was made for another {self._model_name} object than the "
                f"{type(decoder).__name__} that it was given to; make one with "
                "profile.cache(model) for this model"
            )
        if self._interrupted:
            raise UnsupportedRequestError(
                "an earlier forward with this cache failed half-way, so its layers disagree; "
                "call cache.reset() and start with the prompt again"
            )
        base = base_implementation(decoder.config)
        seen = self.get_seq_length()
        refusals.check_forward(self, decoder, arguments, base)
        batch, new_tokens = refusals.new_tokens_shape(arguments)
        self._prepare_prompt(seen, new_tokens)
        self._masks.clear()
        self._additive = base == "eager"
        self._seen_before = seen
        self._in_forward = True

    def _prepare_prompt(self, seen: int, new_tokens: int) -> None:
        prompt_tokens = new_tokens if self._prompt_tokens is None else self._prompt_tokens
        if seen >= prompt_tokens:
            return
        if seen + new_tokens > prompt_tokens:
            raise UnsupportedRequestError(
                f"the cache was made for a prompt of {prompt_tokens} tokens, but {seen} seen and "
                f"{new_tokens} new ones are more; send the prompt and what follows it separately"
            )
        self._prompt_tokens = prompt_tokens
        if seen + new_tokens < prompt_tokens:
            return
        self._budgets = self.profile.budgets_for(prompt_tokens)[:, 0]
        for layer, budget in zip(self.layers, self._budgets, strict=True):
            if isinstance(layer, BudgetLayer) and budget < prompt_tokens:
                layer.expect_eviction()

    def attend(self, states: AttentionStates, compute: Compute) -> Any:
        """Run one layer's attention with the mask that fits it; evict after the prompt."""
        layer = self.layers[states.layer]
        if not isinstance(layer, BudgetLayer):
            output = compute(states.mask)
            _free_slid_out(layer, states)
            return output
        if layer.evicted_tokens:
            if layer.logit_bias is not None:
                return compute(biased_mask(layer.logit_bias, states))
            return self._read(layer, states, compute)
        output = compute(states.mask)
        if layer.awaits_eviction:
            self._evict(layer, states)
        elif self._budgets is None:
            self._observe(layer, states)
        return output

    def end_forward(self, *, completed: bool) -> None:
        """Clean up after a forward; after a failed one, find out what it left."""
        self._in_forward = False
        self._masks.clear()
        budget_layers = [layer for layer in self.layers if isinstance(layer, BudgetLayer)]
        unseen = [layer for layer in budget_layers if layer.awaits_eviction]
        if completed and unseen:
            self._interrupted = True
            raise UnsupportedModelError(
                f"the attention of {self._model_name} did not go through transformers' attention "
                'interface, so nothing was evicted; load it with attn_implementation="sdpa"'
            )
        if completed:
            return
        for layer in budget_layers:
            layer.cancel_eviction()
        lengths = {layer.get_seq_length() for layer in self.layers}
        self._interrupted = bool(unseen) or lengths != {self._seen_before}
        if self._seen_before == 0:
            self._prompt_tokens = self._announced_tokens

    def _read(self, layer: BudgetLayer, states: AttentionStates, compute: Compute) -> Any:
        """Attend to what is stored, or to the part of it that the policy wants read."""
        if self._reader is None or states.queries.shape[2] > 1:
            return compute(self._mask_for(states))
        assert layer.kept_indices is not None
        indices = self._reader.read(
            states,
            place=self.profile.shape.full_layers.index(states.layer),
            n_prompt=int(layer.kept_indices.shape[-1]),
            positions=layer.kept_indices,
        )
        if indices is None:
            return compute(None)
        return compute(None, gathered(states.keys, indices), gathered(states.values, indices))

    @torch.no_grad()
    def _observe(self, layer: BudgetLayer, states: AttentionStates) -> None:
        """Note what the policy wants to know of a chunk that does not complete the prompt."""
        assert self._prompt_tokens is not None
        states = replace(states, observed=layer.observed)
        layer.observed = self._policy.observe(states, sinks=self.profile.policy.sinks)
        layer.keep_query_tail(states.queries, self._policy.query_rows(self._prompt_tokens))

    @torch.no_grad()
    def _evict(self, layer: BudgetLayer, states: AttentionStates) -> None:
        assert self._budgets is not None
        assert self._prompt_tokens is not None
        sinks, window = self.profile.policy.sinks, self.profile.policy.window
        wanted = self._policy.query_rows(self._prompt_tokens)
        queries = layer.with_query_tail(states.queries, wanted)
        states = replace(states, observed=layer.observed)
        if queries is not states.queries:
            # The mask has no rows for the older queries; without padding it is plain causal.
            states = replace(states, queries=queries, mask=None)
        budgets = torch.full(
            states.keys.shape[:2], int(self._budgets[states.layer]), device=states.keys.device
        )
        kept = self._policy.keep(states, budgets, sinks=sinks, window=window)
        check_kept(self._policy, kept, budgets)
        layer.evict(kept, self._policy.combine(states, kept, sinks=sinks, window=window))

    def _mask_for(self, states: AttentionStates) -> Tensor | None:
        new_tokens, stored = int(states.queries.shape[2]), int(states.keys.shape[2])
        if new_tokens == 1:
            return None
        key = (stored, states.keys.device)
        if key not in self._masks:
            dtype = states.queries.dtype if self._additive else None
            self._masks[key] = stored_mask(
                new_tokens, stored, additive_dtype=dtype, device=states.keys.device
            )
        return self._masks[key]

    # What transformers calls

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add a layer's new keys and values (called by the model's attention).

        Raises
        ------
        ModelMismatchError
            If the caller is not a forward of the cache's own model.
        """
        if not self._in_forward:
            raise ModelMismatchError(
                f"this cache works only inside a forward of the {self._model_name} object that it "
                "was made for; make one with profile.cache(model) for the model at hand"
            )
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values

    def reset(self) -> None:
        """Forget prompt and tokens, and free their storage; the next forward is a new prompt."""
        for layer in self.layers:
            if not isinstance(layer, BudgetLayer):
                layer.keys = layer.values = None
                layer.is_initialized = False
            layer.reset()
        self._forget()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens from the end, at most back to the end of the compressed prompt.

        Parameters
        ----------
        tokens_to_remove : int
            Negative: remove that many tokens. Positive, where transformers still has it: keep
            that many.

        Raises
        ------
        UnsupportedRequestError
            If the cut would reach into a reduced prompt, or into tokens that a sliding layer has
            dropped.
        """
        for layer in self.layers:
            if isinstance(layer, BudgetLayer):
                layer.crop_count(tokens_to_remove)
            elif layer.get_seq_length() >= layer.sliding_window:
                raise UnsupportedRequestError(
                    "cannot crop: a sliding-window layer has already dropped the tokens that "
                    "would come back into its window; make a new cache"
                )
        super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i continue what row ``beam_idx[i]`` holds (beam search)."""
        self._rows_change()
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        self._rows_change()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows."""
        self._rows_change()
        super().batch_select_indices(indices)

    def _rows_change(self) -> None:
        if self._reader is not None:
            self._reader.forget()

    def activate_past_recording(self) -> None:
        """Refuse: this is what assisted generation asks for.

        Raises
        ------
        UnsupportedRequestError
            Always.
        """
        raise UnsupportedRequestError(refusals.ASSISTED)

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Refuse: evicted layers are small, and their masks are made on their device.

        Raises
        ------
        UnsupportedRequestError
            Always.
        """
        raise UnsupportedRequestError(refusals.OFFLOADED)

    def __deepcopy__(self, memo: dict[int, Any]) -> BudgetCache:
        """A cache that goes on from here on its own, e.g. one prompt for several questions."""
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        shared = {id(self.profile): self.profile, id(self._policy): self._policy}
        memo.update(shared)
        clone.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
        decoder = self._decoder()
        if decoder is not None:
            hooks.retain(clone, decoder)
        return clone


def _with_policy(
    profile: BudgetProfile, policy: str | Policy | None, options: Mapping[str, Any] | None
) -> BudgetProfile:
    if isinstance(policy, str):
        return replace(profile, policy=changed_policy(profile.policy, policy, options))
    if options:
        raise InputError("policy_options belong to a policy: name it with policy=")
    return profile if policy is None else replace(profile, policy=policy)


def _free_slid_out(layer: Any, states: AttentionStates) -> None:
    """Give back the storage of prompt tokens that have left a sliding window.

    transformers keeps a view of the last tokens, whose storage is the whole prompt's.
    """
    if states.queries.shape[2] == 1:
        return
    for name in ("keys", "values"):
        view: Tensor = getattr(layer, name)
        if view.untyped_storage().nbytes() > view.nbytes:
            setattr(layer, name, view.clone(memory_format=torch.contiguous_format))
