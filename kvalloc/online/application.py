"""`kvalloc.apply`: a model's new caches are reduced."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from kvalloc.accounting import IntArray
from kvalloc.allocation.decision import loss_outlook
from kvalloc.allocation.request import RequestOptions
from kvalloc.errors import (
    InputError,
    UnsupportedModelError,
    UnsupportedRequestError,
    option,
    warn_user,
)
from kvalloc.extensions.assisted import check_assisted, is_assisted
from kvalloc.extensions.lossless import check_lossless, generate_lossless, verify_with
from kvalloc.extensions.making import extended
from kvalloc.formats.budget_profile import BudgetProfile, Policy
from kvalloc.formats.shipped_profiles import load_profile
from kvalloc.models import names
from kvalloc.models.loading import check_not_loaded
from kvalloc.models.structure import decoder_of, scattering_tokens, text_config, token_kinds
from kvalloc.online.conflicts import check_conflicts, given_names
from kvalloc.online.decision import Decision, PromptSize, StoredProfile
from kvalloc.online.default import Default
from kvalloc.online.per_prompt import NOT_OF_A_PROMPT, PromptOptions, PromptTarget
from kvalloc.runtime import hooks
from kvalloc.runtime.attention.masks import shown_columns
from kvalloc.runtime.cache import BudgetCache
from kvalloc.runtime.options import CacheOptions
from kvalloc.runtime.refusals import check_generate, check_goes_on, setting
from kvalloc.runtime.rows import scattered_rows
from kvalloc.units import keywords_of, parse_bytes

_LOG = logging.getLogger(__name__)

OWN_MAKES_NONE = (
    "the {} that was given to it keeps all entries; leave it out, or pass the cache of an earlier "
    "call on"
)
PAGED_MAKES_NONE = (
    "generate_batch() keeps all entries, in pages of its own; call generate(), with several rows"
)
WHOLE_TEXTS = (
    "a forward read a whole text and nothing followed it, so its logits are the full cache's: a "
    "reduced cache changes what comes after. Read the context, then pass its cache on with the "
    "tokens to score, as the model 'kvalloc' of lm-eval does"
)
"""Logged once, for forwards such as the scoring of multiple choice."""


@keywords_of(RequestOptions, PromptOptions, without=NOT_OF_A_PROMPT)
def apply(
    model: Any,
    profile: BudgetProfile | str | Path | None = None,
    *,
    allow_other_model: bool = False,
    policy: str | Policy | None = None,
    decode_every: int | None = None,
    fitted: str | Path | None = None,
    across: Literal["rows"] | None = None,
    lossless: bool = False,
    **keywords: Unpack[PromptOptions],
) -> Applied:
    """Reduce the prompt of each ``model.generate()`` and each ``model()`` from now on.

    To a share of the bytes, a profile, or a target of each prompt::

        with kvalloc.apply(model, budget="20%"):         # any model, nothing measured
        with kvalloc.apply(model, profile):              # a stored decision
        with kvalloc.apply(model, target_retention=0.9): # decided for each prompt (XKV)
            model.generate(**inputs)

    It ends with the ``with``, or the result's ``remove()``. A forward that makes a cache,
    ``model(**inputs)``, is a whole prompt, which its cache continues. The first call runs two
    tokens through the layers.

    A budget, alone or with ``memory``, is kept by the best unmeasured method; ``memory`` alone
    gives the largest budget with a peak within it. The method is logged
    (``kvalloc.online.default``, INFO) and in ``last_cache.profile.detail``. Other options, such as
    ``scorer="snapkv"``, decide budgets for each prompt.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    profile : BudgetProfile, str or Path, optional
        Budgets, their file, or a shipped name. Without it, exactly one target is required.
    allow_other_model : bool
        Accept a profile or fitted file of another model of the same sizes.
    policy, decode_every : optional
        As for `kvalloc.make_cache`.
    fitted : str or Path, optional
        File of `kvalloc.fit`, for a budget, memory or target loss alone; by default these weights'
        in the cache folder, or a shipped one.
    across : {"rows"}, optional
        With a budget alone: rows share all bytes by predicted losses; short prompts get larger
        shares, also for later tokens.
    lossless : bool
        Answer as the full cache: the reduced one drafts, the full one verifies, from host memory if
        there is a GPU. Counts are in ``last_cache.verifier``.
    **keywords
        The target and how it is decided, without a profile; see
        `kvalloc.online.per_prompt.PromptOptions`.

    Raises
    ------
    KVAllocError
        As `kvalloc.make_cache`; if the model cannot generate; for a profile and a target at once,
        or neither.
    """
    options = CacheOptions(
        policy=policy,
        decode_every=decode_every,
        allow_other_model=allow_other_model,
        fitted=fitted,
        across=across,
    )
    request = {"profile": profile, "lossless": lossless, **vars(options), **keywords}
    check_conflicts(given_names(request))
    decision = decision_of(profile, options, **keywords)
    applied = Applied(names.uncompiled(model), decision, lossless=lossless)
    if isinstance(decision, StoredProfile) and (outlook := loss_outlook(decision.profile)):
        _LOG.warning("%s", outlook)
    return applied


def decision_of(
    profile: BudgetProfile | str | Path | None,
    options: CacheOptions,
    **keywords: Unpack[PromptOptions],
) -> Decision:
    """Return the decision of `apply`'s keywords; a profile beside a target is not refused.

    Raises
    ------
    KVAllocError
        For an invalid profile or target.
    """
    if (memory := keywords.get("memory")) is not None:
        options = replace(options, memory=parse_bytes(memory))
    if profile is None:
        if Default.applies(policy=options.policy, **keywords):
            return Default.parse(options=options, **keywords)
        return PromptTarget.parse(options=options, **keywords)
    if isinstance(profile, str | Path):
        profile = load_profile(profile)
    if not isinstance(profile, BudgetProfile):
        raise InputError(
            f"the profile is a {type(profile).__name__}, expected a BudgetProfile, its file, or "
            "the name of a shipped one"
        )
    return StoredProfile(profile=profile, options=options)


class Applied:
    """Reduced caches of `kvalloc.apply`, until `remove` or the end of the ``with``.

    Each ``generate()``, and each forward that would make a cache, gets a fresh one. If it cannot be
    reduced, or a call brings another kind, a warning says why; with a memory an error. With
    `lossless` a forward makes a plain cache. Prompts may come in chunks (``prefill_chunk_size``).
    The latest counts, in any order of ending.

    Attributes
    ----------
    last_cache : BudgetCache or None
        Of the latest ``generate()`` or forward.
    """

    def __init__(self, model: Any, decision: Decision, *, lossless: bool = False) -> None:
        check_not_loaded(model)
        if getattr(model, "generate", None) is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot generate; pass the model with its language-model "
                "head"
            )
        self.last_cache: BudgetCache | None = None
        self._model, self._decoder = model, decoder_of(model)
        self._decision, self._lossless = decision, lossless
        # whether a model puts images between its tokens, so that ids do not determine the input
        self._embeds = text_config(model) is not model.config
        # Made now, so that what cannot work is refused here; held, so that the hooks stay.
        self._held: BudgetCache | None = self._new_cache(self._size({}, None))
        self._limited = self._held.options.memory is not None or self._held.profile.fits_a_peak
        self._said: weakref.WeakSet[Any] = weakref.WeakSet()  # caches of others in forwards
        self._read_tokens: int | None = None  # of the latest cache, if a forward made it
        self._warned_of_whole = False
        hooks.serve(self._decoder, self._read)
        outer = getattr(model, "base_model", model) is not self._decoder  # may make caches itself
        self._watching = hooks.watch_calls(model) if outer else None
        if _IN_EFFECT not in vars(model):
            _lend_methods(model)
        vars(model)[_IN_EFFECT].append(self)

    def __repr__(self) -> str:
        state, cache = "in effect" if self.active else "removed", self.last_cache
        last = "nothing read yet" if cache is None else f"last cache: {cache.share_text}"
        return f"Applied({type(self._model).__name__}, {state}; {last})"

    @property
    def active(self) -> bool:
        """Whether it is still in effect."""
        return self._held is not None

    def remove(self) -> None:
        """Let the model generate as before; the second time does nothing."""
        if self._held is None:
            return
        hooks.end_serving(self._decoder, self._read)
        if self._watching is not None:
            hooks.end_watching(self._model, self._watching)
        self._held = None
        in_effect: list[Applied] = vars(self._model)[_IN_EFFECT]
        in_effect.remove(self)
        if not in_effect:
            hooks.give_to_copies(self._model, _take_methods_back)
            _take_methods_back(vars(self._model))

    def _new_cache(self, size: PromptSize) -> BudgetCache:
        cache = extended(self._decision.cache(self._model, size))
        cache.token_kinds = token_kinds(self._model)
        if self._lossless:
            verify_with(cache, self._model)
        return cache

    def _read(
        self, arguments: Mapping[str, Any], begin: Callable[[BudgetCache], dict[str, Any]]
    ) -> dict[str, Any] | None:
        """Begin a forward with a reduced cache; None leaves it unchanged."""
        ids, other = _prompt(arguments), names.cache_among(arguments)
        uses = arguments.get("use_cache")
        if uses is None:
            uses = getattr(self._decoder.config, "use_cache", True)
        if other is not None and not self._lossless:
            self._say_plain(other)
        if ids is None or self._lossless or not uses or other is not None:
            return None  # the model names missing arguments itself
        size = self._size(arguments, ids)
        try:
            cache = self._new_cache(size)
            begun = begin(cache)
        except UnsupportedRequestError as error:
            if self._limited:
                raise
            _warn_of_plain(error)
            return None
        last = self.last_cache
        unfollowed = last is not None and last.get_seq_length() == self._read_tokens
        # where a memory is kept, a text is read in pieces and entries go between them
        if unfollowed and not (self._warned_of_whole or cache.profile.fits_a_peak):
            warn_user(WHOLE_TEXTS)
            self._warned_of_whole = True
        self.last_cache, self._read_tokens = cache, size.tokens
        return begun

    def _generate(
        self, generate: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        model = self._model
        # a wrapper such as PEFT's has no name for the first argument
        named = {"inputs": args[0]} if args else {}
        arguments = named | hooks.named_arguments(generate, args, kwargs)
        cache, ids = names.cache_among(kwargs), _prompt(arguments)
        assists = bool(setting(model, arguments, "is_assistant"))
        fresh = cache is None and not assists
        if fresh:
            check_assisted(model, arguments)
            check_generate(model, arguments)
            if setting(model, arguments, "cache_implementation") == "dynamic":
                kwargs["cache_implementation"] = None  # generate() takes a cache or its name
            cache = self._new_cache(self._size(arguments, ids, generates=True))
            self.last_cache, self._read_tokens = cache, None
        if cache is not None:  # under the name that this version of transformers takes
            kwargs = {**names.without_cache(kwargs), names.generation_argument(): cache}
        if not isinstance(cache, BudgetCache):
            if not assists:
                self._say_plain(cache, repeated=True)
            return generate(*args, **kwargs)
        if ids is not None:
            _check_turn(cache, ids)
            if cache.verifier is not None:
                check_lossless(model, arguments)
                streamer = kwargs.get("streamer")  # generate() passes it to no decoding but its own
                kwargs["custom_generate"] = partial(generate_lossless, streamer=streamer)
            elif is_assisted(model, arguments):
                cache.activate_past_recording(int(ids.shape[1]))
        seen = cache.get_seq_length()
        try:
            output = generate(*args, **kwargs)
        except BaseException:
            cache.go_back(seen)
            raise
        if fresh:  # what runs the model beside it, such as guidance, made caches of its own
            self.last_cache, self._read_tokens = cache, None
        cache.end_turn()
        beams = (setting(model, arguments, "num_beams") or 1) > 1  # rows are not those returned
        known = ids is not None and ids.ndim == 2 and not beams
        written = getattr(output, "sequences", output)
        cache.read_ids = written[:, : cache.get_seq_length()] if known else None
        return output

    def _size(
        self, arguments: Mapping[str, Any], ids: Tensor | None, *, generates: bool = False
    ) -> PromptSize:
        """Return a prompt's size; ``generate()`` finds padding by its token, and repeats rows."""
        setting_of = partial(setting, self._model, arguments if generates else {})
        chunked = setting_of("prefill_chunk_size") is not None
        if ids is None:
            return PromptSize(chunked=chunked)
        mask, _ = shown_columns(arguments)
        if not isinstance(mask, Tensor) or mask.shape != ids.shape[:2]:
            pad, ends = setting_of("pad_token_id"), setting_of("eos_token_id")
            ends = ends if isinstance(ends, list) else [ends]
            pads = generates and ids.ndim == 2 and pad is not None and pad not in ends
            mask = ids.ne(pad) if pads else ids.new_ones(ids.shape[:2])
        if generates:
            counts = ("num_beams", "num_return_sequences")
            copies = max(setting_of(name) or 1 for name in counts)
            ids, mask = (one.repeat_interleave(copies, dim=0) for one in (ids, mask))
        mask, rows = mask.bool().cpu(), tuple[IntArray, ...]()
        if ids.ndim == 2 and not self._embeds:
            pairs = zip(ids.long().cpu(), mask, strict=True)
            rows = tuple(row[shown].numpy() for row, shown in pairs)
        lengths, scattered = tuple(mask.sum(dim=1).tolist()), scattered_rows(arguments, len(ids))
        if generates and ids.ndim == 2:  # its positions are made later
            of_images = torch.tensor(scattering_tokens(self._model), device=ids.device)
            scattered = torch.isin(ids, of_images).any(dim=1).tolist()
        return PromptSize(
            tokens=int(ids.shape[1]),
            lengths=lengths,
            chunked=chunked,
            rows=rows,
            scattered=tuple(scattered),
        )

    def _say_plain(self, other: Any, *, repeated: bool = False) -> None:
        if isinstance(other, tuple | list) or (other in self._said and not repeated):
            return  # models refuse the first themselves
        why = OWN_MAKES_NONE.format(type(other).__name__)
        if names.is_paged(other):
            why = PAGED_MAKES_NONE
        if self._limited:
            raise _beyond_memory(why)
        self._said.add(other)
        _warn_of_plain(why)

    def __enter__(self) -> Applied:
        if not self.active:
            raise UnsupportedRequestError(
                "these budgets have been removed from the model; call kvalloc.apply() again"
            )
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def _beyond_memory(why: str) -> UnsupportedRequestError:
    return UnsupportedRequestError(f"{option('memory')} would be exceeded by a plain cache: {why}")


def _warn_of_plain(why: object) -> None:
    warn_user(f"this forward makes a plain cache, and nothing is reduced: {why}")


_IN_EFFECT = "_kvalloc_applied"
"""The attribute of a model that lists the `Applied` in effect, the latest last."""

_REPLACED = "_kvalloc_replaced"
"""Attribute of a lent method: the model's own attribute of that name, or None."""

_PAGED = "init_continuous_batching"
"""Method that ``generate_batch()`` calls before it starts its thread."""


def _lend_methods(model: Any) -> None:
    """Let a model's methods ask the latest `Applied`."""
    attributes = vars(model)
    in_effect: list[Applied] = attributes.setdefault(_IN_EFFECT, [])

    def lend(name: str, answer: Callable[..., Any]) -> None:
        if (method := getattr(model, name, None)) is not None:

            @wraps(method)
            def lent(*args: Any, **kwargs: Any) -> Any:
                return answer(method, args, kwargs) if in_effect else method(*args, **kwargs)

            setattr(lent, _REPLACED, attributes.get(name))
            attributes[name] = lent

    def begin_batch(begin: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if any(one._limited for one in in_effect):
            raise _beyond_memory(PAGED_MAKES_NONE)
        return begin(*args, **kwargs)

    lend("generate", lambda *call: in_effect[-1]._generate(*call))
    lend(_PAGED, begin_batch)
    hooks.keep_from_copies(model, _take_methods_back)


def _take_methods_back(attributes: dict[str, Any]) -> None:
    """Undo `_lend_methods`, also in a copy's attributes."""
    attributes.pop(_IN_EFFECT, None)
    for name in ("generate", _PAGED):
        method = attributes.get(name)
        if hasattr(method, _REPLACED):
            attributes[name] = getattr(method, _REPLACED)
            if attributes[name] is None:
                del attributes[name]


def _check_turn(cache: BudgetCache, ids: Tensor) -> None:
    """Refuse ids that do not begin with the cache's tokens; ignore embeddings."""
    seen, tokens = cache.get_seq_length(), int(ids.shape[1])
    cache.check_intact()
    if not seen or ids.ndim > 2:
        return
    before = cache.read_ids
    if before is not None and before.shape[0] == ids.shape[0]:
        shared = min(seen, tokens, before.shape[1])
        differs = (before[:, :shared] != ids[:, :shared].to(before.device)).any(dim=0).nonzero()
        if len(differs):
            raise InputError(
                f"token {int(differs[0])} of these is not the one that the cache has read: its "
                f"{seen} tokens are another text; pass the text as it was read, or begin with a "
                "new cache"
            )
    check_goes_on(tokens, seen)


def _prompt(arguments: Mapping[str, Any]) -> Tensor | None:
    for name in ("inputs_embeds", "inputs", "input_ids"):
        tensor = arguments.get(name)
        if isinstance(tensor, Tensor) and tensor.ndim >= 2:
            return tensor
    return None
