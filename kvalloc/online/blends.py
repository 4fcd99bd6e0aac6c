"""Documents that were read separately, put together in front of a question.

References
----------
CacheBlend (Yao et al., 2024): keys are turned to their new places, and the tokens whose keys and
values deviate most are computed anew, the same share in all layers. ProphetKV: the tokens that the
question attends to. Here the rank of a token is what both say of it, multiplied; that fewer tokens
in deeper layers are no better is a row of docs/studies.md.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvalloc.errors import InputError, UnsupportedModelError, by_interface, option
from kvalloc.extensions.blend import Documents
from kvalloc.extensions.making import extended
from kvalloc.extensions.saved import fill_rows, filled_cache
from kvalloc.formats.saved_cache import SavedCacheHeader
from kvalloc.models.attention import rotary_frequencies
from kvalloc.models.loading import shape_of
from kvalloc.models.names import base_implementation
from kvalloc.models.structure import context_limit, text_config
from kvalloc.runtime.cache import BudgetCache
from kvalloc.runtime.making import build_cache
from kvalloc.runtime.options import CacheOptions
from kvalloc.runtime.refusals import check_owner
from kvalloc.units import parse_share

DEFAULT_SHARE = 0.15
"""CacheBlend's."""


def blend(
    model: Any,
    documents: Sequence[str | Path | BudgetCache],
    *,
    question: Tensor | Sequence[int] | None = None,
    before: Tensor | Sequence[int] = (),
    recompute: float | str | None = None,
    ids: Sequence[Tensor | Sequence[int]] | None = None,
    allow_other_model: bool = False,
) -> BudgetCache:
    """Put caches of documents behind each other, in front of a question.

    They are not read again: keys are turned to their new places (RoPE). Each document knows nothing
    of those in front of it, though, so keys and values of some tokens are computed anew: of those
    by how much the question attends to them and their values change.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        On sdpa or eager attention, with full attention and RoPE of halves in all layers.
    documents : sequence of str, Path or BudgetCache
        Caches of one row, each of a text that was read alone. Their entries are copied.
    question : Tensor of int64, (n_question,), or sequence of int, optional
        What will be asked, not read into the cache. Needed for `recompute`.
    before : Tensor of int64, (n_before,), or sequence of int
        Tokens in front of the first document, such as the beginning of a chat; it is read.
    recompute : float or str, optional
        Tokens that are computed anew, ``0.15`` or ``"15%"``; 15% where there is a question, else
        none. Beside them all tokens go through the first layer, and the question through all.
    ids : sequence of (n_tokens,), optional
        Tokens of each document, where its file does not have them.
    allow_other_model : bool
        As for `kvalloc.load_cache`.

    Returns
    -------
    BudgetCache
        One row: `before` and all documents. It goes on as any other, with the budgets of the first
        document, scaled to all tokens.

    Raises
    ------
    InputError
        If a document is held, unfinished, of several rows, of a chat, at other widths than the
        first, or its tokens are needed and not known; or all is beyond the model's context.
    ModelMismatchError, ProfileFileError
        As `kvalloc.load_cache`.
    UnsupportedModelError
        If the model has sliding layers, or its keys cannot be turned.

    Examples
    --------
    >>> cache = kvalloc.blend(model, ["a.kv", "b.kv"], question=ids)  # doctest: +SKIP
    >>> list(answer(model, cache, ids))  # doctest: +SKIP
    """
    frequencies = _frequencies(model)
    if not documents:
        raise InputError("there is no document to blend; name at least one saved cache")
    share = _share(recompute, question)
    pairs = [_loaded(model, one, allow_other_model) for one in documents]
    names, caches = [name for name, _ in pairs], [cache for _, cache in pairs]
    front, question_ids = _ids(before), _ids(() if question is None else question)
    if share and not len(question_ids):
        raise InputError("the question has no tokens; ask something")
    _check_joinable(model, names, caches, len(front) + len(question_ids))
    if len(caches) == 1 and not len(front) and not share:
        return copy.deepcopy(caches[0]) if caches[0] is documents[0] else caches[0]
    stated = [None] * len(caches) if ids is None else ids
    read = [
        _ids_of(*pair, tokens, needed=share > 0) for pair, tokens in zip(pairs, stated, strict=True)
    ]
    joined = Documents.joined(model, caches, [front, *read, question_ids], frequencies)
    if share:
        joined.recompute(_chosen(joined, share))
    else:
        joined.recompute(torch.arange(len(front), device="cpu"))
    return _cache_of(joined, caches[0], allow_other_model)


def _chosen(documents: Documents, share: float) -> Tensor:
    """Return the positions of the tokens that matter most, rising."""
    weights = documents.question_attention() * documents.value_change().sqrt()
    ranked = weights[documents.before :].argsort(descending=True, stable=True)
    return (ranked[: math.ceil(share * len(ranked))] + documents.before).sort().values


def _cache_of(documents: Documents, like: BudgetCache, allow_other_model: bool) -> BudgetCache:
    """Return a cache that has read all of it, with the budgets of one document's."""
    profile, n_tokens = like.row_profiles[0], documents.n_tokens
    options = CacheOptions(
        allow_other_model=allow_other_model,
        decode_every=like.options.decode_every,
        memory=like.options.memory,
    )
    cache = build_cache(documents.model, profile, options)
    for index, layer in enumerate(documents.layers):
        layer.fill(cache.layers[index], n_tokens, profile.widths[index])
    fill_rows(cache, n_tokens, n_tokens, None, (n_tokens,))
    ids = documents.ids[:n_tokens]
    cache.read_ids = ids[None] if bool((ids >= 0).all()) else None
    return extended(cache)


def _check_joinable(
    model: Any, names: Sequence[str], caches: Sequence[BudgetCache], beside_documents: int
) -> None:
    """Refuse documents that cannot follow each other, beside this number of other tokens."""
    widths = [cache.row_profiles[0].widths for cache in caches]
    for name, widths_of in zip(names, widths, strict=True):
        if not np.array_equal(widths_of, widths[0]):
            raise InputError(
                f"{name} stores its heads at other widths than {names[0]}; reduce all of them with "
                f"one profile ({option('profile')}): widths by a budget depend on the length"
            )
    n_tokens, limit = (
        beside_documents + sum(cache.get_seq_length() for cache in caches),
        context_limit(model),
    )
    if limit is not None and n_tokens >= limit:
        raise InputError(
            f"the documents and the question are {n_tokens:,} tokens, and the model was made for "
            f"{limit:,}; leave out a document"
        )


def _share(recompute: float | str | None, question: object) -> float:
    """Return the share of tokens to be computed anew."""
    if recompute is None:
        return 0.0 if question is None else DEFAULT_SHARE
    share = 0.0 if recompute in (0, "0", "0%") else parse_share(recompute)
    if share and question is None:
        raise InputError(
            "which tokens are computed anew depends on what will be asked; give question=, or "
            "recompute=0"
        )
    return share


def _frequencies(model: Any) -> list[Tensor]:
    """Return the RoPE inverse frequencies of all layers, where keys can be turned by them."""
    shape, frequencies = shape_of(model), rotary_frequencies(model)
    reasons = [one for one in frequencies if isinstance(one, str)]
    attention = base_implementation(text_config(model))
    if attention not in ("sdpa", "eager"):
        raise UnsupportedModelError(
            f"{shape.model_id} is on {attention} attention, which takes no mask of what each token "
            'sees; load it with attn_implementation="sdpa"'
        )
    kind = (getattr(text_config(model), "rope_parameters", None) or {}).get("rope_type")
    if shape.sliding_layers:
        reasons = [f"{len(shape.sliding_layers)} of its layers keep the latest tokens alone"]
    elif kind in ("dynamic", "longrope"):
        reasons = [f"its {kind} rotation depends on the length of the text"]
    if reasons:
        raise UnsupportedModelError(
            f"documents of {shape.model_id} cannot be put elsewhere: {reasons[0]}; read them "
            "together"
        )
    return [one for one in frequencies if not isinstance(one, str)]


def _loaded(
    model: Any, document: str | Path | BudgetCache, allow_other_model: bool
) -> tuple[str, BudgetCache]:
    """Return a document's name and cache, checked to be one whole text of this model."""
    if isinstance(document, BudgetCache):
        name, cache = repr(document), document
        _check_finished(model, document)
    elif not isinstance(document, str | Path):
        raise InputError(
            f"a document is a {type(document).__name__}, expected the path of a saved cache or a "
            "cache of one row"
        )
    else:
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
    if cache.batch != 1:
        raise InputError(f"{name} holds {cache.batch} texts at once; save a cache of each")
    return name, cache


def _check_finished(model: Any, cache: BudgetCache) -> None:
    """Refuse a cache that is of another model, or is no whole document yet."""
    check_owner(model, cache)
    state = cache.interrupted
    if not cache.prompt_complete:
        state = "it holds no complete prompt; let the model read it"
    if state is not None:
        raise InputError(f"{cache!r} is no finished document: {state}")


def _ids_of(
    name: str, cache: BudgetCache, stated: Tensor | Sequence[int] | None, *, needed: bool
) -> Tensor:
    """Return the tokens of a document; -1 for each where they are not needed and not known."""
    n_tokens = cache.get_seq_length()
    if stated is None and cache.read_ids is not None:
        stated = cache.read_ids[0, :n_tokens]
    if stated is None and not needed:
        stated = torch.full((n_tokens,), -1, device="cpu")
    if stated is None:
        raise InputError(
            f"{name} does not say which tokens it holds, and some are to be computed anew; give "
            "ids=, or recompute=0"
        )
    ids = _ids(stated)
    if len(ids) != n_tokens:
        raise InputError(f"{name} holds {n_tokens:,} tokens, and {len(ids):,} are given for it")
    return ids


def _ids(tokens: Tensor | Sequence[int]) -> Tensor:
    """Return tokens as int64, (n_tokens,), on the host."""
    return torch.as_tensor(tokens, dtype=torch.long, device="cpu").reshape(-1).cpu()
