"""A transformers cache whose layers and heads keep what a budget profile grants them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache

from kvalloc.accounting import IntArray
from kvalloc.accounting.costs import full_bytes
from kvalloc.accounting.stored import bytes_at_16_bits, layer_tensors, storages
from kvalloc.errors import UnsupportedRequestError, one_line
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.models.attention import AttentionStates, Compute
from kvalloc.models.names import can_take_back
from kvalloc.models.structure import context_limit
from kvalloc.runtime import conversation, hooks, refusals
from kvalloc.runtime.arrival import Arrival, row_tokens
from kvalloc.runtime.attention.masks import shown_columns
from kvalloc.runtime.drafts import part, unread
from kvalloc.runtime.layer import BudgetLayer
from kvalloc.runtime.options import CacheOptions
from kvalloc.runtime.prompt import Prompt
from kvalloc.runtime.saving import save_cache
from kvalloc.runtime.verifier import Verifier
from kvalloc.units import share_text

_BY_ROW = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")
"""Arguments of a forward that are of rows."""


class BudgetCache(Cache, hooks.HookedCache):
    """Keeps, of a prompt, the entries that a budget profile grants each layer and KV head.

    While the prompt runs, each full-attention layer first attends to all it holds, then the
    policy ranks the entries and only the budget stays: sinks, window and, for each row and KV
    head, its own best. What is evicted is freed before the next layer runs. Where a prompt is read
    twice, or all layers share its budgets, all of them evict at once when it is complete; until
    then the cache is a full one. Tokens that follow, turns and answers, any number at a time, are
    added; every so many (``decode_every``) and at the end of a turn they compete with what is kept
    for the budgets of all tokens seen. Positions stay true: `get_seq_length` is the number of
    tokens seen. Make one with `kvalloc.make_cache`; budgets, entries and masks belong to this
    object and not to the model, so any number of caches can be interleaved.

    Notes
    -----
    Rows of a batch may have different lengths, padded on either side: each gets the budgets of
    its own length, and padding is neither kept nor counted. A prompt may come in chunks that are
    announced (``prompt_tokens``). `reorder_cache` (beam search), `crop` back to the end of the
    prompt, `copy.deepcopy` and `reset` work. Sliding-window layers are transformers' own.
    """

    layers: list[Any]  # each with keys: `make_layers` refuses others
    _ahead = False  # while pieces of a forward run, all but the last
    verifier: Verifier | None = None  # see `kvalloc.runtime.lossless`
    read_ids: Tensor | None = None  # the first tokens that it has seen, as far as they are known

    def __init__(self, prompts: Sequence[Prompt], rows: Sequence[Sequence[int]] = ()) -> None:
        super().__init__(layers=prompts[0].layers)
        self.decoder = prompts[0].plan.decoder
        self._before: list[BudgetCache] = []  # copies from before what drafts made due
        self._states: list[tuple[Tensor, Tensor]] = []  # of the layer that runs, by group
        self._regroup(prompts, rows)
        if (decoder := self.decoder()) is not None:
            hooks.retain(self, decoder)

    @classmethod
    def joined(cls, caches: Sequence[tuple[Sequence[int], BudgetCache]]) -> BudgetCache:
        """Return a cache for a batch whose rows are kept in different ways.

        The model reads all rows in one forward. As long as nothing of a layer has gone, its
        attention is that of the whole batch; then it is computed group by group.

        Parameters
        ----------
        caches : sequence of (sequence of int, BudgetCache)
            Rows of the batch, each in one group, and what keeps them: empty caches of one model.
        """
        return cls([own._prompt for _, own in caches], [rows for rows, _ in caches])

    def _regroup(self, prompts: Sequence[Prompt], rows: Sequence[Sequence[int]]) -> None:
        """Note which rows are kept alike, and by whom."""
        self._prompts, self.layers = list(prompts), prompts[0].layers
        self._places = [torch.tensor(own, device="cpu") for own in rows] if len(prompts) > 1 else []
        self._order = torch.cat(self._places).argsort() if self._places else None

    @property
    def _prompt(self) -> Prompt:
        """That of the first group, for what is the same in all."""
        return self._prompts[0]

    @property
    def groups(self) -> Sequence[tuple[Any, Prompt]]:
        """Rows that are kept alike, as what picks them, and their prompt."""
        every: Sequence[Any] = self._places or [slice(None)]
        return [*zip(every, self._prompts, strict=True)]

    def _in_order(self, several: Sequence[Any]) -> Any:
        """Return what is known of the rows of each prompt as that of the batch."""
        if self._order is None:
            return several[0]
        order = self._order[: sum(len(own) for own in several)]  # all, or none that are stored
        if isinstance(several[0], Tensor):
            return torch.cat([*several])[order.to(several[0].device)]
        if isinstance(several[0], np.ndarray):
            return np.concatenate(several)[order.numpy()]
        rows = [own for of_group in several for own in of_group]
        return [rows[place] for place in order.tolist()]

    def _of(self, arguments: Mapping[str, Any], place: Any) -> Mapping[str, Any]:
        """Return the arguments of a forward for the rows of one group."""
        if self._order is None:
            return arguments
        own, batch = dict(arguments), len(self._order)
        for name in _BY_ROW:
            given = own.get(name)
            if name == "position_ids" and isinstance(given, Tensor) and given.shape[-2] == batch:
                own[name] = given[..., place, :]  # in front are the axes of an image's positions
            elif isinstance(given, Tensor) and len(given) == batch:
                own[name] = given[place]
        return own

    def __repr__(self) -> str:
        """Model, tokens and share; layers each by itself would fill screens."""
        stored = self.share_text if self.batch else "empty"
        state = "" if self.interrupted is None else ", interrupted"
        return (
            f"BudgetCache({self._prompt.plan.name}, rows={self.batch}, "
            f"tokens={self.get_seq_length()}, {stored}{state})"
        )

    # The prompt

    @property
    def profile(self) -> BudgetProfile:
        """Whose budgets hold: decided ones, where all rows have the same.

        Where rows are kept in different ways, that of the first of these; its detail tells of all.
        """
        first, *others = (prompt.profile for prompt in self._prompts)
        details = one_line("; ".join(own.detail for own in (first, *others)), 100)
        return first.replace(detail=details) if others else first

    @property
    def row_profiles(self) -> tuple[BudgetProfile, ...]:
        """Whose budgets each row keeps, ``(batch,)``: its own, where they are decided by prompt."""
        return tuple(self._in_order([prompt.row_profiles for prompt in self._prompts]))

    @property
    def longer_profile(self) -> BudgetProfile | None:
        """By whose budgets the conversation will go once it is longer; None where it goes on."""
        prompt = self._prompt
        return prompt.plan.longer if prompt.profile is prompt.plan.profile else None

    @property
    def decision_seconds(self) -> float | None:
        """What deciding budgets took; None where nothing was decided."""
        return self._prompt.decision_seconds

    @property
    def options(self) -> CacheOptions:
        """How it keeps its budgets, as it was asked."""
        return self._prompt.plan.options

    @property
    def arrival(self) -> Arrival:
        """What has come: tokens, padding, whose budgets."""
        return self._prompt.arrival

    @property
    def prompt_complete(self) -> bool:
        """Whether the whole prompt has been seen, so that all that comes now follows it."""
        return self.arrival.complete

    @property
    def interrupted(self) -> str | None:
        """Why only `reset` helps: a forward failed half-way; None if none did."""
        reasons = (prompt.interrupted for prompt in self._prompts)
        return next((reason for reason in reasons if reason is not None), None)

    @property
    def reduced(self) -> bool:
        """Whether any entry has been evicted, padding included."""
        return any(prompt.reduced for prompt in self._prompts)

    def end_turn(self) -> None:
        """Keep no more than the budget of all tokens seen: a turn has been read and answered.

        What followed the latest eviction competes with what was kept. `kvalloc.apply` does so
        after each ``generate()``; without it, it happens every so many tokens.

        Raises
        ------
        UnsupportedRequestError
            If the cache is interrupted.
        """
        if self.interrupted is not None:
            raise UnsupportedRequestError(self.interrupted)
        for prompt in self._prompts:
            conversation.settle(prompt)

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
        for place, prompt in self.groups:
            prompt.decide(self._of(inputs, place))

    # What it stores

    @property
    def batch(self) -> int:
        """Rows that are stored; 0 before the first forward."""
        return sum(prompt.batch for prompt in self._prompts)

    @property
    def retained_bytes(self) -> int:
        """Bytes allocated now: every storage once and in full, positions too."""
        return sum(int(storage.nbytes()) for storage, _, _ in storages(self._tensors()))

    @property
    def share(self) -> float:
        """Share of a cache at 16 bits a number of all tokens seen that is stored.

        Positions of kept entries count, sliding layers do not; 0 before the first
        forward.
        """
        if not self.batch:
            return 0.0
        shape = self._prompt.profile.shape
        tokens = sum(int(prompt.arrival.visible.sum()) for prompt in self._prompts)
        whole = shape.bytes_per_entry * shape.n_kv_heads * len(shape.full_layers)
        return sum(bytes_at_16_bits(own.layers) for own in self._prompts) / max(1, tokens * whole)

    @property
    def share_text(self) -> str:
        """What was asked for, if that is known, and all that is stored."""
        return share_text(self.retained_bytes, self.full_bytes, self.profile.target_text)

    @property
    def full_bytes(self) -> int:
        """Bytes of a cache at 16 bits a number of all tokens seen; padding does not count.

        Of a sliding layer the last ``sliding_window - 1`` entries count, and one more where, after
        a decoded token, it is still allocated, and in `retained_bytes` as well.
        """
        if not self.batch:
            return 0
        shape = replace(self._prompt.profile.shape, dtype_bytes=self.layers[0].keys.dtype.itemsize)
        tokens = [n for own in self._prompts for n in row_tokens(own.arrival.visible).tolist()]
        slid_out: int = sum(
            tensor.untyped_storage().nbytes() - tensor.nbytes
            for prompt in self._prompts
            for layer in prompt.layers
            if not isinstance(layer, BudgetLayer)
            for tensor in layer_tensors(layer)
        )
        return sum(full_bytes(shape, own) for own in tokens if own) + slid_out

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
        refusals.refuse(
            kept_by_sliding=not isinstance(self.layers[layer], BudgetLayer) and (layer,),
            kept_of_nothing=not self.batch or self.arrival.prompt_tokens is None,
        )
        indices = [
            prompt.layers[layer].kept_positions(prompt.arrival.prompt_tokens)
            for prompt in self._prompts
        ]
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
        end = seen + refusals.new_tokens_shape(arguments)[1]
        cuts = sorted({one for own in self._prompts for one in conversation.cuts(own, end)})
        mask = arguments.get("attention_mask")
        refusals.refuse(mask_in_pieces=bool(cuts) and shown_columns(mask) is not mask)
        self._ahead = True
        try:
            for column in cuts:
                new = column - self.get_seq_length()
                outputs.append(decoder(**part(arguments, slice(new), column)))
                arguments = part(arguments, slice(new, None))
                if prompt.given is not None and column > prompt.given:
                    shared = {id(tensor): tensor for tensor in self._tensors()}
                    self._before.append(copy.deepcopy(self, {**shared, id(self._before): []}))
                for own in self._prompts:
                    conversation.catch_up(own)
        finally:
            self._ahead = False
        return outputs, arguments

    def _take(self) -> None:
        """Nothing that is there is taken back any more: let go of what was kept for that."""
        self._before = []
        for prompt in self._prompts:
            conversation.catch_up(prompt)
            for layer in prompt.layers:
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
        names = self._prompt.plan.name, type(decoder).__name__
        refusals.refuse(given_to_other=self.decoder() is not decoder and names)
        if self.interrupted is not None:
            raise UnsupportedRequestError(self.interrupted)
        rows = self.batch if self._order is None else len(self._order)
        masks = refusals.check_forward(decoder, arguments, rows)
        seen, limit = self.get_seq_length(), context_limit(decoder)
        _, new = refusals.new_tokens_shape(arguments)
        beyond = seen > 0 and new > 1 and limit is not None and seen + new > limit
        refusals.refuse(
            turn_of_nothing=not new and (seen, seen),
            turn_beyond=beyond and (seen, new, limit),
        )
        hides, mask = False, arguments.get("attention_mask")
        ready_made = shown_columns(mask) is not mask
        refusals.refuse(ready_made=self.reduced and ready_made)
        if ready_made:  # nothing was evicted, so it fits
            columns = None if self.prompt_complete else shown_columns(mask)
            arguments = {**arguments, "attention_mask": columns}
        with ExitStack() as begun:
            for place, prompt in self.groups:
                hides |= prompt.begin(self._of(arguments, place), masks)
                begun.callback(prompt.end, completed=False)
            begun.pop_all()
        if ready_made or not hides:
            return None
        forwards = (prompt.forward for prompt in self._prompts)
        visible = self._in_order([own.step.visible for own in forwards if own is not None])
        return {"attention_mask": visible.to(self.layers[0].device, torch.long)}

    def attend(self, states: AttentionStates, compute: Compute) -> Any:
        """Run one layer's attention with the mask that fits it; evict what is not to stay."""
        if self._order is None:
            return self._prompt.attend(states, compute)
        together = None if self._is_split(states.layer) else compute(states.mask)[0]
        outputs = []
        for (place, prompt), (keys, values) in zip(self.groups, self._states, strict=True):
            own = replace(states, queries=states.queries[place], keys=keys, values=values)
            if together is None:
                assert prompt.forward is not None
                own = replace(own, mask=prompt.forward.mask(own))
            own_rows = partial(_attention, compute, own, place, together)
            outputs.append(prompt.attend(own, own_rows)[0])
        self._states = []
        return self._in_order(outputs), None

    def _is_split(self, layer: int) -> bool:
        """Whether any group has evicted something of a layer, so that they differ."""
        return any(getattr(own.layers[layer], "reduced", False) for own in self._prompts)

    def end_forward(self, *, completed: bool) -> None:
        """Clean up after a forward; after a failed one, find out what it left."""
        self._states = []
        with ExitStack() as stack:  # whatever fails in one
            for prompt in self._prompts:
                stack.callback(_end, prompt, completed=completed)

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
        refusals.refuse(outside_forward=self._prompt.forward is None and self._prompt.plan.name)
        if self._order is None:
            alone = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            return alone[0], alone[1]
        self._states = [
            own.layers[layer_idx].update(key_states[place], value_states[place], *args, **kwargs)
            for place, own in self.groups
        ]
        if self._is_split(layer_idx) or self._states[0][0].shape[2] == key_states.shape[2]:
            return key_states, value_states
        keys, values = zip(*self._states, strict=True)
        return self._in_order(keys), self._in_order(values)

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
        groups = len(self._prompts)
        refusals.refuse(saved_in_groups=groups > 1 and groups)
        save_cache(self, path)

    def reset(self) -> None:
        """Forget prompt and tokens, and free their storage; the next forward is a new prompt."""
        self.read_ids = None
        for prompt in self._prompts:
            prompt.reset()

    def take_back(self, seen: int) -> None:
        """Forget all that followed so many tokens: a turn that broke off was not read.

        Where something was evicted meanwhile, which cannot come back, the cache is `interrupted`.
        """
        if not seen:
            self.reset()
        elif self.interrupted is None and (more := self.get_seq_length() - seen) > 0:
            try:
                self.crop(-more)
            except UnsupportedRequestError:
                for prompt in self._prompts:
                    prompt.broke_off(more)

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
        end = min(tokens_to_remove if tokens_to_remove > 0 else seen + tokens_to_remove, seen)
        end = max(end, 0)
        before = next((one for one in self._before if one.get_seq_length() > end), None)
        checked = self if before is None else before
        for prompt in checked._prompts:
            prompt.check_crop(prompt.n_seen - end)
        if before is not None:
            self._regroup(before._prompts, [place.tolist() for place in before._places])
            self._before, self._states = [], []
        if seen and not end:
            return self.reset()
        if remove := self.get_seq_length() - end:
            for prompt in self._prompts:
                prompt.crop(remove)
        if self._prompt.given is not None:
            self._take()
        if self.read_ids is not None:
            self.read_ids = self.read_ids[:, :end]

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
        columns = given or max(prompt.given or 0, self.arrival.announced or 0, seen)
        refusals.refuse(
            drafts_unannounced=not columns,
            drafts_slide_out=not all(map(can_take_back, self.layers)),
            drafts_read_all=prompt.reader is not None and prompt.plan.policy.name,
        )
        self.draft_from(columns)

    # Drafts of its own, see `kvalloc.runtime.lossless`

    @property
    def leaves_unread(self) -> bool:
        """Whether decoded tokens read only a part of what is stored."""
        return self._prompt.reader is not None

    def draft_from(self, column: int | None) -> None:
        """Say from which column on tokens may be drafts; None: none is."""
        for prompt in self._prompts:
            prompt.given = column

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
        return min(conversation.room_for_drafts(own, longest) for own in self._prompts)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i continue what row ``beam_idx[i]`` holds (beam search)."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times, at least once; see `batch_select_indices`."""
        rows = torch.arange(self.batch, device="cpu")
        self.batch_select_indices(rows.repeat_interleave(max(repeats, 0)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows; one may be kept more than once. An empty cache stays as it is.

        Raises
        ------
        InputError
            If no row is selected, or one that is not there.
        """
        if not self.batch:
            return
        rows = refusals.selected_rows(indices, self.batch)
        if (ids := self.read_ids) is not None:
            self.read_ids = ids[rows.to(ids.device)] if len(ids) == self.batch else None
        if not self._places:
            self._prompt.select(rows)
            return
        prompts, now = [], []
        for place, prompt in zip(self._places, self._prompts, strict=True):
            was = place.tolist()
            if own := [row for row, old in enumerate(rows.tolist()) if old in was]:
                prompt.select(
                    torch.tensor([was.index(int(rows[row])) for row in own], device="cpu")
                )
                prompts.append(prompt)
                now.append(own)
        if prompts:
            self._regroup(prompts, now)

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
        for prompt in self._prompts:  # a layer's attention holds weights of the model
            attention = (layer.attention for layer in prompt.budget_layers)
            for shared in (prompt.profile, *prompt.row_profiles, *attention):
                memo[id(shared)] = shared
        for tensor in self._tensors():
            if tensor.requires_grad:  # torch copies no tensor with a history
                memo[id(tensor)] = copy.deepcopy(tensor.detach(), memo)
        memo[id(self.number)] = clone.number
        clone.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
        for prompt in clone._prompts:
            prompt.forked()
        if (decoder := self.decoder()) is not None:
            hooks.retain(clone, decoder)
        return clone


def _end(prompt: Prompt, *, completed: bool) -> None:
    """End a forward; go back to the budgets, unless what was read may be taken back."""
    running = prompt.forward is not None
    prompt.end(completed=completed)
    if running and completed and prompt.given is None:
        conversation.catch_up(prompt)


def _attention(
    compute: Compute,
    own: AttentionStates,
    place: Tensor,
    together: Tensor | None,
    mask: Any,
    keys: Tensor | None = None,
    values: Tensor | None = None,
) -> Any:
    """Return what the model's own attention gives the rows of one group."""
    if together is not None:
        return together[place], None
    keys, values = own.keys if keys is None else keys, own.values if values is None else values
    return compute(mask, keys, values, place)
