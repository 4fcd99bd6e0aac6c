"""`kvalloc.apply`: every new cache of a model is a reduced one, for a while."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, Literal, Unpack

from torch import Tensor

from kvalloc.accounting import IntArray
from kvalloc.allocation.outlook import loss_outlook
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
from kvalloc.models.loading import check_not_loaded
from kvalloc.models.names import (
    cache_among,
    generation_argument,
    is_paged,
    uncompiled,
    without_cache,
)
from kvalloc.models.structure import decoder_of
from kvalloc.online.conflicts import check_conflicts, given_names
from kvalloc.online.default import Default
from kvalloc.online.per_prompt import NOT_OF_A_PROMPT, PromptOptions, PromptTarget
from kvalloc.online.prompt_size import PromptSize
from kvalloc.runtime.attention.masks import shown_columns
from kvalloc.runtime.cache import BudgetCache
from kvalloc.runtime.hooks import (
    end_serving,
    end_watching,
    give_to_copies,
    keep_from_copies,
    named_arguments,
    serve,
    watch_calls,
)
from kvalloc.runtime.making import Way, build_rows
from kvalloc.runtime.options import CacheOptions
from kvalloc.runtime.refusals import check_generate, check_goes_on, setting
from kvalloc.units import keywords_of, parse_bytes

_LOG = logging.getLogger(__name__)

_APPLIED = "_kvalloc_applied"

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
"""Said once of forwards such as those that score multiple choice."""


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

    To a share of the bytes in the best way that needs nothing measured, to the budgets of a stored
    profile, or to budgets decided from each prompt itself::

        with kvalloc.apply(model, budget="20%"):         # any model, nothing measured
        with kvalloc.apply(model, profile):              # a stored decision
        with kvalloc.apply(model, target_retention=0.9): # decided for each prompt (XKV)
            model.generate(**inputs)

    It ends with the ``with``; without one, with ``remove()`` of the returned object. Every call
    gets a fresh cache, but one that brings a cache keeps it. A forward that makes a
    cache, ``model(**inputs)``, is taken for a whole prompt, and its cache goes on from there.

    The first call for a model runs two tokens through its layers (`kvalloc.models.probe`).
    A budget is a share of the bytes of a cache at 16 bits a number. Alone it is kept by default
    (`kvalloc.online.default`), with ``memory`` beside it in a way that fits at its peak. ``memory``
    alone is the largest budget that fits at its peak. The way is logged
    (``kvalloc.online.default``, level INFO) and stands in ``last_cache.profile.detail``. Whoever
    says how budgets are decided or entries are picked, such as ``scorer="snapkv",
    solver="uniform"``, gets budgets decided for each prompt.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A model that can generate.
    profile : BudgetProfile, str or Path, optional
        Budgets made for this model, their file, or the name of shipped ones. Without any, exactly
        one target is given.
    allow_other_model : bool
        With a profile or a fitted file: accept a model of another name with the same sizes.
    policy, decode_every : optional
        As for `kvalloc.make_cache`.
    fitted : str or Path, optional
        With a budget, a memory or a target loss alone: what ``kvalloc fit`` wrote for this model,
        so that one read of a prompt is enough. By default the file that `kvalloc.fit` left in the
        cache folder for these weights, or the one that ships for them.
    across : {"rows"}, optional
        With a budget alone: the prompts of a batch share the bytes of all by their predicted
        losses, so that short ones get a larger share than long ones. Tokens after a prompt are kept
        at its row's share. By default each row has the budget as it has it alone.
    lossless : bool
        Answer as the full cache does, token by token: tokens are drafted with the reduced cache and
        verified, several at once, with the full one, which on a GPU lies in the host's memory. What
        that took is in ``last_cache.verifier``.
    **keywords
        What each prompt is to reach, and how that is measured and decided; see
        `kvalloc.online.per_prompt.PromptOptions`. It does not go with a profile.

    Returns
    -------
    Applied
        Its ``last_cache`` tells what the latest call stored.

    Raises
    ------
    KVAllocError
        As `kvalloc.make_cache`, and for a profile and a target at once, or neither.
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
    model = uncompiled(model)
    make = partial(cache_maker(profile, options, **keywords), model)
    applied = Applied(model, make, lossless=lossless)
    if profile is not None and (outlook := loss_outlook(load_profile(profile))):
        _LOG.warning("%s", outlook)
    return applied


def cache_maker(
    profile: BudgetProfile | str | Path | None,
    options: CacheOptions,
    **keywords: Unpack[PromptOptions],
) -> Callable[[Any, PromptSize], BudgetCache]:
    """Return what makes a cache of a model for a prompt; refuse what can be without a model.

    Parameters
    ----------
    profile, options, **keywords
        As for `apply`; a profile and a target do not exclude each other here.

    Returns
    -------
    callable
        Takes the model and the size of a prompt.

    Raises
    ------
    KVAllocError
        If the profile cannot be read, or the target is none.
    """
    if (memory := keywords.get("memory")) is not None:
        options = replace(options, memory=parse_bytes(memory))
    if profile is None:
        if Default.applies(policy=options.policy, **keywords):
            return Default.parse(options=options, **keywords).cache
        return PromptTarget.parse(options=options, **keywords).cache
    if isinstance(profile, str | Path):
        profile = load_profile(profile)
    if not isinstance(profile, BudgetProfile):
        raise InputError(
            f"the profile is a {type(profile).__name__}, expected a BudgetProfile, its file, or "
            "the name of a shipped one"
        )

    def make(model: Any, size: PromptSize) -> BudgetCache:
        lengths = size.lengths if size.chunked else None
        way = Way(profile=profile, options=options)
        return build_rows(model, [way], prompt_tokens=size.announced, lengths=lengths)

    return make


class Applied:
    """Reduced caches in effect: from now on until `remove`, or until the ``with`` is left.

    Every ``generate()`` gets a fresh cache, and so does every forward of the model or its decoder
    that would make one. Where that cannot be reduced, a warning says why each time, or an error if
    a memory is given; so it does of a call that brings a cache of another kind, which keeps it.
    Prompts may be prefilled in chunks (``prefill_chunk_size``).
    Nesting works: the latest one counts, in whichever order they end.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A model that can generate.
    make : callable
        Makes a cache for a prompt of a size.
    lossless : bool
        Whether answers are verified with the full cache. A forward then makes a plain cache.

    Attributes
    ----------
    last_cache : BudgetCache or None
        The cache of the latest ``generate()`` or forward; None before the first.

    Raises
    ------
    UnsupportedModelError
        If the model cannot generate.
    KVAllocError
        As `make`, which is called once.
    """

    def __init__(
        self,
        model: Any,
        make: Callable[[PromptSize], BudgetCache],
        *,
        lossless: bool = False,
    ) -> None:
        check_not_loaded(model)
        generate = getattr(model, "generate", None)
        if generate is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot generate; pass the model with its language-model "
                "head"
            )
        self.last_cache: BudgetCache | None = None
        self._model, self._decoder = model, decoder_of(model)
        # whether a model puts images between its tokens, so that these do not say what is read
        self._embeds = getattr(model, "base_model", model) is not self._decoder
        # Made once, so that what cannot work is refused here; held, so that the hooks stay.
        self._held: BudgetCache | None = make(self._size({}, None))
        if lossless:
            verify_with(self._held, model)
        self._limited = self._held.options.memory is not None or self._held.profile.fits_a_peak
        self._make: Callable[[PromptSize], BudgetCache] = lambda size: extended(make(size))
        self._said: weakref.WeakSet[Any] = weakref.WeakSet()  # caches of others in forwards
        self._read_tokens: int | None = None  # of the latest cache, if a forward made it
        self._warned_of_whole, self._lossless = False, lossless
        serve(self._decoder, self._read)
        self._watching = watch_calls(model) if self._embeds else None
        self._before = {name: vars(model).get(name, _MISSING) for name in _REPLACED}
        model.generate = _reduced(self, generate)
        if self._limited and (paged := getattr(model, _PAGED, None)) is not None:
            setattr(model, _PAGED, _refused(self, paged))
        keep_from_copies(model, _without_applied)

    def __repr__(self) -> str:
        state, cache = "in effect" if self.active else "removed", self.last_cache
        last = "nothing read yet" if cache is None else f"last cache: {cache.share_text}"
        return f"Applied({type(self._model).__name__}, {state}; {last})"

    @property
    def active(self) -> bool:
        """Return whether it is still in effect."""
        return self._held is not None

    def remove(self) -> None:
        """Let the model generate as before; does nothing the second time."""
        if self._held is None:
            return
        end_serving(self._decoder, self._read)
        if self._watching is not None:
            end_watching(self._model, self._watching)
        self._held = None
        give_to_copies(self._model, _without_applied)
        # One that ended earlier, below a later one, is still in the chain: take it out, too.
        _uncover(vars(self._model), lambda applied: not applied.active)

    def _read(
        self, arguments: Mapping[str, Any], begin: Callable[[BudgetCache], dict[str, Any]]
    ) -> dict[str, Any] | None:
        """Begin a forward that would make a cache with a reduced one; None leaves it as it is."""
        ids, other = _prompt(arguments), cache_among(arguments)
        uses = arguments.get("use_cache")
        if uses is None:
            uses = getattr(self._decoder.config, "use_cache", True)
        if other is not None and not self._lossless:
            self._say_plain(other)
        if ids is None or self._lossless or not uses or other is not None:
            return None  # the model names missing arguments itself
        size = self._size(arguments, ids)
        try:
            cache = self._make(size)
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

    def _size(
        self, arguments: Mapping[str, Any], ids: Tensor | None, *, generates: bool = False
    ) -> PromptSize:
        """Return the size of a prompt, by which its cache is made; its ids if they are known.

        Without a mask, a forward takes nothing for padding; ``generate()`` finds it by its token,
        and reads the rows once for each beam or answer.
        """
        setting_of = partial(setting, self._model, arguments if generates else {})
        chunked = setting_of("prefill_chunk_size") is not None
        if ids is None:
            return PromptSize(chunked=chunked)
        mask = shown_columns(arguments.get("attention_mask"))
        if not isinstance(mask, Tensor) or mask.shape != ids.shape[:2]:
            mask = ids.new_ones(ids.shape[:2])
            pad, ends = setting_of("pad_token_id"), setting_of("eos_token_id")
            ends = ends if isinstance(ends, list) else [ends]
            if generates and ids.ndim == 2 and pad is not None and pad not in ends:
                mask = ids.ne(pad)
        if generates:
            counts = ("num_beams", "num_return_sequences")
            copies = max(setting_of(name) or 1 for name in counts)
            ids, mask = (one.repeat_interleave(copies, dim=0) for one in (ids, mask))
        mask, rows = mask.bool().cpu(), tuple[IntArray, ...]()
        if ids.ndim == 2 and not self._embeds:
            pairs = zip(ids.long().cpu(), mask, strict=True)
            rows = tuple(row[shown].numpy() for row, shown in pairs)
        lengths = tuple(mask.sum(dim=1).tolist())
        return PromptSize(tokens=int(ids.shape[1]), lengths=lengths, chunked=chunked, rows=rows)

    def _say_plain(self, other: Any, *, repeated: bool = False) -> None:
        """Warn that another cache is used, once for each; refuse it if the memory is limited."""
        if isinstance(other, tuple | list) or (other in self._said and not repeated):
            return  # models refuse the first themselves
        why = PAGED_MAKES_NONE if is_paged(other) else OWN_MAKES_NONE.format(type(other).__name__)
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


_MISSING = object()

_PAGED = "init_continuous_batching"
"""What ``generate_batch()`` calls before it starts the thread in which it runs the model."""

_REPLACED = ("generate", _PAGED)
"""Methods of a model that are replaced."""


def _uncover(attributes: dict[str, Any], ended: Callable[[Applied], bool]) -> None:
    """Bring back the methods below ended ones."""
    for name in _REPLACED:
        current = attributes.get(name, _MISSING)
        while (applied := getattr(current, _APPLIED, None)) is not None and ended(applied):
            current = applied._before[name]
        attributes[name] = current
        if current is _MISSING:
            del attributes[name]


def _without_applied(state: dict[str, Any]) -> None:
    """Let a copy of the model generate as a plain model."""
    _uncover(state, lambda applied: True)


def _refused(applied: Applied, paged: Callable[..., Any]) -> Callable[..., Any]:
    """Return what begins ``generate_batch()``, refused while these are in effect."""

    @wraps(paged)
    def refused(*args: Any, **kwargs: Any) -> Any:
        if applied.active:
            raise _beyond_memory(PAGED_MAKES_NONE)
        return paged(*args, **kwargs)

    setattr(refused, _APPLIED, applied)
    return refused


def _reduced(applied: Applied, generate: Callable[..., Any]) -> Callable[..., Any]:
    """Return `generate` with reduced caches, while these are in effect."""

    @wraps(generate)
    def reduced_generate(*args: Any, **kwargs: Any) -> Any:
        if not applied.active:
            return generate(*args, **kwargs)
        model = applied._model
        # a wrapper such as PEFT's has no name for the first argument
        named = {"inputs": args[0]} if args else {}
        arguments = named | named_arguments(generate, args, kwargs)
        cache, ids = cache_among(kwargs), _prompt(arguments)
        assists = bool(setting(model, arguments, "is_assistant"))
        fresh = cache is None and not assists
        if fresh:
            check_assisted(model, arguments)
            check_generate(model, arguments)
            if setting(model, arguments, "cache_implementation") == "dynamic":
                kwargs["cache_implementation"] = None  # generate() takes a cache or its name
            cache = applied._make(applied._size(arguments, ids, generates=True))
            if applied._lossless:
                verify_with(cache, model)
            applied.last_cache, applied._read_tokens = cache, None
        if isinstance(cache, BudgetCache) and ids is not None:
            _check_turn(cache, ids)
            if cache.verifier is not None:
                check_lossless(model, arguments)
                streamer = kwargs.get("streamer")  # generate() passes it to no decoding but its own
                kwargs["custom_generate"] = partial(generate_lossless, streamer=streamer)
            elif is_assisted(model, arguments):
                cache.activate_past_recording(int(ids.shape[1]))
        if cache is not None:  # under the name that this version of transformers takes
            kwargs = {**without_cache(kwargs), generation_argument(): cache}
        if not isinstance(cache, BudgetCache):
            if not assists:
                applied._say_plain(cache, repeated=True)
            return generate(*args, **kwargs)
        seen = cache.get_seq_length()
        try:
            output = generate(*args, **kwargs)
        except BaseException:
            cache.take_back(seen)
            raise
        if fresh:  # what runs the model beside it, such as guidance, made caches of its own
            applied.last_cache, applied._read_tokens = cache, None
        cache.end_turn()
        beams = (setting(model, arguments, "num_beams") or 1) > 1  # rows are not those returned
        known = ids is not None and ids.ndim == 2 and not beams
        written = getattr(output, "sequences", output)
        cache.read_ids = written[:, : cache.get_seq_length()] if known else None
        return output

    setattr(reduced_generate, _APPLIED, applied)
    return reduced_generate


def _check_turn(cache: BudgetCache, ids: Tensor) -> None:
    """Refuse a turn that does not begin with the tokens that the cache has seen.

    Parameters
    ----------
    cache : BudgetCache
    ids : Tensor
        The whole text so far, (rows, tokens), or its embeddings, which are not compared.
    """
    seen, tokens = cache.get_seq_length(), int(ids.shape[1])
    if cache.interrupted is not None:
        raise UnsupportedRequestError(cache.interrupted)
    if not seen or ids.ndim > 2:
        return
    before = cache.read_ids
    if before is not None and before.shape[0] == ids.shape[0]:
        shared = min(seen, tokens, before.shape[1])
        differs = (before[:, :shared] != ids[:, :shared].to(before.device)).any(dim=0).nonzero()
        if len(differs):
            raise InputError(
                f"token {int(differs[0])} of these is not the one that the cache has read there: "
                f"its {seen} tokens are another text, such as one whose chat template rewrote "
                "earlier turns; begin with a new cache, or pass the text as it was read"
            )
    check_goes_on(tokens, seen)


def _prompt(arguments: Mapping[str, Any]) -> Tensor | None:
    """Return the prompt of ``generate()``, or None where the arguments do not show it."""
    for name in ("inputs_embeds", "inputs", "input_ids"):
        tensor = arguments.get(name)
        if isinstance(tensor, Tensor) and tensor.ndim >= 2:
            return tensor
    return None
