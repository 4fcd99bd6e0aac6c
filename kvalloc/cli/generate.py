"""``kvalloc generate``: answer one prompt with a reduced cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvalloc.allocation.request import RequestOptions
from kvalloc.cli.answers import Conversation, PromptOptions
from kvalloc.cli.options import ModelFlags, from_typed, takes
from kvalloc.cli.output import duration, note, print_json, wants_json
from kvalloc.cli.reduction import OF_A_PROMPT, Reduction, note_whole


@takes(RequestOptions, Reduction, PromptOptions, ModelFlags, only={RequestOptions: OF_A_PROMPT})
def generate(model: str, **typed: Any) -> None:
    """Answer one prompt with a reduced cache.

    The cache keeps of prompt and answer only what the budget profile grants, or what is decided for
    the prompt itself with --target-retention, --budget, --budget-tokens or --memory. A --budget and
    nothing else is kept in the best way that needs nothing measured; --memory beside it takes a way
    whose peak fits. The answer goes to stdout, what it took to stderr.

    Examples
    --------
    kvalloc generate demo --budget 20% --prompt-file prompt.txt
    kvalloc generate demo --profile p.json --policy tova --prompt-file prompt.txt
    kvalloc generate demo --target-retention 0.9 --prompt-file prompt.txt
    kvalloc generate demo --budget 100% --prompt "What is a KV cache?" --max-new-tokens 40
    cat prompt.txt | kvalloc generate demo --profile p.json --json
    """
    reduction, options = Reduction.of(model, typed), from_typed(PromptOptions, typed)
    text, where = options.read()
    conversation = Conversation.begin(reduction, options)
    facts = _answer(conversation, text)
    note_whole(conversation.cache, facts["prompt_tokens"])
    conversation.document, conversation.read_seconds = where, facts["prefill_seconds"]
    conversation.save()
    if wants_json():
        print_json(facts)
    else:
        _note_figures(conversation, facts)


def _answer(conversation: Conversation, text: str) -> dict[str, Any]:
    """Answer a prompt; return its figures, None where one is unknown."""
    n_tokens = len(conversation.turn_ids(text))
    answer = conversation.answer(text)
    return {
        "model": conversation.loaded.model_id,
        "profile": conversation.reduction.profile,
        "answer": answer.text,
        "prompt_tokens": n_tokens,
        "new_tokens": len(answer.tokens),
        **conversation.cache_facts(),
        "prefill_seconds": answer.first_seconds,
        "decode_tokens_per_second": answer.tokens_per_second,
    }


def _note_figures(conversation: Conversation, facts: Mapping[str, Any]) -> None:
    deciding, speed = facts["decision_seconds"], facts["decode_tokens_per_second"]
    times = f"prefill {duration(facts['prefill_seconds'])}"
    times += "" if deciding is None else f", {duration(deciding)} of it to decide the budgets"
    times += "" if speed is None else f", then {speed:.1f} tokens/s"
    note(f"[{facts['prompt_tokens']:,} prompt and {facts['new_tokens']:,} new tokens; {times}]")
    note(f"[cache of prompt and answer: {conversation.kept_text()}]")
