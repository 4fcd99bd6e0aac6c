"""What the runtime cannot do right: one table of conditions and the lines that refuse them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvalloc.errors import (
    InputError,
    KVAllocError,
    ModelMismatchError,
    OptionNames,
    SolverError,
    UnsupportedModelError,
    UnsupportedRequestError,
    one_line,
    warn_user,
)
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.models.names import MaskFunction, base_implementation, mask_function
from kvalloc.models.structure import has_compiled_layers
from kvalloc.runtime.checks import ensure
from kvalloc.runtime.policies import policy_class
from kvalloc.runtime.policies.base import EvictionPolicy

HALF_WAY = (
    "a forward with this cache failed half-way, so its layers disagree; call cache.reset() and "
    "start with the prompt again"
)
TURN_BROKEN_OFF = (
    "an answer broke off after {:,} tokens of its turn, and what was evicted meanwhile, or slid "
    "out of a window, cannot come back; call cache.reset() and start with the prompt again, or go "
    "on from a copy.deepcopy(cache) made before; to end an answer early, use stopping_criteria"
)
OWN_MAKES_NONE = (
    "the {} that was given to it keeps all entries; leave it out, or pass the cache of an earlier "
    "call on"
)
PAGED_MAKES_NONE = (
    "generate_batch() keeps all entries, in pages of its own; call generate(), with several rows"
)
UNCOMPILED = (
    "with a kvalloc cache a graph holds one token that follows a complete prompt, without "
    "gradients; all else runs uncompiled: leave out fullgraph=True, or read the prompt with the "
    "model that is not compiled"
)
REFUSALS: dict[type[KVAllocError], dict[str, str]] = {
    UnsupportedRequestError: {
        # What a profile asks for
        "bits_are_compared": "this profile stores entries at {0[0]} bits, but the policy {0[1]} "
        "compares keys as the model made them at each decoded token; choose another policy, or "
        "solve again without {option[bits]}",
        # How a cache is made
        "beyond_memory": "these budgets were decided for {option[memory]} at its peak, and here "
        "the policy {0} takes more than what is kept and one layer in full while the prompt is "
        "read; choose another policy, or decide by {option[budget]}",
        "plain_beyond_memory": "{option[memory]} would be exceeded by a plain cache: {0}",
        # What the model is set to, and what a call asks for
        "assisted": "use_mtp and speculation_type draft by what only a full cache holds; leave "
        "them out, or take prompt_lookup_num_tokens or assistant_model",
        "drafts_unannounced": "assisted generation sends the prompt and the first drafts in one "
        "forward; say how long the prompt is: kvalloc.make_cache(model, profile, "
        "prompt_tokens=...), or use kvalloc.apply, which does so",
        "drafts_slide_out": "this version of transformers takes back no drafts from sliding-window "
        "layers; install a newer one, or call generate() without assistance",
        "drafts_read_all": "the policy {0} leaves entries unread at each decoded token, but drafts "
        "come several at a time and read all; call generate() without assistance, or choose "
        "another policy",
        "lossless_apart": "the reduced cache has seen {0[0]} tokens and the full one beside it "
        "{0[1]}, so no answer can be verified; begin with a new cache",
        "lossless_with": "{option[lossless]} drafts and verifies by itself and takes one token "
        "after the other; leave out {0}",
        "lossless_of_embeddings": "{option[lossless]} reads again what it answered, as token ids; "
        "pass input_ids instead of inputs_embeds",
        "offloaded": "a reduced cache cannot be offloaded; it is small enough to stay on the "
        "device",
        "other_cache": "the generation config asks for a {0} cache, which does not go with another "
        "one; leave cache_implementation out, or set "
        "model.generation_config.cache_implementation to None",
        "compiled_layers": "a layer of this model is compiled by itself, which sees nothing of a "
        "cache; compile the whole model, or none of it",
        "given_up": "a kvalloc cache with {0[0]} tokens was given to {0[1]}, but its layers got "
        "{0[2]}: the model, a wrapper or transformers gave it up, as Phi-3 does where a text "
        "passes its original context; begin a new cache for a text of that length",
        "unused": "use_cache=False asks for no cache, so there is nothing to reduce; leave it out",
        "weights": "output_attentions=True is not supported: layers keep different entries, so the "
        "weights' columns would not mean the same tokens",
        # One forward
        "ready_made": "an attention mask that is not causal, given or made by the model around its "
        "images, does not fit layers that keep different entries; pass a 2-D attention_mask or "
        "none, and images in the first prompt alone",
        "mask_in_pieces": "a forward with an attention mask that is not causal, given or made by "
        "the model around its images, cannot be read in pieces; leave out {option[memory]}, or "
        "drafts",
        "repeats_both": "a scorer has the model repeat a prompt, but its chunks came as token ids "
        "and as inputs_embeds; send all in one form, or choose another scorer",
        "no_tokens": "this forward has neither input_ids nor inputs_embeds",
        "checkpointed": "with gradient checkpointing a model in training fills no cache; call "
        "model.eval(), or model.gradient_checkpointing_disable()",
        "attention": "a reduced cache runs on sdpa, eager, flash and flex attention, not on {0}; "
        'load the model with attn_implementation="sdpa"',
        "other_batch": "the cache holds a batch of {0[0]}, but this input has one of {0[1]}; make "
        "a cache for each batch, or repeat the rows with cache.batch_repeat_interleave(n)",
        "rounded_beyond_memory": "these budgets were decided for {option[memory]} at its peak, and "
        "of a prompt in chunks nothing is rounded before the last one; send it in one piece, or "
        "solve again without {option[bits]}",
        "merges_chunks": "the policy {0} merges entries, for which it has to see the whole prompt; "
        "send it in one piece, or choose another policy",
        "reads_unevenly": "the policy {0} leaves entries unread at each decoded token, which needs "
        "the same number of entries in all rows and heads of a layer; use a profile of layer level "
        "and prompts of equal length, or another policy",
        # What is asked of a cache
        "crop_amid_prompt": "cannot crop before the prompt is complete; reset the cache and start "
        "again",
        "prompt_begun": "{0} is for a new prompt, but this cache has seen one already or was made "
        "with prompt_tokens; call cache.reset(), or make a new cache",
        "decides_from_embeddings": "budgets of a prompt's own are decided from its token ids, but "
        "the decoder got embeddings: inputs_embeds, or those of a model that puts images between "
        "its tokens; name {option[budget=20%]} alone, or use a stored profile",
        "decides_from_chunk": "budgets of a prompt's own are decided from the whole prompt, but "
        "only a chunk of it has come; send it in one piece, show all of it first with "
        "cache.decide(), or use a stored profile",
        "crop_slid_out": "cannot crop: a sliding-window layer has already dropped the tokens that "
        "would come back into its window; make a new cache",
        "saved_incomplete": "this cache holds no complete prompt, so there is nothing to save; run "
        "the model with it first",
        "saved_in_groups": "rows of this cache are kept in {0} different ways, and a file holds "
        "one; read each row by itself, and save its cache",
        "saved_without_model": "the model of this cache is gone, so the file could not say whose "
        "memory it holds; save the cache while its model is loaded",
        "decided_in_file": "the budgets of this cache were decided from the prompt that it was "
        "saved with, and how is not in the file; make a new cache for another prompt",
        "pickled": "a reduced cache belongs to the model that filled it, which does not go into a "
        "pickle; write it with cache.save(path) and read it with kvalloc.load_cache, or use "
        "copy.deepcopy for another one in memory",
    },
    InputError: {
        "no_decode_every": "{option[decode_every]} is {0[0]!r}, expected a number of tokens >= 1",
        "no_prompt_tokens": "prompt_tokens is {0[0]}, expected >= 1",
        "no_policy": "policy is {0[0]!r}; name a policy or a scorer, or give a Policy, as of a "
        "profile",
        "kept_by_sliding": "layer {0[0]} is a sliding-window layer: it keeps the last tokens",
        "kept_of_nothing": "the cache has seen no prompt yet; run the model with it first",
        "asked_in_rows": "a question has one row, but this one has {0}; ask one by one",
        "asked_nothing": "the question has no tokens; ask something",
        "answers_nothing": "an answer of {0[0]} tokens says nothing; allow at least 1",
        "no_rows": "a selection of no rows would leave nothing of the {0} in the cache; call "
        "cache.reset() to empty it",
        "rows_outside": "a selection of rows is {0[0]}, but the cache holds {0[1]}, from 0 on; "
        "give whole numbers below that, or a mask of as many",
        "asked_of_rows": "the cache holds {0} rows, and a question is about one; take one of them "
        "with cache.batch_select_indices",
        "other_tokens": "token {0[0]} of these is not the one that the cache has read there: its "
        "{0[1]} tokens are another text, such as one whose chat template rewrote earlier turns; "
        "begin with a new cache, or pass the text as it was read",
        "turn_of_nothing": "a turn of no tokens: these are {0[0]}, and the cache has seen {0[1]} "
        "already; pass the whole text so far and what is said next",
        "turn_beyond": "{0[0]} tokens in the cache and {0[1]} that follow are beyond the {0[2]} "
        "tokens that the model was made for; shorten the turn or begin a new conversation",
        "asked_beyond": "{0[0]} tokens in the cache, a question of {0[1]} and an answer of up to "
        "{0[2]} are beyond the {0[3]} tokens that the model was made for; shorten the question or "
        "the answer",
    },
    ModelMismatchError: {
        "given_to_other": "this cache was made for another {0[0]} object than the {0[1]} that it "
        "was given to; make one with kvalloc.make_cache(model, profile) for this model",
        "outside_forward": "this cache works only inside a forward of the {0} object that it was "
        "made for, and not after a reset within one; make one with "
        "kvalloc.make_cache(model, profile) for the model at hand",
        "asked_by_other": "this cache was made for another {0} object than the one that is asked; "
        "load it for this one with kvalloc.load_cache, or read the text again",
        "other_dtype": "{0[0]} holds {0[1]} entries, but the model computes in {0[2]}; load the "
        "model in {0[1]}",
        "other_weights": "{0[0]} was filled by a {0[1]} with other weights, adapters or config "
        "than this {0[2]}; load that model, or allow another one of the same sizes "
        "({option[allow_other_model=True]})",
    },
    UnsupportedModelError: {
        "attends_to_others": "layer {0[0]} attends to other keys or values than its cache "
        "returned, so nothing can be evicted or rounded; use this model with its full cache",
    },
    SolverError: {
        "budget_missed": "the policy {0[0]} kept {0[1]} entries in KV head {0[3]} of row {0[2]}, "
        "whose budget is {0[4]}; a policy must meet it exactly",
    },
}
"""What is said where a condition is met, which `{0}` is; options are as the reader writes them."""

_TABLE = {name: (error, line) for error, rows in REFUSALS.items() for name, line in rows.items()}


def refuse(**conditions: object) -> None:
    """Raise what the table says of the first condition that is met, if any is.

    Parameters
    ----------
    **conditions
        By their names in `REFUSALS`: False or None if it is not met, else True or what the line
        says, which may be 0.

    Raises
    ------
    KVAllocError
        As the table has it.
    """
    for name, found in conditions.items():
        if found is not None and found is not False:
            error, message = _TABLE[name]
            raise error(message.format(found, option=OptionNames()))


def check_profile(profile: BudgetProfile) -> None:
    """Refuse budgets that this runtime does not enforce.

    Raises
    ------
    UnsupportedRequestError
        For bits that are not stored or not with this policy.
    """
    name, kind = profile.policy.name, policy_class(profile.policy.name)
    fewest = int(profile.widths.min())
    compared = fewest < 16 and kind.reader is not EvictionPolicy.reader
    refuse(bits_are_compared=compared and (fewest, name))


def check_model(model: nn.Module, prompt_tokens: int | None) -> None:
    """Refuse a model that is set up in a way the cache cannot work with.

    Raises
    ------
    UnsupportedRequestError
        For a model whose layers are compiled one by one, or whose generation config asks for
        another cache.
    InputError
        For a prompt length that is not positive.
    """
    cache = setting(model, {}, "cache_implementation")
    refuse(
        no_prompt_tokens=prompt_tokens is not None and prompt_tokens < 1 and (prompt_tokens,),
        compiled_layers=has_compiled_layers(model),
        other_cache=cache not in (None, "dynamic") and cache,
    )


def setting(model: nn.Module, arguments: Mapping[str, Any], name: str) -> Any:
    """Return a setting of a ``generate()``: its argument, its config's, the model's, or None."""
    configs = (arguments.get("generation_config"), getattr(model, "generation_config", None))
    values = (arguments.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in values if value is not None), None)


def check_generate(model: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Refuse a ``generate()`` call, by its keyword arguments, that no reduced cache can serve.

    Raises
    ------
    UnsupportedRequestError
        For another cache implementation, attention weights, drafts of the model's own, or no
        cache at all.
    """
    asked = partial(setting, model, arguments)
    cache = asked("cache_implementation") or "dynamic"
    refuse(
        assisted=bool(asked("use_mtp") or asked("speculation_type")),
        offloaded="offloaded" in cache,
        other_cache=cache != "dynamic" and cache,
        unused=asked("use_cache") is False,
        weights=bool(asked("output_attentions")),
    )


def is_assisted(model: nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Return whether a ``generate()`` call, by its keyword arguments, tries drafts."""
    names = ("prompt_lookup_num_tokens", "assistant_early_exit")
    among = [arguments.get("assistant_model"), *(setting(model, arguments, n) for n in names)]
    return any(one is not None for one in among)


def check_forward(
    decoder: nn.Module, arguments: Mapping[str, Any], stored_rows: int
) -> MaskFunction:
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
    MaskFunction
        What makes the masks of the model's attention implementation.

    Raises
    ------
    UnsupportedRequestError
        If the attention implementation, the arguments, the batch size or the mask do not fit.
    """
    base, batch = base_implementation(decoder.config), new_tokens_shape(arguments)[0]
    masks, weights = mask_function(base), arguments.get("output_attentions")
    if weights is None:
        weights = getattr(decoder.config, "output_attentions", False)
    refuse(
        # Looked for once a prompt; `hooks` notices layers that are compiled after it.
        compiled_layers=stored_rows == 0 and has_compiled_layers(decoder),
        unused=arguments.get("use_cache") is False,
        checkpointed=decoder.training
        and any(getattr(one, "gradient_checkpointing", False) for one in decoder.modules()),
        attention=masks is None and base,
        weights=bool(weights),
        other_batch=stored_rows not in (0, batch) and (stored_rows, batch),
    )
    assert masks is not None
    return masks


def selected_rows(indices: Any, n_rows: int) -> Tensor:
    """Return the numbers of selected rows, on the host.

    Parameters
    ----------
    indices : Tensor
        Numbers of rows, from the end if negative, or a mask of all rows.
    n_rows : int
        Rows that the cache holds.

    Raises
    ------
    InputError
        If no row is selected, or one that is not there.
    """
    rows = torch.as_tensor(indices, device="cpu")  # whatever the default device is
    is_mask, dtype = rows.dtype == torch.bool, rows.dtype
    sound = rows.ndim == 1 and not dtype.is_floating_point and not dtype.is_complex
    sound &= len(rows) == n_rows if sound and is_mask else True
    if sound:
        rows = rows.nonzero()[:, 0] if is_mask else rows.long()
        sound = bool(((rows >= -n_rows) & (rows < n_rows)).all())
    refuse(
        rows_outside=not sound and (one_line(rows.tolist(), 60), n_rows),
        no_rows=not rows.numel() and n_rows,
    )
    return rows % n_rows


def check_kept(policy: EvictionPolicy, kept: Tensor, budgets: Tensor) -> None:
    """Refuse what a policy of another package kept, where it does not meet the budgets.

    Raises
    ------
    SolverError
        If a head keeps more or fewer entries than its budget.
    """
    found, wanted = kept.sum(dim=-1), budgets.to(kept.device)

    def fail() -> None:
        row, head = (found != wanted).nonzero()[0].tolist()
        kept_here, budget = int(found[row, head]), int(wanted[row, head])
        refuse(budget_missed=(policy.name, kept_here, row, head, budget))

    ensure((found == wanted).all(), fail)


def new_tokens_shape(arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Return rows and new tokens of a forward, as `new_tokens` finds them."""
    rows, columns = new_tokens(arguments).shape[:2]
    return rows, columns


def new_tokens(arguments: Mapping[str, Any]) -> Tensor:
    """Return the embeddings of a forward, (batch, n, hidden_size), or else its ids, (batch, n).

    Raises
    ------
    UnsupportedRequestError
        If there is neither.
    """
    among = (arguments.get(name) for name in ("inputs_embeds", "input_ids"))
    given = next((one for one in among if isinstance(one, Tensor)), None)
    refuse(no_tokens=given is None)
    assert given is not None
    return given


def warn_of_plain(why: object) -> None:
    """Warn that a forward under `kvalloc.apply` makes a plain cache."""
    warn_user(f"this forward makes a plain cache, and nothing is reduced: {why}")
