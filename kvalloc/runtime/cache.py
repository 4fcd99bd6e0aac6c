"""A transformers cache whose layers and heads keep what a budget profile grants them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from kvalloc.accounting import IntArray
from kvalloc.accounting.stored import bytes_at_16_bits, layer_tensors, storages
from kvalloc.errors import UnsupportedRequestError
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.models.attention import AttentionStates, Compute
from kvalloc.models.structure import context_limit
from kvalloc.runtime import hooks, refusals
from kvalloc.runtime.arrival import Arrival, row_tokens
from kvalloc.runtime.attention.backends import attend
from kvalloc.runtime.attention.call import AttentionCall
from kvalloc.runtime.attention.masks import MaskFunction, stored_mask
from kvalloc.runtime.drafts import part, unread
from kvalloc.runtime.layer import BudgetLayer, cropped_tokens, row_numbers
from kvalloc.runtime.plan import Plan
from kvalloc.runtime.policies.base import Reader
from kvalloc.runtime.prompt import Prompt, State
from kvalloc.runtime.saving import save_cache
from kvalloc.runtime.selection import gathered
from kvalloc.runtime.verifier import Verifier
from kvalloc.units import share_text, size

__all__ = ["BudgetCache"]


class BudgetCache(Cache, hooks.HookedCache):
    """Keeps, of a prompt, the entries that a budget profile grants each layer and KV head.

    While the prompt runs, each full-attention layer first attends to all it holds, then the
    policy ranks the entries and only the budget stays: sinks, window and, for each row and KV
    head, its own best. What is evicted is freed before the next layer runs. A policy that looks at
    what follows the prompt evicts later: the cache is a full one until so many tokens have
    followed (`awaited_tokens`), then all layers evict at once. Tokens that follow, turns and
    answers, any number at a time, are added; every so many (``decode_every``) and at the end of a
    turn they compete with what is kept for the budgets of all tokens seen. Positions stay true:
    `get_seq_length` is the number of tokens seen. Make one with `kvalloc.make_cache`; budgets,
    entries and masks belong to this object and not to the model, so any number of caches can be
    interleaved.

    Notes
    -----
    Rows of a batch may have different lengths, padded on either side: each gets the budgets of
    its own length, and padding is neither kept nor counted. A prompt may come in chunks, announced
    (``prompt_tokens``) or inside `prefill`. `reorder_cache` (beam search), `crop` back to the end
    of the prompt, `copy.deepcopy` and `reset` work. Sliding-window layers are transformers' own.
    """

    layers: list[Any]  # each with keys: `make_layers` refuses others
    _ahead = False  # while pieces of a forward run, all but the last
    verifier: Verifier | None = None  # see `kvalloc.runtime.lossless`
    read_ids: Tensor | None = None  # what `generate` read and wrote, where that is known

    def __init__(self, plan: Plan, layers: list[Any], arrival: Arrival) -> None:
        super().__init__(layers=layers)
        self._prompt = Prompt(plan, self.layers, arrival)
        self.decoder = plan.decoder
        self._before: list[BudgetCache] = []  # copies from before what drafts made due
        self._masks: dict[tuple[int, int, torch.device], Any] = {}
        self._mask_function: MaskFunction | None = None
        if (decoder := self.decoder()) is not None:
            hooks.retain(self, decoder)

    @property
    def _prompts(self) -> Sequence[Prompt]:
        """Those of rows that are kept alike."""
        return [self._prompt]

    def _in_order(self, several: Sequence[Any]) -> Any:
        """Return what is known of the rows of each prompt as that of the batch."""
        return several[0]

    def __repr__(self) -> str:
        """Model, tokens and share; layers each by itself would fill screens."""
        stored = f"{self.share_text}, {size(self.retained_bytes)}" if self.batch else "empty"
        state = "" if self.interrupted is None else ", interrupted"
        return (
            f"BudgetCache({self._prompt.plan.name}, rows={self.batch}, "
            f"tokens={self.get_seq_length()}, {stored}{state})"
        )

    # The prompt

    @property
    def profile(self) -> BudgetProfile:
        """Whose budgets hold: decided ones, where all rows have the same."""
        return self._prompt.profile

    @property
    def row_profiles(self) -> tuple[BudgetProfile, ...]:
        """Whose budgets each row keeps, ``(batch,)``: its own, where they are decided by prompt."""
        return tuple(self._in_order([prompt.row_profiles for prompt in self._prompts]))

    @property
    def decision_seconds(self) -> float | None:
        """What deciding budgets took; None where nothing was decided."""
        return self._prompt.decision_seconds

    @property
    def decode_every(self) -> int | None:
        """Tokens after which what followed competes; None where they grow with the tokens seen."""
        return self._prompt.plan.every

    @property
    def memory(self) -> int | None:
        """Bytes that it never exceeds, however long a conversation grows; None for any."""
        return self._prompt.plan.memory

    @property
    def arrival(self) -> Arrival:
        """What has come: tokens, padding, whose budgets."""
        return self._prompt.arrival

    @property
    def state(self) -> State:
        """How far the prompt has come."""
        state = max(self._prompts, key=lambda prompt: prompt.awaited_tokens).state
        return state if self.interrupted is None else State.INTERRUPTED

    @property
    def prompt_complete(self) -> bool:
        """Whether the whole prompt has been seen, so that all that comes now follows it."""
        return self.arrival.complete

    @property
    def interrupted(self) -> str | None:
        """Why only `reset` helps: a forward failed half-way, or `prefill` did; None if neither."""
        reasons = (prompt.interrupted for prompt in self._prompts)
        return next((reason for reason in reasons if reason is not None), None)

    @property
    def awaited_tokens(self) -> int:
        """Tokens that still have to follow before a held prompt is evicted; 0 if none is held."""
        return max(prompt.awaited_tokens for prompt in self._prompts)

    @property
    def reduced(self) -> bool:
        """Whether any entry has been evicted, padding included."""
        return any(prompt.reduced for prompt in self._prompts)

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
        with ExitStack() as stack:
            for prompt in self._prompts:
                stack.enter_context(prompt.reading())
            yield

    def evict(self) -> None:
        """Let a held prompt be evicted now; only tokens that have followed so far vote.

        For a cache that is to be measured before anybody asks it. Does nothing where no prompt is
        held.

        Raises
        ------
        UnsupportedRequestError
            If the cache is interrupted.
        """
        if self.interrupted is not None:
            raise UnsupportedRequestError(self.interrupted)
        for prompt in self._prompts:
            prompt.evict()

    def end_turn(self) -> None:
        """Keep no more than the budget of all tokens seen: a turn has been read and answered.

        What followed the latest eviction competes with what was kept. `kvalloc.apply` does so
        after each ``generate()``; without it, it happens every so many tokens.

        Raises
        ------
        UnsupportedRequestError
            If the cache is interrupted.
        """
        self.evict()
        for prompt in self._prompts:
            prompt.settle_following()

    def decide(self, inputs: Mapping[str, Any]) -> None:
        """Show a prompt of announced length that comes in chunks, before its first one.

        Its budgets are decided then, where that is asked for, and the lengths of its rows are
        known. By itself the cache decides in the first forward, which has to be the whole prompt.

        Parameters
        ----------
        inputs : mapping
            ``input_ids`` (batch, n_tokens) and, where there is padding, ``attention_mask``.

        Raises
        ------
        UnsupportedRequestError
            If a prompt has been seen already, or it is not given as token ids.
        KVAllocError
            As the decider does.
        """
        self._prompt.decide(inputs)

    # What it stores

    @property
    def batch(self) -> int:
        """Rows that are stored; 0 before the first forward."""
        return sum(prompt.batch for prompt in self._prompts)

    @property
    def retained_bytes(self) -> int:
        """Bytes allocated now: every storage once and in full, positions and biases too."""
        return sum(int(storage.nbytes()) for storage, _, _ in storages(self._tensors()))

    @property
    def share(self) -> float:
        """Share of a cache at 16 bits a number of all tokens seen that is stored.

        Positions and biases of kept entries count, sliding layers do not; 0 before the first
        forward.
        """
        stored, whole = self._of_16_bits() if self.batch else (0, 1)
        return stored / max(1, whole)

    def _of_16_bits(self) -> tuple[int, int]:
        """What `share` is made of: bytes that are stored, and those of a cache at 16 bits."""
        shape = self._prompt.profile.shape
        tokens = sum(int(prompt.arrival.visible.sum()) for prompt in self._prompts)
        whole = shape.bytes_per_entry * shape.n_kv_heads * len(shape.full_layers)
        return sum(bytes_at_16_bits(prompt.layers) for prompt in self._prompts), tokens * whole

    @property
    def share_text(self) -> str:
        """What was asked for, if that is known, and the share that is stored."""
        return share_text(self.share, self.profile.target_text)

    @property
    def full_bytes(self) -> int:
        """Bytes of a cache at 16 bits a number of all tokens seen; padding does not count.

        Of a sliding layer the last ``sliding_window - 1`` entries count, and one more where, after
        a decoded token, it is still allocated, and in `retained_bytes` as well.
        """
        if not self.batch:
            return 0
        shape = replace(self._prompt.profile.shape, dtype_bytes=self.layers[0].dtype.itemsize)
        tokens = [n for own in self._prompts for n in row_tokens(own.arrival.visible).tolist()]
        slid_out: int = sum(
            tensor.untyped_storage().nbytes() - tensor.nbytes
            for prompt in self._prompts
            for layer in prompt.layers
            if not isinstance(layer, BudgetLayer)
            for tensor in layer_tensors(layer)
        )
        return sum(shape.full_bytes(own) for own in tokens if own) + slid_out

    @property
    def kept_tokens(self) -> IntArray:
        """Entries stored now, ``(n_layers, n_kv_heads)``; where rows differ, those of the most."""
        counts: IntArray = self.kept_tokens_by_row.max(axis=0, initial=0)
        return counts

    @property
    def kept_tokens_by_row(self) -> IntArray:
        """Entries stored now, ``(batch, n_layers, n_kv_heads)``."""
        counts: IntArray = self._in_order([prompt.stored_counts() for prompt in self._prompts])
        return counts

    def _tensors(self) -> Iterator[Tensor]:
        """All K and V tensors."""
        layers = (layer for prompt in self._prompts for layer in prompt.layers)
        return (tensor for layer in layers for tensor in layer_tensors(layer))

    def kept_indices(self, layer: int) -> Tensor:
        """Original positions of the prompt's entries that a layer keeps.

        While a prompt arrives in chunks, of all that has come of it; later also of the tokens that
        followed up to the latest eviction.

        Parameters
        ----------
        layer : int
            A full-attention layer.

        Returns
        -------
        Tensor of int32, (batch, n_kv_heads, n_kept)
            Columns of the input in increasing order; -1 beyond the end of a head that keeps fewer
            than another. These four bytes an entry are the cache's own book-keeping and do not
            count as K or V bytes.

        Raises
        ------
        InputError
            If the layer is a sliding one, or no prompt has been seen.
        """
        indices = [prompt.kept_indices(layer) for prompt in self._prompts]
        most = max(int(own.shape[-1]) for own in indices)
        pad = nn.functional.pad
        found: Tensor = self._in_order(
            [pad(own, (0, most - own.shape[-1]), value=-1) for own in indices]
        )
        return found

    # What the hooks call

    def ahead(
        self, decoder: nn.Module, arguments: Mapping[str, Any]
    ) -> tuple[list[Any], Mapping[str, Any]]:
        """Run the pieces of a forward, all but the last.

        It is cut where it has drafts, and where the memory does not take it whole.

        Returns
        -------
        list
            The decoder's outputs.
        mapping
            Arguments of the last piece.
        """
        prompt, outputs = self._prompt, list[Any]()
        if self._ahead:
            return outputs, arguments
        seen = self.get_seq_length()
        if prompt.given is not None:
            arguments = unread(arguments, seen)
            self._take()
        cuts = self._cuts(seen + refusals.new_tokens_shape(arguments)[1])
        self._ahead = True
        try:
            for column in cuts:
                new = column - self.get_seq_length()
                outputs.append(decoder(**part(arguments, slice(new), column)))
                arguments = part(arguments, slice(new, None))
                if prompt.given is not None and column > prompt.given:
                    shared = {id(tensor): tensor for tensor in self._tensors()}
                    self._before.append(copy.deepcopy(self, {**shared, id(self._before): []}))
                prompt.catch_up()
        finally:
            self._ahead = False
        return outputs, arguments

    def _cuts(self, end: int) -> list[int]:
        return self._prompt.cuts(end)

    def _take(self) -> None:
        """Nothing that is there is taken back any more: let go of what was kept for that."""
        self._before = []
        self._prompt.catch_up()
        for layer in self.layers:
            if getattr(layer, "record_past", False):
                layer.crop(0)

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
        prompt = self._prompt
        names = prompt.plan.name, type(decoder).__name__
        refusals.refuse(given_to_other=self.decoder() is not decoder and names)
        if prompt.interrupted is not None:
            raise UnsupportedRequestError(prompt.interrupted)
        mask_function = refusals.check_forward(decoder, arguments, self.batch)
        seen, limit = self.get_seq_length(), context_limit(decoder)
        _, new = refusals.new_tokens_shape(arguments)
        beyond = seen and new > 1 and limit is not None and seen + new > limit
        refusals.refuse(
            turn_of_nothing=not new and (seen, seen),
            turn_beyond=beyond and (seen, new, limit),
        )
        mask = arguments.get("attention_mask")
        if prompt.given is not None and self.prompt_complete:
            for layer in self.layers:
                if hasattr(layer, "activate_past_recording"):
                    layer.activate_past_recording()
        if self.prompt_complete and not self.reduced and getattr(mask, "ndim", 2) != 2:
            mask = None  # nothing was evicted, so any mask of transformers' own fits
        step = prompt.begin(arguments, mask)
        # one token is attended to without a copy of what is kept in front of what followed
        alone = step.new_tokens == 1 and step.follows
        for layer in self.layers:
            if isinstance(layer, BudgetLayer):
                layer.joins = prompt.reader is not None or not alone
        self._masks.clear()
        self._mask_function = mask_function
        reduced = all(getattr(layer, "reduced", False) for layer in self.layers)
        if mask is not None or reduced or bool(step.visible.all()):
            return None
        return {"attention_mask": step.visible.to(self.layers[0].device, torch.long)}

    def attend(self, states: AttentionStates, compute: Compute) -> Any:
        """Run one layer's attention with the mask that fits it; evict what is not to stay."""
        layer = self.layers[states.layer]
        if not isinstance(layer, BudgetLayer):
            output = compute(states.mask)
            _free_slid_out(layer, states)
            return output
        with self._prompt.checks.noted():  # the host reads once a forward what it has to know
            output = self._attention(layer, states, compute)
            self._prompt.attended(layer, states)
        return output

    def end_forward(self, *, completed: bool) -> None:
        """Clean up after a forward; after a failed one, find out what it left."""
        self._masks.clear()
        self._prompt.end(completed=completed)

    def _attention(self, layer: BudgetLayer, states: AttentionStates, compute: Compute) -> Any:
        """Attention over what the layer stores, the new tokens included."""
        if not layer.reduced:
            return compute(states.mask)
        step, reader = self._prompt.step, self._prompt.reader
        assert step is not None
        assert layer.entries is not None
        n_stored, n_kept = int(states.keys.shape[2]), layer.in_front
        visible = step.following_visible(n_stored - n_kept, states.keys.device)
        if not n_kept or layer.entries.parts[0].bias is not None:
            call = AttentionCall.of(states, visible, first=n_kept)
            return attend(call, layer.entries.parts), None
        if reader is not None and states.queries.shape[2] == 1 and visible is None:
            return self._read(reader, layer, states, compute)
        return compute(self.stored_mask(states, n_kept))

    def stored_mask(self, states: AttentionStates, n_kept: int = 0) -> Any:
        """Return the mask of what a layer stores, of which so many entries stand in front.

        It is made once a forward for all layers that store as much.
        """
        step, n_stored = self._prompt.step, int(states.keys.shape[2])
        key = (n_stored, n_kept, states.keys.device)
        if key not in self._masks:
            assert step is not None
            assert self._mask_function is not None
            self._masks[key] = stored_mask(
                self._mask_function,
                int(states.queries.shape[2]),
                n_stored,
                dtype=states.queries.dtype,
                device=states.keys.device,
                batch=int(states.queries.shape[0]),
                visible=step.following_visible(n_stored - n_kept, states.keys.device),
            )
        return self._masks[key]

    def _read(
        self, reader: Reader, layer: BudgetLayer, states: AttentionStates, compute: Compute
    ) -> Any:
        """Attend to the part of what is stored that the policy wants read."""
        assert layer.entries is not None
        place = self.profile.shape.full_layers.index(states.layer)
        positions, _ = layer.entries.columns
        indices = reader.read(states, place=place, positions=positions)
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
        refusals.refuse(outside_forward=self._prompt.step is None and self._prompt.plan.name)
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
            If no complete prompt is stored, or one is held until tokens have followed it.
        InputError
            If the folder does not exist or is read-only.
        """
        save_cache(self, path)

    def reset(self) -> None:
        """Forget prompt and tokens, and free their storage; the next forward is a new prompt."""
        for prompt in self._prompts:
            prompt.reset()

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
        end = seen - max(cropped_tokens(tokens_to_remove, seen), 0)
        before = next((one for one in self._before if one.get_seq_length() > end), None)
        checked = self if before is None else before
        checked.check_crop(end - checked.get_seq_length())
        if before is not None:
            self.__dict__.update(before.__dict__, _ahead=False, number=self.number)
        if remove := self.get_seq_length() - end:
            super().crop(-remove)  # not every layer of transformers' own knows a number to keep
            self._prompt.crop()
        if self._prompt.given is not None:
            self._take()

    def check_crop(self, tokens_to_remove: int) -> int:
        """Return how many tokens `crop` would remove; raise as it does, and change nothing."""
        remove = cropped_tokens(tokens_to_remove, self.get_seq_length())
        self._prompt.check_crop(remove)
        for layer in self.layers if remove > 0 else ():
            if isinstance(layer, BudgetLayer):
                layer.crop_count(-remove)
            elif not getattr(layer, "record_past", False):
                refusals.refuse(crop_slid_out=layer.get_seq_length() >= layer.sliding_window)
        return remove

    def activate_past_recording(self, given: int | None = None) -> None:
        """From now on each forward may end in drafts, and a `crop` follows that takes some back.

        Assisted generation says so. What is evicted and rounded is then what it would be if the
        tokens that stay had come one at a time.

        Parameters
        ----------
        given : int, optional
            Columns that are no drafts, where the next forward holds both; by default the prompt
            that was announced, or what the cache has seen.

        Raises
        ------
        UnsupportedRequestError
            If the cache is empty and no prompt was announced, or it leaves entries unread at each
            decoded token.
        """
        prompt, seen = self._prompt, self.get_seq_length()
        sliding = [layer for layer in self.layers if not isinstance(layer, BudgetLayer)]
        columns = given or max(prompt.given or 0, self.arrival.announced or 0, seen)
        refusals.refuse(
            drafts_unannounced=not columns,
            drafts_slide_out=any(not hasattr(one, "record_past") for one in sliding),
            drafts_read_all=prompt.reader is not None and prompt.plan.policy.name,
        )
        prompt.given = columns

    # Drafts of its own, see `kvalloc.runtime.lossless`

    @property
    def groups(self) -> Sequence[tuple[Any, BudgetCache]]:
        """Rows that are kept alike, as what picks them, and their cache."""
        return [(slice(None), self)]

    @property
    def leaves_unread(self) -> bool:
        """Whether decoded tokens read only a part of what is stored."""
        return self._prompt.reader is not None

    def draft_from(self, column: int | None) -> None:
        """Say from which column on tokens may be drafts; None: none is."""
        for _, own in self.groups:
            own._prompt.given = column

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """All that comes inside is drafts: nothing goes before `crop` has said which stay."""
        self._ahead = True
        try:
            yield
        finally:
            self._ahead = False

    def room_for_drafts(self, longest: int) -> int:
        """Return the number of drafts, at least 1, before what followed has to compete."""
        return self._prompt.room_for_drafts(longest)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i continue what row ``beam_idx[i]`` holds (beam search)."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        self.batch_select_indices(torch.arange(self.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows; one may be kept more than once."""
        if self.batch:
            rows = row_numbers(indices)
            super().batch_select_indices(rows)
            self._prompt.select(rows)

    # What it cannot do

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse, always, to be pickled, or copied by half (`copy.copy`)."""
        refusals.refuse(pickled=True)

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Refuse, always: evicted layers are small, and their masks are made on their device."""
        refusals.refuse(offloaded=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> BudgetCache:
        """A cache that goes on from here on its own, e.g. one prompt for several questions."""
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        shapes = self._prompt.attention.values()  # they hold weights of the model
        for shared in (self.profile, *self.row_profiles, *shapes):
            memo[id(shared)] = shared
        for tensor in self._tensors():
            if tensor.requires_grad:  # torch copies no tensor with a history
                memo[id(tensor)] = copy.deepcopy(tensor.detach(), memo)
        memo[id(self.number)] = clone.number
        clone.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
        clone._prompt.forked()
        if (decoder := self.decoder()) is not None:
            hooks.retain(clone, decoder)
        return clone


def _free_slid_out(layer: Any, states: AttentionStates) -> None:
    """Give back the storage of prompt tokens that have left a sliding window.

    transformers keeps a view of the last tokens, whose storage is the whole prompt's. After one
    decoded token it has one entry more than the view, and to free that would copy the whole window
    for each token; it goes with the next one.
    """
    if states.queries.shape[2] == 1:
        return
    for name in ("keys", "values"):
        view: Tensor = getattr(layer, name)
        if view.untyped_storage().nbytes() > view.nbytes:
            setattr(layer, name, view.clone(memory_format=torch.contiguous_format))
