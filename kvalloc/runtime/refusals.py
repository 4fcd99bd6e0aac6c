"""What the runtime cannot do right, refused in one clear line before anything runs."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping
from math import inf
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from kvalloc.accounting import IntArray
from kvalloc.errors import InputError, SolverError, UnsupportedRequestError, option
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.sharing_groups import shared_text
from kvalloc.models.attention import base_implementation
from kvalloc.models.structure import is_compiled
from kvalloc.runtime.arrival import Step
from kvalloc.runtime.attention.masks import MaskKind, mask_kind
from kvalloc.runtime.policies import EvictionPolicy, RankedPolicy, policy_class
from kvalloc.scorers import Scorer
from kvalloc.scorers.base import repetitions

__all__ = [
    "HALF_WAY",
    "broken_off",
    "check_bounded",
    "check_chunk",
    "check_crop",
    "check_decoding",
    "check_forward",
    "check_generate",
    "check_kept",
    "check_model",
    "check_not_chunked",
    "check_policy_decoding",
    "check_profile",
    "check_read",
    "new_tokens_shape",
    "warn_of_long_chunk",
]

ASSISTED = (
    "assisted generation takes back tokens that were already cached, which a reduced cache cannot "
    "do; call generate() without assistant_model and prompt_lookup_num_tokens"
)
HALF_WAY = (
    "a forward with this cache failed half-way, so its layers disagree; call cache.reset() and "
    "start with the prompt again"
)
OFFLOADED = "a reduced cache cannot be offloaded; it is small enough to stay on the device"
COMPILED = (
    "a compiled model sees fixed cache sizes, but here layers differ and grow; use the model "
    "without torch.compile"
)
WEIGHTS = (
    "output_attentions=True is not supported: layers keep different entries, so the weights' "
    "columns would not mean the same tokens"
)
CHECKPOINTED = (
    "with gradient checkpointing a model in training fills no cache; call model.eval(), or "
    "model.gradient_checkpointing_disable()"
)
PICKLED = (
    "a reduced cache belongs to the model that filled it, which does not go into a pickle; write "
    "it with cache.save(path) and read it with kvalloc.load_cache, or use copy.deepcopy for "
    "another one in memory"
)
UNUSED = "use_cache=False asks for no cache, so there is nothing to reduce; leave it out"


LONG_CHUNK = 32
"""Tokens right after a prompt, and at least half as many as it has, that look like more of it."""


def _refuse(wrong: object, message: str) -> None:
    """One row of a table of refusals: raise `UnsupportedRequestError` if the condition is true."""
    if wrong:
        raise UnsupportedRequestError(message)


def broken_off(prompt_tokens: int) -> str:
    """Why a cache cannot go on whose `prefill` was left by an error after so many tokens."""
    return (
        f"prefill() was left by an error after {prompt_tokens:,} tokens, so this cache lacks the "
        "rest of the prompt; call cache.reset() and start with the prompt again"
    )


def warn_of_long_chunk(seen: int, new_tokens: int) -> bool:
    """Warn where the tokens right after a prompt look like more of it.

    Parameters
    ----------
    seen : int
        Tokens of the prompt, which just ended.
    new_tokens : int
        Tokens that follow it, none of which will be evicted.

    Returns
    -------
    bool
        Whether a warning was given.
    """
    long = new_tokens >= max(LONG_CHUNK, seen / 2)
    if long:
        warnings.warn(
            f"{new_tokens} tokens follow a prompt of {seen} and are all kept, beyond its budgets. "
            "If they belong to the prompt, announce its length: kvalloc.runtime.make_cache("
            f"profile, model, prompt_tokens={seen + new_tokens}); or run all of its chunks inside "
            "`with cache.prefill():`",
            stacklevel=2,
        )
    return long


def check_profile(profile: BudgetProfile) -> None:
    """Refuse budgets that this runtime does not enforce.

    Raises
    ------
    UnsupportedRequestError
        For bits that are not stored or not with this policy, or layers that share entries with a
        policy that cannot choose for several.
    InputError
        For budgets below sinks and window.
    """
    name, kind = profile.policy.name, policy_class(profile.policy.name)
    fewest = 16 if profile.bits is None else int(profile.bits.min())
    groups = f"in this profile {shared_text(profile.share_groups)}"
    several = profile.unit_policies is not None or profile.unit_weights is not None
    _refuse(
        fewest < 16 and kind.reader is not EvictionPolicy.reader,
        f"this profile stores entries at {fewest} bits, but the policy {name} compares keys as "
        "the model made them at each decoded token; choose another policy, or solve again "
        f"without {option('bits')}",
    )
    _refuse(
        profile.share_groups and several,
        f"{groups}, but heads have different policies, which cannot choose together; solve "
        f"again without {option('share_groups')}, or with one policy",
    )
    _refuse(
        profile.share_groups and not issubclass(kind, RankedPolicy),
        f"{groups}, but the policy {name} chooses for each layer on its own; take one that "
        f"ranks, such as score, or solve again without {option('share_groups')}",
    )
    smallest = int(profile.budgets[list(profile.shape.full_layers)].min())
    least = min(profile.policy.protected_tokens, profile.context_tokens)
    if smallest < least:
        raise InputError(
            f"the smallest budget is {smallest} entries, below the {least} tokens of sinks and "
            "window that are never evicted; solve again with "
            f"{option('min_tokens', least)}"
        )


def check_model(model: nn.Module, prompt_tokens: int | None) -> None:
    """Refuse a model that is set up in a way the cache cannot work with.

    Raises
    ------
    UnsupportedRequestError
        For a compiled model, or one whose generation config asks for compilation, for another
        cache, or for a prefill in chunks of unannounced length.
    InputError
        For a prompt length that is not positive.
    """
    if prompt_tokens is not None and prompt_tokens < 1:
        raise InputError(f"prompt_tokens is {prompt_tokens}, expected >= 1")
    config = getattr(model, "generation_config", None)
    kind = getattr(config, "cache_implementation", None)
    chunk = getattr(config, "prefill_chunk_size", None)
    _refuse(is_compiled(model), COMPILED)
    _refuse(getattr(config, "compile_config", None) is not None, COMPILED)
    _refuse(
        kind not in (None, "dynamic"),
        f"the model's generation config asks for a {kind} cache, which does not go with "
        "another one; set model.generation_config.cache_implementation to None",
    )
    _refuse(
        chunk is not None and prompt_tokens is None,
        f"the model prefills in chunks of {chunk} tokens, and a second chunk cannot be told "
        "from a follow-up; say how long the prompt is: "
        "kvalloc.runtime.make_cache(profile, model, prompt_tokens=...)",
    )


def check_kept(policy: EvictionPolicy, kept: Tensor, budgets: Tensor) -> None:
    """Refuse what a policy of another package kept, where it does not meet the budgets.

    Raises
    ------
    SolverError
        If a head keeps more or fewer entries than its budget.
    """
    found = kept.sum(dim=-1)
    if not torch.equal(found, budgets.to(found.device)):
        row, head = (int(index) for index in (found != budgets).nonzero()[0])
        raise SolverError(
            f"the policy {policy.name} kept {int(found[row, head])} entries in KV head {head} of "
            f"row {row}, whose budget is {int(budgets[row, head])}; a policy must meet it exactly"
        )


def check_decoding(decode_every: object) -> None:
    """Refuse to keep the budget while decoding every so many tokens, if it is no such number.

    Raises
    ------
    InputError
        For a number of steps that is not positive.
    """
    if decode_every is None:
        return
    if isinstance(decode_every, bool) or not isinstance(decode_every, int) or decode_every < 1:
        raise InputError(
            f"{option('decode_every')} is {decode_every!r}, expected a number of tokens >= 1"
        )


def check_bounded(profile: BudgetProfile, bounded: object, *, decides: bool, awaits: int) -> None:
    """Refuse to bound the memory of late eviction where that cannot be right.

    Parameters
    ----------
    profile : BudgetProfile
    bounded : object
        The multiple of the budgets that is kept at first.
    decides : bool
        Whether budgets are decided from the held prompt.
    awaits : int
        Tokens that its policies wait for.

    Raises
    ------
    InputError
        If it is no number of at least 1.
    UnsupportedRequestError
        If nothing is waited for, layers share entries, or the whole prompt decides budgets.
    """
    name = option("bounded")
    if isinstance(bounded, bool) or not isinstance(bounded, int | float) or not 1 <= bounded < inf:
        raise InputError(f"{name} is {bounded!r}, expected a multiple of the budgets >= 1")
    _refuse(
        not awaits,
        f"{name} bounds what is kept until tokens have followed the prompt, and this profile waits "
        "for none: it evicts while the prompt is read; leave it out",
    )
    _refuse(
        decides,
        f"{option('hold')} decides from the whole prompt, of which {name} keeps a part; leave out "
        "one of them",
    )
    _refuse(
        profile.share_groups,
        f"in this profile {shared_text(profile.share_groups)}, which choose once; leave out {name}",
    )


def check_chunk(policy: EvictionPolicy, step: Step, *, bounded: bool = False) -> None:
    """Refuse a chunk of a prompt where the policy has to see all of it at once.

    Raises
    ------
    UnsupportedRequestError
        For a policy that puts something of the evicted entries into the kept ones: what earlier
        chunks have put there would be counted as one token again.
    """
    whole = step.follows or (step.seen == 0 and step.completes)
    _refuse(
        policy.combines and step.budgets is not None and not whole and not bounded,
        f"the policy {policy.name} merges entries, for which it has to see the whole prompt; send "
        "it in one piece, or choose another policy",
    )
    _refuse(
        step.remember and policy.needs_whole_prompt,
        "one of this profile's policies adds up the attention of all tokens, which works for "
        "prompts in one piece only where heads have different policies; send the prompt in "
        "one piece, or give all heads one policy",
    )


def check_read(policy: EvictionPolicy, targets: Iterable[IntArray]) -> None:
    """Refuse to choose at each decoded token where heads or rows keep different numbers.

    Raises
    ------
    UnsupportedRequestError
        If a layer is to keep different numbers of entries.
    """
    _refuse(
        any((counts != counts[0, 0]).any() for counts in targets),
        f"the policy {policy.name} leaves entries unread at each decoded token, which needs "
        "the same number of entries in all rows and heads of a layer; use a profile of layer "
        "level and prompts of equal length, or another policy",
    )


def check_crop(*, decoding: bool, arriving: bool, held_tokens: int | None) -> None:
    """Refuse to take tokens back where that cannot be right, whichever they are.

    Parameters
    ----------
    decoding : bool
        Whether the budget is kept while decoding.
    arriving : bool
        Whether some of the prompt has come, but not all.
    held_tokens : int or None
        Tokens of a prompt that is held, if the crop would reach into it.

    Raises
    ------
    UnsupportedRequestError
        In all three cases.
    """
    _refuse(
        decoding,
        "cannot crop a cache that keeps its budget while decoding: what scores were made of "
        f"cannot be taken back; make one without {option('decode_every')}",
    )
    _refuse(arriving, "cannot crop before the prompt is complete; reset the cache and start again")
    _refuse(
        held_tokens is not None,
        f"cannot crop into a prompt of {held_tokens} tokens that is held until others follow: its "
        "last queries have been noted; reset the cache and start again",
    )


def check_policy_decoding(policy: EvictionPolicy, scorers: Iterable[Scorer]) -> None:
    """Refuse to keep the budget while decoding with what cannot score what is decoded.

    Parameters
    ----------
    policy : EvictionPolicy
    scorers : iterable of Scorer
        Those that look beyond the prompt.

    Raises
    ------
    UnsupportedRequestError
        If a scorer lets the model repeat the prompt, or heads have different policies of which one
        adds up the attention of all tokens.
    """
    instead = f"leave out {option('decode_every')}, or choose another scorer"
    for scorer in scorers:
        _refuse(
            repetitions([scorer]),
            f"the scorer {scorer.name} lets the model repeat the prompt, which says nothing of "
            f"what is decoded later; {instead}",
        )
    _refuse(
        policy.needs_whole_prompt,
        "heads have different policies, of which one adds up the attention of all tokens, and it "
        f"is not noted for each what chunks and decoded tokens add; {instead}",
    )


def check_generate(model: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse a ``generate()`` call that cannot work with a reduced cache.

    Parameters
    ----------
    model : transformers.GenerationMixin
        The model.
    arguments : mapping
        Keyword arguments of the call.

    Raises
    ------
    UnsupportedRequestError
        For assisted generation, another cache implementation, compilation, attention weights, or
        no cache at all.
    """
    configs = [arguments.get("generation_config"), getattr(model, "generation_config", None)]

    def setting(name: str) -> Any:
        values = [arguments.get(name), *(getattr(config, name, None) for config in configs)]
        return next((value for value in values if value is not None), None)

    kind = setting("cache_implementation")
    _refuse(arguments.get("assistant_model") is not None, ASSISTED)
    _refuse(setting("prompt_lookup_num_tokens"), ASSISTED)
    _refuse("offloaded" in (kind or ""), OFFLOADED)
    _refuse(
        kind not in (None, "dynamic"),
        f"cache_implementation={kind!r} asks for another cache; leave it out where kvalloc "
        "supplies the cache",
    )
    _refuse(setting("use_cache") is False, UNUSED)
    _refuse(setting("compile_config") is not None, COMPILED)
    _refuse(setting("output_attentions"), WEIGHTS)


def check_forward(decoder: nn.Module, arguments: Mapping[str, Any], stored_rows: int) -> MaskKind:
    """Refuse a forward that the cache cannot serve.

    Parameters
    ----------
    decoder : nn.Module
        The model.
    arguments : mapping
        Arguments of the decoder's forward by name.
    stored_rows : int
        Rows that the cache holds before it.

    Returns
    -------
    MaskKind
        What the model's attention implementation takes.

    Raises
    ------
    UnsupportedRequestError
        If the attention implementation, the arguments, the batch size or the mask do not fit.
    """
    base = base_implementation(decoder.config)
    kind = mask_kind(base)
    weights = arguments.get("output_attentions")
    if weights is None:
        weights = getattr(decoder.config, "output_attentions", False)
    # Looked for once a prompt; `hooks` notices layers that are compiled after it.
    _refuse(_is_compiling() or (stored_rows == 0 and is_compiled(decoder)), COMPILED)
    _refuse(arguments.get("use_cache") is False, UNUSED)
    _refuse(decoder.training and _is_checkpointed(decoder), CHECKPOINTED)
    _refuse(
        kind is None,
        f"a reduced cache runs on sdpa, eager, flash and flex attention, not on {base}; load "
        'the model with attn_implementation="sdpa"',
    )
    _refuse(weights, WEIGHTS)
    batch, _ = new_tokens_shape(arguments)
    rows = "1 row" if stored_rows == 1 else f"{stored_rows} rows"
    _refuse(
        stored_rows not in (0, batch),
        f"the cache holds {rows}, but this input has {batch}; make a cache for each batch, or "
        "repeat the rows with cache.batch_repeat_interleave(n)",
    )
    assert kind is not None
    return kind


def check_not_chunked() -> None:
    """Refuse the first chunk of a prompt that ``generate()`` cuts up without a word to the cache.

    Only the call itself knows: its chunk size may come as a keyword, and what the model is given
    looks like a short prompt and questions after it, of which nothing would be evicted.

    Raises
    ------
    UnsupportedRequestError
        If this runs in such a call.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_prefill":
        frame = frame.f_back
    chunks = () if frame is None else frame.f_locals.get("input_chunks", ())
    if len(chunks) > 1:
        tokens = sum(int(chunk.shape[-1]) for chunk in chunks)
        raise UnsupportedRequestError(
            f"this generate() prefills in {len(chunks)} chunks, which a cache cannot tell from "
            "follow-ups; say how long the prompt is: "
            f"kvalloc.runtime.make_cache(profile, model, prompt_tokens={tokens}), or use "
            "kvalloc.apply, which does so"
        )


def _is_checkpointed(decoder: nn.Module) -> bool:
    """Whether a layer recomputes its activations: transformers takes its cache away then."""
    found = (getattr(module, "gradient_checkpointing", False) for module in decoder.modules())
    return any(found)


def _is_compiling() -> bool:
    """Whether this runs inside ``torch.compile``, also where its tracing has broken off."""
    if torch.compiler.is_compiling():
        return True
    try:
        from torch._C._dynamo.eval_frame import get_eval_frame_callback
    except ImportError:  # not a public name: without it, what torch.compile breaks off at is unseen
        return False
    return callable(get_eval_frame_callback())


def new_tokens_shape(arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and new tokens of a forward, from its input ids or embeddings.

    Raises
    ------
    UnsupportedRequestError
        If there is neither.
    """
    for name in ("inputs_embeds", "input_ids"):
        tensor = arguments.get(name)
        if isinstance(tensor, Tensor):
            return int(tensor.shape[0]), int(tensor.shape[1])
    raise UnsupportedRequestError("this forward has neither input_ids nor inputs_embeds")
