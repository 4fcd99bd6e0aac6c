"""``kvalloc generate``."""

from __future__ import annotations

from typing import Unpack

from kvalloc.allocation.request import RequestOptions
from kvalloc.cli.answers import OF_A_PROMPT, Conversation, PromptOptions
from kvalloc.cli.options import takes
from kvalloc.cli.output import print_result
from kvalloc.report.wording import deciding_text, kept_text
from kvalloc.units import duration


@takes(only=OF_A_PROMPT)
def generate(options: PromptOptions, **target: Unpack[RequestOptions]) -> None:
    """Answer one prompt with a reduced cache.

    With --budget or --target-loss the cache is reduced by the best method for the model, from a
    file of 'kvalloc fit' or a shipped one, if any. --memory beside it limits the peak; alone it
    takes the largest budget that fits. --profile takes budgets decided before. Other targets are
    decided by the scores of the prompt. The answer goes to stdout, its times and bytes to stderr.

    Examples
    --------
    kvalloc generate demo --budget 20% --prompt-file prompt.txt
    kvalloc generate demo --profile p.json --policy tova --prompt-file prompt.txt
    kvalloc generate demo --target-retention 0.9 --prompt-file prompt.txt
    kvalloc generate demo --budget 100% --prompt "Explain KV caches." --max-new-tokens 40
    cat prompt.txt | kvalloc generate demo --profile p.json --json
    """
    options.check(target)
    text, where = options.read()
    conversation = Conversation.begin(options, target)
    n_tokens = len(conversation.turn_ids(text))
    answer = conversation.answer(text)
    conversation.note_whole(n_tokens)
    facts = {
        "model": conversation.loaded.model_id,
        "profile": options.profile,
        "prompt_tokens": n_tokens,
        **answer.facts(),
        **conversation.facts(),
        "prefill_seconds": answer.first_seconds,
    }
    conversation.document, conversation.read_seconds = where, answer.first_seconds
    kept = kept_text(conversation.cache)
    conversation.save()
    prefill = f"prefill {duration(answer.first_seconds)}{deciding_text(conversation.cache)}"
    took = f"[{n_tokens:,} prompt and {answer.count_text}; {prefill}{answer.speed_text}]"
    print_result(facts, notes=[took, f"[cache of prompt and answer: {kept}]"])
