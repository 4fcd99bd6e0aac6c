"""Documents read separately and joined before a question.

References
----------
CacheBlend (Yao et al., 2024) recomputes tokens with the largest changes of keys and values,
ProphetKV tokens that the question attends to. `blend` ranks by both
(benchmarks/studies/documents.md).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting.costs import counts_of
from kvalloc.errors import InputError, UnsupportedModelError, by_interface, option
from kvalloc.extensions.making import extended
from kvalloc.extensions.saved import fill_rows, filled_cache
from kvalloc.formats.saved_cache import SavedCacheHeader
from kvalloc.models.attention import (
    AttentionResult,
    AttentionStates,
    Compute,
    Handler,
    intercept_attention,
    probe_of,
)
from kvalloc.models.loading import shape_of
from kvalloc.models.names import base_implementation
from kvalloc.models.rope import Rotation, rotate
from kvalloc.models.structure import context_limit, decoder_of, input_device, text_config
from kvalloc.runtime.cache import BudgetCache
from kvalloc.runtime.kept import Part
from kvalloc.runtime.making import Way, build_rows
from kvalloc.runtime.options import CacheOptions
from kvalloc.runtime.refusals import check_owner
from kvalloc.runtime.store import Store
from kvalloc.scorers.attention_rows import window_attention
from kvalloc.units import parse_share

DEFAULT_SHARE = 0.15
"""Default share of CacheBlend."""

CHECK_LAYER = 1
"""Layer at which the change of values is measured: the first with an input that depends on the text
before."""

Tokens: TypeAlias = Tensor | Sequence[int]

See: TypeAlias = Callable[[AttentionStates, Tensor], None]
"""Takes the states of a layer's attention, and its mask."""


def blend(
    model: Any,
    documents: Sequence[str | Path | BudgetCache],
    *,
    question: Tokens | None = None,
    before: Tokens = (),
    recompute: float | str | None = None,
    ids: Sequence[Tokens] | None = None,
    allow_other_model: bool = False,
) -> BudgetCache:
    """Join caches of documents before a question, without a second read.

    Keys are rotated to new positions (RoPE). Documents do not depend on earlier ones, so some
    tokens are recomputed: by the largest product of the question's attention and the values'
    change.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        With sdpa or eager attention, only full-attention layers, and RoPE or no positions.
    documents : sequence of str, Path or BudgetCache
        One row each, read alone; copied.
    question : Tensor of int64, (n_question,), or sequence of int, optional
        Not read into the cache; required for `recompute`.
    before : Tensor of int64, (n_before,), or sequence of int
        Read first, such as a chat's beginning.
    recompute : float or str, optional
        Share of tokens, with a question ``"15%"`` by default. The first layer also gets all tokens,
        and all layers the question.
    ids : sequence of (n_tokens,), optional
        Each document's tokens, if its file has none.
    allow_other_model : bool
        As for `kvalloc.load_cache`.

    Returns
    -------
    BudgetCache
        One row: `before` and all documents, with the first's budgets, scaled.

    Raises
    ------
    InputError
        If a document is unfinished, of several rows, of a chat, or at other widths than the first;
        if required tokens are unknown, or exceed the context.
    ModelMismatchError, ProfileFileError
        As `kvalloc.load_cache`.
    UnsupportedModelError
        For other models.

    Examples
    --------
    >>> kvalloc.blend(model, ["a.kv", "b.kv"], question=ids)  # doctest: +SKIP
    """
    rotations = _rotations(model)
    if not documents:
        raise InputError("there is no document to blend; name at least one saved cache")
    share = _share(recompute, question)
    named = [_loaded(model, one, allow_other_model) for one in documents]
    front, question_ids = _ids(before), _ids(() if question is None else question)
    n_before, n_after = len(front), len(question_ids)
    if share and not n_after:
        raise InputError("the question has no tokens; ask something")
    _check_joinable(model, named, n_before + n_after)
    caches = [cache for _, cache in named]
    if len(caches) == 1 and not n_before and not share:
        return copy.deepcopy(caches[0]) if caches[0] is documents[0] else caches[0]
    stated = [None] * len(named) if ids is None else ids
    read = [
        _ids_of(*pair, tokens, needed=share > 0) for pair, tokens in zip(named, stated, strict=True)
    ]
    all_ids = torch.cat([front, *read, question_ids])
    layers = [
        DenseLayer.joined([cache.layers[index] for cache in caches], n_before, n_after, rotation)
        for index, rotation in enumerate(rotations)
    ]
    n_tokens = len(all_ids) - n_after
    joined = Documents(model=model, ids=all_ids, before=n_before, n_tokens=n_tokens, layers=layers)
    joined.recompute(_chosen(joined, share) if share else torch.arange(n_before, device="cpu"))
    return _cache_of(joined, caches[0], allow_other_model)


def _chosen(documents: Documents, share: float) -> Tensor:
    weights = documents.question_attention() * documents.value_change().sqrt()
    ranked = weights[documents.before :].argsort(descending=True, stable=True)
    return (ranked[: math.ceil(share * len(ranked))] + documents.before).sort().values


def _cache_of(documents: Documents, like: BudgetCache, allow_other_model: bool) -> BudgetCache:
    profile, n_tokens = like.row_profiles[0], documents.n_tokens
    options = CacheOptions(
        allow_other_model=allow_other_model,
        decode_every=like.options.decode_every,
        memory=like.options.memory,
    )
    cache = build_rows(documents.model, [Way(profile=profile, options=options)])
    for layer, dense, widths in zip(cache.layers, documents.layers, profile.widths, strict=True):
        dense.fill(layer, n_tokens, widths)
    fill_rows(cache, n_tokens, n_tokens, None, (n_tokens,))
    ids = documents.ids[:n_tokens]
    cache.read_ids = ids[None] if bool((ids >= 0).all()) else None
    return extended(cache)


# Documents and options, checked


def _check_joinable(
    model: Any, named: Sequence[tuple[str, BudgetCache]], n_other_tokens: int
) -> None:
    first, widths = named[0][0], named[0][1].row_profiles[0].widths
    for name, cache in named:
        if not np.array_equal(cache.row_profiles[0].widths, widths):
            raise InputError(
                f"{name} stores its heads at other widths than {first}; reduce all of them with "
                f"one profile ({option('profile')}): widths by a budget depend on the length"
            )
    n_tokens = n_other_tokens + sum(cache.get_seq_length() for _, cache in named)
    limit = context_limit(model)
    if limit is not None and n_tokens >= limit:
        raise InputError(
            f"the documents and the question are {n_tokens:,} tokens, and the model was made for "
            f"{limit:,}; leave out a document"
        )


def _share(recompute: float | str | None, question: object) -> float:
    if recompute is None:
        return 0.0 if question is None else DEFAULT_SHARE
    share = 0.0 if recompute in (0, "0", "0%") else parse_share(recompute)
    if share and question is None:
        raise InputError(
            "which tokens are computed anew depends on what will be asked; give question=, or "
            "recompute=0"
        )
    return share


def _rotations(model: Any) -> list[Rotation]:
    """Return each layer's rotation, if keys can be moved."""
    shape, by_layer = shape_of(model), probe_of(model).rotations
    rotations = [by_layer[layer] for layer in sorted(by_layer)]
    reasons = [one.fixed for one in rotations if one.fixed is not None]
    attention = base_implementation(text_config(model))
    if attention not in ("sdpa", "eager"):
        raise UnsupportedModelError(
            f"{shape.model_id} is on {attention} attention, which takes no mask of what each token "
            'sees; load it with attn_implementation="sdpa"'
        )
    kind = (getattr(text_config(model), "rope_parameters", None) or {}).get("rope_type")
    if not_full := [kind for kind in shape.layer_types if kind != "full"]:
        reasons = [f"{len(not_full)} of its layers are not of full attention ({not_full[0]})"]
    elif kind in ("dynamic", "longrope"):
        reasons = [f"its {kind} rotation depends on the length of the text"]
    if reasons:
        raise UnsupportedModelError(
            f"documents of {shape.model_id} cannot be put elsewhere: {reasons[0]}; read them "
            "together"
        )
    return rotations


def _loaded(
    model: Any, document: str | Path | BudgetCache, allow_other_model: bool
) -> tuple[str, BudgetCache]:
    if isinstance(document, BudgetCache):
        name, cache = repr(document), document
        check_owner(model, cache)
        state = cache.interrupted
        if not cache.prompt_complete:
            state = "it holds no complete prompt; let the model read it"
        if state is not None:
            raise InputError(f"{name} is no finished document: {state}")
    elif isinstance(document, str | Path):
        name = str(document)
        header, tensors = SavedCacheHeader.read(document)
        if header.notes.get("chat"):
            read = f"with {option('no_chat')}"
            chat = by_interface(python="without a chat template", flags=read)
            raise InputError(
                f"{name} begins with the model's chat form, which would stand amid the text; read "
                f"the document {chat}"
            )
        cache = filled_cache(document, header, tensors, model, allow_other_model)
    else:
        raise InputError(
            f"a document is a {type(document).__name__}, expected the path of a saved cache or a "
            "cache of one row"
        )
    if cache.batch != 1:
        raise InputError(f"{name} holds {cache.batch} texts at once; save a cache of each")
    if cache.door.visible is not None:
        raise InputError(f"{name} holds padding, which would stand amid the text; read it without")
    return name, cache


def _ids_of(name: str, cache: BudgetCache, stated: Tokens | None, *, needed: bool) -> Tensor:
    n_tokens = cache.get_seq_length()
    if stated is None and cache.read_ids is not None:
        stated = cache.read_ids[0, :n_tokens]
    if stated is None and not needed:
        return torch.full((n_tokens,), -1, device="cpu")
    if stated is None:
        raise InputError(
            f"{name} does not say which tokens it holds, and some are to be computed anew; give "
            "ids=, or recompute=0"
        )
    ids = _ids(stated)
    if len(ids) != n_tokens:
        raise InputError(f"{name} holds {n_tokens:,} tokens, and {len(ids):,} are given for it")
    return ids


def _ids(tokens: Tokens) -> Tensor:
    """Return tokens as int64, (n_tokens,), on the host."""
    return torch.as_tensor(tokens, dtype=torch.long, device="cpu").reshape(-1)


# Keys and values


class _Enough(Exception):
    """Ends a forward early."""


@dataclass(kw_only=True)
class DenseLayer:
    """One layer's keys and values, (1, n_kv_heads, n_tokens, head_dim), by position.

    `present`, (1, n_kv_heads, n_tokens), is True at kept entries (others are 0), and None if no
    document was reduced. `rounded`: kept entries have fewer bits.
    """

    keys: Tensor
    values: Tensor
    present: Tensor | None = None
    rounded: bool = False

    @classmethod
    def joined(
        cls, stores: Sequence[Store], n_before: int, n_after: int, rotation: Rotation
    ) -> DenseLayer:
        """Copy one layer of documents, one row each, with rotated keys.

        Keys and values of `n_before` and `n_after` tokens are 0.
        """
        n_tokens = n_before + sum(store.seen for store in stores) + n_after
        keys, values = (
            states.new_zeros(*states.shape[:2], n_tokens, states.shape[3])
            for states in (stores[0].keys, stores[0].values)
        )
        present, place = torch.ones_like(keys[..., 0], dtype=torch.bool), n_before
        for store in stores:
            entries = store.candidates(np.array([0]), lambda row: slice(None), store.seen)
            turned, shown = entries.keys, slice(place, place + store.seen)
            if place:
                by = torch.tensor([place], device=keys.device)
                turned = rotate(turned, by, rotation, keys=True)
            _, head, at = (entries.positions < store.seen).nonzero(as_tuple=True)
            column = place + entries.positions[0, head, at].long()
            keys[0, head, column] = turned[0, head, at]
            values[0, head, column] = entries.values[0, head, at]
            present[:, :, shown] = False
            present[0, head, column] = True
            place += store.seen
        reduced = [store.kept for store in stores if store.kept is not None]
        return cls(
            keys=keys,
            values=values,
            present=present if reduced else None,
            rounded=any(kept.is_rounded for kept in reduced),
        )

    def mask(self, places: Tensor, n_query_heads: int) -> Tensor:
        """Return tokens' additive causal mask, (1, 1 or n_query_heads, n, n_tokens)."""
        seen = torch.arange(int(self.keys.shape[2]), device=places.device) <= places[:, None]
        seen, lowest = seen[None, None], torch.finfo(self.keys.dtype).min
        if self.present is not None:
            group = n_query_heads // int(self.keys.shape[1])
            seen = seen & self.present.repeat_interleave(group, dim=1)[:, :, None]
        return self.keys.new_zeros(1).masked_fill(~seen, lowest)

    def fill(self, layer: Store, seen: int, bits: Any) -> None:
        """Fill an empty layer with the first ``seen`` tokens, at bits, (n_kv_heads,)."""
        first = 0 if self.present is None else seen
        layer.lazy_initialization(self.keys, self.values)
        layer.keys, layer.values = (
            part[:, :, first:seen].clone(memory_format=torch.contiguous_format)
            for part in (self.keys, self.values)
        )
        layer.seen = seen
        if self.present is None:
            return
        kept = self.present[:, :, :seen]
        positions = torch.arange(seen, dtype=torch.int32, device=kept.device)
        part = Part(
            keys=self.keys[:, :, :seen][kept],
            values=self.values[:, :, :seen][kept],
            tokens=positions.expand_as(kept)[kept],
            segments=np.arange(kept.shape[1]),
            lengths=kept.sum(dim=2).cpu().numpy().ravel(),
        )
        row, counts = np.array([0]), counts_of(part.lengths, bits) if self.rounded else None
        layer.replace(row, layer.as_stored(part, row, counts))


@dataclass(kw_only=True)
class Documents:
    """Documents between earlier tokens and a question.

    `ids`, (n_tokens + n_question,), are on the host; `before` and `n_tokens` count tokens before
    the documents and the question.
    """

    model: Any
    ids: Tensor
    before: int
    n_tokens: int
    layers: list[DenseLayer]

    def recompute(self, places: Tensor, see: See | None = None) -> None:
        """Recompute keys and values of tokens at rising places, (n_computed,), in all layers.

        They attend to kept entries and each other. Each layer calls ``see(states, mask)``.
        """
        if not len(places):
            return
        end = int(places[-1]) + 1  # later tokens are not looked at
        masks: dict[bool, Tensor] = {}

        def attend(states: AttentionStates, compute: Compute) -> AttentionResult:
            layer, at = self.layers[states.layer], places.to(states.keys.device)
            layer.keys[:, :, at], layer.values[:, :, at] = states.keys, states.values
            plain = layer.present is None
            mask = masks.get(plain)
            if mask is None or not plain or mask.device != at.device:
                mask = masks[plain] = layer.mask(at, int(states.queries.shape[1]))[..., :end]
            if see is not None:
                see(states, mask)
            if states.layer == len(self.layers) - 1:
                raise _Enough
            return compute(mask, layer.keys[:, :, :end], layer.values[:, :, :end])

        self._run(places, attend)

    def question_attention(self) -> Tensor:
        """Return the question's mean attention to tokens, float32, (n_tokens,).

        The tokens before the documents are read too.

        References
        ----------
        ProphetKV, in the deeper half of the layers: the first attend to neighbours.
        """
        end, first = len(self.ids), len(self.layers) // 2
        totals = torch.zeros(self.n_tokens, device="cpu")

        def see(states: AttentionStates, mask: Tensor) -> None:
            if states.layer < first:
                return
            document = replace(states, keys=self.layers[states.layer].keys, mask=mask)
            weights = window_attention(document, end - self.n_tokens)[..., : self.n_tokens]
            totals.add_(weights.mean(dim=(0, 1, 2, 3)).cpu())

        tokens = torch.arange(end, device="cpu")
        self.recompute(torch.cat([tokens[: self.before], tokens[self.n_tokens :]]), see)
        return totals / (len(self.layers) - first)

    def value_change(self) -> Tensor:
        """Return the squared change of recomputed values, float32, (n_tokens,).

        References
        ----------
        CacheBlend's check layer, for values only.
        """
        check, n_tokens = min(CHECK_LAYER, len(self.layers) - 1), self.n_tokens
        changes = torch.zeros(n_tokens, device="cpu")

        def attend(states: AttentionStates, compute: Compute) -> AttentionResult:
            layer = self.layers[states.layer]
            if states.layer < check:
                return compute(None)  # causal among themselves: all are computed
            changed = (layer.values[:, :, :n_tokens] - states.values).float().square()
            if layer.present is not None:
                changed = changed * layer.present[:, :, :n_tokens, None]
            changes.add_(changed.sum(dim=(0, 1, 3)).cpu())
            raise _Enough

        self._run(torch.arange(n_tokens, device="cpu"), attend)
        return changes

    def _run(self, places: Tensor, attend: Handler) -> None:
        device = input_device(self.model)
        ids, positions = self.ids[places].to(device), places.to(device)
        # a mask that is ready is taken as it is, and none is made
        ready = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)
        with suppress(_Enough), torch.no_grad(), intercept_attention(self.model, attend):
            decoder_of(self.model)(
                input_ids=ids[None],
                position_ids=positions[None],
                attention_mask=ready,
                use_cache=False,
            )
