"""``kvalloc generate``: answer one prompt with a reduced cache."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvalloc.allocation.request import RequestOptions
from kvalloc.cli.answers import (
    PROMPT,
    Answer,
    PromptOptions,
    check_room,
    feed,
    prompt_ids,
    save,
    write_answer,
)
from kvalloc.cli.options import takes
from kvalloc.cli.output import duration, note, print_json, wants_json
from kvalloc.cli.reduction import (
    OF_A_PROMPT,
    Reduction,
    cache_facts,
    kept_text,
    load_with_caches,
    model_shape,
    note_way,
    note_whole,
)
from kvalloc.prompts.chat import wants_chat
from kvalloc.units import Option, size

if TYPE_CHECKING:
    from kvalloc.models.loading import LoadedModel

EXAMPLES = """\
  kvalloc generate demo --budget 20% --prompt-file prompt.txt
  kvalloc generate demo --profile p.json --policy tova --prompt-file prompt.txt
  kvalloc generate demo --target-retention 0.9 --prompt-file prompt.txt
  kvalloc generate demo --full --prompt "What is a KV cache?" --max-new-tokens 40
  cat prompt.txt | kvalloc generate demo --profile p.json --json
"""


@takes(RequestOptions, Reduction, PromptOptions, only={RequestOptions: OF_A_PROMPT})
def generate(
    model: str, save_cache: Annotated[Path | None, Option("FILE", PROMPT)] = None, **typed: Any
) -> None:
    """Answer one prompt with a reduced cache.

    The cache keeps of the prompt only what the budget profile grants, or what is decided for the
    prompt itself with --target-retention, --budget, --budget-tokens or --memory; the answer comes
    on top of it. A --budget and nothing else is kept in the best way that needs nothing measured;
    --memory beside it is what the cache may take meanwhile. The answer goes to stdout, what it took
    to stderr.

    Parameters
    ----------
    save_cache : Path
        Save the cache with prompt and answer, for 'kvalloc chat --cache'.
    """
    from kvalloc.evaluate.caches import end_tokens

    reduction, options = Reduction.of(model, typed), PromptOptions.of(typed)
    reduction.check()
    if save_cache is not None:
        from kvalloc.files import check_writable

        check_writable(save_cache)
    text, where = options.read()
    loaded, make_cache = load_with_caches(reduction)
    in_chat = wants_chat(loaded.tokenizer, options.chat)
    ids = prompt_ids(loaded.tokenizer, text, in_chat)
    check_room(loaded, len(ids), options)
    cache = make_cache(len(ids))
    note_way(cache, reduction)
    ends = end_tokens(loaded.model, loaded.tokenizer)
    facts, answer = _answer(loaded, cache, ids, options, ends)
    note_whole(cache, len(ids))
    if save_cache is not None:
        feed(loaded, cache, [token for token in answer.tokens[-1:] if token not in ends])
        notes = {"document": where, "read_seconds": answer.first_seconds, "chat": in_chat}
        save(cache, save_cache, {**notes, "answered": True})
    if wants_json():
        profile = None if reduction.full else reduction.profile
        print_json({"model": loaded.model_id, "profile": profile, **facts})
    else:
        _note_figures(cache, facts)


def _answer(
    loaded: LoadedModel,
    cache: Any,
    ids: Sequence[int],
    options: PromptOptions,
    ends: Collection[int],
) -> tuple[dict[str, Any], Answer]:
    """Answer a prompt; returns its figures too, None where one is unknown."""
    from transformers import DynamicCache

    from kvalloc.evaluate.caches import stored_bytes
    from kvalloc.runtime.account import kept_bytes

    at_first: dict[str, Any] = {}

    def measure() -> None:
        at_first["share"] = getattr(cache, "share", 1.0)
        at_first["prompt_retained_bytes"] = stored_bytes(cache)

    answer = write_answer(
        loaded, cache, ids, options,
        ends=ends, keep=True, waiting="reading the prompt", at_first=measure,
    )  # fmt: skip
    facts = {
        "answer": answer.text,
        "prompt_tokens": len(ids),
        "new_tokens": len(answer.tokens),
        **cache_facts(loaded, cache, len(ids)),
        "prompt_full_bytes": model_shape(loaded).full_bytes(len(ids)),
        "prefill_seconds": answer.first_seconds,
        "decision_seconds": getattr(cache, "decision_seconds", None),
        "decode_tokens_per_second": answer.tokens_per_second,
    }
    kept = None if isinstance(cache, DynamicCache) else kept_bytes(cache.layers)
    if kept is None:
        return {**facts, **at_first}, answer
    return {**facts, "prompt_retained_bytes": kept}, answer  # also where it was evicted late


def _note_figures(cache: Any, facts: Mapping[str, Any]) -> None:
    deciding, speed = facts["decision_seconds"], facts["decode_tokens_per_second"]
    times = f"prefill {duration(facts['prefill_seconds'])}"
    times += "" if deciding is None else f", {duration(deciding)} of it to decide the budgets"
    times += "" if speed is None else f", then {speed:.1f} tokens/s"
    sizes = facts["prompt_retained_bytes"], facts["prompt_full_bytes"]
    kept = kept_text(cache, facts["share"], *sizes)
    note(f"[{facts['prompt_tokens']:,} prompt and {facts['new_tokens']:,} new tokens; {times}]")
    note(f"[cache of the prompt: {kept}, {size(facts['retained_bytes'])} with the answer]")
