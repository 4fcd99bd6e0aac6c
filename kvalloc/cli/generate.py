"""``kvalloc generate``: answer a prompt with a reduced cache."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from kvalloc.allocation.request import TARGETS, RequestOptions
from kvalloc.cli import targets
from kvalloc.cli.generate_document import ask_document
from kvalloc.cli.generate_facts import (
    bytes_of,
    context_limit,
    device_of,
    granted_fields,
    kept_text,
    note_short,
    policies_of,
    wants_chat,
)
from kvalloc.cli.generate_request import (
    OF_A_PROMPT,
    Asked,
    check_text,
    given_prompt,
    load_with_cache,
)
from kvalloc.cli.options import from_fields
from kvalloc.cli.output import duration, note, print_json, size
from kvalloc.cli.progress import slow
from kvalloc.errors import InputError, option

if TYPE_CHECKING:
    from kvalloc.models.loading import LoadedModel

EXAMPLES = """\
  kvalloc generate demo --profile p.json --prompt-file prompt.txt
  kvalloc generate demo --target-retention 0.9 --prompt-file prompt.txt
  kvalloc generate demo --full --prompt "What is a KV cache?" --max-new-tokens 40
  kvalloc generate demo --profile p.json --policy tova --prompt-file prompt.txt
  cat prompt.txt | kvalloc generate demo --profile p.json --json

\b
  Read a long text once, ask about it as often as you like:
  kvalloc generate demo --profile p.json --prompt-file doc.txt --save-cache doc.kv
  kvalloc generate demo --cache doc.kv --question "Who speaks?" --question "To whom?"
  kvalloc generate demo --cache doc.kv --ask --keep-turns
"""

_REDUCING = (
    *OF_A_PROMPT,
    *("profile", "full", "solver", "adapt", "measured_tokens", "hold"),
    *("policy", "policy_option", "decode_every"),
)
"""Options that say how a prompt is reduced: a saved cache was reduced when it was saved."""


@targets.takes(RequestOptions, only=OF_A_PROMPT)
@from_fields(Asked)
def generate(asked: Asked, **target: Unpack[RequestOptions]) -> None:
    """Answer a prompt, or questions about a long one, with a reduced cache.

    The cache keeps of the prompt only what the budget profile grants, or what is decided for the
    prompt itself with --target-retention, --budget, --budget-tokens or --memory; the answer comes
    on top of it.
    Answers go to stdout, what they took to stderr; in a pipe or a file an empty line stands
    between two answers, and --json keeps them apart whatever is in them. Always the most likely
    token is taken, so that answers can be compared.
    """
    asked = replace(asked, target=target)
    if asked.cache is None:
        _check_reduction(asked)
    elif given := asked.given(*_REDUCING):
        raise InputError(
            f"{option(given[0])} says how a document is reduced, and the one in --cache was "
            "reduced when it was saved; leave it out"
        )
    _check_documents(asked)
    if asked.questions or asked.ask or asked.save_cache or asked.cache:
        ask_document(asked)
    else:
        _answer_prompt(asked)


def _check_reduction(asked: Asked) -> None:
    """Refuse ways of reducing a prompt that contradict each other."""
    reached = [option(name) for name in asked.given(*(kind.keyword for kind in TARGETS))]
    decided = asked.given("level", "solver")
    if not reached and decided:
        raise InputError(
            f"{option(decided[0])} says how a target for each prompt is decided; give one, such as "
            "--target-retention 0.9"
        )
    if reached and asked.profile is not None:
        raise InputError(
            f"{reached[0]} decides for each prompt and --profile was decided before; give one of "
            "them (--adapt moves a profile by the prompt)"
        )
    if reached and asked.allow_other_model:
        raise InputError(
            "--allow-other-model accepts the stored profile of another model, and here the budgets "
            "are decided from the prompt; leave it out, or give a profile"
        )
    if not reached and asked.profile is None and not asked.full:
        raise InputError(
            "say which budgets to use with --profile P.json, decide them for the prompt with "
            "--target-retention 0.9, or take the full cache with --full"
        )
    if reached and asked.full:
        raise InputError(f"{reached[0]} reduces the cache and --full does not; give one of them")
    if asked.policy_option and asked.policy is None:
        raise InputError("--policy-option belongs to a policy; name it with --policy")
    if asked.full and (asked.policy is not None or asked.decode_every is not None):
        raise InputError("--policy and --decode-every keep to budgets; they do not go with --full")
    if asked.adapt is not None and (asked.profile is None or asked.full):
        raise InputError("--adapt moves the budgets of a --profile; give one")
    of_prompt = asked.given("hold", "measured_tokens")
    if of_prompt and asked.adapt is None and not reached:
        raise InputError(
            f"{option(of_prompt[0])} is about budgets for each prompt; give it with --adapt or a "
            "target"
        )


def _check_documents(asked: Asked) -> None:
    """Refuse what contradicts itself about documents and questions, before anything is read."""
    for place, question in enumerate(asked.questions, start=1):
        which = f"question {place}" if len(asked.questions) > 1 else "the question"
        if not check_text(question, which).strip():
            raise InputError(f"{which} is empty; ask something")
    documents = bool(asked.questions or asked.ask or asked.save_cache or asked.cache)
    if asked.keep_turns and not documents:
        raise InputError("--keep-turns is about questions; give --question or --ask, too")
    if asked.questions and asked.ask:
        raise InputError("--question and --ask both give the questions; choose one of them")
    prompted = asked.prompt is not None or asked.prompt_file is not None
    if asked.cache is not None and prompted:
        raise InputError(
            "--cache holds the document already; ask about it with --question or --ask instead "
            "of giving a prompt"
        )
    if asked.cache is not None and asked.save_cache is not None:
        raise InputError("--cache is a saved cache already; leave out --save-cache")
    if asked.save_cache is not None:
        from kvalloc.files import check_writable

        if changing := asked.given("full", "decode_every"):
            raise InputError(
                f"--save-cache saves a reduced cache as it is after the document, which does "
                f"not go with {option(changing[0])}; leave one of them out"
            )
        check_writable(asked.save_cache)
    if asked.ask and asked.cache is None and not prompted:
        raise InputError(
            "with --ask the questions come from stdin, so the document has to come from "
            "--prompt-file, --prompt or --cache"
        )


def _answer_prompt(asked: Asked) -> None:
    """One prompt, one answer, as the model's own ``generate()`` gives it."""
    text, _ = given_prompt(asked)
    loaded, cache = load_with_cache(asked)
    inputs = _tokenized(loaded, text, asked.chat)
    n_tokens = int(inputs["input_ids"].shape[1])
    if n_tokens < 1:
        raise InputError("the prompt has no tokens; give some text")
    limit = context_limit(loaded)
    if limit is not None and n_tokens + asked.max_new_tokens > limit:
        raise InputError(
            f"a prompt of {n_tokens:,} tokens and an answer of up to {asked.max_new_tokens:,} are "
            f"beyond the {limit:,} tokens of {loaded.model_id}; shorten the prompt or "
            "--max-new-tokens"
        )
    answer = _answered(loaded, inputs, cache, asked)
    note_short(cache, n_tokens, quiet=asked.quiet)
    if asked.json:
        profile = None if asked.full else asked.profile
        print_json({"model": loaded.model_id, "profile": profile, **policies_of(cache), **answer})
        return
    deciding, speed = answer["decision_seconds"], answer["decode_tokens_per_second"]
    times = f"prefill {duration(answer['prefill_seconds'])}"
    times += "" if deciding is None else f", {duration(deciding)} of it to decide the budgets"
    times += "" if speed is None else f", then {speed:.1f} tokens/s"
    kept = kept_text(cache, answer["prompt_retained_bytes"], answer["prompt_full_bytes"])
    with_answer = size(answer["retained_bytes"])
    many = f"{n_tokens:,} prompt and {answer['new_tokens']:,} new tokens"
    note(f"[{many}; {times}]", quiet=asked.quiet)
    note(f"[cache of the prompt {kept}, {with_answer} with the answer]", quiet=asked.quiet)


def _tokenized(loaded: LoadedModel, text: str, chat: bool | None) -> dict[str, Any]:
    tokenizer, in_chat = loaded.tokenizer, wants_chat(loaded, chat)
    if in_chat:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
    # a chat template writes the special tokens itself
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=not in_chat)
    device = device_of(loaded)
    return {name: inputs[name].to(device) for name in ("input_ids", "attention_mask")}


def _answered(loaded: LoadedModel, inputs: Any, cache: Any, asked: Asked) -> dict[str, Any]:
    """Generate, the most likely token each time, and measure it; unknown is None."""
    from kvalloc.models.loading import shape_of
    from kvalloc.models.quiet import quiet_transformers

    n_tokens = int(inputs["input_ids"].shape[1])
    with ExitStack() as waiting, quiet_transformers():
        waiting.enter_context(slow("reading the prompt", quiet=asked.quiet))
        clock = _clock(loaded.tokenizer, cache, stream=not asked.json, waiting=waiting)
        try:
            ids = loaded.model.generate(
                **inputs,
                past_key_values=cache,
                do_sample=False,
                max_new_tokens=asked.max_new_tokens,
                streamer=clock,
            )
        except KeyboardInterrupt:
            clock.end()  # what is said next gets a line of its own
            raise
    new = ids[0, n_tokens:]
    begun, first, last = clock.seconds[0], clock.seconds[1], clock.seconds[-1]
    steps = len(clock.seconds) - 2
    shape = shape_of(loaded.model, model_id=loaded.model_id)
    return {
        "answer": loaded.tokenizer.decode(new, skip_special_tokens=True),
        "prompt_tokens": n_tokens,
        "new_tokens": int(new.shape[0]),
        **granted_fields(cache, n_tokens),
        "prompt_retained_bytes": clock.prompt_retained_bytes,
        "prompt_full_bytes": shape.full_bytes(n_tokens),
        **bytes_of(loaded, cache),
        "prefill_seconds": first - begun,
        "decision_seconds": getattr(cache, "decision_seconds", None),
        "decode_tokens_per_second": steps / (last - first) if steps > 0 else None,
    }


def _clock(tokenizer: Any, cache: Any, *, stream: bool, waiting: ExitStack) -> Any:
    """A streamer that notes when tokens came, and prints the answer as it grows if wanted.

    With the first token the waiting is over.
    """
    from transformers import TextStreamer

    from kvalloc.evaluate.caches import stored_bytes

    class Clock(TextStreamer):
        seconds: list[float]
        prompt_retained_bytes: int

        def put(self, value: Any) -> None:
            self.seconds.append(time.perf_counter())
            if len(self.seconds) == 2:  # the first token is chosen and has not been run
                waiting.close()
                self.prompt_retained_bytes = stored_bytes(cache)
            if stream:
                super().put(value)  # type: ignore[no-untyped-call]

        def end(self) -> None:
            if stream:
                super().end()  # type: ignore[no-untyped-call]

    clock = Clock(tokenizer, skip_prompt=True, skip_special_tokens=True)
    clock.seconds = []
    return clock
