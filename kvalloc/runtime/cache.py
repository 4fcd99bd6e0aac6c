"""A transformers cache whose layers and heads keep what a budget profile grants them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from kvalloc.accounting import IntArray
from kvalloc.errors import (
    ModelMismatchError,
    UnsupportedModelError,
    UnsupportedRequestError,
)
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.models.attention import AttentionStates, Compute
from kvalloc.models.structure import decoder_of
from kvalloc.runtime import hooks, refusals
from kvalloc.runtime.account import Account, free_slid_out, stored_tensors
from kvalloc.runtime.arrival import Arrival, Step
from kvalloc.runtime.attention.backends import attend
from kvalloc.runtime.attention.call import AttentionCall
from kvalloc.runtime.attention.masks import MaskKind, stored_mask
from kvalloc.runtime.deciding import Decide, DecidesByPrompt
from kvalloc.runtime.eviction import Eviction, Held, groups_by_layer
from kvalloc.runtime.holding import HoldsPrompt
from kvalloc.runtime.kept import FlatEntries
from kvalloc.runtime.layer import BudgetLayer, cropped_tokens, gathered, row_numbers
from kvalloc.runtime.packed import packed_layers
from kvalloc.runtime.policies import policies_of
from kvalloc.runtime.policies.base import Reader
from kvalloc.runtime.refusals import RefusedCalls
from kvalloc.runtime.saving import save_cache

__all__ = ["BudgetCache"]


class BudgetCache(RefusedCalls, Cache, hooks.HookedCache, Account, DecidesByPrompt, HoldsPrompt):
    """Keeps, of a prompt, the entries that a budget profile grants each layer and KV head.

    While the prompt runs, each full-attention layer first attends to all it holds, then the
    policy ranks the entries and only the budget stays: sinks, window and, for each row and KV
    head, its own best. What is evicted is freed before the next layer runs. Tokens that follow,
    any number at a time, are added, and never evicted unless the budget is kept while decoding
    (``decode_every``). Positions stay true: `get_seq_length` is the number of tokens seen. Make
    one with `BudgetProfile.cache` or `make_cache`; budgets, entries and masks belong to this
    object and not to the model, so any number of caches can be interleaved.

    Notes
    -----
    Rows of a batch may have different lengths, padded on either side: each gets the budgets of
    its own length, and padding is neither kept nor counted. A prompt may come in chunks, announced
    (``prompt_tokens``) or inside `prefill`. `reorder_cache` (beam search), `crop` back to the end
    of the prompt, `copy.deepcopy` and `reset` work. Sliding-window layers are transformers' own.
    """

    layers: list[Any]  # each with keys: `make_layers` refuses others

    def __init__(
        self,
        profile: BudgetProfile,
        model: nn.Module,
        *,
        layers: list[Any],
        prompt_tokens: int | None = None,
        decode_every: int | None = None,
        decide: Decide | None = None,
    ) -> None:
        super().__init__(layers=layers)
        self.profile = self._stored_profile = profile
        self._decide = decide
        self._policy = policies_of(profile)
        self.decoder = weakref.ref(decoder_of(model))
        self._model_name = type(model).__name__
        self.arrival = Arrival(profile, prompt_tokens, decode_every)
        self._prefilling = self._warned = False
        self._bits = packed_layers(profile)
        self._groups = groups_by_layer(profile.share_groups)
        self._reader = self._policy.reader(sinks=profile.policy.sinks, window=profile.policy.window)
        self._holding = self._make_holding(model)
        self._forget()
        hooks.retain(self, decoder_of(model))

    def _forget(self) -> None:
        if self._reader is not None:
            self._reader.forget()
        if self._holding is not None:
            self._holding.forget()
        self.arrival = self.arrival.afresh()
        self.arrival.open = self._prefilling
        self.profile = self._stored_profile
        self.decision_seconds, self._decided_ahead = None, False
        self._step: Step | None = None
        self._targets: dict[int, IntArray] = {}
        self._held: list[Held] = []
        self._masks: dict[tuple[int, int, torch.device], Any] = {}
        self._mask_kind: MaskKind = "boolean"
        self._interrupted: str | None = None  # why it cannot go on

    def __repr__(self) -> str:
        """Model, tokens and bytes; layers each by itself would fill screens."""
        stored = f"{self.retained_bytes:,} of {self.full_bytes:,} bytes" if self.batch else "empty"
        state = "" if self.interrupted is None else ", interrupted"
        return (
            f"BudgetCache({self._model_name}, {len(self.layers)} layers, rows={self.batch}, "
            f"tokens={self.get_seq_length()}, {stored}{state})"
        )

    @property
    def prompt_complete(self) -> bool:
        """Whether the whole prompt has been seen, so that all that comes now follows it."""
        return self.arrival.complete

    @property
    def interrupted(self) -> str | None:
        """Why only `reset` helps: a forward failed half-way, or `prefill` did; None if neither."""
        return self._interrupted or (None if self._step is None else refusals.HALF_WAY)

    @property
    def reduced(self) -> bool:
        """Whether any entry has been evicted, padding included."""
        return any(layer.reduced for layer in self._budget_layers)

    @contextmanager
    def prefill(self) -> Iterator[None]:
        """Everything that runs inside the ``with`` is the prompt, in however many forwards.

        For a prompt that arrives in chunks and whose length is not known beforehand (otherwise
        announce it: ``prompt_tokens``). After each chunk the cache keeps the budgets of what has
        arrived so far, and at the end those of the whole prompt. Where an error leaves the
        ``with`` after some of the prompt, the rest never arrives: the cache is `interrupted`, and
        refuses to go on and to be saved until `reset`, which inside the ``with`` begins the
        prompt anew.

        Raises
        ------
        UnsupportedRequestError
            If the cache has seen a prompt already, or its length was announced.
        """
        if self.get_seq_length() or self.arrival.announced is not None:
            raise UnsupportedRequestError(
                "prefill() announces a new prompt, but this cache has seen one already or was "
                "made with prompt_tokens; call cache.reset(), or make a new cache"
            )
        self._prefilling = self.arrival.open = True
        failed = True
        try:
            yield
            failed = False
        finally:
            self._prefilling = self.arrival.open = False
            self._end_prefill(failed=failed)

    def _end_prefill(self, *, failed: bool) -> None:
        """Nothing more of the prompt comes: either it is complete, or it never will be."""
        arrival = self.arrival
        if failed and arrival.prompt_tokens is not None:
            self._interrupted = self._interrupted or refusals.broken_off(arrival.prompt_tokens)
        arrival.complete = arrival.prompt_tokens is not None and not failed
        if self._holding is not None and arrival.complete:
            self._finish_held()
        for layer in self._budget_layers if arrival.decode_every is None else ():
            layer.unfinished.clear()
        for index, bits in self._bits.items() if arrival.complete else ():
            self.layers[index].pack(bits)

    def end_prompt(self) -> None:
        """Say that what has been read is the whole prompt, and what comes now follows it.

        A prompt in one forward is taken for the whole without this, too, but where a long second
        forward comes next, a warning says that it may be more of the prompt.
        """
        self.arrival.end_prompt()

    # What the hooks call

    @property
    def _budget_layers(self) -> list[BudgetLayer]:
        return [layer for layer in self.layers if isinstance(layer, BudgetLayer)]

    def begin_forward(
        self, decoder: nn.Module, arguments: Mapping[str, Any]
    ) -> Mapping[str, Any] | None:
        """Check a forward before anything of it runs, and prepare the layers for it.

        Returns
        -------
        mapping or None
            Arguments to change: the mask of known padding where the caller gave none, for the
            layers that are transformers' own and may still store some.
        """
        if self.decoder() is not decoder:
            raise ModelMismatchError(
                f"this cache was made for another {self._model_name} object than the "
                f"{type(decoder).__name__} that it was given to; make one with "
                "profile.cache(model) for this model"
            )
        if self._interrupted is not None:
            raise UnsupportedRequestError(self._interrupted)
        mask_kind = refusals.check_forward(decoder, arguments, self.batch)
        batch, new_tokens = refusals.new_tokens_shape(arguments)
        if not (self.get_seq_length() or self.arrival.announced or self.arrival.open):
            refusals.check_not_chunked()
        mask = arguments.get("attention_mask")
        if self.prompt_complete and not self.reduced and getattr(mask, "ndim", 2) != 2:
            mask = None  # nothing was evicted, so any mask of transformers' own fits
        self._decide_on_arrival(batch, arguments, mask)
        step = self.arrival.step(self.get_seq_length(), batch, new_tokens, mask)
        if self.arrival.took_for_whole(step) and self.reduced and not self._warned:
            self._warned = refusals.warn_of_long_chunk(step.seen, new_tokens)
        self._targets = {}
        if holds := self._holds(step):
            self._begin_held(arguments, step)
        else:
            refusals.check_chunk(self._policy, step)
        evicts = step.budgets is not None and not holds
        for index, layer in enumerate(self.layers) if evicts else ():
            if isinstance(layer, BudgetLayer):
                always = step.completes and self._is_packed(index)
                targets = step.targets(index, layer.stored_counts(), always=always)
                if targets is not None:
                    self._targets[index] = targets
        if self._reader is not None:
            refusals.check_read(self._policy, self._targets.values())
        for index in self._targets:
            self.layers[index].expect_eviction()
        if self._reader is None:
            self._hold_apart(step)
        self._masks.clear()
        self._mask_kind = mask_kind
        self._step = step
        if mask is None and step.visible is not None:
            return {"attention_mask": step.visible.long()}
        return None

    def _is_packed(self, index: int) -> bool:
        """Whether a layer is stored at fewer bits, or one that it chooses entries with."""
        return any(one in self._bits for one in self._groups.get(index, (index,)))

    def attend(self, states: AttentionStates, compute: Compute) -> Any:
        """Run one layer's attention with the mask that fits it; evict what is not to stay."""
        layer = self.layers[states.layer]
        if not isinstance(layer, BudgetLayer):
            output = compute(states.mask)
            free_slid_out(layer, states)
            return output
        output = self._attention(layer, states, compute)
        step = self._step
        assert step is not None
        if self._holds(step):
            self._note_held(layer, states, step)
            return output
        if step.follows and states.layer in self._bits and not layer.awaits_eviction:
            layer.pack_following(step.following_visible(layer.dense_tokens))
        if not layer.awaits_eviction and not step.remember:
            layer.unfinished.clear()
            return output
        policy = self.profile.policy
        eviction = Eviction(
            policy=self._policy,
            sinks=policy.sinks,
            window=policy.window,
            prompt_tokens=step.prompt_tokens,
            visible=step.new_visible,
            remember=step.remember,
            bits=self._bits if step.settles else {},
        )
        if not layer.awaits_eviction:
            eviction.observe(layer, states)
            return output
        group = self._groups.get(states.layer)
        eviction.evict_in_group(layer, states, self._targets[states.layer], group, self._held)
        if self._reader is not None:
            self._reader.forget()
        return output

    def end_forward(self, *, completed: bool, output: Any = None) -> None:
        """Clean up after a forward; after a failed one, find out what it left."""
        step, self._step = self._step, None
        self._masks.clear()
        self._held.clear()
        if step is None:  # it was interrupted, and `reset` has tidied up before this
            return
        unseen = [layer for layer in self._budget_layers if layer.awaits_eviction]
        if completed and unseen:
            self._interrupted = refusals.HALF_WAY
            raise UnsupportedModelError(
                f"the attention of {self._model_name} did not go through transformers' attention "
                'interface, so nothing was evicted; load it with attn_implementation="sdpa"'
            )
        if completed:
            self.arrival.commit(step)
            if self._holds(step):
                self._end_held(step, output)
            return
        for layer in self._budget_layers:
            layer.cancel_eviction()
        lengths = {layer.get_seq_length() for layer in self.layers}
        if unseen or lengths != {step.seen}:
            self._interrupted = refusals.HALF_WAY

    def _hold_apart(self, step: Step) -> None:
        """Let those layers store the next token apart from the others that may.

        Not where padding among the latest tokens asks for a mask.
        """
        if step.new_tokens != 1 or step.budgets is not None or step.remember:
            return
        for layer in self._budget_layers:
            padded = step.following_visible(layer.following_tokens + 1) is not None
            if layer.kept_indices is not None and not padded:
                layer.expect_apart()

    def _attention(self, layer: BudgetLayer, states: AttentionStates, compute: Compute) -> Any:
        """Attention over what the layer stores, the new tokens included."""
        if not layer.reduced:
            return compute(states.mask)
        assert self._step is not None
        if layer.holds_apart:
            even = FlatEntries.even(*layer.kept_apart, layer.logit_bias)
            return attend(AttentionCall.of(states), [even]), None
        n_stored = int(states.keys.shape[2])
        n_kept = 0 if layer.kept_indices is None else int(layer.kept_indices.shape[-1])
        visible = self._step.following_visible(n_stored - n_kept)
        if layer.entries is not None:
            return attend(AttentionCall.of(states, visible), layer.entries.flat), None
        if layer.logit_bias is not None:
            even = FlatEntries.even(states.keys, states.values, layer.logit_bias, n_kept)
            return attend(AttentionCall.of(states, visible, first=n_kept), [even]), None
        if self._reader is not None and states.queries.shape[2] == 1 and visible is None:
            return self._read(self._reader, layer, states, compute)
        key = (n_stored, n_kept, states.keys.device)
        if key not in self._masks:
            self._masks[key] = stored_mask(
                int(states.queries.shape[2]),
                n_stored,
                kind=self._mask_kind,
                dtype=states.queries.dtype,
                device=states.keys.device,
                batch=int(states.queries.shape[0]),
                visible=visible,
            )
        return compute(self._masks[key])

    def _read(
        self, reader: Reader, layer: BudgetLayer, states: AttentionStates, compute: Compute
    ) -> Any:
        """Attend to the part of what is stored that the policy wants read."""
        assert layer.kept_indices is not None
        indices = reader.read(
            states,
            place=self.profile.shape.full_layers.index(states.layer),
            n_prompt=int(layer.kept_indices.shape[-1]),
            positions=layer.kept_indices,
        )
        if indices is None:
            return compute(None)
        return compute(None, gathered(states.keys, indices), gathered(states.values, indices))

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
        if self._step is None:
            raise ModelMismatchError(
                f"this cache works only inside a forward of the {self._model_name} object that it "
                "was made for; make one with profile.cache(model) for the model at hand"
            )
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values

    def save(self, path: str | Path) -> None:
        """Write the cache to a file, from which `kvalloc.load_cache` brings it back.

        Parameters
        ----------
        path : str or Path
            Usually ``*.safetensors``: keys, values and positions as they are stored, and a JSON
            header with the budget profile and digests of profile, model and tensors.

        Raises
        ------
        UnsupportedRequestError
            If no complete prompt is stored.
        InputError
            If the folder does not exist or is read-only.
        """
        save_cache(self, path)

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
            Negative: remove that many tokens. Positive: keep that many.

        Raises
        ------
        UnsupportedRequestError
            If the cut would reach into a reduced prompt, or into tokens that a sliding layer has
            dropped.
        """
        seen = self.get_seq_length()
        arriving = bool(seen) and not self.prompt_complete
        refusals.check_crop(decoding=self.arrival.decode_every is not None, arriving=arriving)
        remove = cropped_tokens(tokens_to_remove, seen)
        if remove <= 0:
            return
        for layer in self.layers:
            if isinstance(layer, BudgetLayer):
                layer.crop_count(-remove)
            elif layer.get_seq_length() >= layer.sliding_window:
                raise UnsupportedRequestError(
                    "cannot crop: a sliding-window layer has already dropped the tokens that "
                    "would come back into its window; make a new cache"
                )
        super().crop(-remove)  # not every layer of transformers' own knows a number to keep
        self.arrival.crop(self.get_seq_length())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i continue what row ``beam_idx[i]`` holds (beam search)."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._rows_change(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        rows = torch.arange(self.batch).repeat_interleave(repeats)
        super().batch_repeat_interleave(repeats)
        self._rows_change(rows)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows."""
        super().batch_select_indices(indices)
        self._rows_change(row_numbers(indices))

    def _rows_change(self, rows: Tensor) -> None:
        if not self.batch:
            return
        self.arrival.select(rows)
        if self._holding is not None:
            self._holding.select(rows)
        if self._reader is not None:
            self._reader.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> BudgetCache:
        """A cache that goes on from here on its own, e.g. one prompt for several questions."""
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        for shared in (self._stored_profile, self._policy, self._decide, *self.row_profiles):
            memo[id(shared)] = shared
        for tensor in (one for layer in self.layers for one in stored_tensors(layer)):
            if tensor.requires_grad:  # torch copies no tensor with a history
                memo[id(tensor)] = copy.deepcopy(tensor.detach(), memo)
        clone.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
        clone._prefilling = False  # the `with` is the original's
        if clone._step is not None:  # no hook will end a forward of the copy
            clone._interrupted = refusals.HALF_WAY
        if (decoder := self.decoder()) is not None:
            hooks.retain(clone, decoder)
        return clone
